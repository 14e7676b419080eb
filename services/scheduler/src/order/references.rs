//! The gain of drafts by the finished outputs of a group, as far as it has been seen.

/// Weight of the newest chunk, once there are many.
const STEP: f64 = 1.0 / 256.0;
/// Fewer chunks of a kind tell nothing.
const CHUNKS_MIN: u32 = 16;
/// Chunks with fewer tokens per step have no drafts worth the name.
const DRAFTED_MIN: f64 = 1.01;

/// Chunks of one kind, the newest with the most weight.
#[derive(Clone, Copy, Debug, Default)]
struct Chunks {
    chunks: u32,
    tokens: f64,
    steps: f64,
}

impl Chunks {
    fn note(&mut self, emitted_tokens: u32, steps: u32) {
        self.chunks = self.chunks.saturating_add(1);
        self.tokens = (1.0 - STEP) * self.tokens + f64::from(emitted_tokens);
        self.steps = (1.0 - STEP) * self.steps + f64::from(steps);
    }

    fn tokens_per_step(&self) -> Option<f64> {
        (self.chunks >= CHUNKS_MIN).then(|| self.tokens / self.steps)
    }
}

/// Tokens per step of the chunks that began before any member of their group had finished, and of the others.
#[derive(Clone, Debug, Default)]
pub(crate) struct ReferenceGain {
    without: Chunks,
    with: Chunks,
}

impl ReferenceGain {
    /// Notes a chunk. Each token that was not an accepted draft took a step.
    pub(crate) fn note(&mut self, had_reference: bool, emitted_tokens: u32, accepted_tokens: u32) {
        if emitted_tokens == 0 {
            return;
        }
        let steps = emitted_tokens.saturating_sub(accepted_tokens).max(1);
        let of = match had_reference {
            true => &mut self.with,
            false => &mut self.without,
        };
        of.note(emitted_tokens, steps);
    }

    /// How many more tokens per step chunks have that can draft from a finished member, as a share. `None`: unknown
    /// yet. Where not even the others have drafts, the engine makes none, and there is nothing to wait for.
    pub(crate) fn value(&self) -> Option<f64> {
        let without = self.without.tokens_per_step()?;
        match self.with.tokens_per_step() {
            Some(with) => Some(with / without - 1.0),
            None => (without < DRAFTED_MIN).then_some(0.0),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_gain_is_in_tokens_per_step_and_follows_the_newest_chunks() {
        let mut gain = ReferenceGain::default();
        for _ in 0..CHUNKS_MIN {
            assert_eq!(gain.value(), None);
            gain.note(false, 100, 20);
        }
        assert_eq!(gain.value(), None);
        for _ in 0..CHUNKS_MIN {
            // Chunks of other lengths, and an empty one.
            gain.note(true, 30, 15);
            gain.note(true, 0, 0);
        }
        // 2 tokens per step instead of 1.25.
        let value = |gain: &ReferenceGain| gain.value().expect("chunks of both kinds");
        assert!((value(&gain) - 0.6).abs() < 1e-9, "{gain:?}");
        for _ in 0..2_000 {
            gain.note(true, 30, 0);
            gain.note(false, 30, 0);
        }
        assert!(value(&gain).abs() < 0.01, "{gain:?}");
        // A chunk that was cut has fewer tokens than were accepted.
        gain.note(true, 1, u32::MAX);
        assert!(value(&gain).is_finite());
    }

    #[test]
    fn an_engine_without_drafts_is_soon_known_as_such() {
        let mut gain = ReferenceGain::default();
        for _ in 0..CHUNKS_MIN {
            assert_eq!(gain.value(), None);
            gain.note(false, 100, 0);
        }
        assert_eq!(gain.value(), Some(0.0));
    }
}
