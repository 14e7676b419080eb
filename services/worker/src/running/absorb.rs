//! The engine's output for one request in a step: it is checked and taken into the request's state.

use std::time::Instant;

use refrain_protocol::chunk::{ChunkEndReason, DraftSource, StepCounts, StepMessage};
use refrain_protocol::document::FinishReason;
use refrain_protocol::engine::StepOutput;
use refrain_protocol::{ApiError, ErrorKind};
use refrain_speculation::router::Offer;

use super::sent_draft::{DraftCounts, accepted_of_head, check_draft, credited, step_labels};
use super::step_record::{Absorbed, StepRecord};
use super::{ActiveRequest, EngineLimits, OWN};

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
