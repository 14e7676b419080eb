//! The pace of streams and the price of calls, and the times for calls that should lose.

use refrain_speculation::DecayedRatio;
use refrain_speculation::router::StepCost;

use super::best_call::StreamPace;
use crate::engine::VerifyMethod;

/// Maximum share of the streaming time that probes and failed calls may cost.
const LOST_SHARE_MAX: f64 = 0.01;
/// Number of consecutive losses after which the pause before the next call no longer doubles.
const DOUBLINGS_MAX: u32 = 4;
/// Least loss that a call which should lose is expected to cost, seconds.
const LOSS_MIN_S: f64 = 1e-6;
/// Number of tokens below which the pace of streams is not trusted.
const TOKENS_MIN: f64 = 16.0;

/// The pace at one size of the batch.
#[derive(Default)]
pub(super) struct BatchPace {
    /// Seconds per token.
    tokens: DecayedRatio,
    tokens_seen: f64,
    /// Silence before the first token of a stream, seconds.
    restart: DecayedRatio,
    /// By [`VerifyMethod`].
    calls: [Calls; VerifyMethod::ALL.len()],
}

/// Calls of one method.
#[derive(Default)]
struct Calls {
    cost: StepCost,
    /// Pause before the next call that should lose.
    probe: Pause,
    /// Pause before any call.
    failure: Pause,
}

/// A pause that ends when streams have run for long enough to make a loss small in proportion.
#[derive(Clone, Copy, Debug, Default)]
struct Pause {
    left_s: f64,
    losses: u32,
}

impl Pause {
    fn is_over(&self) -> bool {
        self.left_s <= 0.0
    }

    fn record_streamed(&mut self, seconds: f64) {
        self.left_s = (self.left_s - seconds).max(0.0);
    }

    /// Begins a pause after a loss. Each consecutive loss doubles it, since a fixed share would be paid forever.
    fn record_loss(&mut self, seconds: f64) {
        let doublings = self.losses.min(DOUBLINGS_MAX);
        self.losses += 1;
        self.left_s = seconds / LOST_SHARE_MAX * f64::from(1u32 << doublings);
    }
}

impl BatchPace {
    /// Records the time that a stream took for some tokens.
    pub(super) fn record_streamed(&mut self, tokens: usize, seconds: f64) {
        if !(seconds.is_finite() && seconds >= 0.0) {
            return;
        }
        self.tokens.add(seconds, tokens as f64);
        self.tokens_seen += tokens as f64;
        for calls in &mut self.calls {
            calls.probe.record_streamed(seconds);
            calls.failure.record_streamed(seconds);
        }
    }

    /// Records the silence before the first token of a stream that was opened after a call.
    pub(super) fn record_restart(&mut self, seconds: f64) {
        if seconds.is_finite() {
            let silence = seconds - self.tokens.value().unwrap_or(0.0);
            self.restart.add(silence.max(0.0), 1.0);
        }
    }

    /// The pace of streams; `None` until enough was streamed.
    pub(super) fn of_streams(&self, is_streaming: bool) -> Option<StreamPace> {
        let token_s = self.tokens.value()?;
        (self.tokens_seen >= TOKENS_MIN).then(|| StreamPace {
            token_s,
            restart_s: self.restart.value().unwrap_or(0.0),
            is_streaming,
        })
    }

    /// Expected duration of a call, seconds. Close to zero until one was made, so that one is made.
    pub(super) fn call_s(&self, method: VerifyMethod, computed: u32, prompt_tokens: u64) -> f64 {
        self.calls[method as usize]
            .cost
            .seconds(computed, prompt_tokens)
    }

    /// Whether calls may be made: none has failed lately.
    pub(super) fn may_call(&self, method: VerifyMethod) -> bool {
        self.calls[method as usize].failure.is_over()
    }

    /// Whether a call may be made that should lose. Prices change, and only calls can show that.
    pub(super) fn is_probe_due(&self, method: VerifyMethod) -> bool {
        self.calls[method as usize].probe.is_over()
    }

    /// Begins a call that should lose `expected_loss_s`. The real loss is known when it is over.
    pub(super) fn begin_probe(&mut self, method: VerifyMethod, expected_loss_s: f64) {
        self.calls[method as usize].probe.left_s = expected_loss_s.max(LOSS_MIN_S) / LOST_SHARE_MAX;
    }

    /// Ends such a call, which brought `tokens` in `seconds` until a stream ran again.
    pub(super) fn end_probe(&mut self, method: VerifyMethod, tokens: u32, seconds: f64) {
        let token_s = self.tokens.value().unwrap_or(0.0);
        let lost = seconds - f64::from(tokens) * token_s;
        let probe = &mut self.calls[method as usize].probe;
        if lost > 0.0 {
            probe.record_loss(lost);
        } else {
            *probe = Pause::default();
        }
    }

    /// Records a call that produced tokens.
    pub(super) fn record_call(
        &mut self,
        method: VerifyMethod,
        computed: u32,
        prompt_tokens: u64,
        seconds: f64,
    ) {
        let calls = &mut self.calls[method as usize];
        calls.cost.observe(computed, prompt_tokens, seconds);
        calls.failure = Pause::default();
    }

    /// Records a call that produced nothing.
    pub(super) fn record_failed_call(&mut self, method: VerifyMethod, seconds: f64) {
        let token_s = self.tokens.value().unwrap_or(0.0);
        // A refusal comes at once, but the stream was given up for it.
        let lost = seconds + token_s + self.restart.value().unwrap_or(0.0);
        self.calls[method as usize].failure.record_loss(lost);
    }
}
