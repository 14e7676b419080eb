//! The counts and times of a chunk, which begin anew with each chunk of a request.

use std::time::Instant;

use refrain_protocol::chunk::{ChunkEnd, ChunkEndReason, DraftSource, StepCounts, StepMessage};
use refrain_speculation::router::Pace;

/// The counts and times of a chunk.
pub(crate) struct ChunkTally {
    counts: StepCounts,
    /// Number of emitted tokens in steps that verified a suffix draft.
    suffix_emitted: u64,
    /// Number of tokens whose KV was in the engine's cache when it began to read.
    cached_tokens: u32,
    began_at: Instant,
    first: Option<FirstTokens>,
    last_at: Instant,
}

/// The tokens of the first step that emitted any.
struct FirstTokens {
    at: Instant,
    count: u32,
}

impl ChunkTally {
    pub(crate) fn new(now: Instant, cached_tokens: u32) -> Self {
        ChunkTally {
            counts: StepCounts::default(),
            suffix_emitted: 0,
            cached_tokens,
            began_at: now,
            first: None,
            last_at: now,
        }
    }

    pub(crate) fn counts(&self) -> StepCounts {
        self.counts
    }

    /// Number of steps that sampled.
    pub(super) fn steps(&self) -> u64 {
        self.counts.steps
    }

    /// Number of emitted tokens.
    pub(crate) fn emitted(&self) -> u32 {
        self.counts.emitted as u32
    }

    /// Number of tokens emitted by steps without a suffix draft.
    pub(crate) fn unmatched(&self) -> u32 {
        (self.counts.emitted - self.suffix_emitted) as u32
    }

    /// Records how much of the text was in the engine's cache when it began to read.
    pub(crate) fn found_in_cache(&mut self, tokens: u32) {
        self.cached_tokens = tokens;
    }

    /// Adds what a piece of the text found in the engine's cache.
    pub(super) fn found_more_in_cache(&mut self, tokens: u32) {
        self.cached_tokens = self.cached_tokens.saturating_add(tokens);
    }

    /// Counts a step that emitted tokens.
    pub(super) fn count(&mut self, step: &StepMessage, now: Instant) {
        let emitted = step.tokens.len();
        for (source, counts) in step.counts(emitted) {
            self.counts.add(counts);
            if matches!(
                source,
                DraftSource::Suffix | DraftSource::Prediction | DraftSource::Grammar
            ) {
                self.suffix_emitted += counts.emitted;
            }
        }
        self.first.get_or_insert(FirstTokens {
            at: now,
            count: emitted as u32,
        });
        self.last_at = now;
    }

    /// The progress towards a target between tokens, counted from the first token of the chunk. Earlier chunks ran
    /// elsewhere, and the request waited between them.
    pub(super) fn pace(&self, tpot_ms: u32, now: Instant) -> Option<Pace> {
        let first = self.first.as_ref()?;
        Some(Pace {
            tpot_s: f64::from(tpot_ms) / 1e3,
            elapsed_s: now.saturating_duration_since(first.at).as_secs_f64(),
            tokens: self.emitted().saturating_sub(1),
        })
    }

    /// The end of the chunk for its reader.
    pub(crate) fn end(&self, reason: ChunkEndReason) -> ChunkEnd {
        let first = self.first.as_ref();
        let (first_at, first_tokens) = first.map_or((self.began_at, 0), |it| (it.at, it.count));
        ChunkEnd {
            next_worker: None,
            reason,
            cached_tokens: self.cached_tokens,
            prefill_s: (first_at - self.began_at).as_secs_f64(),
            decode_s: (self.last_at - first_at).as_secs_f64(),
            decode_tokens: self.emitted().saturating_sub(first_tokens),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use refrain_protocol::chunk::DraftScope;

    use super::*;

    fn step(source: DraftSource, tokens: usize) -> StepMessage {
        StepMessage {
            sequence: 0,
            tokens: vec![1; tokens],
            logprobs: None,
            weight_version: 0,
            source,
            scope: DraftScope::None,
            drafted: tokens as u32,
            accepted: tokens as u32 - 1,
            merged: None,
            forced: None,
        }
    }

    #[test]
    fn the_first_tokens_end_the_prefill_and_the_others_are_decoded() {
        let start = Instant::now();
        let at = |seconds| start + Duration::from_secs(seconds);
        let mut tally = ChunkTally::new(start, 7);
        let end = tally.end(ChunkEndReason::GaveWay);
        assert_eq!(
            (end.prefill_s, end.decode_s, end.decode_tokens),
            (0.0, 0.0, 0)
        );
        assert!(tally.pace(50, at(1)).is_none());
        tally.count(&step(DraftSource::None, 2), at(3));
        tally.count(&step(DraftSource::Suffix, 4), at(5));
        assert_eq!(
            (tally.steps(), tally.emitted(), tally.unmatched()),
            (2, 6, 2)
        );
        let pace = tally.pace(50, at(4)).unwrap();
        assert_eq!((pace.elapsed_s, pace.tokens), (1.0, 5));
        tally.found_more_in_cache(3);
        let end = tally.end(ChunkEndReason::Stop);
        assert_eq!(
            (end.prefill_s, end.decode_s, end.decode_tokens),
            (3.0, 2.0, 4)
        );
        assert_eq!(end.cached_tokens, 10);
    }
}
