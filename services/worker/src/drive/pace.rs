//! How quick streams and calls are, and when calls are tried that are thought to lose.

use refrain_speculation::{DecayedRatio, STEP_SECONDS_MIN, StepCost, StreamPace};

use crate::engine::VerifyWay;

/// Time that probes and failed calls may cost, of the time of streams.
const LOST_SHARE_MAX: f64 = 0.01;
/// Losses in a row after which the pause before the next call does not double any more.
const DOUBLINGS_MAX: u32 = 4;
/// Tokens before which the pace of streams is not believed.
const TOKENS_MIN: f64 = 16.0;

/// With so many chunks at once.
#[derive(Default)]
pub(super) struct Pace {
    /// Seconds over tokens.
    tokens: DecayedRatio,
    tokens_seen: f64,
    /// Seconds of silence before the first token.
    restart: DecayedRatio,
    chain: Calls,
    fan_out: Calls,
}

/// Calls of one way.
#[derive(Default)]
struct Calls {
    cost: StepCost,
    /// None that is thought to lose, before streams have run for so long.
    probe: Pause,
    /// None at all.
    failure: Pause,
}

/// Waits until streams have run for a time that makes a loss small.
#[derive(Clone, Copy, Debug, Default)]
struct Pause {
    left_s: f64,
    losses: u32,
}

impl Pause {
    fn is_over(&self) -> bool {
        self.left_s <= 0.0
    }

    fn streamed(&mut self, seconds: f64) {
        self.left_s = (self.left_s - seconds).max(0.0);
    }

    /// A share alone would go on paying for the question, so each loss in a row also doubles it.
    fn lost(&mut self, seconds: f64) {
        let doublings = self.losses.min(DOUBLINGS_MAX);
        self.losses += 1;
        self.left_s = seconds / LOST_SHARE_MAX * f64::from(1u32 << doublings);
    }
}

impl Pace {
    fn calls(&self, way: VerifyWay) -> &Calls {
        match way {
            VerifyWay::Chain => &self.chain,
            VerifyWay::FanOut => &self.fan_out,
        }
    }

    fn calls_mut(&mut self, way: VerifyWay) -> &mut Calls {
        match way {
            VerifyWay::Chain => &mut self.chain,
            VerifyWay::FanOut => &mut self.fan_out,
        }
    }

    pub(super) fn streamed(&mut self, tokens: usize, seconds: f64) {
        if !(seconds.is_finite() && seconds >= 0.0) {
            return;
        }
        self.tokens.add(seconds, tokens as f64);
        self.tokens_seen += tokens as f64;
        for calls in [&mut self.chain, &mut self.fan_out] {
            calls.probe.streamed(seconds);
            calls.failure.streamed(seconds);
        }
    }

    pub(super) fn restarted(&mut self, seconds: f64) {
        if seconds.is_finite() {
            let silence = seconds - self.tokens.value().unwrap_or(0.0);
            self.restart.add(silence.max(0.0), 1.0);
        }
    }

    /// `None` until enough was streamed.
    pub(super) fn of_streams(&self, is_streaming: bool) -> Option<StreamPace> {
        let token_s = self.tokens.value()?;
        (self.tokens_seen >= TOKENS_MIN).then(|| StreamPace {
            token_s,
            restart_s: self.restart.value().unwrap_or(0.0),
            is_streaming,
        })
    }

    /// What a call takes that computes so many tokens behind texts of so many. Next to nothing until one was made, so
    /// that one is made.
    pub(super) fn call_s(&self, way: VerifyWay, computed: u32, carried: u64) -> f64 {
        self.calls(way).cost.seconds(computed, carried)
    }

    /// Whether calls do not fail now.
    pub(super) fn may_call(&self, way: VerifyWay) -> bool {
        self.calls(way).failure.is_over()
    }

    /// Whether a call may be made that is thought to lose: prices change, and only calls tell.
    pub(super) fn is_probe_due(&self, way: VerifyWay) -> bool {
        self.calls(way).probe.is_over()
    }

    /// A call is made that is thought to lose so much. What it loses is known when it is over.
    pub(super) fn probes(&mut self, way: VerifyWay, expected_loss_s: f64) {
        self.calls_mut(way).probe.left_s = expected_loss_s.max(STEP_SECONDS_MIN) / LOST_SHARE_MAX;
    }

    /// It brought so many tokens in so long, with all that came of it.
    pub(super) fn probed(&mut self, way: VerifyWay, tokens: u32, seconds: f64) {
        let token_s = self.tokens.value().unwrap_or(0.0);
        let lost = seconds - f64::from(tokens) * token_s;
        let probe = &mut self.calls_mut(way).probe;
        if lost > 0.0 {
            probe.lost(lost);
        } else {
            *probe = Pause::default();
        }
    }

    pub(super) fn called(&mut self, way: VerifyWay, computed: u32, carried: u64, seconds: f64) {
        let calls = self.calls_mut(way);
        calls.cost.observe(computed, carried, seconds);
        calls.failure = Pause::default();
    }

    pub(super) fn call_failed(&mut self, way: VerifyWay, seconds: f64) {
        let token_s = self.tokens.value().unwrap_or(0.0);
        // A refusal comes at once, but the stream is lost with it.
        let lost = seconds + token_s + self.restart.value().unwrap_or(0.0);
        self.calls_mut(way).failure.lost(lost);
    }
}
