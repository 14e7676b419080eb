//! What the engine answered, checked and taken into the chunk's state.

use std::time::Instant;

use refrain_protocol::chunk::{
    ChunkEnd, ChunkEndReason, DraftScope, DraftSource, StepCounts, StepMessage,
};
use refrain_protocol::document::FinishReason;
use refrain_protocol::engine::StepOutput;
use refrain_protocol::{ApiError, DocumentId, ErrorKind, TokenId};

use super::{EngineLimits, Lesson, OWN, Running};

/// What one step brought.
pub(crate) struct Absorbed {
    /// For the reader.
    pub(crate) message: StepMessage,
    pub(crate) heard: Heard,
    pub(crate) end: Option<ChunkEnd>,
}

/// The same for those who remember it.
pub(crate) struct Heard {
    pub(crate) tokens: Vec<TokenId>,
    /// Output tokens before them.
    pub(super) prev_len: u32,
    /// How the output ended with them, if it has.
    pub(super) finish: Option<FinishReason>,
    /// Documents of the namespace whose draft tokens were accepted.
    pub(crate) credited: Vec<DocumentId>,
    pub(crate) lesson: Lesson,
    /// The reader's message without its tokens, which stand here.
    pub(crate) said: StepMessage,
}

impl Heard {
    /// The step's counts by where its drafts came from.
    pub(crate) fn counts(&self) -> impl Iterator<Item = (DraftSource, DraftScope, StepCounts)> {
        let StepMessage { source, scope, .. } = self.said;
        let counts = self.said.counts(self.tokens.len());
        counts.map(move |(of, counts)| {
            // What the engine drafts is found nowhere.
            let is_first = of == source;
            (of, if is_first { scope } else { DraftScope::None }, counts)
        })
    }
}

impl Running {
    /// Takes what the engine answered.
    ///
    /// # Errors
    /// An answer that no engine may give; or the engine's own error, when it is final for this request.
    pub(crate) fn absorb(
        &mut self,
        output: StepOutput,
        sampled: bool,
        weight_version: u64,
        limits: EngineLimits,
        now: Instant,
    ) -> Result<Option<Absorbed>, ApiError> {
        if self.engine_len == 0 {
            self.cached_tokens = output.cached_tokens;
        }
        let offered = std::mem::take(&mut self.offered);
        let broken = |what: &str| {
            Err(
                ApiError::new(ErrorKind::Upstream, "the engine broke its contract")
                    .with_detail(what),
            )
        };
        if output.text_len as usize != self.sent_len as usize + output.emitted.len() {
            return broken("the session's length is not that of the text");
        }
        if !sampled {
            self.engine_len = output.text_len;
            return if output.emitted.is_empty() {
                Ok(None)
            } else {
                broken("a step emitted without sampling")
            };
        }
        if output.emitted.is_empty() || output.emitted.len() > self.max_emit as usize {
            return broken("a step emitted nothing, or more than it may");
        }
        if let Err(what) = offered.check(&output) {
            return broken(what);
        }
        let (drafted, accepted, merged) = offered.credit(&output);
        let drafted_in_all = drafted + merged.map_or(0, |share| share.drafted);
        let accepted_in_all = output.accepted_nodes.len() as u32;
        if accepted_in_all > drafted_in_all.min(output.emitted.len() as u32) {
            return broken("a step accepted more than was drafted or emitted");
        }
        if self.sequence == 0 {
            self.head.weight_version = weight_version;
        }
        let prev_len = self.output().len() as u32;
        let (source, scope) = offered.labels();
        // A head that came to no draft may not have read all of the text yet.
        if output.self_drafted > 0 || !output.agreed_nodes.is_empty() {
            self.head_len = self.sent_len;
        }
        self.engine_len = output.text_len;
        self.text.extend_from_slice(&output.emitted);
        if let Some(sources) = &mut self.sources {
            let appended = sources.own.append(OWN, &output.emitted);
            appended.map_err(ApiError::internal)?;
        }
        if self.first_token_at.is_none() {
            self.first_token_at = Some(now);
            self.first_step_tokens = output.emitted.len() as u32;
        }
        self.last_token_at = Some(now);
        self.counts.add(StepCounts {
            steps: 1,
            drafted: u64::from(drafted_in_all),
            accepted: u64::from(accepted_in_all),
            emitted: output.emitted.len() as u64,
        });
        if matches!(source, DraftSource::Suffix | DraftSource::Prediction) {
            let by_engine = merged.map_or(0, |share| u64::from(share.accepted));
            self.suffix_emitted += output.emitted.len() as u64 - by_engine;
        }
        let end = if output.stopped {
            Some((ChunkEndReason::Stop, Some(FinishReason::Stop)))
        } else if self.emit_left(limits) == 0 {
            Some((ChunkEndReason::Length, Some(FinishReason::Length)))
        } else if self
            .request
            .chunk_tokens
            .is_some_and(|limit| self.emitted() >= limit)
        {
            Some((ChunkEndReason::ChunkLimit, None))
        } else {
            None
        };
        let finish = end.and_then(|(_, finish)| finish);
        if let Some(asked) = &mut self.lesson.asked_head {
            asked.drafted = output.self_drafted > 0 || !output.agreed_nodes.is_empty();
            asked.accepted = offered.accepted_of_engine(&output);
        }
        let credited = offered.credited(&output.accepted_nodes, self.document());
        let tokens = output.emitted.clone();
        let message = StepMessage {
            sequence: self.sequence,
            tokens: output.emitted,
            logprobs: output.logprobs,
            weight_version,
            source,
            scope,
            drafted,
            accepted,
            merged,
        };
        self.sequence += 1;
        let end = end.map(|(reason, _)| self.end(reason));
        let said = StepMessage {
            tokens: Vec::new(),
            logprobs: None,
            ..message
        };
        Ok(Some(Absorbed {
            message,
            heard: Heard {
                tokens,
                prev_len,
                finish,
                credited,
                lesson: std::mem::take(&mut self.lesson),
                said,
            },
            end,
        }))
    }
}
