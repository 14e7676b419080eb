//! Fakes: a verifying engine whose target model is a function, and a scheduler.

use std::collections::HashMap;
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::time::Duration;

use async_trait::async_trait;
use refrain_protocol::engine::*;
use refrain_protocol::engine_order::*;
use refrain_protocol::scheduling::*;
use refrain_protocol::{ApiError, EngineSessionId, ErrorKind, TokenId};
use refrain_rpc::Scheduler;
use tokio::sync::Semaphore;

/// The stop id of the fake model.
pub(crate) const STOP: TokenId = 0;

/// The version of the weights that the fake model starts with.
const FIRST_VERSION: u64 = 3;

/// A target model: the token that follows a text.
pub(crate) type Target = fn(&[TokenId]) -> TokenId;

/// An engine that keeps the contract of the protocol, and checks that the worker keeps it too.
pub(crate) struct FakeEngine {
    pub(crate) capabilities: EngineCapabilities,
    target: Target,
    /// The target of the weights that it is told to load; `None`: they are damaged.
    pub(crate) next_target: Option<Target>,
    /// How long it loads them, and how often it has begun to.
    pub(crate) load_time: Duration,
    pub(crate) loading: AtomicU64,
    pub(crate) weight_version: AtomicU64,
    /// Its EAGLE-3 head: the token that it predicts after a text.
    head: Option<Target>,
    sessions: Mutex<HashMap<EngineSessionId, Session>>,
    /// For each session: whether it was opened for drafts of the head.
    pub(crate) opened: Mutex<Vec<bool>>,
    pub(crate) steps: AtomicU64,
    pub(crate) closed: AtomicU64,
    /// Number of sessions that were parked, and of context tokens that items brought.
    pub(crate) parked: AtomicU64,
    pub(crate) sent: AtomicU64,
    /// Number of steps to come over which the decode loop panics.
    pub(crate) panics: AtomicU32,
    /// Number of steps to come that fail.
    pub(crate) failures: AtomicU32,
    /// Permits for steps; `None`: any number.
    pub(crate) allowed: Option<Semaphore>,
    /// Number of steps to come before which all sessions are lost.
    pub(crate) amnesia: AtomicU32,
    /// It answers no question whether it is ready.
    pub(crate) is_silent: AtomicBool,
    pub(crate) step_time: Duration,
    /// Reported duration of a step, and of the head per request in it, seconds.
    pub(crate) step_s: f64,
    pub(crate) draft_s: f64,
    /// Reported duration that each draft token adds to a step, seconds.
    pub(crate) verify_s: f64,
}

#[derive(Default)]
struct Session {
    text: Vec<TokenId>,
    /// The text that was announced when the session was opened, and has not come yet.
    ahead: Vec<TokenId>,
    self_drafts: bool,
}

impl FakeEngine {
    pub(crate) fn new(target: Target) -> Self {
        FakeEngine {
            capabilities: EngineCapabilities {
                drafter: None,
                model: "fake".into(),
                tokenizer: "fake".into(),
                vocab_size: 1000,
                max_context: 2000,
                max_batch: 8,
                max_step_tokens: 64,
                max_sessions: 8,
                tree_drafts: true,
                max_draft_tokens: 16,
                eos_token_ids: vec![STOP],
                output_forms: false,
                reads_ahead: false,
                token_bodies: false,
            },
            target,
            next_target: None,
            load_time: Duration::ZERO,
            loading: AtomicU64::new(0),
            weight_version: AtomicU64::new(FIRST_VERSION),
            head: None,
            sessions: Mutex::default(),
            opened: Mutex::default(),
            steps: AtomicU64::new(0),
            closed: AtomicU64::new(0),
            parked: AtomicU64::new(0),
            sent: AtomicU64::new(0),
            panics: AtomicU32::new(0),
            failures: AtomicU32::new(0),
            allowed: None,
            amnesia: AtomicU32::new(0),
            is_silent: AtomicBool::new(false),
            step_time: Duration::ZERO,
            step_s: 0.001,
            draft_s: 0.0,
            verify_s: 0.0,
        }
    }

    /// With a head that takes this long for a draft.
    pub(crate) fn with_head(mut self, head: Target, draft_s: f64) -> Self {
        self.capabilities.drafter = Some(DrafterCapabilities {
            kind: DrafterKind::Eagle3,
            depth_max: 6,
            top_k_max: 2,
        });
        self.head = Some(head);
        self.draft_s = draft_s;
        self
    }

    /// It is told of the text ahead, and finds three tokens of each of its pieces.
    pub(crate) fn reading_ahead(mut self) -> Self {
        self.capabilities.reads_ahead = true;
        self
    }

    /// With a draft model instead of a head.
    pub(crate) fn drafting_by_model(mut self) -> Self {
        if let Some(drafter) = &mut self.capabilities.drafter {
            drafter.kind = DrafterKind::DraftModel;
        }
        self
    }

    /// The target of the present weights.
    fn target(&self) -> Target {
        let is_first = self.weight_version.load(Ordering::SeqCst) == FIRST_VERSION;
        self.next_target
            .filter(|_| !is_first)
            .unwrap_or(self.target)
    }

    /// The chain that the head predicts.
    fn self_draft(&self, wanted: SelfDraft, session: &Session) -> Draft {
        let head = self
            .head
            .expect("only an engine with a head is asked to draft");
        assert!(session.self_drafts, "the session was not opened for it");
        assert!((1..=6).contains(&wanted.depth));
        assert!((1..=2).contains(&wanted.top_k));
        assert!((1..=self.capabilities.max_draft_tokens).contains(&wanted.tokens_max));
        let mut text = session.text.clone();
        let mut draft = Draft::default();
        for node in 0..wanted.depth.min(wanted.tokens_max) {
            text.push(head(&text));
            draft.tokens.extend(text.last());
            draft.parents.push(node.checked_sub(1));
        }
        draft
    }

    fn item(&self, sessions: &mut HashMap<EngineSessionId, Session>, item: StepItem) -> StepResult {
        if let Some(spec) = &item.open {
            assert_eq!(item.keep_len, 0, "an opened session has no text");
            // The session of a measurement has default sampling parameters.
            let measures = spec.sampling == Sampling::default();
            assert!(measures || spec.sampling.stop_token_ids == [STOP]);
            self.opened.lock().unwrap().push(spec.self_drafts);
            let session = Session {
                text: Vec::new(),
                ahead: [&item.tokens[..], &spec.ahead].concat(),
                self_drafts: spec.self_drafts,
            };
            sessions.insert(item.session, session);
        }
        let Some(session) = sessions.get_mut(&item.session) else {
            return Err(ApiError::new(ErrorKind::NotFound, "no such session"));
        };
        let sent = item.tokens.len() as u64;
        self.sent.fetch_add(sent, Ordering::Relaxed);
        let mut cached_tokens = 0;
        if self.capabilities.reads_ahead && !session.ahead.is_empty() {
            assert!(
                session.ahead.starts_with(&item.tokens),
                "it was not announced"
            );
            session.ahead.drain(..item.tokens.len());
            assert_eq!(session.ahead.is_empty(), item.sample);
            cached_tokens = 3;
        }
        let text = &mut session.text;
        assert!(
            item.keep_len as usize <= text.len(),
            "keep_len is past the text"
        );
        text.truncate(item.keep_len as usize);
        text.extend_from_slice(&item.tokens);
        assert!(!text.is_empty());
        let mut emitted = Vec::new();
        let mut accepted_nodes = Vec::new();
        let mut stopped = false;
        let mut self_drafted = 0;
        let mut agreed_nodes = Vec::new();
        if item.sample {
            let mut draft = item.draft.unwrap_or_default();
            let sent = draft.tokens.len() as u32;
            draft.validate().expect("a draft in shape");
            if let Some(wanted) = item.self_draft {
                assert!(
                    sent == 0 || !wanted.sampled,
                    "drawn tokens cannot be merged"
                );
                agreed_nodes = draft.merge(&self.self_draft(wanted, session));
                agreed_nodes.retain(|node| *node < sent);
                self_drafted = draft.tokens.len() as u32 - sent;
            }
            let text = &mut session.text;
            assert!(draft.tokens.len() <= self.capabilities.max_draft_tokens as usize);
            let mut parent = None;
            loop {
                let token = self.target()(text);
                text.push(token);
                emitted.push(token);
                stopped = token == STOP;
                let child = (0..draft.tokens.len())
                    .find(|&node| draft.parents[node] == parent && draft.tokens[node] == token);
                match child {
                    Some(node) if !stopped && emitted.len() < item.max_emit as usize => {
                        accepted_nodes.push(node as u32);
                        parent = Some(node as u32);
                    }
                    _ => break,
                }
            }
        } else {
            assert!(item.draft.is_none() && item.self_draft.is_none());
        }
        let text = &session.text;
        assert!(text.len() <= self.capabilities.max_context as usize);
        Ok(StepOutput {
            self_drafted,
            agreed_nodes,
            emitted,
            accepted_nodes,
            text_len: text.len() as u32,
            cached_tokens,
            stopped,
            logprobs: None,
        })
    }
}

#[async_trait]
impl refrain_worker::VerifyingEngine for FakeEngine {
    fn capabilities(&self) -> &EngineCapabilities {
        &self.capabilities
    }

    async fn confirm(&self) -> Result<(), ApiError> {
        if self.is_silent.load(Ordering::SeqCst) {
            std::future::pending::<()>().await;
        }
        Ok(())
    }

    async fn step(&self, request: StepRequest) -> Result<StepResponse, ApiError> {
        if let Some(allowed) = &self.allowed {
            allowed.acquire().await.unwrap().forget();
        }
        if self.step_time.is_zero() {
            // Even a sleep of zero lasts a millisecond.
            tokio::task::yield_now().await;
        } else {
            tokio::time::sleep(self.step_time).await;
        }
        self.steps.fetch_add(1, Ordering::Relaxed);
        let take = |left: &AtomicU32| {
            left.fetch_update(Ordering::Relaxed, Ordering::Relaxed, |left| {
                left.checked_sub(1)
            })
            .is_ok()
        };
        assert!(!take(&self.panics), "planned panic");
        if take(&self.failures) {
            return Err(ApiError::new(ErrorKind::Upstream, "planned failure"));
        }
        let mut sessions = self.sessions.lock().unwrap();
        if take(&self.amnesia) {
            sessions.clear();
        }
        assert!(request.items.len() <= self.capabilities.max_batch as usize);
        let tokens: usize = request
            .items
            .iter()
            .map(|item| {
                let draft = item.draft.as_ref().map_or(0, |draft| draft.tokens.len());
                let own = item.self_draft.map_or(0, |draft| draft.tokens_max as usize);
                item.tokens.len().max(1) + draft + own
            })
            .sum();
        assert!(
            tokens <= self.capabilities.max_step_tokens as usize,
            "{tokens} tokens in a step"
        );
        let drafted: usize = request
            .items
            .iter()
            .filter_map(|item| item.draft.as_ref())
            .map(|draft| draft.tokens.len())
            .sum();
        let self_drafts = request
            .items
            .iter()
            .filter(|item| item.self_draft.is_some());
        let draft_s = self.draft_s * self_drafts.count() as f64;
        let results = request
            .items
            .into_iter()
            .map(|item| self.item(&mut sessions, item))
            .collect();
        Ok(StepResponse {
            draft_s,
            results,
            step_s: self.step_s + draft_s + self.verify_s * drafted as f64,
            weight_version: self.weight_version.load(Ordering::SeqCst),
        })
    }

    async fn close(&self, request: CloseRequest) -> Result<(), ApiError> {
        if request.parks {
            let parked = request.sessions.len() as u64;
            self.parked.fetch_add(parked, Ordering::Relaxed);
            return Ok(());
        }
        let mut sessions = self.sessions.lock().unwrap();
        for session in request.sessions {
            if sessions.remove(&session).is_some() {
                self.closed.fetch_add(1, Ordering::Relaxed);
            }
        }
        Ok(())
    }

    async fn abort(&self, sessions: Vec<EngineSessionId>) -> Result<(), ApiError> {
        self.close(CloseRequest {
            sessions,
            keep_kv: false,
            parks: false,
        })
        .await
    }

    async fn order(&self, order: EngineOrder) -> Result<EngineOrderReply, ApiError> {
        match order {
            EngineOrder::LoadWeights { directory, version } => {
                self.loading.fetch_add(1, Ordering::SeqCst);
                tokio::time::sleep(self.load_time).await;
                if self.next_target.is_none() {
                    let message = format!("{directory} has no weights");
                    return Err(ApiError::new(ErrorKind::InvalidRequest, message));
                }
                let present = self.weight_version.load(Ordering::SeqCst);
                let version = version.unwrap_or(present + 1);
                let mut sessions = self.sessions.lock().unwrap();
                sessions.clear();
                self.weight_version.store(version, Ordering::SeqCst);
            }
            EngineOrder::SetVersion { version } => {
                self.weight_version.store(version, Ordering::SeqCst);
            }
            EngineOrder::Pause { .. } => self.sessions.lock().unwrap().clear(),
            EngineOrder::Report | EngineOrder::Resume | EngineOrder::FlushCache => {}
            EngineOrder::PassOn(_) => {
                let error = ApiError::new(ErrorKind::InvalidRequest, "nothing is passed on");
                return Err(error.with_code("unsupported_by_engine"));
            }
        }
        let state = EngineState {
            weight_version: self.weight_version.load(Ordering::SeqCst),
            ..EngineState::default()
        };
        Ok(EngineOrderReply {
            state,
            answer: None,
        })
    }
}

/// A scheduler that records heartbeats.
#[derive(Default)]
pub(crate) struct FakeScheduler {
    /// Leases that should give way.
    pub(crate) give_way: Mutex<Vec<refrain_protocol::LeaseId>>,
    pub(crate) last: Mutex<Option<Heartbeat>>,
    /// The workers that said that they leave.
    pub(crate) left: Mutex<Vec<refrain_protocol::WorkerId>>,
    /// When heartbeats came.
    pub(crate) times: Mutex<Vec<tokio::time::Instant>>,
    /// Its report about the fallback worker.
    pub(crate) fallback: Mutex<Option<Eagle3Report>>,
}

#[async_trait]
impl Scheduler for FakeScheduler {
    async fn lease(&self, _: LeaseRequest) -> Result<Lease, ApiError> {
        Err(ApiError::new(
            ErrorKind::Unavailable,
            "a fake grants nothing",
        ))
    }

    async fn finish(&self, _: LeaseFinish) -> Result<(), ApiError> {
        Ok(())
    }

    async fn heartbeat(&self, heartbeat: Heartbeat) -> Result<HeartbeatReply, ApiError> {
        if heartbeat.leaves {
            self.left.lock().unwrap().push(heartbeat.worker.clone());
        }
        *self.last.lock().unwrap() = Some(heartbeat);
        self.times.lock().unwrap().push(tokio::time::Instant::now());
        Ok(HeartbeatReply {
            give_way: self.give_way.lock().unwrap().clone(),
            next_in_ms: 20,
            fallback: *self.fallback.lock().unwrap(),
        })
    }

    async fn models(&self) -> Result<Vec<ServedModel>, ApiError> {
        Ok(Vec::new())
    }
}
