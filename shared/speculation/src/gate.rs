//! Whether a way of drafting pays on this engine: measured against doing without, by size of batch.
//!
//! Written for the fallback; the same question is asked of suffix drafts, with the difference that they are in use
//! until they are seen to lose.
//!
//! A draft head earns its keep on one machine and loses on another, wins at a batch of one and loses at
//! sixteen, and nobody can say so in advance. So both ways are measured. The one that is in use is measured all
//! the time; the other one is *tried* for a few steps now and then: the fallback is probed while it is out of
//! use, and pauses for plain decoding while it is in use.
//!
//! **What a trial may cost.** A trial of the slower way loses time, and what it lost is known when it ends. The
//! next one waits until the way in use has run for `1 / trial_cost_share_max` times that long, so trials cannot
//! cost more than that share, however slow the other way is; a trial that is clearly losing ends early. After
//! clear losses the wait also doubles, up to a limit. A share alone was tried on paper and left: a machine
//! where the fallback never pays would go on paying for the question.
//!
//! **What is evidence.** Only steps in which every request sampled, and all in the same way: a step that also
//! read prompts or verified suffix drafts says nothing about either. Others only advance a trial to its end.
//!
//! **What reading the text costs.** A head must read the context before it can draft: once per request, and in one
//! go if it was out of use. A trial of eight steps that pays for reading a long context would make a head
//! look hopeless that pays for it once in a thousand steps; leaving it out would make it look good for long
//! prompts with short answers. So it is measured apart, as seconds per token read, and charged at the rate that
//! requests have had lately: context tokens for each emitted one, suffix drafts apart. (What a trial lost counts
//! it in full: that time is gone.)

mod bucket;

use bucket::Bucket;
pub use bucket::TRIAL_STEPS_MIN;

use crate::DecayedRatio;

/// The gate's settings.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct GateParams {
    /// The way in use before anything was measured.
    pub starts_with: Mode,
    /// Steps of a trial that are evidence; at least [`TRIAL_STEPS_MIN`].
    pub probe_steps: u32,
    /// Steps between trials at first.
    pub backoff_steps: u32,
    /// Steps between trials at most, after one clear loss after another.
    pub backoff_steps_max: u32,
    /// Time that trials may lose, of all time.
    pub trial_cost_share_max: f64,
    /// Tokens per second with the fallback / without, above which it comes into use.
    pub gain_enter: f64,
    /// The same, below which it goes out of use; lower, so that noise does not turn it on and off.
    pub gain_leave: f64,
}

impl Default for GateParams {
    fn default() -> Self {
        GateParams {
            starts_with: Mode::Plain,
            probe_steps: 8,
            backoff_steps: 64,
            backoff_steps_max: 4096,
            trial_cost_share_max: 0.01,
            gain_enter: 1.05,
            gain_leave: 1.0,
        }
    }
}

/// A way to decode.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Mode {
    /// One token a step.
    Plain,
    /// Drafts of the fallback.
    Fallback,
}

/// What the gate lets a step do.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Passage {
    /// The fallback is out of use: slower, or not measured yet.
    Shut,
    /// It is out of use, and tried.
    Probe,
    /// It is in use.
    Open,
    /// It is in use, and plain decoding is tried.
    Pause,
}

impl Passage {
    /// How the step goes.
    pub fn mode(self) -> Mode {
        match self {
            Passage::Shut | Passage::Pause => Mode::Plain,
            Passage::Probe | Passage::Open => Mode::Fallback,
        }
    }

    /// Whether the fallback is in use, left out for a trial or not.
    pub fn is_in_use(self) -> bool {
        matches!(self, Passage::Open | Passage::Pause)
    }

    /// Whether the step tries the way that is not in use.
    pub fn is_trial(self) -> bool {
        matches!(self, Passage::Probe | Passage::Pause)
    }
}

/// A step that was made.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct GateStep {
    /// Requests that decoded in it.
    pub batch: u32,
    /// How, if all in one way, and nothing else was computed.
    pub mode: Option<Mode>,
    /// Tokens emitted.
    pub tokens: u32,
    /// Seconds it took.
    pub seconds: f64,
    /// Of them, seconds the fallback took to draft.
    pub draft_seconds: f64,
    /// Text that the fallback had to read first, if it was much: beyond what the last steps brought: tokens.
    pub catch_up_tokens: u32,
}

/// Decides by size of batch whether the fallback is used. No clock: the caller passes the seconds.
#[derive(Clone, Debug)]
pub struct Gate {
    params: GateParams,
    /// By the power of two that the batch does not exceed.
    buckets: Vec<Bucket>,
    /// Seconds per token read.
    reading: DecayedRatio,
    /// Context tokens per emitted one.
    contexts: DecayedRatio,
}

/// Requests that ended after which an older one counts half in the ratio of context to output; the same of catching up, in
/// the speed of reading.
const HALF_LIFE_REQUESTS: f64 = 13.5;

impl Gate {
    /// A gate that knows nothing yet.
    pub fn new(params: GateParams) -> Self {
        Gate {
            params,
            buckets: Vec::new(),
            reading: DecayedRatio::with_half_life(HALF_LIFE_REQUESTS),
            contexts: DecayedRatio::with_half_life(HALF_LIFE_REQUESTS),
        }
    }

    /// What a step of `batch` requests may do.
    pub fn passage(&self, batch: u32) -> Passage {
        let unseen = match self.params.starts_with {
            Mode::Plain => Passage::Shut,
            Mode::Fallback => Passage::Open,
        };
        self.buckets
            .get(place(batch))
            .map_or(unseen, Bucket::passage)
    }

    /// Takes a step into account. One whose seconds are no time at all is left out.
    pub fn observe(&mut self, step: GateStep) {
        if let Some((bucket, reading)) = self.measure(&step) {
            let params = self.params;
            self.buckets[bucket].observe(&step, reading, &params);
        }
    }

    /// Takes a step into account in which the gate had no say: its requests had asked for one way. It advances no
    /// trial. What it says of the fallback counts only until the first trial: requests that always draft with
    /// it accept more than those that turn to it where nothing else was found.
    pub fn learn(&mut self, step: GateStep) {
        if let Some((bucket, _)) = self.measure(&step) {
            self.buckets[bucket].learn(&step);
        }
    }

    /// Takes out of a step what it says of reading. The bucket of its batch, and seconds of reading per emitted token;
    /// `None` if the step's figures make no sense.
    fn measure(&mut self, step: &GateStep) -> Option<(usize, f64)> {
        let sane = |seconds: f64| seconds.is_finite() && seconds >= 0.0;
        if step.batch == 0
            || step.seconds <= 0.0
            || ![step.seconds, step.draft_seconds].into_iter().all(sane)
        {
            return None;
        }
        let place = place(step.batch);
        if self.buckets.len() <= place {
            self.buckets
                .resize_with(place + 1, || Bucket::new(&self.params));
        }
        if step.catch_up_tokens > 0 {
            // The head's time beyond what drafting alone takes it.
            let reading =
                (step.draft_seconds - self.buckets[place].draft_seconds().unwrap_or(0.0)).max(0.0);
            self.reading.add(reading, f64::from(step.catch_up_tokens));
        }
        Some((place, self.reading_per_token()))
    }

    /// Forgets what was measured in batches of this size: one of the two ways means something else now.
    pub fn forget(&mut self, batch: u32) {
        if let Some(bucket) = self.buckets.get_mut(place(batch)) {
            *bucket = Bucket::new(&self.params);
        }
    }

    /// A request ended that the fallback could have served: the text it came with, and what it was given by steps
    /// that were the fallback's or would have been.
    pub fn request_ended(&mut self, context_tokens: u32, emitted_tokens: u32) {
        if emitted_tokens > 0 {
            self.contexts
                .add(f64::from(context_tokens), f64::from(emitted_tokens));
        }
    }

    /// Tokens per second with the fallback / without it in batches of this size, once both were measured.
    pub fn gain(&self, batch: u32) -> Option<f64> {
        self.buckets
            .get(place(batch))?
            .gain(self.reading_per_token())
    }

    /// What is known, by size of batch: the largest batch of the bucket, whether the fallback is in use, its
    /// gain.
    pub fn buckets(&self) -> impl Iterator<Item = (u32, bool, Option<f64>)> + '_ {
        let reading = self.reading_per_token();
        self.buckets
            .iter()
            .enumerate()
            .filter(|(_, bucket)| bucket.was_seen())
            .map(move |(place, bucket)| {
                let in_use = bucket.passage().is_in_use();
                (bucket_batch_max(place), in_use, bucket.gain(reading))
            })
    }

    /// Seconds of reading the context that fall on an emitted token. Until a request has ended: as much
    /// context as output.
    fn reading_per_token(&self) -> f64 {
        self.reading.value().unwrap_or(0.0) * self.contexts.value().unwrap_or(1.0)
    }
}

/// The largest batch that is measured together with this one.
pub fn batch_bucket(batch: u32) -> u32 {
    bucket_batch_max(place(batch))
}

fn place(batch: u32) -> usize {
    (u32::BITS - batch.saturating_sub(1).leading_zeros()) as usize
}

fn bucket_batch_max(place: usize) -> u32 {
    1u32.checked_shl(place as u32).unwrap_or(u32::MAX)
}

#[cfg(test)]
mod tests;
