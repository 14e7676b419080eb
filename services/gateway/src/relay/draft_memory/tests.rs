//! Calls of the draft store, with a store that counts them.

use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

use async_trait::async_trait;
use refrain_protocol::document::{
    AppendReply, AppendRequest, FollowReply, FollowRequest, StoreStats, TouchRequest,
};
use refrain_protocol::{ErrorKind, Namespace, SignedNamespace};
use refrain_service_kit::telemetry::Metrics;

use super::*;

#[derive(Default)]
struct CountingStore {
    registrations: AtomicUsize,
    questions: AtomicUsize,
    is_away: AtomicBool,
    is_silent: AtomicBool,
}

impl CountingStore {
    async fn answer<T>(&self, answer: T) -> Result<T, ApiError> {
        if self.is_silent.load(Ordering::Relaxed) {
            std::future::pending::<()>().await;
        }
        match self.is_away.load(Ordering::Relaxed) {
            true => Err(ApiError::new(ErrorKind::Unavailable, "away")),
            false => Ok(answer),
        }
    }
}

#[async_trait]
impl DraftStore for CountingStore {
    async fn append(&self, _: AppendRequest) -> Result<AppendReply, ApiError> {
        Err(ApiError::internal("not here"))
    }

    async fn follow(&self, _: FollowRequest) -> Result<FollowReply, ApiError> {
        Err(ApiError::internal("not here"))
    }

    async fn touch(&self, _: TouchRequest) -> Result<(), ApiError> {
        Ok(())
    }

    async fn stats(&self) -> Result<StoreStats, ApiError> {
        Ok(StoreStats::default())
    }

    async fn register_group(&self, _: RegisterGroupRequest) -> Result<(), ApiError> {
        self.registrations.fetch_add(1, Ordering::Relaxed);
        self.answer(()).await
    }

    async fn output_lengths(
        &self,
        request: OutputLengthsRequest,
    ) -> Result<OutputLengths, ApiError> {
        self.questions.fetch_add(1, Ordering::Relaxed);
        let lengths = match request.prompt {
            PromptHash(1) => vec![10, 30, 20],
            _ => Vec::new(),
        };
        tokio::task::yield_now().await;
        self.answer(OutputLengths::of(lengths)).await
    }
}

fn memory() -> (Arc<CountingStore>, DraftMemory) {
    let store = Arc::new(CountingStore::default());
    let metrics = Arc::new(GatewayMetrics::new(&Metrics::new().unwrap()).unwrap());
    let memory = DraftMemory::new(store.clone(), metrics, Handle::current());
    (store, memory)
}

fn namespace() -> KnownNamespace {
    let signed = SignedNamespace::unsigned(Namespace {
        tenant: "tenant".into(),
        model: "model".into(),
        tokenizer: "tokenizer".into(),
    });
    signed.into()
}

#[tokio::test]
async fn a_group_is_registered_once_and_again_after_a_failure() {
    let (store, memory) = memory();
    let registrations = || store.registrations.load(Ordering::Relaxed);
    for group in ["a", "b", "a", "a"] {
        memory.group_runs(&namespace(), group);
        tokio::task::yield_now().await;
    }
    assert_eq!(registrations(), 2);
    store.is_away.store(true, Ordering::Relaxed);
    for expected in [3, 4] {
        memory.group_runs(&namespace(), "c");
        tokio::task::yield_now().await;
        assert_eq!(registrations(), expected);
    }
    // A store that is silent holds a limited number of calls, and keeps no request waiting.
    store.is_away.store(false, Ordering::Relaxed);
    store.is_silent.store(true, Ordering::Relaxed);
    for number in 0..2 * REGISTRATIONS_MAX {
        memory.group_runs(&namespace(), &format!("silent {number}"));
        tokio::task::yield_now().await;
    }
    assert_eq!(registrations(), 4 + REGISTRATIONS_MAX);
    let rejected = memory.metrics.rejections("group_registrations");
    assert_eq!(rejected, REGISTRATIONS_MAX as u64);
}

#[tokio::test]
async fn samples_of_one_prompt_ask_for_their_length_once() {
    let (store, memory) = memory();
    let namespace = namespace();
    let expected = |prompt| memory.expected_tokens(&namespace, PromptHash(prompt));
    let samples = (0..8).map(|_| expected(1));
    let all = futures_util::future::join_all(samples).await;
    assert_eq!(all, [Some(20); 8]);
    assert_eq!(expected(2).await, None);
    assert_eq!(expected(2).await, None);
    assert_eq!(store.questions.load(Ordering::Relaxed), 2);
}

#[tokio::test]
async fn a_store_that_is_away_or_silent_is_left_alone_for_a_while() {
    for is_silent in [false, true] {
        let (store, memory) = memory();
        let namespace = namespace();
        let expected = |prompt| memory.expected_tokens(&namespace, PromptHash(prompt));
        store.is_away.store(!is_silent, Ordering::Relaxed);
        store.is_silent.store(is_silent, Ordering::Relaxed);
        assert_eq!(expected(1).await, None);
        store.is_away.store(false, Ordering::Relaxed);
        store.is_silent.store(false, Ordering::Relaxed);
        assert_eq!((expected(1).await, expected(2).await), (None, None));
        assert_eq!(store.questions.load(Ordering::Relaxed), 1);
        // The failure is not remembered as an answer.
        *memory.away_until.lock() = None;
        assert_eq!(expected(1).await, Some(20));
    }
}
