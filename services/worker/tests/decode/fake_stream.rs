//! An engine that generates by itself what a function says.

use std::collections::VecDeque;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use async_trait::async_trait;
use futures_util::StreamExt;
use refrain_protocol::chunk::ChunkRequest;
use refrain_protocol::document::FinishReason;
use refrain_protocol::{ApiError, DocumentId, ErrorKind, TokenId};
use refrain_worker::{
    DraftVerdict, DraftVerifier, GenerateRequest, Generated, GeneratedEnd, GeneratedStream,
    StreamingCapabilities, StreamingEngine, StreamingLoad, VerifyAbilities, VerifyMethod,
    VerifyRequest, WorkerConfig, WorkerEngine,
};

use crate::bench::*;
use crate::fakes::{STOP, Target};

/// Generates by itself what a target model says, and behaves as it is told.
pub(crate) struct FakeStream {
    pub(crate) capabilities: StreamingCapabilities,
    pub(crate) abilities: VerifyAbilities,
    pub(crate) target: Target,
    /// Tokens of one piece.
    pub(crate) piece: usize,
    /// Pause before each piece.
    pub(crate) pause: Duration,
    /// Has all its pieces at hand: nobody ever waits for one.
    pub(crate) at_hand: bool,
    /// Pieces that were taken from it.
    pub(crate) taken: Arc<AtomicU64>,
    /// Answers this many of the coming calls with an error of this kind.
    pub(crate) refusals: AtomicU32,
    pub(crate) refusal: Mutex<ErrorKind>,
    pub(crate) refusal_code: Option<&'static str>,
    /// Breaks off after this many pieces, in this many of the coming calls.
    pub(crate) breaks: AtomicU32,
    pub(crate) breaks_after: usize,
    /// Longest text that it takes, whatever it says.
    pub(crate) context: usize,
    /// Leaves its own end token out.
    pub(crate) hides_stop: bool,
    pub(crate) asked: Mutex<VecDeque<GenerateRequest>>,
    /// Drafts that it was to judge.
    pub(crate) judged: Mutex<Vec<VerifyRequest>>,
    /// How long it takes to judge one.
    pub(crate) judging: Duration,
    /// Answers this many of the coming verify calls with an error of the kind of refusals.
    pub(crate) call_refusals: AtomicU32,
    /// Leaves the first place of this many of the coming chains open.
    pub(crate) blind_chains: AtomicU32,
    pub(crate) at_work: Arc<AtomicU64>,
}

impl FakeStream {
    /// Waits until it works for nobody.
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
            },
            abilities: VerifyAbilities::default(),
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
            asked: Mutex::default(),
            judged: Mutex::default(),
            judging: Duration::ZERO,
            call_refusals: AtomicU32::new(0),
            blind_chains: AtomicU32::new(0),
            at_work: Arc::default(),
        }
    }

    pub(crate) fn last_asked(&self) -> GenerateRequest {
        self.asked.lock().unwrap().back().unwrap().clone()
    }
}

/// Counts one request for as long as its stream lives.
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
        let mut said = plainly(self.target, &request.tokens, most);
        let end = match said.last() == Some(&STOP) {
            true => GeneratedEnd::Stop,
            false => GeneratedEnd::Length,
        };
        if self.hides_stop && end == GeneratedEnd::Stop {
            said.pop();
        }
        let mut pieces: Vec<Result<Generated, ApiError>> = said
            .chunks(self.piece)
            .map(|piece| {
                Ok(Generated::Tokens {
                    tokens: piece.to_vec(),
                    logprobs: None,
                })
            })
            .collect();
        pieces.insert(0, Ok(Generated::Begun { cached_tokens: 2 }));
        pieces.push(Ok(Generated::End(end)));
        if take(&self.breaks) {
            pieces.truncate(1 + self.breaks_after);
            pieces.push(Err(ApiError::new(ErrorKind::Upstream, "planned break")));
        }
        self.at_work.fetch_add(1, Ordering::SeqCst);
        let at_work = AtWork(self.at_work.clone());
        let pause = (!self.at_hand).then_some(self.pause);
        let taken = self.taken.clone();
        let stream = futures_util::stream::iter(pieces).then(move |piece| {
            let _ = &at_work;
            let taken = taken.clone();
            async move {
                match pause {
                    Some(pause) => tokio::time::sleep(pause).await,
                    // As a socket does that always has something: others get their turn.
                    None => tokio::task::consume_budget().await,
                }
                taken.fetch_add(1, Ordering::SeqCst);
                piece
            }
        });
        Ok(stream.boxed())
    }

    async fn load(&self) -> Result<StreamingLoad, ApiError> {
        Ok(StreamingLoad {
            running: Some(self.at_work.load(Ordering::SeqCst) as f64),
            waiting: Some(1.0),
            kv_usage: Some(0.25),
        })
    }

    async fn metrics(&self) -> Result<String, ApiError> {
        Ok("fake:requests 3\n".to_owned())
    }
}

#[async_trait]
impl DraftVerifier for FakeStream {
    fn abilities(&self) -> VerifyAbilities {
        self.abilities
    }

    async fn verify(&self, request: VerifyRequest) -> Result<DraftVerdict, ApiError> {
        assert!(match request.method {
            VerifyMethod::Chain => self.abilities.chain,
            VerifyMethod::FanOut => self.abilities.fan_out,
        });
        request.draft.validate().unwrap();
        assert!(!request.draft.tokens.is_empty());
        self.judged.lock().unwrap().push(request.clone());
        self.at_work.fetch_add(1, Ordering::SeqCst);
        let _at_work = AtWork(self.at_work.clone());
        tokio::time::sleep(self.judging).await;
        if take(&self.call_refusals) {
            let kind = *self.refusal.lock().unwrap();
            return Err(ApiError::new(kind, "planned refusal"));
        }
        let mut texts = vec![request.text.tokens.clone()];
        for (token, parent) in request.draft.tokens.iter().zip(&request.draft.parents) {
            let mut text = texts[parent.map_or(0, |parent| parent as usize + 1)].clone();
            text.push(*token);
            texts.push(text);
        }
        let mut drawn: Vec<Option<TokenId>> =
            texts.iter().map(|text| Some((self.target)(text))).collect();
        // Its own end, to a request that knows it for none, is told by streams alone; a chain's scores say the token.
        let stop_ids = &request.text.sampling.stop_token_ids;
        let ends = |drawn: &Option<TokenId>| *drawn == Some(STOP) && !stop_ids.contains(&STOP);
        let (chained, answered) = match request.method {
            VerifyMethod::Chain => (drawn.len() - 1, &mut drawn[..]),
            VerifyMethod::FanOut => (0, &mut drawn[..]),
        };
        for open in answered[chained..].iter_mut().filter(|drawn| ends(drawn)) {
            *open = None;
        }
        if request.method == VerifyMethod::Chain && take(&self.blind_chains) {
            drawn[0] = None;
        }
        Ok(DraftVerdict { next_tokens: drawn })
    }
}

/// A worker that listens to it.
pub(crate) async fn listening(
    engine: FakeStream,
    change: impl FnOnce(&mut WorkerConfig),
) -> (Arc<FakeStream>, Bench<FakeStream>) {
    let engine = Arc::new(engine);
    let verifier = match engine.abilities.any() {
        true => Some(engine.clone() as Arc<dyn DraftVerifier>),
        false => None,
    };
    let joined = WorkerEngine::Streaming {
        engine: engine.clone(),
        verifier,
    };
    (engine.clone(), bench_with(engine, joined, change).await)
}

/// All that the store has of a request.
pub(crate) fn stored(
    bench: &Bench<FakeStream>,
    request: &ChunkRequest,
) -> Option<(Vec<TokenId>, Option<FinishReason>)> {
    let document: DocumentId = request.request.into();
    let documents = bench.store.documents.lock().unwrap();
    let stored = documents.get(&document)?;
    Some((stored.tokens.clone(), stored.finish))
}

/// Waits until a request's output is in the store as cancelled, with so many tokens at least.
pub(crate) async fn kept_as_cancelled(
    bench: &Bench<FakeStream>,
    request: &ChunkRequest,
    tokens_min: usize,
) {
    eventually("what was said is kept", || {
        stored(bench, request).is_some_and(|(tokens, finish)| {
            tokens.len() >= tokens_min && finish == Some(FinishReason::Cancelled)
        })
    })
    .await;
}
