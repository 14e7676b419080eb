//! A streaming engine whose target model is a function.

use std::collections::VecDeque;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use async_trait::async_trait;
use futures_util::StreamExt;
use refrain_protocol::chunk::ChunkRequest;
use refrain_protocol::document::FinishReason;
use refrain_protocol::engine_order::{EngineAnswer, EngineOrder};
use refrain_protocol::{ApiError, DocumentId, ErrorKind, TokenId};
use refrain_worker::{
    EngineSlots, FormAbilities, GenerateRequest, Generated, GeneratedEnd, GeneratedStream,
    RestoredWeights, StreamingCapabilities, StreamingEngine, StreamingLoad, WorkerConfig,
    WorkerEngine,
};

use tokio::sync::watch;

use crate::bench::*;
use crate::fakes::{STOP, Target};

/// A streaming engine whose behaviour tests can script.
pub(crate) struct FakeStream {
    pub(crate) capabilities: StreamingCapabilities,
    pub(crate) target: Target,
    /// Number of tokens in one piece.
    pub(crate) piece: usize,
    /// Pause before each piece.
    pub(crate) pause: Duration,
    /// All pieces are ready at once.
    pub(crate) at_hand: bool,
    /// Number of pieces that were read.
    pub(crate) taken: Arc<AtomicU64>,
    /// Number of calls to come that are refused.
    pub(crate) refusals: AtomicU32,
    pub(crate) refusal: Mutex<ErrorKind>,
    pub(crate) refusal_code: Option<&'static str>,
    /// Number of calls to come that break after `breaks_after` pieces.
    pub(crate) breaks: AtomicU32,
    pub(crate) breaks_after: usize,
    /// Longest text that it accepts, whatever its capabilities say.
    pub(crate) context: usize,
    /// The stream leaves out the end token.
    pub(crate) hides_stop: bool,
    /// It tells what it found in its cache right before the last piece, as vLLM does.
    pub(crate) tells_cached_late: bool,
    pub(crate) asked: Mutex<VecDeque<GenerateRequest>>,
    pub(crate) at_work: Arc<AtomicU64>,
    pub(crate) orders: Arc<StreamOrders>,
    pub(crate) table: FakeTable,
}

/// The table of n-grams from which the fake engine would draft.
pub(crate) struct FakeTable {
    /// Its slots as it tells them, or the kind of its failure.
    pub(crate) slots: Mutex<Result<EngineSlots, ErrorKind>>,
    pub(crate) looks: AtomicU64,
    /// The texts with which it was primed.
    pub(crate) primed: Mutex<Vec<Vec<TokenId>>>,
    /// Whether it refuses them.
    pub(crate) refuses: AtomicBool,
}

impl Default for FakeTable {
    fn default() -> Self {
        let slots = EngineSlots {
            last_request: None,
            is_free: true,
            has_others: false,
        };
        FakeTable {
            slots: Mutex::new(Ok(slots)),
            looks: AtomicU64::new(0),
            primed: Mutex::default(),
            refuses: AtomicBool::new(false),
        }
    }
}

/// The orders of a trainer to the fake engine, and what they leave.
#[derive(Default)]
pub(crate) struct StreamOrders {
    pub(crate) received: Mutex<Vec<EngineOrder>>,
    /// It generates nothing.
    pub(crate) is_paused: watch::Sender<bool>,
    /// Its streams end by an abort of its own.
    pub(crate) aborts: AtomicBool,
    /// How long it loads weights, and whether they are damaged.
    pub(crate) load_time: Mutex<Duration>,
    pub(crate) load_fails: AtomicBool,
    /// How many calls to go on it does not answer, and whether it has its first weights after a failed load.
    pub(crate) resumes_lost: AtomicU32,
    pub(crate) begins_anew: AtomicBool,
    /// It takes no orders at all.
    pub(crate) refuses: AtomicBool,
}

impl FakeStream {
    /// Waits until it works for no request.
    pub(crate) async fn becomes_free(&self) {
        eventually("the engine is free", || {
            self.at_work.load(Ordering::SeqCst) == 0
        })
        .await;
    }

    pub(crate) fn new(target: Target) -> Self {
        FakeStream {
            capabilities: StreamingCapabilities {
                model: "fake".into(),
                tokenizer: "fake".into(),
                max_context: 2000,
                top_logprobs_max: None,
                top_k: true,
                min_p: false,
                logit_bias: true,
                output_penalties: true,
                repetition_penalty: true,
                min_tokens: true,
                ignore_eos: true,
                bad_words: false,
                forms: FormAbilities::default(),
            },
            target,
            piece: 1,
            pause: Duration::ZERO,
            at_hand: false,
            taken: Arc::default(),
            refusals: AtomicU32::new(0),
            refusal: Mutex::new(ErrorKind::Unavailable),
            refusal_code: None,
            breaks: AtomicU32::new(0),
            breaks_after: 3,
            context: 2000,
            hides_stop: false,
            tells_cached_late: false,
            asked: Mutex::default(),
            at_work: Arc::default(),
            orders: Arc::default(),
            table: FakeTable::default(),
        }
    }

    /// An engine that tells what it found in its cache with its last piece.
    pub(crate) fn telling_late(target: Target) -> Self {
        FakeStream {
            tells_cached_late: true,
            ..FakeStream::new(target)
        }
    }

    pub(crate) fn last_asked(&self) -> GenerateRequest {
        self.asked.lock().unwrap().back().unwrap().clone()
    }
}

/// Counts a request for as long as its stream lives.
struct AtWork(Arc<AtomicU64>);

impl Drop for AtWork {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::SeqCst);
    }
}

fn take(left: &AtomicU32) -> bool {
    left.fetch_update(Ordering::SeqCst, Ordering::SeqCst, |left| {
        left.checked_sub(1)
    })
    .is_ok()
}

#[async_trait]
impl StreamingEngine for FakeStream {
    fn capabilities(&self) -> &StreamingCapabilities {
        &self.capabilities
    }

    async fn confirm(&self) -> Result<(), ApiError> {
        Ok(())
    }

    async fn generate(&self, request: GenerateRequest) -> Result<GeneratedStream, ApiError> {
        self.asked.lock().unwrap().push_back(request.clone());
        if take(&self.refusals) {
            let kind = *self.refusal.lock().unwrap();
            let mut error = ApiError::new(kind, "planned refusal");
            error.code = self.refusal_code.map(str::to_owned);
            return Err(error);
        }
        let room = self.context.saturating_sub(request.tokens.len());
        let most = room.min(request.tokens_max as usize);
        let mut received = plainly(self.target, &request.tokens, most);
        let end = match received.last() == Some(&STOP) {
            true => GeneratedEnd::Stop,
            false => GeneratedEnd::Length,
        };
        if self.hides_stop && end == GeneratedEnd::Stop {
            received.pop();
        }
        let mut pieces: Vec<Result<Generated, ApiError>> = received
            .chunks(self.piece)
            .map(|piece| {
                Ok(Generated::Tokens {
                    tokens: piece.to_vec(),
                    logprobs: None,
                })
            })
            .collect();
        let told_at = match self.tells_cached_late {
            true => pieces.len().saturating_sub(1),
            false => 0,
        };
        // All but the token that has to be computed.
        let tokens = (request.tokens.len() as u32).saturating_sub(1);
        pieces.insert(told_at, Ok(Generated::Cached { tokens }));
        pieces.push(Ok(Generated::End(end)));
        if take(&self.breaks) {
            pieces.truncate(1 + self.breaks_after);
            pieces.push(Err(ApiError::new(ErrorKind::Upstream, "planned break")));
        }
        self.at_work.fetch_add(1, Ordering::SeqCst);
        let at_work = AtWork(self.at_work.clone());
        let pause = (!self.at_hand).then_some(self.pause);
        let taken = self.taken.clone();
        let orders = self.orders.clone();
        let stream = futures_util::stream::iter(pieces).then(move |piece| {
            let _ = &at_work;
            let taken = taken.clone();
            let orders = orders.clone();
            async move {
                let mut is_paused = orders.is_paused.subscribe();
                is_paused.wait_for(|is_paused| !is_paused).await.unwrap();
                if orders.aborts.load(Ordering::SeqCst) {
                    return Ok(Generated::End(GeneratedEnd::Aborted));
                }
                match pause {
                    Some(pause) => tokio::time::sleep(pause).await,
                    // Like a socket that is always ready: other tasks get their turn.
                    None => tokio::task::consume_budget().await,
                }
                taken.fetch_add(1, Ordering::SeqCst);
                piece
            }
        });
        Ok(stream.boxed())
    }

    fn check_order(&self, _: &EngineOrder) -> Result<(), ApiError> {
        match self.orders.refuses.load(Ordering::SeqCst) {
            true => Err(ApiError::new(
                ErrorKind::InvalidRequest,
                "it takes no orders",
            )),
            false => Ok(()),
        }
    }

    async fn order(&self, order: EngineOrder) -> Result<Option<EngineAnswer>, ApiError> {
        let orders = &self.orders;
        orders.received.lock().unwrap().push(order.clone());
        match order {
            EngineOrder::Pause { .. } => _ = orders.is_paused.send_replace(true),
            EngineOrder::Resume if take(&orders.resumes_lost) => {
                return Err(ApiError::new(ErrorKind::Upstream, "planned loss"));
            }
            EngineOrder::Resume => _ = orders.is_paused.send_replace(false),
            EngineOrder::LoadWeights { .. } => {
                let load_time = *orders.load_time.lock().unwrap();
                tokio::time::sleep(load_time).await;
                if orders.load_fails.load(Ordering::SeqCst) {
                    return Err(ApiError::new(ErrorKind::Upstream, "planned failure"));
                }
            }
            EngineOrder::PassOn(call) => {
                return Ok(Some(EngineAnswer {
                    status: 202,
                    body: call.path,
                }));
            }
            EngineOrder::Report | EngineOrder::FlushCache | EngineOrder::SetVersion { .. } => {}
        }
        Ok(None)
    }

    async fn restore_weights(&self) -> RestoredWeights {
        match self.orders.begins_anew.load(Ordering::SeqCst) {
            true => RestoredWeights::Initial,
            false => RestoredWeights::Earlier,
        }
    }

    async fn slots(&self) -> Result<EngineSlots, ApiError> {
        self.table.looks.fetch_add(1, Ordering::SeqCst);
        let slots = *self.table.slots.lock().unwrap();
        slots.map_err(|kind| ApiError::new(kind, "planned failure"))
    }

    async fn prime(&self, text: &[TokenId]) -> Result<(), ApiError> {
        let refuses = self.table.refuses.load(Ordering::SeqCst);
        self.table.primed.lock().unwrap().push(text.to_vec());
        match refuses {
            true => Err(ApiError::new(ErrorKind::Upstream, "planned failure")),
            false => Ok(()),
        }
    }

    async fn load(&self) -> Result<StreamingLoad, ApiError> {
        Ok(StreamingLoad {
            running: Some(self.at_work.load(Ordering::SeqCst) as f64),
            waiting: Some(1.0),
            kv_usage: Some(0.25),
            kv_capacity: Some(1_000.0),
            prefill_ms_per_1k: None,
        })
    }

    async fn metrics(&self) -> Result<String, ApiError> {
        Ok("fake:requests 3\n".to_owned())
    }
}

/// A worker in front of the engine.
pub(crate) async fn listening(
    engine: FakeStream,
    change: impl FnOnce(&mut WorkerConfig),
) -> (Arc<FakeStream>, Bench<FakeStream>) {
    let engine = Arc::new(engine);
    let joined = WorkerEngine::Streaming(engine.clone());
    (engine.clone(), bench_with(engine, joined, change).await)
}

/// The stored output of a request and its end.
pub(crate) fn stored(
    bench: &Bench<FakeStream>,
    request: &ChunkRequest,
) -> Option<(Vec<TokenId>, Option<FinishReason>)> {
    let document: DocumentId = request.request.into();
    let documents = bench.store.documents();
    let stored = documents.get(&document)?;
    Some((stored.tokens.clone(), stored.finish))
}

/// Waits until the store has a request's output as cancelled, with at least `tokens_min` tokens.
pub(crate) async fn kept_as_cancelled(
    bench: &Bench<FakeStream>,
    request: &ChunkRequest,
    tokens_min: usize,
) {
    eventually("what was received is kept", || {
        stored(bench, request).is_some_and(|(tokens, finish)| {
            tokens.len() >= tokens_min && finish == Some(FinishReason::Cancelled)
        })
    })
    .await;
}
