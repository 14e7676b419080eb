//! The gain from drafts: tokens per second with drafts over tokens per second of plain decoding, with the error of
//! that figure.
//!
//! This is what operators are shown. It decides nothing: the guard compares a few steps of a trial with what came
//! before, which is enough to notice a loss, and too little to publish.
//!
//! **The steps that count.** Both sides are steps that decoded for the same number of requests, all of which leave
//! drafting to the router, and that read no prompt. A step is evidence for *drafts* if drafts might have been in it,
//! whether any was found or not. Its time includes the search. A step is evidence for *plain decoding* if it verified
//! no draft and each request got one token. The engine's time alone counts there, so the search is never charged to
//! plain decoding.
//!
//! **The ratio.** Plain decoding takes some time per token at each batch size. The ratio is the time that plain
//! decoding would have taken for the tokens of the steps with drafts, at the batch size of each of them, over the
//! time that they took. A batch size that was seen in one way only is left out.
//!
//! **The error.** Steps that follow each other resemble each other: they belong to the same outputs, and whatever
//! else the machine does slows them all. So steps are summed up in blocks of time, and the error is that of the
//! jackknife over these blocks (Efron and Tibshirani, An Introduction to the Bootstrap, section 11.5). A trial of
//! many steps in one moment counts as one block.
//!
//! **Left out.** Engines are slow at first, so nothing counts for some time after the first step, nor do the first
//! steps of each kind at each batch size. Blocks count for the length of the window. A batch size of which nothing
//! was seen lately has no figure.

use std::collections::{BTreeMap, VecDeque};
use std::time::Duration;

use super::{Step, StepPart, batch_bucket};

/// Settings of the measurement of what drafts gain.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct GainParams {
    /// Time after the first step that does not count.
    pub warm_up: Duration,
    /// Age up to which steps count.
    pub window: Duration,
    /// Time without steps after which there is no figure.
    pub idle: Duration,
    /// Largest error of a ratio that is shown, as a share of the ratio.
    pub error_max: f64,
}

impl Default for GainParams {
    fn default() -> Self {
        GainParams {
            warm_up: Duration::from_secs(60),
            window: Duration::from_secs(600),
            idle: Duration::from_secs(120),
            error_max: 0.2,
        }
    }
}

/// How a step or a stretch of time decoded.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum GainSide {
    /// One token for each request, without drafts.
    Plain,
    /// With drafts wherever they were expected to pay.
    Drafted,
}

/// Time that was spent on decoding.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct GainSample {
    /// Requests that decoded.
    pub batch: u32,
    /// How they decoded.
    pub side: GainSide,
    /// Tokens that were emitted.
    pub tokens: u32,
    /// Seconds that it took.
    pub seconds: f64,
}

/// The figures of the gain at a batch size.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct GainReading {
    /// The largest batch that it is about; see [`batch_bucket`].
    pub batch: u32,
    /// Plain steps that the ratio rests on.
    pub plain_steps: u64,
    /// Steps with drafts that the ratio rests on.
    pub drafted_steps: u64,
    /// Two standard errors of the ratio, as a share of it. The true ratio is within it about nine times in ten.
    /// `None` while the steps are too few or too close together to tell.
    pub error: Option<f64>,
    /// Tokens per second with drafts over those of plain decoding. `None` where the error is unknown or too large.
    pub ratio: Option<f64>,
}

/// Blocks of a window.
const WINDOW_BLOCKS: u32 = 120;
/// Blocks in which each side must have been seen, before the blocks can tell an error.
const BLOCKS_MIN: usize = 5;
/// First steps of each side at each batch size that do not count. An engine may compile or allocate in them.
const FIRST_STEPS: u32 = 8;

/// Sums over steps of one side.
#[derive(Clone, Copy, Debug, Default)]
struct Sums {
    steps: u64,
    tokens: u64,
    seconds: f64,
}

/// Both sides at one batch size.
#[derive(Clone, Copy, Debug, Default)]
struct Pair {
    plain: Sums,
    drafted: Sums,
}

/// By the exact number of requests.
type Pairs = BTreeMap<u32, Pair>;

/// The steps of a stretch of time.
#[derive(Clone, Debug, Default)]
struct Block {
    /// Its number since the clock started.
    number: u128,
    pairs: Pairs,
}

/// Measures what drafts gain. It has no clock: the caller passes the time since any fixed moment.
#[derive(Clone, Debug)]
pub struct GainEstimator {
    params: GainParams,
    /// When the first step was made.
    began: Option<Duration>,
    /// Steps so far by batch size and side, up to [`FIRST_STEPS`].
    first_steps: BTreeMap<(u32, GainSide), u32>,
    /// The oldest first.
    blocks: VecDeque<Block>,
    /// The last evidence, by the largest batch that is shown together.
    last_seen: BTreeMap<u32, Duration>,
}

impl GainEstimator {
    /// An estimator that has seen nothing.
    pub fn new(params: GainParams) -> Self {
        GainEstimator {
            params,
            began: None,
            first_steps: BTreeMap::new(),
            blocks: VecDeque::new(),
            last_seen: BTreeMap::new(),
        }
    }

    /// Begins anew with the warm-up, because the engine may have been restarted.
    pub fn restart(&mut self) {
        self.began = None;
        self.first_steps.clear();
        self.blocks.clear();
    }

    /// Takes a step into account that ended at `at`. `may_draft` tells whether the settings allow drafts in it.
    pub fn observe_step(&mut self, at: Duration, step: &Step, may_draft: bool) {
        self.began.get_or_insert(at);
        let is_comparable = step.is_clean()
            && step
                .items
                .iter()
                .all(|item| item.is_auto && item.context_tokens <= 1);
        if !is_comparable {
            return;
        }
        let mut sample = GainSample {
            batch: step.batch(),
            side: GainSide::Plain,
            tokens: step.emitted(),
            seconds: step.seconds,
        };
        let is_plain = |item: &StepPart| {
            item.draft_tokens == 0 && item.head.is_none() && item.emitted == Some(1)
        };
        if step.items.iter().all(is_plain) {
            self.observe(at, sample);
        }
        if may_draft && !step.withheld {
            sample.side = GainSide::Drafted;
            sample.seconds += step.compose_seconds;
            self.observe(at, sample);
        }
    }

    /// Takes time into account that ended at `at`. A sample without requests, tokens or time is left out.
    pub fn observe(&mut self, at: Duration, sample: GainSample) {
        let GainSample {
            batch,
            side,
            tokens,
            seconds,
        } = sample;
        let began = *self.began.get_or_insert(at);
        let is_sane = batch > 0 && tokens > 0 && seconds > 0.0 && seconds.is_finite();
        if !is_sane {
            return;
        }
        let first_steps = self.first_steps.entry((batch, side)).or_default();
        let is_first = *first_steps < FIRST_STEPS;
        if is_first {
            *first_steps += 1;
        }
        if is_first || at.saturating_sub(began) < self.params.warm_up {
            return;
        }
        self.last_seen.insert(batch_bucket(batch), at);
        let pairs = &mut self.block(at).pairs;
        let pair = pairs.entry(batch).or_default();
        let sums = match side {
            GainSide::Plain => &mut pair.plain,
            GainSide::Drafted => &mut pair.drafted,
        };
        sums.steps += 1;
        sums.tokens += u64::from(tokens);
        sums.seconds += seconds;
    }

    /// The figures at `at`, by batch size, of all batch sizes that were ever seen.
    pub fn readings(&self, at: Duration) -> Vec<GainReading> {
        let oldest = self.oldest(at);
        let blocks: Vec<&Pairs> = self
            .blocks
            .iter()
            .filter(|block| block.number >= oldest)
            .map(|block| &block.pairs)
            .collect();
        let buckets = self.last_seen.iter();
        buckets
            .map(
                |(&batch, &seen)| match at.saturating_sub(seen) > self.params.idle {
                    true => GainReading::nothing(batch),
                    false => self.reading(batch, &blocks),
                },
            )
            .collect()
    }

    fn reading(&self, batch: u32, blocks: &[&Pairs]) -> GainReading {
        let of_bucket = |pairs: &Pairs| -> Pairs {
            let pairs = pairs.iter();
            pairs
                .filter(|(size, _)| batch_bucket(**size) == batch)
                .map(|(size, pair)| (*size, *pair))
                .collect()
        };
        let blocks: Vec<Pairs> = blocks.iter().map(|pairs| of_bucket(pairs)).collect();
        let mut all = Pairs::new();
        for (size, pair) in blocks.iter().flatten() {
            let sum = all.entry(*size).or_default();
            sum.plain.add(&pair.plain);
            sum.drafted.add(&pair.drafted);
        }
        // One way alone at a batch size says nothing.
        all.retain(|_, pair| pair.plain.steps > 0 && pair.drafted.steps > 0);
        let steps = |side: fn(&Pair) -> Sums| all.values().map(|pair| side(pair).steps).sum();
        let (plain_steps, drafted_steps) = (steps(|of| of.plain), steps(|of| of.drafted));
        let estimate = ratio(all.values()).zip(error(&all, &blocks));
        let error = estimate.map(|(ratio, error)| error / ratio);
        GainReading {
            batch,
            plain_steps,
            drafted_steps,
            error,
            ratio: estimate
                .map(|(ratio, _)| ratio)
                .filter(|_| error.is_some_and(|error| error <= self.params.error_max)),
        }
    }

    /// The block of this time, after those that are too old are gone.
    fn block(&mut self, at: Duration) -> &mut Block {
        let oldest = self.oldest(at);
        while self.blocks.front().is_some_and(|of| of.number < oldest) {
            self.blocks.pop_front();
        }
        let number = self.number(at);
        if self.blocks.back().is_none_or(|of| of.number < number) {
            let pairs = Pairs::new();
            self.blocks.push_back(Block { number, pairs });
        }
        let last = self.blocks.len() - 1;
        &mut self.blocks[last]
    }

    fn number(&self, at: Duration) -> u128 {
        let length = self.params.window / WINDOW_BLOCKS;
        at.as_nanos() / length.as_nanos().max(1)
    }

    /// The number of the oldest block that counts.
    fn oldest(&self, at: Duration) -> u128 {
        (self.number(at) + 1).saturating_sub(WINDOW_BLOCKS.into())
    }
}

impl GainReading {
    fn nothing(batch: u32) -> Self {
        GainReading {
            batch,
            plain_steps: 0,
            drafted_steps: 0,
            error: None,
            ratio: None,
        }
    }
}

/// The ratio over pairs of which both sides were seen; `None` if there are none.
fn ratio<'a>(pairs: impl Iterator<Item = &'a Pair>) -> Option<f64> {
    let (mut plain_s, mut drafted_s) = (0.0, 0.0);
    for Pair { plain, drafted } in pairs {
        if plain.steps > 0 && drafted.steps > 0 {
            plain_s += plain.seconds / plain.tokens as f64 * drafted.tokens as f64;
            drafted_s += drafted.seconds;
        }
    }
    (drafted_s > 0.0).then(|| plain_s / drafted_s)
}

/// Two standard errors of the ratio over all pairs, from the ratios without one block each. `None` if either side was
/// seen in too few blocks.
fn error(all: &Pairs, blocks: &[Pairs]) -> Option<f64> {
    let pairs = |block: &Pairs| -> Vec<(u32, Pair)> {
        let known = block.iter().filter(|(size, _)| all.contains_key(size));
        known.map(|(size, pair)| (*size, *pair)).collect()
    };
    let blocks: Vec<Vec<(u32, Pair)>> = blocks.iter().map(pairs).collect();
    let seen = |side: fn(&Pair) -> Sums| {
        let has_side = |block: &&Vec<(u32, Pair)>| block.iter().any(|(_, of)| side(of).steps > 0);
        blocks.iter().filter(has_side).count()
    };
    if seen(|of| of.plain).min(seen(|of| of.drafted)) < BLOCKS_MIN {
        return None;
    }
    let without = |block: &Vec<(u32, Pair)>| {
        let mut rest = all.clone();
        for (size, pair) in block {
            if let Some(sum) = rest.get_mut(size) {
                sum.plain.subtract(&pair.plain);
                sum.drafted.subtract(&pair.drafted);
            }
        }
        ratio(rest.values())
    };
    let blocks = blocks.iter().filter(|block| !block.is_empty());
    let ratios: Vec<f64> = blocks.map(without).collect::<Option<_>>()?;
    let count = ratios.len() as f64;
    let mean = ratios.iter().sum::<f64>() / count;
    let squares: f64 = ratios.iter().map(|of| (of - mean).powi(2)).sum();
    Some(2.0 * ((count - 1.0) / count * squares).sqrt())
}

impl Sums {
    fn add(&mut self, other: &Sums) {
        self.steps += other.steps;
        self.tokens += other.tokens;
        self.seconds += other.seconds;
    }

    fn subtract(&mut self, other: &Sums) {
        self.steps -= other.steps;
        self.tokens -= other.tokens;
        self.seconds -= other.seconds;
    }
}

#[cfg(test)]
mod tests;
