//! One chunk's part in drive mode: its reports about its stream, and the calls that it makes.

use std::sync::Arc;
use std::time::{Duration, Instant};

use parking_lot::{Mutex, MutexGuard};
use refrain_protocol::chunk::ChunkRequest;
use refrain_protocol::{NamespaceId, TokenId};
use refrain_speculation::draft::{Candidate, Expansion, ProposeParams, ProposeRules, Setting};
use refrain_speculation::router::Asked;
use refrain_speculation::verify::{Walk, walk_drawn};

use super::call::VerifyCall;
use super::followed::FollowedDrafts;
use super::policy::{DraftOpportunity, DriveDecision, DrivePolicy, Stretch};
use crate::config::WorkerConfig;
use crate::engine::{DraftVerdict, VerifyAbilities, VerifyMethod};
use crate::metrics::WorkerMetrics;
use crate::routing::{asked, drafts_from_indexes};
use crate::running::ActiveRequest;

/// The part of drive mode that all chunks of a worker share.
#[derive(Clone)]
pub(crate) struct SharedDrive {
    policy: Arc<Mutex<DrivePolicy>>,
    abilities: VerifyAbilities,
    pub(super) rules: Arc<ProposeRules>,
    /// Whether sampled requests are driven as well.
    drives_sampled: bool,
    metrics: Arc<WorkerMetrics>,
}

impl SharedDrive {
    pub(crate) fn new(
        config: &WorkerConfig,
        abilities: VerifyAbilities,
        metrics: Arc<WorkerMetrics>,
    ) -> Self {
        let policy = DrivePolicy::new(config, metrics.clone());
        SharedDrive {
            policy: Arc::new(Mutex::new(policy)),
            abilities,
            rules: Arc::new(call_rules(config)),
            drives_sampled: config.engine.drive_sampled,
            metrics,
        }
    }

    pub(super) fn lock(&self) -> MutexGuard<'_, DrivePolicy> {
        self.policy.lock()
    }
}

/// The rules of drafts that a call verifies: those of the configuration, for one chain that fits into a call.
///
/// Most of a call's price is fixed, and the policy cuts each draft where it no longer pays. So drafts are as long as
/// a call may be after a match of any length, unless alpha is set.
fn call_rules(config: &WorkerConfig) -> ProposeRules {
    let tokens_max = config.engine.drive_tokens_max;
    let mut rules = config.speculation.rules();
    if rules.alpha == Setting::Auto {
        rules.alpha = Setting::Fixed(tokens_max as f32);
    }
    let params = &mut rules.params;
    params.expansion = Expansion::Linear;
    params.max_spec_tokens = params.max_spec_tokens.min(tokens_max as usize);
    rules
}

/// One chunk's part in drive mode.
pub(crate) struct ChunkDrive {
    shared: SharedDrive,
    namespace: NamespaceId,
    asked: Asked,
    /// The methods that can judge drafts of this request; empty: it is never driven.
    methods: Vec<VerifyMethod>,
    /// Tokens that end the output of this request.
    stop_ids: Vec<TokenId>,
    followed: FollowedDrafts,
    stream: StreamState,
    /// The last token of the stream.
    last_token: Option<TokenId>,
    /// The measurement under way.
    measured: Option<Measurement>,
}

/// The state of the chunk's stream.
enum StreamState {
    /// It was opened after a call at this time, and has sent nothing yet.
    Restarting(Instant),
    /// It runs. The time when the chunk last began to wait for it; `None`: it has sent nothing yet, or the chunk did
    /// not wait for it.
    Running(Option<Instant>),
}

struct Measurement {
    stretch: Stretch,
    /// Number of tokens of this chunk in it.
    tokens: u32,
    /// Number of tokens that end it. A measurement of a call has none: it ends with the first token of the next
    /// stream.
    tokens_wanted: Option<u32>,
}

impl ChunkDrive {
    /// Begins a chunk.
    pub(crate) fn new(shared: SharedDrive, namespace: NamespaceId, request: &ChunkRequest) -> Self {
        let drafts = drafts_from_indexes(request.speculation);
        let may_sample = request.sampling.temperature == 0.0 || shared.drives_sampled;
        let methods = match drafts && may_sample {
            true => shared.abilities.methods(&request.sampling).collect(),
            false => Vec::new(),
        };
        shared.lock().chunk_began();
        ChunkDrive {
            shared,
            namespace,
            asked: asked(request.speculation),
            methods,
            stop_ids: request.sampling.stop_token_ids.clone(),
            followed: FollowedDrafts::default(),
            stream: StreamState::Running(None),
            last_token: None,
            measured: None,
        }
    }

    /// Records that a stream was opened, after a call or not.
    pub(crate) fn stream_opened(&mut self, is_restart: bool, now: Instant) {
        self.stream = match is_restart {
            true => StreamState::Restarting(now),
            false => StreamState::Running(None),
        };
        self.last_token = None;
    }

    /// Records that the stream ended by itself, although the request did not know its last token as an end. No draft
    /// is accepted beyond that token.
    pub(crate) fn stream_ended(&mut self) {
        if let Some(token) = self.last_token {
            self.shared.lock().record_end_token(token);
        }
    }

    /// Records tokens that the stream sent.
    pub(crate) fn stream_sent(&mut self, tokens: &[u32], now: Instant) {
        self.last_token = tokens.last().copied().or(self.last_token);
        let mut policy = self.shared.lock();
        policy.record_tokens(tokens.len());
        let seconds = |since: Instant| now.saturating_duration_since(since).as_secs_f64();
        let mut is_first = false;
        match std::mem::replace(&mut self.stream, StreamState::Running(None)) {
            StreamState::Restarting(since) => {
                is_first = true;
                policy.record_restart(seconds(since));
            }
            StreamState::Running(Some(since)) => {
                policy.record_streamed(tokens.len(), seconds(since));
            }
            StreamState::Running(None) => {}
        }
        drop(policy);
        self.emitted(tokens);
        if let Some(measured) = &self.measured {
            let is_over = match measured.tokens_wanted {
                Some(wanted) => measured.tokens >= wanted,
                None => is_first,
            };
            if is_over {
                self.end(now);
            }
        }
    }

    /// Follows drafts along these tokens, and counts them.
    fn emitted(&mut self, tokens: &[u32]) {
        let mut policy = self.shared.lock();
        self.followed.advance(tokens, |found, emitted| {
            policy.learn(self.namespace, found, emitted);
        });
        if let Some(measured) = &mut self.measured {
            measured.tokens += tokens.len() as u32;
        }
    }

    /// Records that the chunk has passed its tokens on, and waits for the stream again.
    pub(crate) fn waits_for_stream(&mut self, now: Instant) {
        if let StreamState::Running(since) = &mut self.stream {
            *since = Some(now);
        }
    }

    /// The verify call that should be made now, if any.
    pub(crate) fn next_call(
        &mut self,
        request: &ActiveRequest,
        is_streaming: bool,
    ) -> Option<Box<VerifyCall>> {
        let params = self.params(&request.rules(&self.shared.rules))?;
        let started = Instant::now();
        let found = {
            let policy = self.shared.lock();
            request.found(&params, policy.known_statistics(self.namespace))
        };
        let now = Instant::now();
        let seconds = (now - started).as_secs_f64();
        self.shared
            .metrics
            .families
            .propose_seconds
            .observe(seconds);
        self.decide(found?, request.text().len() as u32, is_streaming, now)
    }

    /// How drafts are proposed for this request by its rules, beside all others that run; `None` if it is never
    /// driven.
    pub(super) fn params(&self, rules: &ProposeRules) -> Option<ProposeParams> {
        let requests = || self.shared.lock().batch();
        (!self.methods.is_empty()).then(|| rules.whole(requests() as usize, None))
    }

    /// Decides about a draft. `found` is the draft and the node that ends the output if it is accepted.
    pub(super) fn decide(
        &mut self,
        found: (Candidate, Option<u32>),
        text_tokens: u32,
        is_streaming: bool,
        now: Instant,
    ) -> Option<Box<VerifyCall>> {
        let (candidate, ends_with) = found;
        // One measurement at a time: while the stream is measured, it is not given up.
        if is_streaming && self.measured.is_some() {
            self.followed.add(&candidate);
            return None;
        }
        let opportunity = DraftOpportunity {
            namespace: self.namespace,
            asked: self.asked,
            methods: &self.methods,
            text_tokens,
            candidate: &candidate,
            ends_with,
            is_streaming,
        };
        let mut policy = self.shared.lock();
        match policy.decide(&opportunity, now) {
            DriveDecision::Stream => {
                self.followed.add(&candidate);
                None
            }
            DriveDecision::Measure(stretch, tokens) => {
                self.followed.add(&candidate);
                self.measured = Some(Measurement {
                    stretch,
                    tokens: 0,
                    tokens_wanted: Some(tokens),
                });
                None
            }
            DriveDecision::Call(call) => {
                if is_streaming {
                    self.measured = Some(Measurement {
                        stretch: policy.begin_call(&call, now),
                        tokens: 0,
                        tokens_wanted: None,
                    });
                }
                Some(call)
            }
        }
    }

    /// Takes the verdict of a call, `None` if it failed. Returns the draft and the
    /// engine's path through it if the call produced tokens.
    pub(crate) fn call_ended(
        &mut self,
        call: Box<VerifyCall>,
        verdict: Option<&DraftVerdict>,
        duration: Duration,
    ) -> Option<(Candidate, Walk)> {
        let seconds = duration.as_secs_f64();
        let mut policy = self.shared.lock();
        let Some(verdict) = verdict else {
            policy.record_failed_call(&call, "failed", seconds);
            return None;
        };
        // Where the engine's stream may end by itself, only a stream can tell.
        let mut is_open =
            |token: &TokenId| !self.stop_ids.contains(token) && policy.is_end_token(*token);
        let next_tokens: Vec<Option<TokenId>> = verdict
            .next_tokens
            .iter()
            .map(|next| next.filter(|token| !is_open(token)))
            .collect();
        let walk = walk_drawn(&call.verified.tree, &next_tokens);
        if walk.emitted.is_empty() {
            policy.record_failed_call(&call, "unknown", seconds);
            return None;
        }
        policy.record_call(&call, walk.accepted.len() as u32, seconds);
        policy.learn(self.namespace, &call.found, &walk.emitted);
        Some((call.verified, walk))
    }

    /// Records tokens that a call produced.
    pub(crate) fn call_emitted(&mut self, tokens: &[u32]) {
        self.shared.lock().record_tokens(tokens.len());
        self.emitted(tokens);
    }

    /// Ends the measurement under way, as at the end of the chunk.
    pub(crate) fn end(&mut self, now: Instant) {
        if let Some(measured) = self.measured.take() {
            let mut policy = self.shared.lock();
            policy.end_stretch(measured.stretch, measured.tokens, now);
        }
    }
}

impl Drop for ChunkDrive {
    fn drop(&mut self) {
        let mut policy = self.shared.lock();
        policy.chunk_ended();
        self.followed
            .end(|found, emitted| policy.learn(self.namespace, found, emitted));
    }
}
