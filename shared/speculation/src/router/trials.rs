//! Trials: whether a way of drafting pays on this engine, measured against doing without it, by batch size.
//!
//! A draft head earns its keep on one machine and loses on another, wins at a batch of one and loses at sixteen, and
//! nobody can say so in advance. So both ways are measured. The way in use is measured all the time; the other one is
//! *tried* for a few steps now and then. The score policy asks this of the head, and the guard asks it of all drafts.
//!
//! **The cost of a trial.** A trial of the slower way loses time, and the loss is known when it ends. The next one
//! waits until the way in use has run for `1 / trial_cost_share_max` times as long ([`Schedule`]). Trials can thus
//! not cost more than that share, however slow the other way is, and a trial that is clearly losing ends early. After
//! clear losses the wait also doubles, up to a limit. (A share alone was rejected: a machine where drafts never pay
//! would go on paying for the question.)
//!
//! **Evidence.** Only steps count in which every request sampled, and all in the same way. A step that also read
//! prompts or verified other drafts says nothing about either way; it only advances a trial to its end.
//!
//! **Reading the text.** A head must read the context before it can draft: once per request, and in one go if it was
//! out of use. A trial of eight steps that pays for reading a long context would make a head look hopeless that pays
//! for it once in a thousand steps. Leaving it out would make the head look good for long prompts with short answers.
//! So reading is measured apart, as seconds per token read, and charged at the recent ratio of context tokens to
//! emitted ones. (The loss of a trial counts it in full, since that time is gone.)

mod bucket;
mod sample;
mod schedule;

use bucket::Bucket;
pub use sample::TrialParams;
pub(super) use sample::{Mode, Phase, Sample};
pub(super) use schedule::Schedule;

use crate::DecayedRatio;

/// Decides by batch size whether drafts are used. It has no clock: the caller passes the seconds.
#[derive(Clone, Debug)]
pub(super) struct Trials {
    /// The way in use before anything was measured.
    starts_with: Mode,
    params: TrialParams,
    /// By the power of two that the batch does not exceed.
    buckets: Vec<Bucket>,
    /// Seconds per token read.
    reading: DecayedRatio,
    /// Context tokens per emitted one.
    contexts: DecayedRatio,
}

/// Requests that ended after which an older one counts half in the ratio of context to output. It is also the number
/// of readings after which an older one counts half in the speed of reading.
const HALF_LIFE_REQUESTS: f64 = 13.5;

impl Trials {
    /// Trials of which none was made yet.
    pub(super) fn new(starts_with: Mode, params: TrialParams) -> Self {
        Trials {
            starts_with,
            params,
            buckets: Vec::new(),
            reading: DecayedRatio::with_half_life(HALF_LIFE_REQUESTS),
            contexts: DecayedRatio::with_half_life(HALF_LIFE_REQUESTS),
        }
    }

    /// How a step of `batch` requests goes.
    pub(super) fn phase(&self, batch: u32) -> Phase {
        match self.buckets.get(place(batch)) {
            Some(bucket) => bucket.phase(),
            None => Phase {
                in_use: self.starts_with == Mode::With,
                on_trial: false,
            },
        }
    }

    /// Takes a step into account. A step whose seconds are not positive is left out.
    pub(super) fn observe(&mut self, step: Sample) {
        if let Some((bucket, reading)) = self.measure(&step) {
            self.buckets[bucket].observe(&step, reading, &self.params);
        }
    }

    /// Takes a step into account whose requests had asked for one way. It advances no trial. Its evidence for drafts
    /// counts only until the first trial: requests that always draft with the head accept more than those that turn
    /// to it where nothing else was found.
    pub(super) fn learn(&mut self, step: Sample) {
        if let Some((bucket, _)) = self.measure(&step) {
            self.buckets[bucket].learn(&step);
        }
    }

    /// Learns from a step how fast the head reads. Returns the bucket of its batch and the seconds of reading per
    /// emitted token; `None` if the figures of the step make no sense.
    fn measure(&mut self, step: &Sample) -> Option<(usize, f64)> {
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
                .resize_with(place + 1, || Bucket::new(self.starts_with, &self.params));
        }
        if step.read_tokens > 0 {
            // The head's time beyond that of drafting alone.
            let reading =
                (step.draft_seconds - self.buckets[place].draft_seconds().unwrap_or(0.0)).max(0.0);
            self.reading.add(reading, f64::from(step.read_tokens));
        }
        Some((place, self.reading_per_token()))
    }

    /// Forgets the measurements of this batch size, because one of the two ways means something else now.
    pub(super) fn forget(&mut self, batch: u32) {
        if let Some(bucket) = self.buckets.get_mut(place(batch)) {
            *bucket = Bucket::new(self.starts_with, &self.params);
        }
    }

    /// Takes into account that a request ended which the head could have served: the length of its context at the
    /// start, and the tokens that were emitted by steps that the head drafted or could have.
    pub(super) fn request_ended(&mut self, context_tokens: u32, emitted_tokens: u32) {
        if emitted_tokens > 0 {
            self.contexts
                .add(f64::from(context_tokens), f64::from(emitted_tokens));
        }
    }

    /// Tokens per second with drafts over those without at this batch size, once both were measured.
    pub(super) fn gain(&self, batch: u32) -> Option<f64> {
        self.buckets
            .get(place(batch))?
            .gain(self.reading_per_token())
    }

    /// The greatest gain over all batch sizes, or only over those where drafts are in use.
    pub(super) fn best_gain(&self, only_in_use: bool) -> Option<f64> {
        let reading = self.reading_per_token();
        let buckets = self.buckets.iter();
        buckets
            .filter(|bucket| !only_in_use || bucket.phase().in_use)
            .filter_map(|bucket| bucket.gain(reading))
            .max_by(f64::total_cmp)
    }

    /// Seconds of reading the context per emitted token. Until a request has ended, as much context as output is
    /// assumed.
    fn reading_per_token(&self) -> f64 {
        self.reading.value().unwrap_or(0.0) * self.contexts.value().unwrap_or(1.0)
    }
}

/// The largest batch that is measured together with this one: the next power of two.
pub fn batch_bucket(batch: u32) -> u32 {
    1u32.checked_shl(place(batch) as u32).unwrap_or(u32::MAX)
}

fn place(batch: u32) -> usize {
    (u32::BITS - batch.saturating_sub(1).leading_zeros()) as usize
}

#[cfg(test)]
mod tests;
