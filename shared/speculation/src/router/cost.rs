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

use super::HeadWork;
use crate::DecayedRatio;

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
/// Weight of a point of a profile, steps.
const PROFILE_STEPS: f64 = 8.0;
/// Seconds of every step before any was seen. It does not depend on the tokens, so that drafts are tried.
const UNKNOWN_S: f64 = 1e-3;
/// Shortest possible step, in seconds. A step that is reported to be shorter was not measured.
pub const STEP_SECONDS_MIN: f64 = 1e-6;

/// Sizes up to `.0` tokens are measured together in buckets of `.1`, each closed above: edges of tiles are multiples
/// of powers of two.
const WIDTHS: [(u32, u32); 4] = [(64, 1), (256, 4), (1024, 16), (4096, 64)];

/// Seconds of an engine's step by its tokens and KV tokens. The module documentation has the method.
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
    /// Most tokens of a step that takes as long; not below the number that was asked for.
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

/// Decayed moments of all steps, weighted by the inverse square of their seconds.
#[derive(Clone, Copy, Debug, Default)]
struct Line {
    steps: f64,
    weight: f64,
    tokens: f64,
    kv_tokens: f64,
    seconds: f64,
    /// Second moments of tokens and KV tokens about zero: (tokens², tokens kv, kv²).
    squares: [f64; 3],
    /// Products of either with seconds.
    products: [f64; 2],
}

/// Seconds = `at_zero` + `per_token` tokens + `per_kv_token` KV tokens.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
struct Fit {
    at_zero: f64,
    per_token: f64,
    per_kv_token: f64,
}

impl Default for StepCost {
    fn default() -> Self {
        let buckets = vec![Bucket::default(); bucket_of(WIDTHS[WIDTHS.len() - 1].0).0 + 1];
        StepCost {
            line: Line::default(),
            curve: vec![UNKNOWN_S; buckets.len()],
            buckets,
        }
    }
}

impl StepCost {
    /// Creates a cost that has seen no step: every step takes the same.
    pub fn new() -> Self {
        StepCost::default()
    }

    /// Starts from measured points: the tokens of a step, and its seconds with next to no KV.
    pub fn from_profile(points: &[(u32, f64)]) -> Self {
        let mut cost = StepCost::new();
        for &(tokens, seconds) in points.iter().filter(|(_, seconds)| is_time(*seconds)) {
            cost.add(PROFILE_STEPS, tokens, 0, seconds);
        }
        cost.draw();
        cost
    }

    /// Whether any step was seen.
    pub fn is_known(&self) -> bool {
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
                    let beyond = f64::from(batched_tokens - WIDTHS[WIDTHS.len() - 1].0);
                    self.curve[self.curve.len() - 1] + fit.per_token * beyond
                }
            };
            Stair {
                seconds: without_kv + kv,
                tokens_max: last,
            }
        }
    }

    /// Takes a step into account; `seconds` are those without the head. A step of less than [`STEP_SECONDS_MIN`] is
    /// left out.
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

impl Line {
    fn add(&mut self, steps: f64, tokens: f64, kv_tokens: f64, seconds: f64) {
        let weight = steps / (seconds * seconds);
        self.steps += steps;
        self.weight += weight;
        self.tokens += weight * tokens;
        self.kv_tokens += weight * kv_tokens;
        self.seconds += weight * seconds;
        self.squares[0] += weight * tokens * tokens;
        self.squares[1] += weight * tokens * kv_tokens;
        self.squares[2] += weight * kv_tokens * kv_tokens;
        self.products[0] += weight * tokens * seconds;
        self.products[1] += weight * kv_tokens * seconds;
    }

    fn scale(&mut self, by: f64) {
        let Line {
            steps,
            weight,
            tokens,
            kv_tokens,
            seconds,
            squares,
            products,
        } = self;
        for sum in [steps, weight, tokens, kv_tokens, seconds] {
            *sum *= by;
        }
        for sum in squares.iter_mut().chain(products) {
            *sum *= by;
        }
    }

    fn fit(&self) -> Fit {
        if self.weight <= 0.0 {
            return Fit {
                at_zero: UNKNOWN_S,
                ..Fit::default()
            };
        }
        let mean = |sum: f64| sum / self.weight;
        let (tokens, kv_tokens, seconds) =
            (mean(self.tokens), mean(self.kv_tokens), mean(self.seconds));
        let [tt, tk, kk] = self.squares.map(mean);
        let [ts, ks] = self.products.map(mean);
        let (per_token, per_kv_token) = slopes(
            [
                tt - tokens * tokens,
                tk - tokens * kv_tokens,
                kk - kv_tokens * kv_tokens,
            ],
            [ts - tokens * seconds, ks - kv_tokens * seconds],
            [tt, kk],
        );
        // A step over an edge can tilt the line until it meets zero above zero tokens. Small steps would then be
        // free, and their true times would look held up.
        let sloped = per_token * tokens + per_kv_token * kv_tokens;
        let scale = if sloped > seconds {
            seconds / sloped
        } else {
            1.0
        };
        Fit {
            at_zero: (seconds - sloped).max(0.0),
            per_token: per_token * scale,
            per_kv_token: per_kv_token * scale,
        }
    }
}

/// The two slopes, neither below 0, of least squares with these (co)variances; drawn towards 0 where the data hardly
/// vary beside their `sizes`, the means of their squares.
fn slopes(of: [f64; 3], with: [f64; 2], sizes: [f64; 2]) -> (f64, f64) {
    const RIDGE: f64 = 1e-4;
    let a = of[0].max(0.0) + RIDGE * sizes[0];
    let b = of[2].max(0.0) + RIDGE * sizes[1];
    let alone = |with: f64, of: f64| if of > 0.0 { (with / of).max(0.0) } else { 0.0 };
    let determinant = a * b - of[1] * of[1];
    if a > 0.0 && b > 0.0 && determinant > 0.0 {
        let first = (with[0] * b - with[1] * of[1]) / determinant;
        let second = (with[1] * a - with[0] * of[1]) / determinant;
        if first >= 0.0 && second >= 0.0 {
            return (first, second);
        }
        if first < 0.0 {
            return (0.0, alone(with[1], b));
        }
    }
    (alone(with[0], a), 0.0)
}

/// The nearest values that never fall, by weighted squares: neighbours that fall are merged into their mean.
fn never_falling(values: &mut [f64], weights: &[f64]) {
    // (mean, weight, how many)
    let mut merged: Vec<(f64, f64, usize)> = Vec::with_capacity(values.len());
    for (value, weight) in values.iter().zip(weights) {
        let mut last = (*value, *weight, 1);
        while let Some(before) = merged.pop_if(|before| before.0 > last.0) {
            let weight = before.1 + last.1;
            last = (
                (before.0 * before.1 + last.0 * last.1) / weight,
                weight,
                before.2 + last.2,
            );
        }
        merged.push(last);
    }
    let mut rest = values;
    for (mean, _, count) in merged {
        let (run, after) = rest.split_at_mut(count);
        run.fill(mean);
        rest = after;
    }
}

/// The bucket of a number of tokens, and the last number in it. Beyond the widths every number has one of its own.
fn bucket_of(tokens: u32) -> (usize, u32) {
    let (mut first, mut from) = (0, 0);
    for (to, width) in WIDTHS {
        if tokens <= to {
            let widths = (tokens.max(1) - from).div_ceil(width);
            return (first + widths as usize - 1, from + widths * width);
        }
        first += ((to - from) / width) as usize;
        from = to;
    }
    (first + (tokens - from) as usize - 1, tokens)
}

/// Tokens in the middle of a bucket.
fn middle(at: usize) -> f64 {
    let (mut first, mut from) = (0, 0);
    for (to, width) in WIDTHS {
        let count = ((to - from) / width) as usize;
        if at < first + count {
            let last = from + width * (at - first + 1) as u32;
            return f64::from(last) - f64::from(width - 1) / 2.0;
        }
        first += count;
        from = to;
    }
    f64::from(from)
}

/// The time that an engine's head takes in a step, and the part of its allowed tokens that it drafts.
///
/// Its passes come one after the other, each for all requests together. So there are seconds per pass, and seconds
/// per pass and request.
#[derive(Clone, Copy, Debug)]
pub(super) struct HeadCost {
    steps: f64,
    /// Second moments of depth and of depth times requests, as in [`Line`].
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
    pub(super) fn observe(&mut self, work: HeadWork, read_tokens: u32, seconds: f64) {
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
    pub(super) fn seconds(&self, requests: u32, depth: u32) -> f64 {
        if requests == 0 {
            return 0.0;
        }
        let sizes = [self.squares[0], self.squares[2]];
        let (per_pass, per_row) = slopes(self.squares, self.products, sizes);
        f64::from(depth) * (per_pass + per_row * f64::from(requests))
    }

    /// Seconds of reading so much text.
    pub(super) fn reading_seconds(&self, tokens: u32) -> f64 {
        f64::from(tokens) * self.reading.value().unwrap_or(0.0)
    }

    /// Expected tokens of a draft that may have `asked_tokens`, all of which are verified.
    pub(super) fn tokens(&self, asked_tokens: u32) -> f32 {
        asked_tokens as f32 * self.drafted.value().unwrap_or(1.0) as f32
    }
}

#[cfg(test)]
mod tests;
