//! The time of the engine's head.

use super::line::slopes;
use super::{HALF_LIFE_STEPS, HELD_UP, USUAL_STEPS_MIN};
use crate::DecayedRatio;

/// The drafts that the head was asked for in a step and the tokens that it drafted.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(in crate::router) struct HeadWork {
    /// Requests that it drafted for.
    pub(in crate::router) requests: u32,
    /// Maximum number of passes for one of them.
    pub(in crate::router) depth: u32,
    /// Maximum number of tokens that it was to draft.
    pub(in crate::router) tokens_max: u32,
    /// Tokens that it drafted.
    pub(in crate::router) drafted: u32,
}

/// The time that an engine's head takes in a step, and the part of its allowed tokens that it drafts.
///
/// Its passes come one after the other, each for all requests together. So there are seconds per pass, and seconds
/// per pass and request.
#[derive(Clone, Copy, Debug)]
pub(in crate::router) struct HeadCost {
    steps: f64,
    /// Second moments of depth and of depth times requests, as in [`Line`](super::line::Line).
    squares: [f64; 3],
    products: [f64; 2],
    /// Tokens drafted per token allowed.
    drafted: DecayedRatio,
    /// Seconds per token of text that it read before it drafted.
    reading: DecayedRatio,
}

impl Default for HeadCost {
    fn default() -> Self {
        HeadCost {
            steps: 0.0,
            squares: [0.0; 3],
            products: [0.0; 2],
            drafted: DecayedRatio::with_half_life(HALF_LIFE_STEPS),
            reading: DecayedRatio::with_half_life(HALF_LIFE_STEPS),
        }
    }
}

impl HeadCost {
    /// Takes the head's work of a step into account. If the head first read `read_tokens` of text, more than the last
    /// steps brought, the step tells the time of reading and nothing else.
    pub(in crate::router) fn observe(&mut self, work: HeadWork, read_tokens: u32, seconds: f64) {
        let HeadWork {
            requests,
            depth,
            tokens_max,
            drafted,
        } = work;
        if !(seconds.is_finite() && seconds >= 0.0) || requests == 0 || depth == 0 {
            return;
        }
        if read_tokens > 0 {
            let reading = (seconds - self.seconds(requests, depth)).max(0.0);
            self.reading.add(reading, f64::from(read_tokens));
            return;
        }
        let usual = self.seconds(requests, depth);
        // If the first drafts took no time, a limit relative to them would let no later draft take any.
        let seconds = if self.steps < USUAL_STEPS_MIN || usual <= 0.0 {
            seconds
        } else {
            seconds.min(usual * HELD_UP)
        };
        let (passes, rows) = (f64::from(depth), f64::from(depth) * f64::from(requests));
        let kept = 0.5f64.powf(1.0 / HALF_LIFE_STEPS);
        let add = |sum: &mut f64, what: f64| *sum = *sum * kept + what;
        add(&mut self.steps, 1.0);
        add(&mut self.squares[0], passes * passes);
        add(&mut self.squares[1], passes * rows);
        add(&mut self.squares[2], rows * rows);
        add(&mut self.products[0], passes * seconds);
        add(&mut self.products[1], rows * seconds);
        self.drafted.add(f64::from(drafted), f64::from(tokens_max));
    }

    /// Seconds of drafting for so many requests up to this depth.
    pub(in crate::router) fn seconds(&self, requests: u32, depth: u32) -> f64 {
        if requests == 0 {
            return 0.0;
        }
        let sizes = [self.squares[0], self.squares[2]];
        let (per_pass, per_row) = slopes(self.squares, self.products, sizes);
        f64::from(depth) * (per_pass + per_row * f64::from(requests))
    }

    /// Seconds of reading so much text.
    pub(in crate::router) fn reading_seconds(&self, tokens: u32) -> f64 {
        f64::from(tokens) * self.reading.value().unwrap_or(0.0)
    }

    /// Expected tokens of a draft that may have `asked_tokens`, all of which are verified.
    pub(in crate::router) fn tokens(&self, asked_tokens: u32) -> f32 {
        asked_tokens as f32 * self.drafted.value().unwrap_or(1.0) as f32
    }
}
