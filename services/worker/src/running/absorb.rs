//! The engine's output for one request in a step: it is checked and taken into the request's state.

use std::time::Instant;

use refrain_protocol::chunk::{
    ChunkEnd, ChunkEndReason, DraftScope, DraftSource, StepCounts, StepMessage,
};
use refrain_protocol::document::FinishReason;
use refrain_protocol::engine::StepOutput;
use refrain_protocol::{ApiError, DocumentId, ErrorKind, TokenId};

use refrain_speculation::router::Offer;

use super::draft::{DraftCounts, accepted_of_head, check_draft, credited, step_labels};
use super::{ActiveRequest, EngineLimits, OWN};

/// The result of a step for one request.
pub(crate) struct Absorbed {
    /// The message to the reader.
    pub(crate) message: StepMessage,
    /// The same result for the store, the metrics and the router.
    pub(crate) record: StepRecord,
    /// The end of the chunk, if it has ended.
    pub(crate) end: Option<ChunkEnd>,
}

/// The result of a step for the store, the metrics and the router.
pub(crate) struct StepRecord {
    pub(crate) tokens: Vec<TokenId>,
    /// Length of the output before these tokens.
    pub(super) prev_len: u32,
    /// How the output ended with these tokens, if it has.
    pub(super) finish: Option<FinishReason>,
    /// Documents of the namespace whose draft tokens were accepted.
    pub(crate) credited: Vec<DocumentId>,
    /// The router's offer, if it decided.
    pub(crate) offer: Option<Offer>,
    /// The engine's own drafter drafted at least one token.
    pub(crate) head_drafted: bool,
    /// Accepted tokens that it drafted.
    pub(crate) head_accepted: u32,
    /// The message to the reader without its tokens, which are in `tokens`.
    pub(crate) step: StepMessage,
}

impl StepRecord {
    /// The counts of the step by the source of its drafts.
    pub(crate) fn counts(&self) -> impl Iterator<Item = (DraftSource, DraftScope, StepCounts)> {
        let StepMessage { source, scope, .. } = self.step;
        let counts = self.step.counts(self.tokens.len());
        counts.map(move |(of, counts)| {
            // Drafts of the engine come from no text, so they have no scope.
            let is_first = of == source;
            (of, if is_first { scope } else { DraftScope::None }, counts)
        })
    }
}

/// The error of an engine whose output contradicts its contract.
fn broken_contract(what: &str) -> ApiError {
    ApiError::new(ErrorKind::Upstream, "the engine broke its contract").with_detail(what)
}

impl ActiveRequest {
    /// Takes the engine's output of a step.
    ///
    /// # Errors
    /// The engine broke its contract.
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
        let offer = self.offer.take();
        if output.text_len as usize != self.sent_len as usize + output.emitted.len() {
            return Err(broken_contract(
                "the length of the session differs from that of the text",
            ));
        }
        if !sampled {
            self.engine_len = output.text_len;
            return if output.emitted.is_empty() {
                Ok(None)
            } else {
                Err(broken_contract("a step emitted without sampling"))
            };
        }
        let counts = self.check(offer.as_ref(), &output)?;
        if self.sequence == 0 {
            self.head.weight_version = weight_version;
        }
        let prev_len = self.output().len() as u32;
        let (source, scope) = step_labels(offer.as_ref(), self.drafter);
        self.take_text(&output, now)?;
        self.count(&counts, &output, source);
        let end = self.reached_end(output.stopped, limits);
        let head_drafted = output.self_drafted > 0 || !output.agreed_nodes.is_empty();
        let head_accepted = accepted_of_head(offer.as_ref(), &output);
        let credited = credited(offer.as_ref(), &output.accepted_nodes, self.document());
        let tokens = output.emitted.clone();
        let message = StepMessage {
            sequence: self.sequence,
            tokens: output.emitted,
            logprobs: output.logprobs,
            weight_version,
            source,
            scope,
            drafted: counts.drafted,
            accepted: counts.accepted,
            merged: counts.merged,
        };
        self.sequence += 1;
        let step = StepMessage {
            tokens: Vec::new(),
            logprobs: None,
            ..message
        };
        Ok(Some(Absorbed {
            message,
            record: StepRecord {
                tokens,
                prev_len,
                finish: end.and_then(|(_, finish)| finish),
                credited,
                offer,
                head_drafted,
                head_accepted,
                step,
            },
            end: end.map(|(reason, _)| self.end(reason)),
        }))
    }

    /// Checks the output of a step that sampled against its offer.
    fn check(&self, offer: Option<&Offer>, output: &StepOutput) -> Result<DraftCounts, ApiError> {
        if output.emitted.is_empty() || output.emitted.len() > self.max_emit as usize {
            return Err(broken_contract(
                "a step emitted no token, or more tokens than it may",
            ));
        }
        check_draft(offer, output).map_err(broken_contract)?;
        let counts = DraftCounts::new(offer, self.drafter, output);
        let accepted_in_all = output.accepted_nodes.len() as u32;
        if accepted_in_all > counts.drafted_in_all().min(output.emitted.len() as u32) {
            return Err(broken_contract(
                "a step accepted more tokens than were drafted or emitted",
            ));
        }
        Ok(counts)
    }

    /// Appends the emitted tokens to the text.
    fn take_text(&mut self, output: &StepOutput, now: Instant) -> Result<(), ApiError> {
        // A head that drafted nothing may not have read the whole text yet.
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
        Ok(())
    }

    fn count(&mut self, counts: &DraftCounts, output: &StepOutput, source: DraftSource) {
        let emitted = output.emitted.len() as u64;
        self.counts.add(StepCounts {
            steps: 1,
            drafted: u64::from(counts.drafted_in_all()),
            accepted: output.accepted_nodes.len() as u64,
            emitted,
        });
        if matches!(source, DraftSource::Suffix | DraftSource::Prediction) {
            let by_engine = counts.merged.map_or(0, |share| u64::from(share.accepted));
            self.suffix_emitted += emitted - by_engine;
        }
    }

    /// The end that the text has reached, if any: of the chunk and, unless the request goes on, of the output.
    fn reached_end(
        &self,
        stopped: bool,
        limits: EngineLimits,
    ) -> Option<(ChunkEndReason, Option<FinishReason>)> {
        if stopped {
            return Some((ChunkEndReason::Stop, Some(FinishReason::Stop)));
        }
        if self.emit_left(limits) == 0 {
            return Some((ChunkEndReason::Length, Some(FinishReason::Length)));
        }
        let limit = self.request.chunk_tokens?;
        (self.emitted() >= limit).then_some((ChunkEndReason::ChunkLimit, None))
    }
}
