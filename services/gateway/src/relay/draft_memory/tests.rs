//! Calls of the draft store, with a store that counts them.

use refrain_protocol::{ErrorKind, Namespace, SignedNamespace};
use refrain_rpc::testing::{FakeStore, StoreCall};
use refrain_service_kit::telemetry::Metrics;

use super::*;

/// Has a store answer nothing.
fn silence(store: &FakeStore) {
    store.set_hook(|_| std::future::pending());
}

fn memory() -> (Arc<FakeStore>, DraftMemory) {
    let store = Arc::new(FakeStore::default());
    store
        .content()
        .lengths
        .insert(Some(PromptHash(1)), vec![10, 30, 20]);
    let metrics = Arc::new(GatewayMetrics::new(&Metrics::new().unwrap()).unwrap());
    let memory = DraftMemory::new(store.clone(), metrics, Handle::current());
    (store, memory)
}

fn calls(store: &FakeStore, is_counted: impl Fn(&StoreCall) -> bool) -> usize {
    let content = store.content();
    content.calls.iter().filter(|call| is_counted(call)).count()
}

fn questions(store: &FakeStore) -> usize {
    calls(store, |call| matches!(call, StoreCall::OutputLengths(_)))
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
    let registrations = || calls(&store, |call| matches!(call, StoreCall::RegisterGroup(_)));
    for group in ["a", "b", "a", "a"] {
        memory.group_runs(&namespace(), group);
        tokio::task::yield_now().await;
    }
    assert_eq!(registrations(), 2);
    store.refuse(|_| Some(ErrorKind::Unavailable));
    for expected in [3, 4] {
        memory.group_runs(&namespace(), "c");
        tokio::task::yield_now().await;
        assert_eq!(registrations(), expected);
    }
    // A store that is silent holds a limited number of calls, and keeps no request waiting.
    silence(&store);
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
    // Other samples come between the question and its answer.
    store.set_hook(|_| async {
        tokio::task::yield_now().await;
        Ok(())
    });
    let namespace = namespace();
    let expected = |prompt| memory.expected_tokens(&namespace, PromptHash(prompt));
    let samples = (0..8).map(|_| expected(1));
    let all = futures_util::future::join_all(samples).await;
    assert_eq!(all, [Some(20); 8]);
    assert_eq!(expected(2).await, None);
    assert_eq!(expected(2).await, None);
    assert_eq!(questions(&store), 2);
}

#[tokio::test]
async fn a_store_that_is_away_or_silent_is_left_alone_for_a_while() {
    for is_silent in [false, true] {
        let (store, memory) = memory();
        let namespace = namespace();
        let expected = |prompt| memory.expected_tokens(&namespace, PromptHash(prompt));
        match is_silent {
            true => silence(&store),
            false => store.refuse(|_| Some(ErrorKind::Unavailable)),
        }
        assert_eq!(expected(1).await, None);
        store.remove_hook();
        assert_eq!((expected(1).await, expected(2).await), (None, None));
        assert_eq!(questions(&store), 1);
        // The failure is not remembered as an answer.
        *memory.away_until.lock() = None;
        assert_eq!(expected(1).await, Some(20));
    }
}
