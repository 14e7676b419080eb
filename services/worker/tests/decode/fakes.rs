//! An engine whose target model is a function, a store that is a map, a scheduler that listens.

use std::collections::HashMap;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use async_trait::async_trait;
use refrain_clients::{DraftStore, Scheduler};
use refrain_protocol::document::*;
use refrain_protocol::engine::*;
use refrain_protocol::scheduling::*;
use refrain_protocol::{ApiError, DocumentId, EngineSessionId, ErrorKind, TokenId};

/// The stop id of the fake model.
pub(crate) const STOP: TokenId = 0;

/// The target model: what follows a text.
pub(crate) type Target = fn(&[TokenId]) -> TokenId;

/// Keeps to the contract of the engine's protocol, and complains where the worker does not.
pub(crate) struct FakeEngine {
    capabilities: EngineCapabilities,
    target: Target,
    sessions: Mutex<HashMap<EngineSessionId, Vec<TokenId>>>,
    pub(crate) steps: AtomicU64,
    pub(crate) closed: AtomicU64,
    /// Answers this many of the coming steps with an error.
    pub(crate) failures: AtomicU32,
    /// Forgets all sessions before this many of the coming steps.
    pub(crate) amnesia: AtomicU32,
    pub(crate) step_time: Duration,
}

impl FakeEngine {
    pub(crate) fn new(target: Target) -> Self {
        FakeEngine {
            capabilities: EngineCapabilities {
                eagle3: None,
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
            },
            target,
            sessions: Mutex::default(),
            steps: AtomicU64::new(0),
            closed: AtomicU64::new(0),
            failures: AtomicU32::new(0),
            amnesia: AtomicU32::new(0),
            step_time: Duration::ZERO,
        }
    }

    fn item(
        &self,
        sessions: &mut HashMap<EngineSessionId, Vec<TokenId>>,
        item: StepItem,
    ) -> StepResult {
        if let Some(spec) = &item.open {
            assert_eq!(item.keep_len, 0, "an opened session has no text");
            assert_eq!(spec.sampling.stop_token_ids, vec![STOP]);
            sessions.insert(item.session, Vec::new());
        }
        let Some(text) = sessions.get_mut(&item.session) else {
            return Err(ApiError::new(ErrorKind::NotFound, "no such session"));
        };
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
        if item.sample {
            let draft = item.draft.unwrap_or_default();
            draft.validate().expect("a draft in shape");
            assert!(draft.tokens.len() <= self.capabilities.max_draft_tokens as usize);
            let mut parent = None;
            loop {
                let token = (self.target)(text);
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
            assert!(item.draft.is_none());
        }
        assert!(text.len() <= self.capabilities.max_context as usize);
        Ok(StepOutput {
            self_drafted: 0,
            emitted,
            accepted_nodes,
            text_len: text.len() as u32,
            cached_tokens: 0,
            stopped,
            logprobs: None,
        })
    }
}

#[async_trait]
impl refrain_worker::Engine for FakeEngine {
    fn capabilities(&self) -> &EngineCapabilities {
        &self.capabilities
    }

    async fn confirm(&self) -> Result<(), ApiError> {
        Ok(())
    }

    async fn step(&self, request: StepRequest) -> Result<StepResponse, ApiError> {
        tokio::time::sleep(self.step_time).await;
        self.steps.fetch_add(1, Ordering::Relaxed);
        let take = |left: &AtomicU32| {
            left.fetch_update(Ordering::Relaxed, Ordering::Relaxed, |left| {
                left.checked_sub(1)
            })
            .is_ok()
        };
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
                item.tokens.len().max(1) + item.draft.as_ref().map_or(0, |draft| draft.tokens.len())
            })
            .sum();
        assert!(
            tokens <= self.capabilities.max_step_tokens as usize,
            "{tokens} tokens in a step"
        );
        let results = request
            .items
            .into_iter()
            .map(|item| self.item(&mut sessions, item))
            .collect();
        Ok(StepResponse {
            draft_s: 0.0,
            results,
            step_s: 0.001,
            weight_version: 3,
        })
    }

    async fn close(&self, request: CloseRequest) -> Result<(), ApiError> {
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
        })
        .await
    }

    async fn load(&self) -> Result<EngineLoad, ApiError> {
        Ok(EngineLoad::default())
    }

    async fn tokenize(&self, _: String) -> Result<Vec<TokenId>, ApiError> {
        Err(ApiError::new(
            ErrorKind::NotFound,
            "a fake has no tokenizer",
        ))
    }

    async fn detokenize(&self, _: Vec<TokenId>) -> Result<String, ApiError> {
        Err(ApiError::new(
            ErrorKind::NotFound,
            "a fake has no tokenizer",
        ))
    }
}

/// What a document came to in the store.
#[derive(Clone, Debug, Default, PartialEq)]
pub(crate) struct Stored {
    pub(crate) tokens: Vec<TokenId>,
    pub(crate) finish: Option<FinishReason>,
    pub(crate) head: DocumentHead,
}

/// Documents in a map; its feed is empty.
#[derive(Default)]
pub(crate) struct FakeStore {
    pub(crate) documents: Mutex<HashMap<DocumentId, Stored>>,
    pub(crate) touched: Mutex<Vec<DocumentId>>,
}

#[async_trait]
impl DraftStore for FakeStore {
    async fn append(&self, request: AppendRequest) -> Result<AppendReply, ApiError> {
        let mut documents = self.documents.lock().unwrap();
        let lengths = request.updates.into_iter().map(|update| {
            let stored = documents.entry(update.document).or_default();
            if update.prev_len as usize <= stored.tokens.len() {
                stored.tokens.truncate(update.prev_len as usize);
                stored.tokens.extend(update.tokens);
                stored.finish = update.finish;
                stored.head = update.head;
            }
            stored.tokens.len() as u32
        });
        Ok(AppendReply {
            lengths: lengths.collect(),
        })
    }

    async fn follow(&self, request: FollowRequest) -> Result<FollowReply, ApiError> {
        tokio::time::sleep(Duration::from_millis(u64::from(request.wait_ms))).await;
        Ok(FollowReply {
            reset: false,
            events: Vec::new(),
            cursor: request.after,
            caught_up: true,
        })
    }

    async fn touch(&self, request: TouchRequest) -> Result<(), ApiError> {
        self.touched.lock().unwrap().extend(request.documents);
        Ok(())
    }

    async fn stats(&self) -> Result<StoreStats, ApiError> {
        Ok(StoreStats::default())
    }
}

/// Takes heartbeats.
#[derive(Default)]
pub(crate) struct FakeScheduler {
    pub(crate) last: Mutex<Option<Heartbeat>>,
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
        *self.last.lock().unwrap() = Some(heartbeat);
        Ok(HeartbeatReply {
            next_in_ms: 20,
            fallback: None,
        })
    }

    async fn models(&self) -> Result<Vec<ServedModel>, ApiError> {
        Ok(Vec::new())
    }
}

/// A worker over the fakes.
pub(crate) struct Bench {
    pub(crate) engine: Arc<FakeEngine>,
    pub(crate) store: Arc<FakeStore>,
    pub(crate) scheduler: Arc<FakeScheduler>,
    pub(crate) worker: refrain_worker::RunningWorker,
    pub(crate) signer: refrain_service_kit::mesh::NamespaceSigner,
}
