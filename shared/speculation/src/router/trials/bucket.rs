//! Both ways of decoding at one batch size, with and without drafts: which one is in use, and when the other one is
//! tried.

use super::sample::{Mode, Phase, Sample, TrialParams};
use super::schedule::Schedule;

/// Weight that an older step keeps when one more is added: half after 128 steps.
const STEP_DECAY: f64 = 0.9946;
/// Steps of evidence below which a trial decides nothing.
const TRIAL_STEPS_MIN: u32 = 3;
/// Ratio of a trial's speed to the speed of the way in use, below which the trial ends early.
const HOPELESS: f64 = 0.8;
/// The same ratio, below which the next trial waits longer.
const CLEAR_LOSS: f64 = 0.9;
/// A step that takes more than this many times as long as others of its kind was delayed by something else. The
/// excess does not count, since trials are short and one such step would decide them.
const HELD_UP: f64 = 3.0;
/// Steps of one way before any step of it counts as delayed.
const USUAL_STEPS_MIN: f64 = 8.0;
/// Clear losses in a row after which the share of time that trials may cost no longer shrinks.
const SURE: u32 = 4;
/// Maximum number of steps of a trial, as a multiple of `trial_steps`, since many steps may be no evidence.
const TRIAL_STEPS_FACTOR: u32 = 4;

/// Both ways at one batch size.
#[derive(Clone, Debug)]
pub(super) struct Bucket {
    in_use: Mode,
    /// By way.
    speeds: [Speed; 2],
    /// The wait for the next trial, in seconds of the way in use.
    schedule: Schedule,
    /// Seconds that the last trial lost, more after several clear losses.
    lost_seconds: f64,
    /// Trials in a row that the way in use won clearly.
    clear_wins: u32,
    trial: Option<Trial>,
    /// Drafts were on trial at least once.
    was_tried: bool,
}

/// Decayed sums over the steps of one way.
#[derive(Clone, Copy, Debug, Default)]
struct Speed {
    steps: f64,
    tokens: f64,
    seconds: f64,
    draft_seconds: f64,
}

/// A trial of the other way.
#[derive(Clone, Debug, Default)]
struct Trial {
    /// Its steps that are evidence.
    evidence: Vec<Sample>,
    steps_in_all: u32,
    /// Seconds that it took beyond those of the way in use.
    lost_seconds: f64,
}

impl Bucket {
    pub(super) fn new(starts_with: Mode, params: &TrialParams) -> Self {
        Bucket {
            in_use: starts_with,
            speeds: [Speed::default(); 2],
            schedule: Schedule::new(params.backoff_steps),
            lost_seconds: 0.0,
            clear_wins: 0,
            trial: None,
            was_tried: false,
        }
    }

    pub(super) fn phase(&self) -> Phase {
        Phase {
            in_use: self.in_use == Mode::With,
            on_trial: self.trial.is_some(),
        }
    }

    /// Seconds per step that the head drafts, without its reading; `None` if no such step was observed.
    pub(super) fn draft_seconds(&self) -> Option<f64> {
        let drafted = self.speed(Mode::With);
        if drafted.steps > 0.0 {
            return Some(drafted.draft_seconds / drafted.steps);
        }
        let probe = self
            .trial
            .as_ref()
            .filter(|_| self.in_use == Mode::Without)?;
        let drafting: f64 = probe.evidence.iter().map(|step| step.draft_seconds).sum();
        (!probe.evidence.is_empty()).then(|| drafting / probe.evidence.len() as f64)
    }

    pub(super) fn gain(&self, reading: f64) -> Option<f64> {
        Some(
            self.seconds_per_token(Mode::Without, reading)?
                / self.seconds_per_token(Mode::With, reading)?,
        )
    }

    pub(super) fn observe(&mut self, step: &Sample, reading: f64, params: &TrialParams) {
        let evidence = self.evidence(step);
        let tried = self.trial.as_ref().map(|_| self.in_use.other());
        if let Some((mode, step)) = evidence
            && Some(mode) != tried
        {
            self.speed_mut(mode).add(&step);
        }
        if let Some(trial) = self.trial.take() {
            let evidence = evidence.filter(|(mode, _)| Some(*mode) == tried);
            self.go_on_trying(trial, step, evidence.map(|(_, step)| step), reading, params);
        } else if step.mode == Some(self.in_use) {
            self.schedule.step(step.seconds);
            if self.is_due(reading, params) {
                self.begin_trial(params);
            }
        }
    }

    pub(super) fn learn(&mut self, step: &Sample) {
        let Some((mode, step)) = self.evidence(step) else {
            return;
        };
        if mode == Mode::Without || !self.was_tried {
            self.speed_mut(mode).add(&step);
        }
    }

    /// The step as evidence for its way, without the head's reading time, which is charged separately.
    fn evidence(&self, step: &Sample) -> Option<(Mode, Sample)> {
        let mode = step.mode?;
        if step.read_tokens == 0 {
            return Some((mode, *step));
        }
        let drafting = self.draft_seconds()?.min(step.draft_seconds);
        let step = Sample {
            seconds: step.seconds - (step.draft_seconds - drafting),
            draft_seconds: drafting,
            ..*step
        };
        (step.seconds > 0.0).then_some((mode, step))
    }

    fn is_due(&self, reading: f64, params: &TrialParams) -> bool {
        if self.schedule.waited_steps() < params.backoff_steps
            || self.speed(self.in_use).steps == 0.0
        {
            return false;
        }
        // The last speed of the other way was better than the present one of the way in use. Then a trial is expected
        // to lose no time and starts at once.
        self.better(reading, params) != self.in_use
            || self
                .schedule
                .is_due(self.lost_seconds, params.trial_cost_share_max)
    }

    /// The way that the speeds speak for.
    fn better(&self, reading: f64, params: &TrialParams) -> Mode {
        match (self.in_use, self.gain(reading)) {
            (Mode::Without, Some(gain)) if gain > params.gain_enter => Mode::With,
            (Mode::With, Some(gain)) if gain < params.gain_leave => Mode::Without,
            (in_use, _) => in_use,
        }
    }

    fn begin_trial(&mut self, params: &TrialParams) {
        // Earlier evidence counts half as much as new evidence. It steadies a short trial, but does not decide it
        // when the speed has changed.
        let kept = f64::from(params.trial_steps) / 2.0;
        self.speed_mut(self.in_use.other()).cap(kept);
        self.trial = Some(Trial::default());
        self.was_tried = true;
    }

    fn go_on_trying(
        &mut self,
        mut trial: Trial,
        step: &Sample,
        evidence: Option<Sample>,
        reading: f64,
        params: &TrialParams,
    ) {
        let tried = self.in_use.other();
        let usual = self.seconds_per_token(self.in_use, reading);
        trial.steps_in_all += 1;
        if step.mode == Some(tried) {
            let usual_seconds = usual.map_or(step.seconds, |usual| usual * f64::from(step.tokens));
            trial.lost_seconds += step.seconds - usual_seconds;
        } else if tried == Mode::With {
            // In a mixed step only the head's time is known to be lost.
            trial.lost_seconds += step.draft_seconds;
        }
        trial.evidence.extend(evidence);
        let steps = trial.evidence.len() as u32;
        let charged = if tried == Mode::With { reading } else { 0.0 };
        let seen_alone = trial.speed();
        let speed = usual
            .filter(|_| steps > 0)
            .map(|usual| usual / (seen_alone.seconds / seen_alone.tokens + charged));
        // The standard deviation of accepted lengths is about their mean, so a few may be short by chance.
        let seen = f64::from(steps) * f64::from(step.batch);
        let at_best = speed.map(|speed| speed * (1.0 + 1.0 / seen.max(1.0).sqrt()));
        let hopeless = steps >= TRIAL_STEPS_MIN && at_best.is_some_and(|speed| speed < HOPELESS);
        if steps >= params.trial_steps
            || hopeless
            || trial.steps_in_all >= params.trial_steps.saturating_mul(TRIAL_STEPS_FACTOR)
        {
            self.end_trial(&trial, speed.filter(|_| !hopeless), reading, params);
        } else {
            self.trial = Some(trial);
        }
    }

    /// Ends the trial. `speed` is the ratio of the tried way's speed to that of the way in use; `None` if it was not
    /// observed, or was hopeless.
    fn end_trial(&mut self, trial: &Trial, speed: Option<f64>, reading: f64, params: &TrialParams) {
        let seen = trial.speed();
        self.speed_mut(self.in_use.other()).join(&seen);
        // Earlier evidence does not count for a way that is so slow now.
        let has_evidence = trial.evidence.len() as u32 >= TRIAL_STEPS_MIN;
        let better = match speed.is_some() && has_evidence {
            true => self.better(reading, params),
            false => self.in_use,
        };
        // Without any evidence the next trial waits longer, as after a clear loss.
        let clear = better == self.in_use && speed.is_none_or(|speed| speed < CLEAR_LOSS);
        if clear {
            self.clear_wins = self.clear_wins.saturating_add(1);
            let wait_max = params.backoff_steps_max.max(params.backoff_steps);
            self.schedule.back_off(wait_max);
        } else {
            self.clear_wins = 0;
            self.schedule = Schedule::new(params.backoff_steps);
        }
        self.lost_seconds = trial.lost_seconds.max(0.0) * f64::from(self.clear_wins.clamp(1, SURE));
        self.in_use = better;
    }

    fn seconds_per_token(&self, mode: Mode, reading: f64) -> Option<f64> {
        let speed = self.speed(mode);
        let reading = match mode {
            Mode::Without => 0.0,
            Mode::With => reading,
        };
        (speed.tokens > 0.0).then(|| speed.seconds / speed.tokens + reading)
    }

    fn speed(&self, mode: Mode) -> &Speed {
        &self.speeds[mode as usize]
    }

    fn speed_mut(&mut self, mode: Mode) -> &mut Speed {
        &mut self.speeds[mode as usize]
    }
}

impl Trial {
    /// The sums of its steps, each cut to [`HELD_UP`] times their median.
    fn speed(&self) -> Speed {
        let mut seconds: Vec<f64> = self.evidence.iter().map(|step| step.seconds).collect();
        seconds.sort_by(f64::total_cmp);
        let longest = seconds
            .get(seconds.len() / 2)
            .map_or(0.0, |median| median * HELD_UP);
        let mut speed = Speed::default();
        for step in &self.evidence {
            speed.join(&Speed::of(step, longest));
        }
        speed
    }
}

impl Speed {
    fn of(step: &Sample, longest: f64) -> Self {
        Speed {
            steps: 1.0,
            tokens: f64::from(step.tokens),
            seconds: step.seconds.min(longest),
            draft_seconds: step.draft_seconds.min(longest),
        }
    }

    fn add(&mut self, step: &Sample) {
        let longest = if self.steps < USUAL_STEPS_MIN {
            f64::INFINITY
        } else {
            HELD_UP * self.seconds / self.steps
        };
        self.scale(STEP_DECAY);
        self.join(&Speed::of(step, longest));
    }

    fn join(&mut self, other: &Speed) {
        self.steps += other.steps;
        self.tokens += other.tokens;
        self.seconds += other.seconds;
        self.draft_seconds += other.draft_seconds;
    }

    /// Reduces the weight to that of at most `steps` steps.
    fn cap(&mut self, steps: f64) {
        if self.steps > steps {
            self.scale(steps / self.steps);
        }
    }

    fn scale(&mut self, by: f64) {
        self.steps *= by;
        self.tokens *= by;
        self.seconds *= by;
        self.draft_seconds *= by;
    }
}
