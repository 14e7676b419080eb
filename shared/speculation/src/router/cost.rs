//! The time of a step, learnt from the steps that were made.
//!
//! A draft token costs little as long as the engine waits for memory anyway, more once it is short of arithmetic, and
//! as much as a whole tile at the edge of one. So the cost of a step is a staircase in the tokens of its batch, and a
//! different one on each machine. It is measured during operation.
//!
//! [`StepCost`] is a line fitted to all steps (seconds from tokens and KV tokens, by least squares of the *relative*
//! error, so that prompts do not decide the cost of decoding). To the line it adds, by number of tokens, the mean
//! distance of the steps of that size. A size that was never seen lies between its neighbours, nearer to the smaller.
//! The curve never falls as tokens grow.

mod head;
mod line;
mod stairs;

pub(super) use head::{HeadCost, HeadWork};
use line::{Fit, Line, UNKNOWN_S};
use stairs::{beyond, bucket_of, buckets, middle, never_falling};

/// Steps after which an older one counts half.
const HALF_LIFE_STEPS: f64 = 512.0;
/// Steps of a size for which the line counts beside them.
const LINE_WEIGHT: f64 = 2.0;
/// A step that takes this many times as long as expected was held up by something else, and one that takes so much
/// less was miscounted. No step counts as further off.
const HELD_UP: f64 = 3.0;
/// Steps before which no step counts as held up.
const USUAL_STEPS_MIN: f64 = 8.0;
/// Weight of a size below which it is forgotten.
const WEIGHT_MIN: f64 = 0.05;
/// Weight of a point of a profile, steps. A profile is of one request without KV, and steps of many requests take
/// longer. So the small steps of a profile look too cheap, and the tokens of drafts too dear. With a weight of 8 the
/// router drafted a fifth less on a modelled H100, and goodput was 2 % lower with 16 and 64 requests at once.
const PROFILE_STEPS: f64 = 0.1;
/// Shortest possible step, in seconds. A step that is reported to be shorter was not measured.
pub(super) const STEP_SECONDS_MIN: f64 = 1e-6;

/// Seconds of an engine's step by its tokens and KV tokens. The module documentation has the method. Before any step
/// was seen, every step takes the same.
#[derive(Clone, Debug)]
pub struct StepCost {
    line: Line,
    buckets: Vec<Bucket>,
    /// Seconds by bucket, without KV, derived from `buckets` and `line`.
    curve: Vec<f64>,
}

/// The time of a step, and how many tokens it may have in the same time.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Stair {
    /// Seconds, above 0.
    pub(super) seconds: f64,
    /// Maximum number of tokens of a step that takes as long; not below the number that was asked for.
    pub(super) tokens_max: u32,
}

/// Steps of one size.
#[derive(Clone, Copy, Debug, Default)]
struct Bucket {
    weight: f64,
    tokens: f64,
    kv_tokens: f64,
    seconds: f64,
}

impl Default for StepCost {
    fn default() -> Self {
        StepCost {
            line: Line::default(),
            curve: vec![UNKNOWN_S; buckets()],
            buckets: vec![Bucket::default(); buckets()],
        }
    }
}

impl StepCost {
    /// Starts from measured points: the tokens of a step, and its seconds with next to no KV.
    pub(super) fn from_profile(points: &[(u32, f64)]) -> Self {
        let mut cost = StepCost::default();
        for &(tokens, seconds) in points.iter().filter(|(_, seconds)| is_time(*seconds)) {
            cost.add(PROFILE_STEPS, tokens, 0, seconds);
        }
        cost.draw();
        cost
    }

    /// Whether any step was seen.
    pub(super) fn is_known(&self) -> bool {
        self.line.steps > 0.0
    }

    /// Seconds of a step that computes `batched_tokens` and holds `kv_tokens` of all its requests, above 0.
    pub fn seconds(&self, batched_tokens: u32, kv_tokens: u64) -> f64 {
        self.at_kv(kv_tokens)(batched_tokens).seconds
    }

    /// The same for steps that hold so many KV tokens, by tokens computed: for many questions about one step.
    pub(super) fn at_kv(&self, kv_tokens: u64) -> impl Fn(u32) -> Stair + '_ {
        let fit = self.line.fit();
        let kv = fit.per_kv_token * kv_tokens as f64;
        move |batched_tokens| {
            let (at, last) = bucket_of(batched_tokens);
            let without_kv = match self.curve.get(at) {
                Some(seconds) => *seconds,
                None => {
                    let beyond = f64::from(beyond(batched_tokens));
                    self.curve[self.curve.len() - 1] + fit.per_token * beyond
                }
            };
            Stair {
                seconds: without_kv + kv,
                tokens_max: last,
            }
        }
    }

    /// Takes a step into account; `seconds` are those without the head. A step below a microsecond is left out.
    pub fn observe(&mut self, batched_tokens: u32, kv_tokens: u64, seconds: f64) {
        if !is_time(seconds) || batched_tokens == 0 {
            return;
        }
        let seconds = if self.line.steps < USUAL_STEPS_MIN {
            seconds
        } else {
            let usual = self.seconds(batched_tokens, kv_tokens);
            seconds.clamp(usual / HELD_UP, usual * HELD_UP)
        };
        let kept = 0.5f64.powf(1.0 / HALF_LIFE_STEPS);
        self.line.scale(kept);
        for bucket in &mut self.buckets {
            bucket.weight *= kept;
        }
        self.add(1.0, batched_tokens, kv_tokens, seconds);
        self.draw();
    }

    fn add(&mut self, weight: f64, tokens: u32, kv_tokens: u64, seconds: f64) {
        let (at, _) = bucket_of(tokens);
        let (tokens, kv_tokens) = (f64::from(tokens), kv_tokens as f64);
        self.line.add(weight, tokens, kv_tokens, seconds);
        if let Some(bucket) = self.buckets.get_mut(at) {
            bucket.add(weight, tokens, kv_tokens, seconds);
        }
    }

    /// Computes the curve.
    fn draw(&mut self) {
        let fit = self.line.fit();
        let line = |at: usize| fit.at_zero + fit.per_token * middle(at);
        let seen: Vec<(usize, f64)> = self
            .buckets
            .iter()
            .enumerate()
            .filter(|(_, bucket)| bucket.weight >= WEIGHT_MIN)
            .map(|(at, bucket)| (at, line(at) + bucket.off(fit)))
            .collect();
        let (mut left, mut next) = (None, 0);
        let mut weights = Vec::with_capacity(self.curve.len());
        for at in 0..self.curve.len() {
            if seen.get(next).is_some_and(|(seen, _)| *seen == at) {
                left = Some(seen[next]);
                next += 1;
            }
            self.curve[at] = match (left, seen.get(next)) {
                (Some((from, seconds)), Some(&(to, other))) => {
                    let share = (middle(at) - middle(from)) / (middle(to) - middle(from));
                    // Squared, so that an unseen size is taken to cost little until it is near a seen one. A straight
                    // line from small steps over a ridge to large ones would price out every step between them, and
                    // none would ever be made to show that it is cheap.
                    seconds + (other - seconds) * share * share
                }
                (Some((near, seconds)), None) | (None, Some(&(near, seconds))) => {
                    seconds + line(at) - line(near)
                }
                (None, None) => line(at),
            };
            weights.push(self.buckets[at].weight.max(WEIGHT_MIN));
        }
        never_falling(&mut self.curve, &weights);
        for seconds in &mut self.curve {
            *seconds = seconds.max(STEP_SECONDS_MIN);
        }
    }
}

/// Whether a step can take that long.
fn is_time(seconds: f64) -> bool {
    seconds.is_finite() && seconds >= STEP_SECONDS_MIN
}

impl Bucket {
    fn add(&mut self, weight: f64, tokens: f64, kv_tokens: f64, seconds: f64) {
        self.weight += weight;
        let share = weight / self.weight;
        self.tokens += (tokens - self.tokens) * share;
        self.kv_tokens += (kv_tokens - self.kv_tokens) * share;
        self.seconds += (seconds - self.seconds) * share;
    }

    /// Seconds above the line, drawn towards it while there are few steps.
    fn off(&self, fit: Fit) -> f64 {
        let line = fit.at_zero + fit.per_token * self.tokens + fit.per_kv_token * self.kv_tokens;
        (self.seconds - line) * self.weight / (self.weight + LINE_WEIGHT)
    }
}

#[cfg(test)]
mod tests;
