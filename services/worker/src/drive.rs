//! Drive mode: when the stream of an engine that generates by itself is given up to have a draft verified by a call.
//!
//! Where a call pays is reckoned for each draft, from chances, the pace of streams and the price of calls, all learnt
//! from what happened here ([`refrain_speculation::best_call`]). Behind that stands a guard which believes none of it: of the
//! moments at which a call was thought to pay, it lets some go by, and compares what came of both. It counts the tokens of
//! all requests, since a call may be quick because others wait for it.
//!
//! No clock and no I/O: chunks say what they heard and when, and are told what to do.

mod call;
mod driving;
mod lessons;
mod pace;
#[cfg(test)]
mod tests;

use std::collections::HashMap;
use std::num::NonZeroUsize;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Instant;

use lru::LruCache;
use refrain_protocol::{NamespaceId, TokenId};
use refrain_speculation::{
    Asked, Calibration, CallOffer, CallWorth, Candidate, Expansion, Gate, GateParams, GateStep,
    Mode, ProposeParams, Route, RouteReason, batch_bucket, best_call,
};

use self::pace::Pace;
use crate::config::WorkerConfig;
use crate::engine::{StreamingEngine, VerifyWay};
use crate::metrics::WorkerMetrics;
use crate::running::labels;

pub(crate) use self::call::Call;
use self::call::{carried, nodes_that_fit};
pub(crate) use self::driving::Driving;
use self::lessons::Lessons;

/// What all chunks of a worker that drives share.
#[derive(Clone)]
pub(crate) struct SharedDrive {
    drive: Arc<Mutex<Drive>>,
    /// How drafts are looked up: as long as the text goes on, since a call's price is for the most part fixed.
    pub(crate) params: Arc<ProposeParams>,
    /// Whether requests that are sampled are driven as well.
    pub(crate) drives_sampled: bool,
}

impl SharedDrive {
    /// `None` where drive mode is off, or where the engine verifies nothing.
    pub(crate) fn for_engine(
        config: &WorkerConfig,
        engine: &dyn StreamingEngine,
        metrics: &WorkerMetrics,
    ) -> Option<Self> {
        let drives = config.engine.drives() && engine.capabilities().verifies.any();
        drives.then(|| SharedDrive::new(config, metrics.clone()))
    }

    fn new(config: &WorkerConfig, metrics: WorkerMetrics) -> Self {
        let most = config.engine.drive_tokens_max;
        SharedDrive {
            drive: Arc::new(Mutex::new(Drive::new(config, metrics))),
            params: Arc::new(ProposeParams {
                expansion: Expansion::Linear,
                alpha: 0.0,
                offset: most as f32,
                max_spec_tokens: most as usize,
                ..config.speculation.params()
            }),
            drives_sampled: config.engine.drive_sampled,
        }
    }

    pub(crate) fn lock(&self) -> MutexGuard<'_, Drive> {
        self.drive.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Most end tokens of the engine's own that are remembered: models have a few.
const ENDS_REMEMBERED: NonZeroUsize = NonZeroUsize::new(16).unwrap();

/// See the module.
pub(crate) struct Drive {
    nodes_max: u32,
    /// Most tokens of a call, those of all its prompts together.
    call_tokens_max: u64,
    off_above_batch: Option<u32>,
    /// The one unused longest goes first.
    namespaces: LruCache<NamespaceId, Calibration>,
    /// Tokens at which streams ended by themselves, though no request knew them for ends; the one unused longest goes first.
    ends: LruCache<TokenId, ()>,
    /// By the largest number of chunks measured together.
    paces: HashMap<u32, Pace>,
    /// `None` if the configuration turns it off.
    gate: Option<Gate>,
    /// Chunks that run.
    batch: u32,
    /// Tokens of all chunks so far.
    emitted: u64,
    metrics: WorkerMetrics,
}

/// A request that has a draft.
pub(crate) struct Moment<'a> {
    pub(crate) namespace: NamespaceId,
    pub(crate) asked: Asked,
    /// How the engine can judge drafts of it, the better way first.
    pub(crate) ways: &'a [VerifyWay],
    /// Length of its text, tokens.
    pub(crate) text_tokens: u32,
    pub(crate) candidate: &'a Candidate,
    /// The node that ends the output if it is accepted.
    pub(crate) ends_with: Option<u32>,
    /// Whether it has a stream now.
    pub(crate) is_streaming: bool,
}

/// What to do with it.
#[derive(Debug)]
pub(crate) enum Verdict {
    /// Listen on.
    Stream,
    /// The same, but say what so many tokens took: a call is thought to be quicker.
    Watch(Stretch, u32),
    /// Have the draft verified.
    Call(Box<Call>),
}

/// A stretch of time of which it is to be known what it brought.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Stretch {
    batch: u32,
    began: Instant,
    /// Tokens of all chunks before it.
    emitted: u64,
    kind: StretchKind,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum StretchKind {
    /// A call that was thought to pay, and what came behind it until there was a stream again.
    Driven,
    /// The stream, where a call was thought to pay.
    Watched,
    /// A call that was thought to lose.
    Probe(VerifyWay),
}

impl Drive {
    fn new(config: &WorkerConfig, metrics: WorkerMetrics) -> Self {
        let speculation = &config.speculation;
        let namespaces = NonZeroUsize::new(config.memory.namespaces_max);
        let guards = speculation.gain_min > 0.0;
        let gate = guards.then(|| {
            Gate::new(GateParams {
                starts_with: Mode::Fallback,
                gain_enter: speculation.gain_min,
                gain_leave: speculation.gain_min,
                ..GateParams::default()
            })
        });
        Drive {
            nodes_max: config.engine.drive_tokens_max,
            call_tokens_max: config.engine.drive_prompt_tokens_max,
            off_above_batch: Some(speculation.off_above_batch).filter(|batch| *batch > 0),
            namespaces: LruCache::new(namespaces.unwrap_or(NonZeroUsize::MIN)),
            ends: LruCache::new(ENDS_REMEMBERED),
            paces: HashMap::new(),
            gate,
            batch: 0,
            emitted: 0,
            metrics,
        }
    }

    /// A chunk begins.
    pub(crate) fn enter(&mut self) {
        self.batch += 1;
    }

    /// A chunk is over.
    pub(crate) fn leave(&mut self) {
        self.batch = self.batch.saturating_sub(1);
    }

    /// A chunk said so many tokens.
    pub(crate) fn said(&mut self, tokens: usize) {
        self.emitted += tokens as u64;
    }

    /// A stream brought so many tokens in so long.
    pub(crate) fn streamed(&mut self, tokens: usize, seconds: f64) {
        self.pace().streamed(tokens, seconds);
    }

    /// A stream that was started behind a call was silent for so long before its first token.
    pub(crate) fn restarted(&mut self, seconds: f64) {
        self.pace().restarted(seconds);
    }

    /// A stream ended by itself, at a token that its request did not know for an end.
    pub(crate) fn ended_at(&mut self, token: TokenId) {
        self.ends.put(token, ());
    }

    /// Whether streams end at a token by themselves.
    pub(crate) fn ends_at(&mut self, token: TokenId) -> bool {
        self.ends.get(&token).is_some()
    }

    /// It is known what the target said where a draft was found.
    pub(crate) fn learn(&mut self, namespace: NamespaceId, found: &Candidate, said: &[u32]) {
        let calibration = self
            .namespaces
            .get_or_insert_mut(namespace, Calibration::default);
        calibration.observe(found, said);
    }

    /// What a chunk is to do at `now` that has a draft.
    pub(crate) fn decide(&mut self, moment: &Moment<'_>, now: Instant) -> Verdict {
        let (route, reason, verdict) = self.weigh(moment, now);
        self.metrics.decision((route.as_str(), reason.as_str()));
        verdict
    }

    fn weigh(&mut self, moment: &Moment<'_>, now: Instant) -> (Route, RouteReason, Verdict) {
        let stays = |reason| (Route::Plain, reason, Verdict::Stream);
        let is_auto = moment.asked == Asked::Auto;
        if is_auto && self.off_above_batch.is_some_and(|most| self.batch > most) {
            return stays(RouteReason::LargeBatch);
        }
        let Some((way, worth)) = self.best(moment) else {
            return stays(RouteReason::OverBudget);
        };
        if !worth.pays() {
            // A probe costs a stream; between two calls there is none to lose, but nothing to find out either.
            if !moment.is_streaming || !self.pace().is_probe_due(way) {
                return stays(RouteReason::OverBudget);
            }
            self.pace().probes(way, -worth.saved_s);
            let call = self.call(moment, way, worth, true);
            return (Route::Suffix, RouteReason::Probe, Verdict::Call(call));
        }
        let batch = self.batch;
        if let Some(passage) = self.gate.as_ref().map(|gate| gate.passage(batch))
            && is_auto
            && moment.is_streaming
            && passage.mode() == Mode::Plain
        {
            let tokens = 1 + worth.expected.round() as u32;
            let stretch = self.stretch(StretchKind::Watched, now);
            let reason = if passage.is_trial() {
                RouteReason::Pause
            } else {
                RouteReason::SuffixNotPaying
            };
            return (Route::Plain, reason, Verdict::Watch(stretch, tokens));
        }
        let call = self.call(moment, way, worth, false);
        (
            Route::Suffix,
            RouteReason::WithinBudget,
            Verdict::Call(call),
        )
    }

    /// The best call for the draft; of those that do not pay, the nearest.
    fn best(&mut self, moment: &Moment<'_>) -> Option<(VerifyWay, CallWorth)> {
        let calibration = self
            .namespaces
            .get_or_insert_mut(moment.namespace, Calibration::default);
        let chances = calibration.expect(moment.candidate);
        let pace = self.paces.get(&batch_bucket(self.batch))?;
        let stream = pace.of_streams(moment.is_streaming)?;
        let ways = moment.ways.iter().filter(|way| pace.may_call(**way));
        ways.filter_map(|way| {
            let text_tokens = moment.text_tokens;
            let fit = nodes_that_fit(*way, text_tokens, self.nodes_max, self.call_tokens_max)?;
            let offer = CallOffer {
                tree: &chances,
                ends_with: moment.ends_with,
                nodes_max: fit,
            };
            let call_s = |nodes| {
                let carried = carried(*way, moment.text_tokens, nodes);
                pace.call_s(*way, 1 + nodes, carried)
            };
            Some((*way, best_call(&offer, &stream, call_s)?))
        })
        .max_by(|a, b| a.1.saved_s.total_cmp(&b.1.saved_s))
    }

    fn call(
        &mut self,
        moment: &Moment<'_>,
        way: VerifyWay,
        worth: CallWorth,
        is_probe: bool,
    ) -> Box<Call> {
        let found = moment.candidate;
        let tree = found
            .tree
            .select(|node| worth.nodes.binary_search(&(node as u32)).is_ok());
        Box::new(Call {
            way,
            verified: Candidate {
                score: tree.score(),
                tree,
                ..*found
            },
            found: found.clone(),
            expected: worth.expected,
            batch: self.batch,
            text_tokens: moment.text_tokens,
            is_probe,
        })
    }

    /// The time from now on in which a call is made.
    pub(crate) fn begin(&self, call: &Call, now: Instant) -> Stretch {
        let kind = match call.is_probe {
            true => StretchKind::Probe(call.way),
            false => StretchKind::Driven,
        };
        self.stretch(kind, now)
    }

    fn stretch(&self, kind: StretchKind, now: Instant) -> Stretch {
        Stretch {
            batch: self.batch,
            began: now,
            emitted: self.emitted,
            kind,
        }
    }

    /// A call took so long and said something.
    pub(crate) fn called(&mut self, call: &Call, accepted: u32, seconds: f64) {
        let (computed, carried) = (call.computed(), call.carried());
        self.paces
            .entry(batch_bucket(call.batch))
            .or_default()
            .called(call.way, computed, carried, seconds);
        self.metrics
            .streaming
            .drive_call(call.way, "verified", seconds);
        let (source, _) = labels(&call.verified);
        self.metrics.expectation(source, call.expected, accepted);
    }

    /// A call took so long and said nothing: it failed, or its answer left the next token open.
    pub(crate) fn call_failed(&mut self, call: &Call, outcome: &'static str, seconds: f64) {
        self.paces
            .entry(batch_bucket(call.batch))
            .or_default()
            .call_failed(call.way, seconds);
        self.metrics
            .streaming
            .drive_call(call.way, outcome, seconds);
    }

    /// A stretch is over. It brought its own chunk so many tokens.
    pub(crate) fn end(&mut self, stretch: Stretch, own_tokens: u32, now: Instant) {
        let seconds = now.saturating_duration_since(stretch.began).as_secs_f64();
        let tokens = u32::try_from(self.emitted - stretch.emitted).unwrap_or(u32::MAX);
        if own_tokens == 0 || seconds <= 0.0 {
            return;
        }
        let mode = match stretch.kind {
            StretchKind::Driven => Mode::Fallback,
            StretchKind::Watched => Mode::Plain,
            StretchKind::Probe(way) => {
                let pace = self.paces.entry(batch_bucket(stretch.batch)).or_default();
                pace.probed(way, own_tokens, seconds);
                return;
            }
        };
        let Some(gate) = &mut self.gate else {
            return;
        };
        let batch = stretch.batch;
        let was_in_use = gate.passage(batch).is_in_use();
        gate.observe(GateStep {
            batch,
            mode: Some(mode),
            tokens,
            seconds,
            draft_seconds: 0.0,
            catch_up_tokens: 0,
        });
        let (in_use, gain) = (gate.passage(batch).is_in_use(), gate.gain(batch));
        let batch = batch_bucket(batch);
        self.metrics.guard_gate(batch, in_use, gain);
        if in_use != was_in_use {
            tracing::info!(batch, in_use, gain, "use of verify calls changed");
        }
    }

    fn pace(&mut self) -> &mut Pace {
        self.paces.entry(batch_bucket(self.batch)).or_default()
    }
}
