//! The worth of a token: the step time that it saves its request.
//!
//! The router weighs tokens against seconds. A rate for all tokens, tokens per second of the mean step, is wrong
//! where text is uneven: where a text repeats itself tokens come by the dozen, elsewhere one by one. At the mean rate
//! the time of a draft in hard text looks dear, as if it were lost to easy text. But a text has to be written to its
//! end. A token that is gained in hard text saves the time that a token takes *there*; one that is gained in easy
//! text saves next to nothing, since the next long draft would have had it as well. (In terms of Markov decisions:
//! tokens are priced by the relative value of the position that they lead to, under the policy so far.)
//!
//! So the time per token is measured by how predictable the text is, which is the number of tokens that the best
//! suffix draft is expected to bring ([`Offer::predictability`](super::Offer::predictability)), and by batch size. A
//! step is worth the time that its tokens save all its requests, less the time that it takes all of them. No constant
//! is left to tune. A constant share of the mean rate was rejected: where half of the recorded calls were repeats, it
//! loses up to 11 % to the score policy.

use std::collections::HashMap;

use super::Step;
use super::trials::batch_bucket;

/// Steps after which an older one counts half.
const HALF_LIFE_STEPS: f64 = 2048.0;
/// Steps of a batch size before which nothing is priced.
const STEPS_MIN: u32 = 8;
/// Weight of the mean of a batch size in each of its buckets, in requests times steps.
const PRIOR_STEPS: f64 = 1.0;
/// Edges of the buckets of predictability, in expected tokens. The first bucket has no draft at all.
const EDGES: [f32; 9] = [0.01, 0.25, 0.5, 1.0, 1.5, 2.5, 4.0, 8.0, 16.0];
const BUCKETS: usize = EDGES.len() + 1;

/// Decayed sums.
#[derive(Clone, Copy, Debug, Default)]
struct Sums {
    /// Weight of the entries.
    entries: f64,
    tokens: f64,
    seconds: f64,
}

/// Steps of one batch size.
#[derive(Clone, Debug, Default)]
struct Sized {
    steps: u32,
    all: Sums,
    by_predictability: [Sums; BUCKETS],
}

/// Seconds of step time per token of a request, learnt from steps.
#[derive(Clone, Debug, Default)]
pub(super) struct TimeValue {
    sizes: HashMap<u32, Sized>,
}

impl TimeValue {
    /// Takes a step into account.
    pub(super) fn observe(&mut self, step: &Step) {
        let seconds = step.seconds + step.compose_seconds;
        let batch = step.batch();
        if batch == 0 || !(seconds.is_finite() && seconds > 0.0) {
            return;
        }
        let sized = self.sizes.entry(batch_bucket(batch)).or_default();
        sized.steps = sized.steps.saturating_add(1);
        // Each bucket forgets by its own entries, of which a step has as many as there are requests.
        let kept = 0.5f64.powf(1.0 / HALF_LIFE_STEPS);
        for item in &step.items {
            let Some(emitted) = item.emitted else {
                continue;
            };
            let entry = Sums {
                entries: 1.0,
                tokens: f64::from(emitted),
                seconds,
            };
            sized.all.add(entry, kept);
            sized.by_predictability[bucket(item.predictability)].add(entry, kept);
        }
    }

    /// Seconds that a token takes a request in steps of so many requests, whatever its text; `None` until enough
    /// steps were seen.
    pub(super) fn mean_seconds_per_token(&self, batch: u32) -> Option<f64> {
        let sized = self.sizes.get(&batch_bucket(batch))?;
        let is_known = sized.steps >= STEPS_MIN && sized.all.tokens > 0.0;
        is_known.then(|| sized.all.seconds / sized.all.tokens)
    }

    /// Seconds that a token takes a request in steps of so many requests, by predictability; `None` until enough
    /// steps were seen.
    pub(super) fn seconds_per_token(&self, batch: u32) -> Option<impl Fn(f32) -> f64 + '_> {
        let sized = self.sizes.get(&batch_bucket(batch))?;
        let all = &sized.all;
        if sized.steps < STEPS_MIN || all.tokens <= 0.0 {
            return None;
        }
        let prior = PRIOR_STEPS / all.entries;
        Some(move |predictability| {
            let here = &sized.by_predictability[bucket(predictability)];
            let tokens = here.tokens + prior * all.tokens;
            (here.seconds + prior * all.seconds) / tokens
        })
    }
}

impl Sums {
    fn add(&mut self, entry: Sums, kept: f64) {
        self.entries = self.entries * kept + entry.entries;
        self.tokens = self.tokens * kept + entry.tokens;
        self.seconds = self.seconds * kept + entry.seconds;
    }
}

fn bucket(predictability: f32) -> usize {
    EDGES.partition_point(|edge| *edge <= predictability)
}

#[cfg(test)]
mod tests {
    use super::super::{Route, StepPart};
    use super::*;

    fn step(requests: &[(f32, u32)], seconds: f64) -> Step {
        let item = |&(predictability, emitted): &(f32, u32)| StepPart {
            route: Some(Route::Plain),
            is_auto: true,
            may_use_head: false,
            predictability,
            context_tokens: 1,
            text_tokens: 100,
            draft_tokens: 0,
            head: None,
            head_drafted: 0,
            read_tokens: 0,
            emitted: Some(emitted),
        };
        Step {
            items: requests.iter().map(item).collect(),
            seconds,
            ..Step::default()
        }
    }

    #[test]
    fn tokens_of_hard_text_are_worth_more_than_those_of_copies() {
        let mut value = TimeValue::default();
        for at in 0..200 {
            assert_eq!(value.seconds_per_token(2).is_some(), at >= STEPS_MIN);
            value.observe(&step(&[(0.0, 1), (20.0, 10)], 0.01));
        }
        let near = |predictability: f32, wanted: f64| {
            let found = value.seconds_per_token(2).expect("enough steps")(predictability);
            assert!(
                (found / wanted - 1.0).abs() < 0.05,
                "{predictability}: {found}"
            );
        };
        near(0.0, 0.01);
        near(100.0, 0.001);
        // Text of a kind that was never seen is worth the mean.
        near(2.0, 0.02 / 11.0);
        // Other batch sizes were not seen.
        assert!(value.seconds_per_token(1).is_none());
        assert!(value.seconds_per_token(3).is_none());
    }

    #[test]
    fn recent_steps_count_more_and_impossible_ones_do_not_count() {
        let mut value = TimeValue::default();
        for (tokens, steps) in [(2, 20_000), (4, 2048)] {
            for _ in 0..steps {
                value.observe(&step(&[(0.0, tokens)], 0.01));
            }
        }
        let now = |value: &TimeValue| value.seconds_per_token(1).expect("enough steps")(0.0);
        let before = now(&value);
        assert!((before - 0.01 / 3.0).abs() < 1e-4, "{before}");
        for seconds in [0.0, f64::NAN, f64::INFINITY] {
            value.observe(&step(&[(0.0, 1000)], seconds));
        }
        assert_eq!(now(&value), before);
    }
}
