//! One choice as it grows: a plain state that takes the events of a worker and returns the new output.
//!
//! It has no clock and no I/O: times are arguments.

use std::sync::Arc;
use std::time::Duration;

use refrain_output_parsers::{Counts, Event};
use refrain_protocol::TokenId;
use refrain_protocol::chunk::{ChunkEnd, ChunkEndReason, SourceCounts, StepCounts, StepMessage};
use refrain_protocol::engine::TokenLogprob;
use refrain_protocol::openai::{FinishReason, Timings};
use refrain_protocol::usage::UsageCounts;

use crate::relay::kept_steps::{KeptStep, KeptSteps};
use crate::relay::output_text::OutputText;

/// The prompt and the limits of a choice.
#[derive(Clone, Debug)]
pub(crate) struct ChoicePlan {
    pub(crate) prompt: Arc<[TokenId]>,
    pub(crate) max_new_tokens: u32,
    pub(crate) stop_token_ids: Vec<TokenId>,
    pub(crate) wants_logprobs: bool,
    /// The rest of a prompt that is scored: the worker emits it first. `prompt` is what comes before.
    pub(crate) forced: Arc<[TokenId]>,
    /// Output tokens before which no stop text ends the output.
    pub(crate) min_tokens: u32,
    /// Whether the steps are kept for the answer.
    pub(crate) keeps_steps: bool,
}

/// The state of one choice.
#[derive(Debug)]
pub(crate) struct ChoiceState {
    plan: ChoicePlan,
    text: OutputText,
    output: Vec<TokenId>,
    finish: Option<FinishReason>,
    counts: SourceCounts,
    timings: Timings,
    cached_tokens: Option<u32>,
    chunk: ChunkState,
    /// The steps, if the answer has them.
    steps: Option<KeptSteps>,
}

/// The state of the present chunk. Times count from the head of the request.
#[derive(Clone, Copy, Debug, Default)]
struct ChunkState {
    started: Duration,
    first_step: Option<Duration>,
    /// Length of the output after the first step of the chunk.
    output_after_first: usize,
    last_step: Duration,
    next_sequence: u64,
    /// Length of the output before the chunk.
    output_before: usize,
}

/// A token and, if asked for, its log-probability.
#[derive(Clone, Debug, PartialEq)]
pub struct OutputToken {
    /// The token.
    pub id: TokenId,
    /// Its log-probability, and those of other tokens in its place.
    pub logprob: Option<TokenLogprob>,
    /// The version of the weights that sampled it.
    pub weight_version: u64,
}

/// The figures of a choice, in the answers to trainers.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ChoiceFigures {
    /// Prompt tokens whose KV was in a cache.
    pub cached_tokens: u64,
    /// Engine steps.
    pub steps: u64,
    /// Draft tokens that were verified.
    pub drafted: u64,
    /// Draft tokens that were accepted.
    pub accepted: u64,
}

/// The new output of a choice after an event.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct ChoiceProgress {
    /// New text, reasoning and calls, of which no stop text can take anything back any more. Every call has an id.
    pub events: Vec<Event>,
    /// Tokens of the prompt that were scored.
    pub prompt: Vec<OutputToken>,
    /// New output tokens, each once, whether or not their text is complete.
    pub tokens: Vec<OutputToken>,
    /// The number of the stop text that ended the output.
    pub stop_text: Option<usize>,
    /// Set when the choice has ended.
    pub finish: Option<FinishReason>,
    /// The figures of the choice, once it has ended.
    pub figures: Option<ChoiceFigures>,
    /// Whether the worker has to be told where the output ends, because it decoded, or would decode, past the end.
    pub needs_cut: bool,
    /// The steps that brought the tokens, if the answer has them.
    pub(crate) steps: Vec<KeptStep>,
}

impl ChoiceProgress {
    /// Adds the output that came next.
    pub(crate) fn append(&mut self, next: ChoiceProgress) {
        for event in next.events {
            event.append(&mut self.events);
        }
        self.prompt.extend(next.prompt);
        self.tokens.extend(next.tokens);
        self.stop_text = next.stop_text.or(self.stop_text);
        self.finish = next.finish.or(self.finish);
        self.figures = next.figures.or(self.figures);
        self.needs_cut |= next.needs_cut;
        self.steps.extend(next.steps);
    }
}

/// The figures of a finished choice.
#[derive(Clone, Debug, Default, PartialEq)]
pub(crate) struct ChoiceSummary {
    pub(crate) completion_tokens: u64,
    pub(crate) reasoning_tokens: u64,
    pub(crate) cached_tokens: u64,
    pub(crate) calls: Counts,
    pub(crate) counts: SourceCounts,
    pub(crate) timings: Timings,
    pub(crate) steps: Option<KeptSteps>,
}

impl ChoiceState {
    /// Creates a choice without output.
    pub(crate) fn new(plan: ChoicePlan, text: OutputText) -> Self {
        ChoiceState {
            steps: plan.keeps_steps.then(KeptSteps::default),
            plan,
            text,
            output: Vec::new(),
            finish: None,
            counts: SourceCounts::new(),
            timings: Timings::default(),
            cached_tokens: None,
            chunk: ChunkState::default(),
        }
    }

    /// Prompt and output so far, from which the next chunk decodes on.
    pub(crate) fn context(&self) -> Vec<TokenId> {
        let mut context = Vec::with_capacity(self.plan.prompt.len() + self.output.len());
        context.extend_from_slice(&self.plan.prompt);
        context.extend_from_slice(&self.output);
        context
    }

    /// The output so far.
    pub(crate) fn output(&self) -> &[TokenId] {
        &self.output
    }

    /// Length of the prompt, tokens.
    pub(crate) fn prompt_len(&self) -> u32 {
        self.plan.prompt.len() as u32
    }

    /// Length of the output so far, tokens.
    pub(crate) fn output_len(&self) -> u32 {
        self.output.len() as u32
    }

    /// Output tokens of this chunk.
    pub(crate) fn chunk_output_len(&self) -> u32 {
        (self.output.len() - self.chunk.output_before) as u32
    }

    /// Longest output, tokens, with those that are forced.
    pub(crate) fn max_new_tokens(&self) -> u32 {
        self.plan.max_new_tokens
    }

    /// The tokens that the worker emits before it samples.
    pub(crate) fn forced(&self) -> &[TokenId] {
        &self.plan.forced
    }

    /// Length of the output without forced tokens.
    pub(super) fn own_len(&self) -> usize {
        self.output.len().saturating_sub(self.plan.forced.len())
    }

    /// Begins a chunk.
    pub(crate) fn begin_chunk(&mut self, now: Duration) {
        self.chunk = ChunkState {
            started: now,
            output_before: self.output.len(),
            last_step: now,
            ..ChunkState::default()
        };
        self.timings.chunks += 1;
    }

    /// Takes the tokens of an engine step.
    ///
    /// # Errors
    /// The fault of the message, of which nothing was taken then.
    #[cfg(test)]
    pub(crate) fn step(
        &mut self,
        now: Duration,
        message: StepMessage,
    ) -> Result<ChoiceProgress, &'static str> {
        self.step_in_pieces(now, message, None)
    }

    /// Takes the tokens of an engine step. With `pieces`, the output of each token but the last one is put there, and
    /// the rest is returned.
    ///
    /// # Errors
    /// The fault of the message, of which nothing was taken then.
    pub(super) fn step_in_pieces(
        &mut self,
        now: Duration,
        mut message: StepMessage,
        mut pieces: Option<&mut Vec<ChoiceProgress>>,
    ) -> Result<ChoiceProgress, &'static str> {
        if message.sequence != self.chunk.next_sequence {
            return Err("a step is missing, or came twice");
        }
        if message.tokens.is_empty() {
            return Err("a step has no tokens");
        }
        if self.finish.is_some() {
            return Err("a step came after the end of the output");
        }
        let still_forced = self
            .plan
            .forced
            .get(self.output.len()..)
            .unwrap_or_default();
        if message
            .tokens
            .iter()
            .zip(still_forced)
            .any(|(id, forced)| id != forced)
        {
            return Err("the engine does not score prompts");
        }
        let mut logprobs = match (self.plan.wants_logprobs, message.logprobs.take()) {
            (false, _) => Vec::new(),
            (true, Some(logprobs)) if logprobs.len() == message.tokens.len() => logprobs,
            (true, _) => return Err("a step lacks the log-probabilities that were asked for"),
        }
        .into_iter();
        self.chunk.next_sequence += 1;
        let is_first = self.chunk.first_step.is_none();
        self.chunk.first_step.get_or_insert(now);
        self.chunk.last_step = now;

        let emitted = message.tokens.len();
        let mut progress = ChoiceProgress::default();
        let mut kept = 0;
        for &id in &message.tokens {
            if let Some(pieces) = &mut pieces
                && kept > 0
            {
                pieces.push(std::mem::take(&mut progress));
            }
            kept += 1;
            self.output.push(id);
            let token = OutputToken {
                id,
                logprob: logprobs.next(),
                weight_version: message.weight_version,
            };
            if self.own_len() == 0 {
                progress.prompt.push(token);
            } else {
                progress.tokens.push(token);
                let ends = self.plan.stop_token_ids.contains(&id);
                if ends {
                    self.finish = Some(FinishReason::Stop);
                }
                if ends && !self.text.has_stop_text() {
                    self.text.push_end(id, &mut progress.events);
                    break;
                }
                let may_stop = !ends && self.own_len() > self.plan.min_tokens as usize;
                if self.text.push(id, may_stop, &mut progress.events) {
                    // The worker knows no stop texts.
                    progress.needs_cut = true;
                    progress.stop_text = self.text.stop_text();
                    self.finish = Some(FinishReason::Stop);
                }
            }
            if self.finish.is_none() && self.output_len() >= self.plan.max_new_tokens {
                self.finish = Some(FinishReason::Length);
            }
            if self.finish.is_some() {
                break;
            }
        }
        if is_first {
            self.chunk.output_after_first = self.output.len();
        }
        for (source, counts) in message.counts(kept) {
            self.counts.entry(source).or_default().add(counts);
        }
        if let Some(steps) = &mut self.steps {
            let step = steps.push(now, self.timings.chunks, &message, kept);
            progress.steps.extend(step);
        }
        // The worker decoded past an end that it knows as well, so there is no point in waiting for its `End`.
        progress.needs_cut |= kept < emitted;
        if progress.needs_cut {
            self.text.finish(&mut progress.events);
            progress.finish = self.finish_reason();
            self.close_chunk();
        }
        Ok(progress)
    }

    /// Takes the end of a chunk. The choice ends if the result has a `finish`; otherwise it continues with another
    /// chunk.
    pub(crate) fn end(&mut self, end: &ChunkEnd) -> ChoiceProgress {
        // A chunk that ended before its prompt was read does not know the number.
        if self.cached_tokens.is_none() && self.chunk_output_len() > 0 {
            self.cached_tokens = Some(end.cached_tokens);
        }
        self.timings.prefill_s += seconds(end.prefill_s);
        self.timings.decode_s += seconds(end.decode_s);
        self.timings.decode_tokens += u64::from(end.decode_tokens);
        self.chunk.first_step = None;
        if self.finish.is_none() {
            self.finish = match end.reason {
                ChunkEndReason::Stop => Some(FinishReason::Stop),
                ChunkEndReason::Length => Some(FinishReason::Length),
                ChunkEndReason::Aborted => Some(FinishReason::Abort),
                ChunkEndReason::ChunkLimit
                | ChunkEndReason::GaveWay
                | ChunkEndReason::Draining
                | ChunkEndReason::Transfer => None,
            };
        }
        self.finished()
    }

    /// Ends the output where it is, because the request is aborted. One that has ended keeps its end.
    pub(crate) fn abort(&mut self) -> ChoiceProgress {
        self.close_chunk();
        self.finish.get_or_insert(FinishReason::Abort);
        self.finished()
    }

    /// Takes the loss of a worker. If only its `End` was still to come, the choice has ended.
    pub(crate) fn lost(&mut self) -> ChoiceProgress {
        self.close_chunk();
        self.finished()
    }

    fn finished(&mut self) -> ChoiceProgress {
        let mut progress = ChoiceProgress::default();
        if self.finish.is_some() {
            self.text.finish(&mut progress.events);
            progress.finish = self.finish_reason();
        }
        progress
    }

    /// The reason of the end, if there was one. An output that was cut off by its limit says so, with calls and
    /// without.
    pub(super) fn finish_reason(&self) -> Option<FinishReason> {
        match self.finish {
            Some(FinishReason::Stop) if self.text.has_calls() => Some(FinishReason::ToolCalls),
            finish => finish,
        }
    }

    /// Closes a chunk without an `End`. Its times are those that the gateway measured.
    fn close_chunk(&mut self) {
        if let Some(first) = self.chunk.first_step.take() {
            self.timings.prefill_s += first.saturating_sub(self.chunk.started).as_secs_f64();
            self.timings.decode_s += self.chunk.last_step.saturating_sub(first).as_secs_f64();
            self.timings.decode_tokens +=
                (self.output.len() - self.chunk.output_after_first) as u64;
        }
    }

    /// The counts of the choice so far, for bills. A choice that made nothing has none.
    pub(crate) fn usage(&self) -> UsageCounts {
        if self.output.is_empty() {
            return UsageCounts::default();
        }
        let sum = |of: fn(&StepCounts) -> u64| self.counts.values().map(of).sum();
        UsageCounts {
            requests: 1,
            input_tokens: 0,
            cached_input_tokens: self.cached(),
            output_tokens: self.own_len() as u64,
            reasoning_tokens: self.text.reasoning_tokens(),
            verified_draft_tokens: sum(|counts| counts.drafted),
            accepted_draft_tokens: sum(|counts| counts.accepted),
        }
    }

    fn cached(&self) -> u64 {
        u64::from(self.cached_tokens.unwrap_or(0).min(self.prompt_len()))
    }

    /// The figures of the choice so far, as trainers read them.
    pub(super) fn figures(&self) -> ChoiceFigures {
        let sum = |of: fn(&StepCounts) -> u64| self.counts.values().map(of).sum();
        ChoiceFigures {
            cached_tokens: self.cached(),
            steps: sum(|counts| counts.steps),
            drafted: sum(|counts| counts.drafted),
            accepted: sum(|counts| counts.accepted),
        }
    }

    /// The figures of the choice so far.
    pub(crate) fn summary(&self) -> ChoiceSummary {
        ChoiceSummary {
            completion_tokens: self.own_len() as u64,
            reasoning_tokens: self.text.reasoning_tokens(),
            calls: self.text.counts(),
            cached_tokens: self.cached(),
            counts: self.counts.clone(),
            timings: self.timings,
            steps: self.steps.clone(),
        }
    }
}

/// A time in seconds from a worker, or 0 if it is not a valid one: JSON has no infinity.
fn seconds(value: f64) -> f64 {
    if value.is_finite() && value >= 0.0 {
        value
    } else {
        0.0
    }
}

#[cfg(test)]
mod tests;
