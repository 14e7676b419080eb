//! The engine's output for one request in a step: it is checked and taken into the request's state.

use std::time::Instant;

use refrain_protocol::chunk::{ChunkEndReason, DraftSource, StepMessage};
use refrain_protocol::document::FinishReason;
use refrain_protocol::engine::StepOutput;
use refrain_protocol::{ApiError, ErrorKind};

use super::sent_draft::{accepted_of_head, check_draft, credited, head_drafted, step_message};
use super::step_record::{Absorbed, StepRecord};
use super::{ActiveRequest, OWN};

/// The error of an engine whose output contradicts its contract.
fn broken_contract(what: &str) -> ApiError {
    ApiError::new(ErrorKind::Upstream, "the engine broke its contract").with_detail(what)
}

impl ActiveRequest {
    /// Takes the engine's output of a step. Returns `None` if the step only read a piece of the prompt.
    ///
    /// # Errors
    /// The engine broke its contract.
    pub(crate) fn absorb(
        &mut self,
        mut output: StepOutput,
        weight_version: u64,
        now: Instant,
    ) -> Result<Option<Absorbed>, ApiError> {
        if self.engine_len == 0 {
            self.cached_tokens = 0;
        }
        // Each piece of a text may find some of it.
        self.cached_tokens = self.cached_tokens.saturating_add(output.cached_tokens);
        let offer = self.step.offer.take();
        if output.text_len as usize != self.step.sent_len as usize + output.emitted.len() {
            return Err(broken_contract(
                "the length of the session differs from that of the text",
            ));
        }
        if !self.step.samples {
            self.engine_len = output.text_len;
            return if output.emitted.is_empty() {
                Ok(None)
            } else {
                Err(broken_contract("a step emitted without sampling"))
            };
        }
        if output.emitted.is_empty() || output.emitted.len() > self.step.max_emit as usize {
            return Err(broken_contract(
                "a step emitted no token, or more tokens than it may",
            ));
        }
        check_draft(offer.as_ref(), &output).map_err(broken_contract)?;
        // An output of several versions is stored with that of its first token: whoever asks for outputs of a version
        // gets none that began with older weights. The version of each token is in its step.
        if self.output().is_empty() {
            self.head.weight_version = weight_version;
        }
        let sequence = self.sequence;
        self.sequence += 1;
        let prev_len = self.output().len() as u32;
        self.take_text(&output, now)?;
        let (offered, drafter) = (offer.as_ref(), self.drafter);
        let mut step = step_message(sequence, weight_version, offered, drafter, &output);
        step.tokens = std::mem::take(&mut output.emitted);
        self.count(&step);
        let end = self.reached_end(output.stopped);
        let record = StepRecord {
            prev_len,
            finish: end.and_then(|(_, finish)| finish),
            credited: credited(offer.as_ref(), &output.accepted_nodes, self.document()),
            head_drafted: head_drafted(&output),
            head_accepted: accepted_of_head(offer.as_ref(), &output),
            offer,
            step,
        };
        Ok(Some(Absorbed {
            message: StepMessage {
                logprobs: output.logprobs,
                ..record.step.clone()
            },
            record,
            end: end.map(|(reason, _)| self.end(reason)),
        }))
    }

    /// Appends the emitted tokens to the text.
    fn take_text(&mut self, output: &StepOutput, now: Instant) -> Result<(), ApiError> {
        // A head that drafted nothing may not have read the whole text yet.
        if head_drafted(output) {
            self.head_len = self.step.sent_len;
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

    fn count(&mut self, step: &StepMessage) {
        for (source, counts) in step.counts(step.tokens.len()) {
            self.counts.add(counts);
            if matches!(
                source,
                DraftSource::Suffix | DraftSource::Prediction | DraftSource::Grammar
            ) {
                self.suffix_emitted += counts.emitted;
            }
        }
    }

    /// The end that the text has reached, if any: of the chunk and, unless the request goes on, of the output.
    fn reached_end(&self, stopped: bool) -> Option<(ChunkEndReason, Option<FinishReason>)> {
        if stopped {
            return Some((ChunkEndReason::Stop, Some(FinishReason::Stop)));
        }
        if self.emit_left() == 0 {
            return Some((ChunkEndReason::Length, Some(FinishReason::Length)));
        }
        let limit = self.request.chunk_tokens?;
        (self.emitted() >= limit).then_some((ChunkEndReason::ChunkLimit, None))
    }
}
