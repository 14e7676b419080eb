//! The decision whether a verify call is made for a draft.
//!
//! The expected saving of a call is computed for each draft from the acceptance statistics, the pace of streams and
//! the price of calls, all of them learnt in this worker ([`best_call`]). A guard checks the
//! result without trusting any of these: at some moments where a call should pay, it keeps the stream and compares
//! both outcomes. It counts the tokens of all requests, since a call may be fast only because other requests wait for
//! it.
//!
//! The policy has no clock and does no I/O: chunks report what they received and when.

use std::collections::HashMap;
use std::num::NonZeroUsize;
use std::sync::Arc;
use std::time::Instant;

use lru::LruCache;
use refrain_protocol::{NamespaceId, TokenId};
use refrain_speculation::draft::Candidate;
use refrain_speculation::router::{
    Asked, CallGuard, GainSample, GainSide, Route, RouteReason, batch_bucket,
};
use refrain_speculation::statistics::AcceptanceStatistics;

use super::best_call::{CallOffer, CallWorth, best_call};
use super::call::{VerifyCall, nodes_that_fit, prompt_tokens};
use super::pace::BatchPace;
use crate::config::WorkerConfig;
use crate::engine::VerifyMethod;
use crate::metrics::WorkerMetrics;
use crate::running::labels;

/// Maximum number of the engine's own end tokens that are remembered; a model has a few.
const END_TOKENS_MAX: NonZeroUsize = NonZeroUsize::new(16).unwrap();

/// The state that all chunks of a worker share.
pub(super) struct DrivePolicy {
    nodes_max: u32,
    /// Maximum number of tokens of all prompts of a call.
    prompt_tokens_max: u64,
    off_above_batch: Option<u32>,
    /// Acceptance statistics per namespace; the least recently used one goes first.
    namespaces: LruCache<NamespaceId, AcceptanceStatistics>,
    /// Tokens at which streams ended although the request did not know them as ends; the least recently used one goes
    /// first.
    end_tokens: LruCache<TokenId, ()>,
    /// Pace of streams and calls, by size of the batch (see [`batch_bucket`]).
    paces: HashMap<u32, BatchPace>,
    /// `None` if the configuration turns the guard off.
    guard: Option<CallGuard>,
    /// Number of running chunks.
    batch: u32,
    /// Number of tokens of all chunks so far.
    emitted: u64,
    metrics: Arc<WorkerMetrics>,
}

/// A draft that could be verified now.
pub(super) struct DraftOpportunity<'a> {
    pub(super) namespace: NamespaceId,
    pub(super) asked: Asked,
    /// The methods that can judge the draft, the better one first.
    pub(super) methods: &'a [VerifyMethod],
    /// Length of the text, tokens.
    pub(super) text_tokens: u32,
    pub(super) candidate: &'a Candidate,
    /// The node that ends the output if it is accepted.
    pub(super) ends_with: Option<u32>,
    /// Whether the chunk has a stream now.
    pub(super) is_streaming: bool,
}

/// The decision about a draft.
#[derive(Debug)]
pub(super) enum DriveDecision {
    /// Keep the stream.
    Stream,
    /// Keep the stream, and measure how long it takes for this many tokens, although a call should be faster.
    Measure(Stretch, u32),
    /// Have the draft verified.
    Call(Box<VerifyCall>),
}

/// A stretch of time whose tokens are counted.
#[derive(Clone, Copy, Debug)]
pub(super) struct Stretch {
    batch: u32,
    began: Instant,
    /// Number of tokens of all chunks before it.
    emitted: u64,
    kind: StretchKind,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum StretchKind {
    /// A call that should pay, and everything after it until a new stream runs.
    Driven,
    /// The stream, at a moment where a call should pay.
    Streamed,
    /// A call that should lose.
    Probe(VerifyMethod),
}

impl DrivePolicy {
    pub(super) fn new(config: &WorkerConfig, metrics: Arc<WorkerMetrics>) -> Self {
        let speculation = &config.speculation;
        let namespaces = NonZeroUsize::new(config.replica.namespaces_max);
        let has_guard = speculation.gain_min > 0.0;
        DrivePolicy {
            nodes_max: config.engine.drive_tokens_max,
            prompt_tokens_max: config.engine.drive_prompt_tokens_max,
            off_above_batch: Some(speculation.off_above_batch).filter(|batch| *batch > 0),
            namespaces: LruCache::new(namespaces.unwrap_or(NonZeroUsize::MIN)),
            end_tokens: LruCache::new(END_TOKENS_MAX),
            paces: HashMap::new(),
            guard: has_guard.then(|| CallGuard::new(speculation.gain_min)),
            batch: 0,
            emitted: 0,
            metrics,
        }
    }

    /// Records that a chunk begins.
    pub(super) fn chunk_began(&mut self) {
        self.batch += 1;
    }

    /// Records that a chunk is over.
    pub(super) fn chunk_ended(&mut self) {
        self.batch = self.batch.saturating_sub(1);
    }

    /// Number of running chunks.
    pub(super) fn batch(&self) -> u32 {
        self.batch
    }

    /// The acceptance statistics of a namespace, if any were learnt and not evicted since.
    pub(super) fn known_statistics(&self, namespace: NamespaceId) -> Option<&AcceptanceStatistics> {
        self.namespaces.peek(&namespace)
    }

    /// Records tokens of a chunk, whether they came from a stream or from a call.
    pub(super) fn record_tokens(&mut self, tokens: usize) {
        self.emitted += tokens as u64;
    }

    /// Records the time that a stream took for some tokens.
    pub(super) fn record_streamed(&mut self, tokens: usize, seconds: f64) {
        self.pace(self.batch).record_streamed(tokens, seconds);
    }

    /// Records the silence before the first token of a stream that was opened after a call.
    pub(super) fn record_restart(&mut self, seconds: f64) {
        self.pace(self.batch).record_restart(seconds);
    }

    /// Records that a stream ended by itself, at a token that its request did not know as an end.
    pub(super) fn record_end_token(&mut self, token: TokenId) {
        self.end_tokens.put(token, ());
    }

    /// Whether streams end at this token by themselves.
    pub(super) fn is_end_token(&mut self, token: TokenId) -> bool {
        self.end_tokens.get(&token).is_some()
    }

    /// Learns from the tokens that followed where a draft was found.
    pub(super) fn learn(&mut self, namespace: NamespaceId, found: &Candidate, emitted: &[u32]) {
        let statistics = self
            .namespaces
            .get_or_insert_mut(namespace, AcceptanceStatistics::default);
        statistics.observe(found, emitted);
    }

    /// Decides about a draft at `now`.
    pub(super) fn decide(
        &mut self,
        opportunity: &DraftOpportunity<'_>,
        now: Instant,
    ) -> DriveDecision {
        let (route, reason, decision) = self.weigh(opportunity, now);
        self.metrics.decision((route.as_str(), reason.as_str()));
        decision
    }

    fn weigh(
        &mut self,
        opportunity: &DraftOpportunity<'_>,
        now: Instant,
    ) -> (Route, RouteReason, DriveDecision) {
        let stream = |reason| (Route::Plain, reason, DriveDecision::Stream);
        let is_auto = opportunity.asked == Asked::Auto;
        if is_auto && self.off_above_batch.is_some_and(|most| self.batch > most) {
            return stream(RouteReason::LargeBatch);
        }
        let Some((method, worth)) = self.best(opportunity) else {
            return stream(RouteReason::OverBudget);
        };
        if !worth.pays() {
            // A probe gives up a stream to learn the price of a call. Between two calls there is no stream, and
            // nothing new to learn either.
            if !opportunity.is_streaming || !self.pace(self.batch).is_probe_due(method) {
                return stream(RouteReason::OverBudget);
            }
            self.pace(self.batch).begin_probe(method, -worth.saved_s);
            let call = self.call(opportunity, method, worth, true);
            return (Route::Suffix, RouteReason::Probe, DriveDecision::Call(call));
        }
        let batch = self.batch;
        let held_back = self.guard.as_ref().and_then(|of| of.holds_back(batch));
        if let Some(reason) = held_back
            && is_auto
            && opportunity.is_streaming
        {
            let tokens = 1 + worth.expected.round() as u32;
            let stretch = self.begin_stretch(StretchKind::Streamed, now);
            let decision = DriveDecision::Measure(stretch, tokens);
            return (Route::Plain, reason, decision);
        }
        let call = self.call(opportunity, method, worth, false);
        (
            Route::Suffix,
            RouteReason::WithinBudget,
            DriveDecision::Call(call),
        )
    }

    /// The best call for the draft. If no call pays, the one that loses least.
    fn best(&mut self, opportunity: &DraftOpportunity<'_>) -> Option<(VerifyMethod, CallWorth)> {
        let statistics = self
            .namespaces
            .get_or_insert_mut(opportunity.namespace, AcceptanceStatistics::default);
        let probabilities = statistics.path_probabilities(opportunity.candidate);
        let pace = self.paces.get(&batch_bucket(self.batch))?;
        let stream = pace.of_streams(opportunity.is_streaming)?;
        let text_tokens = opportunity.text_tokens;
        let methods = opportunity.methods.iter();
        let possible = methods.filter(|method| pace.may_call(**method));
        possible
            .filter_map(|method| {
                let fit =
                    nodes_that_fit(*method, text_tokens, self.nodes_max, self.prompt_tokens_max)?;
                let offer = CallOffer {
                    tree: &probabilities,
                    ends_with: opportunity.ends_with,
                    nodes_max: fit,
                };
                let call_s = |nodes| {
                    let tokens = prompt_tokens(*method, text_tokens, nodes);
                    pace.call_s(*method, 1 + nodes, tokens)
                };
                Some((*method, best_call(&offer, &stream, call_s)?))
            })
            .max_by(|a, b| a.1.saved_s.total_cmp(&b.1.saved_s))
    }

    fn call(
        &mut self,
        opportunity: &DraftOpportunity<'_>,
        method: VerifyMethod,
        worth: CallWorth,
        is_probe: bool,
    ) -> Box<VerifyCall> {
        let found = opportunity.candidate;
        Box::new(VerifyCall {
            method,
            verified: found.part(&worth.nodes),
            found: found.clone(),
            expected: worth.expected,
            batch: self.batch,
            text_tokens: opportunity.text_tokens,
            is_probe,
        })
    }

    /// Begins the stretch of time around a call.
    pub(super) fn begin_call(&self, call: &VerifyCall, now: Instant) -> Stretch {
        let kind = match call.is_probe {
            true => StretchKind::Probe(call.method),
            false => StretchKind::Driven,
        };
        self.begin_stretch(kind, now)
    }

    fn begin_stretch(&self, kind: StretchKind, now: Instant) -> Stretch {
        Stretch {
            batch: self.batch,
            began: now,
            emitted: self.emitted,
            kind,
        }
    }

    /// Records a call that produced tokens.
    pub(super) fn record_call(&mut self, call: &VerifyCall, accepted: u32, seconds: f64) {
        let nodes = call.verified.tree.len() as u32;
        let prompt_tokens = prompt_tokens(call.method, call.text_tokens, nodes);
        let pace = self.pace(call.batch);
        pace.record_call(call.method, 1 + nodes, prompt_tokens, seconds);
        self.metrics.verify_call(call.method, "verified", seconds);
        let (source, _) = labels(&call.verified);
        self.metrics.expectation(source, call.expected, accepted);
    }

    /// Records a call that produced nothing: it failed, or its response left the next token open.
    pub(super) fn record_failed_call(
        &mut self,
        call: &VerifyCall,
        outcome: &'static str,
        seconds: f64,
    ) {
        let pace = self.pace(call.batch);
        pace.record_failed_call(call.method, seconds);
        self.metrics.verify_call(call.method, outcome, seconds);
    }

    /// Ends a stretch that brought its own chunk `own_tokens`.
    pub(super) fn end_stretch(&mut self, stretch: Stretch, own_tokens: u32, now: Instant) {
        let seconds = now.saturating_duration_since(stretch.began).as_secs_f64();
        let tokens = u32::try_from(self.emitted - stretch.emitted).unwrap_or(u32::MAX);
        if own_tokens == 0 || seconds <= 0.0 {
            return;
        }
        let called = match stretch.kind {
            StretchKind::Driven => true,
            StretchKind::Streamed => false,
            StretchKind::Probe(method) => {
                let pace = self.pace(stretch.batch);
                pace.end_probe(method, own_tokens, seconds);
                return;
            }
        };
        self.metrics.gain.stretch(GainSample {
            batch: stretch.batch,
            side: match called {
                true => GainSide::Drafted,
                false => GainSide::Plain,
            },
            tokens,
            seconds,
        });
        let Some(guard) = &mut self.guard else {
            return;
        };
        let verdict = guard.observe(stretch.batch, called, tokens, seconds);
        let (batch, in_use, gain) = (verdict.batch, verdict.in_use, verdict.gain);
        self.metrics.drafts_in_use(batch, in_use);
        if verdict.changed {
            tracing::info!(batch, in_use, gain, "use of verify calls changed");
        }
    }

    /// The pace with `batch` running chunks.
    fn pace(&mut self, batch: u32) -> &mut BatchPace {
        self.paces.entry(batch_bucket(batch)).or_default()
    }
}
