//! Both ways of decoding at one size of batch: which is in use, and when the other one is tried.

use super::{GateParams, GateStep, Mode, Passage};

/// Weight that an older step keeps when one more comes: half after 128 steps.
const STEP_DECAY: f64 = 0.9946;
/// Steps of a trial that are evidence, before which nothing is made of it.
pub const TRIAL_STEPS_MIN: u32 = 3;
/// A trial's speed, against the way in use, below which it is given up early.
const HOPELESS: f64 = 0.8;
/// The same, below which the next trial has time.
const CLEAR_LOSS: f64 = 0.9;
/// A step that takes this many times as long as others of its kind was held up by something else: the rest does
/// not count. Trials are short, and one such step would decide them.
const HELD_UP: f64 = 3.0;
/// Steps of one way before which none counts as held up.
const USUAL_STEPS_MIN: f64 = 8.0;
/// Clear losses in a row after which trials may cost no smaller share of the time: this often smaller then.
const SURE: u32 = 4;
/// Steps that a trial may take in all, counted in `probe_steps`: most of them may be no evidence.
const TRIAL_STEPS_FACTOR: u32 = 4;

/// See the module.
#[derive(Clone, Debug)]
pub(super) struct Bucket {
    in_use: Mode,
    plain: Speed,
    fallback: Speed,
    /// Steps of the way in use since the last trial.
    since_steps: u32,
    since_seconds: f64,
    wait_steps: u32,
    wait_seconds: f64,
    /// Trials in a row that the way in use won clearly.
    clear_wins: u32,
    trial: Option<Trial>,
    /// The fallback was, at least once.
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

/// The other way, while it is tried.
#[derive(Clone, Debug, Default)]
struct Trial {
    /// What it brought by itself.
    evidence: Vec<GateStep>,
    steps_in_all: u32,
    /// Seconds more than the way in use would have taken.
    lost_seconds: f64,
}

impl Bucket {
    pub(super) fn new(params: &GateParams) -> Self {
        Bucket {
            in_use: params.starts_with,
            plain: Speed::default(),
            fallback: Speed::default(),
            since_steps: 0,
            since_seconds: 0.0,
            wait_steps: params.backoff_steps,
            wait_seconds: 0.0,
            clear_wins: 0,
            trial: None,
            was_tried: false,
        }
    }

    pub(super) fn passage(&self) -> Passage {
        match (self.in_use, &self.trial) {
            (Mode::Plain, None) => Passage::Shut,
            (Mode::Plain, Some(_)) => Passage::Probe,
            (Mode::Fallback, None) => Passage::Open,
            (Mode::Fallback, Some(_)) => Passage::Pause,
        }
    }

    pub(super) fn was_seen(&self) -> bool {
        self.plain.steps > 0.0 || self.fallback.steps > 0.0
    }

    /// Seconds that the fallback drafts in a step, without reading; `None` if that was never seen.
    pub(super) fn draft_seconds(&self) -> Option<f64> {
        if self.fallback.steps > 0.0 {
            return Some(self.fallback.draft_seconds / self.fallback.steps);
        }
        let probe = self.trial.as_ref().filter(|_| self.in_use == Mode::Plain)?;
        let drafting: f64 = probe.evidence.iter().map(|step| step.draft_seconds).sum();
        (!probe.evidence.is_empty()).then(|| drafting / probe.evidence.len() as f64)
    }

    pub(super) fn gain(&self, reading: f64) -> Option<f64> {
        Some(
            self.seconds_per_token(Mode::Plain, reading)?
                / self.seconds_per_token(Mode::Fallback, reading)?,
        )
    }

    pub(super) fn observe(&mut self, step: &GateStep, reading: f64, params: &GateParams) {
        let evidence = self.evidence(step);
        let tried = self.trial.as_ref().map(|_| other(self.in_use));
        if let Some((mode, step)) = evidence
            && Some(mode) != tried
        {
            self.speed_mut(mode).add(&step);
        }
        if let Some(trial) = self.trial.take() {
            let evidence = evidence.filter(|(mode, _)| Some(*mode) == tried);
            self.go_on_trying(trial, step, evidence.map(|(_, step)| step), reading, params);
        } else if step.mode == Some(self.in_use) {
            self.since_steps = self.since_steps.saturating_add(1);
            self.since_seconds += step.seconds;
            if self.is_due(reading, params) {
                self.begin_trial(params);
            }
        }
    }

    pub(super) fn learn(&mut self, step: &GateStep) {
        let Some((mode, step)) = self.evidence(step) else {
            return;
        };
        if mode == Mode::Plain || !self.was_tried {
            self.speed_mut(mode).add(&step);
        }
    }

    /// The step as it tells of its way of decoding: without what reading took, which is charged apart.
    fn evidence(&self, step: &GateStep) -> Option<(Mode, GateStep)> {
        let mode = step.mode?;
        if step.catch_up_tokens == 0 {
            return Some((mode, *step));
        }
        let drafting = self.draft_seconds()?.min(step.draft_seconds);
        let step = GateStep {
            seconds: step.seconds - (step.draft_seconds - drafting),
            draft_seconds: drafting,
            ..*step
        };
        (step.seconds > 0.0).then_some((mode, step))
    }

    fn is_due(&self, reading: f64, params: &GateParams) -> bool {
        if self.since_steps < params.backoff_steps || self.speed(self.in_use).steps == 0.0 {
            return false;
        }
        // What is measured now, against what the other way did last, speaks for the other one: then a trial is
        // no loss, and waits for nothing.
        let in_doubt = self.gain(reading).is_some_and(|gain| match self.in_use {
            Mode::Plain => gain > params.gain_enter,
            Mode::Fallback => gain < params.gain_leave,
        });
        in_doubt || (self.since_steps >= self.wait_steps && self.since_seconds >= self.wait_seconds)
    }

    fn begin_trial(&mut self, params: &GateParams) {
        // What was seen before is half as good as what is seen now: it steadies a short trial, and is
        // outvoted when the speed has changed.
        let kept = f64::from(params.probe_steps) / 2.0;
        self.speed_mut(other(self.in_use)).cap(kept);
        self.trial = Some(Trial::default());
        self.was_tried = true;
    }

    fn go_on_trying(
        &mut self,
        mut trial: Trial,
        step: &GateStep,
        evidence: Option<GateStep>,
        reading: f64,
        params: &GateParams,
    ) {
        let tried = other(self.in_use);
        let usual = self.seconds_per_token(self.in_use, reading);
        trial.steps_in_all += 1;
        if step.mode == Some(tried) {
            let usual_seconds = usual.map_or(step.seconds, |usual| usual * f64::from(step.tokens));
            trial.lost_seconds += step.seconds - usual_seconds;
        } else if tried == Mode::Fallback {
            // Mixed: what the rest took cannot be told, what the head took is lost.
            trial.lost_seconds += step.draft_seconds;
        }
        trial.evidence.extend(evidence);
        let steps = trial.evidence.len() as u32;
        let charged = if tried == Mode::Fallback {
            reading
        } else {
            0.0
        };
        let seen_alone = trial.speed();
        let speed = usual
            .filter(|_| steps > 0)
            .map(|usual| usual / (seen_alone.seconds / seen_alone.tokens + charged));
        // Accepted lengths scatter about as much as they are long, so a few may be short by chance.
        let seen = f64::from(steps) * f64::from(step.batch);
        let at_best = speed.map(|speed| speed * (1.0 + 1.0 / seen.max(1.0).sqrt()));
        let hopeless = steps >= TRIAL_STEPS_MIN && at_best.is_some_and(|speed| speed < HOPELESS);
        if steps >= params.probe_steps
            || hopeless
            || trial.steps_in_all >= params.probe_steps.saturating_mul(TRIAL_STEPS_FACTOR)
        {
            self.end_trial(&trial, speed.filter(|_| !hopeless), reading, params);
        } else {
            self.trial = Some(trial);
        }
    }

    /// `speed` is that of the way on trial against the one in use; `None` if it was not seen, or was hopeless.
    fn end_trial(&mut self, trial: &Trial, speed: Option<f64>, reading: f64, params: &GateParams) {
        let seen = trial.speed();
        self.speed_mut(other(self.in_use)).join(&seen);
        let better = match (self.in_use, self.gain(reading)) {
            // What it did before does not speak for a way that does so badly now.
            _ if speed.is_none() => self.in_use,
            _ if (trial.evidence.len() as u32) < TRIAL_STEPS_MIN => self.in_use,
            (Mode::Plain, Some(gain)) if gain > params.gain_enter => Mode::Fallback,
            (Mode::Fallback, Some(gain)) if gain < params.gain_leave => Mode::Plain,
            (in_use, _) => in_use,
        };
        // No evidence at all is as good a reason to wait longer as a clear loss.
        let clear = better == self.in_use && speed.is_none_or(|speed| speed < CLEAR_LOSS);
        self.clear_wins = if clear {
            self.clear_wins.saturating_add(1)
        } else {
            0
        };
        let doublings = self.clear_wins.min(31);
        self.wait_steps = params
            .backoff_steps
            .saturating_mul(1 << doublings)
            .min(params.backoff_steps_max.max(params.backoff_steps));
        let lost_seconds = trial.lost_seconds.max(0.0) * f64::from(self.clear_wins.clamp(1, SURE));
        self.wait_seconds = lost_seconds / params.trial_cost_share_max;
        self.in_use = better;
        self.since_steps = 0;
        self.since_seconds = 0.0;
    }

    fn seconds_per_token(&self, mode: Mode, reading: f64) -> Option<f64> {
        let speed = self.speed(mode);
        let reading = match mode {
            Mode::Plain => 0.0,
            Mode::Fallback => reading,
        };
        (speed.tokens > 0.0).then(|| speed.seconds / speed.tokens + reading)
    }

    fn speed(&self, mode: Mode) -> &Speed {
        match mode {
            Mode::Plain => &self.plain,
            Mode::Fallback => &self.fallback,
        }
    }

    fn speed_mut(&mut self, mode: Mode) -> &mut Speed {
        match mode {
            Mode::Plain => &mut self.plain,
            Mode::Fallback => &mut self.fallback,
        }
    }
}

impl Trial {
    /// All its steps, none counted as longer than is usual for them.
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
    fn of(step: &GateStep, longest: f64) -> Self {
        Speed {
            steps: 1.0,
            tokens: f64::from(step.tokens),
            seconds: step.seconds.min(longest),
            draft_seconds: step.draft_seconds.min(longest),
        }
    }

    fn add(&mut self, step: &GateStep) {
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

    /// Leaves the weight of at most so many steps.
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

fn other(mode: Mode) -> Mode {
    match mode {
        Mode::Plain => Mode::Fallback,
        Mode::Fallback => Mode::Plain,
    }
}
