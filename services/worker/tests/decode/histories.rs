//! Requests draft from earlier outputs to their prompts.

use std::sync::atomic::Ordering;

use refrain_protocol::TokenId;
use refrain_protocol::chunk::{ChunkRequest, DraftScope};

use crate::bench::*;
use crate::fakes::{FakeEngine, STOP};

/// Ends of prompts that are longer than what is kept of a prompt before its output.
const COMMON_END: [TokenId; 40] = [9; 40];

/// A target whose output depends on the first token of the prompt alone.
fn by_beginning(text: &[TokenId]) -> TokenId {
    match text.len() < 150 {
        true => 10 + (text[0] * 211 + text.len() as u32 * 37) % 900,
        false => STOP,
    }
}

fn prompt(beginning: TokenId) -> Vec<TokenId> {
    [&[beginning], &COMMON_END[..]].concat()
}

/// A request whose gateway knows of earlier outputs, or does not.
fn returning(bench: &Bench, beginning: TokenId, is_known: bool) -> ChunkRequest {
    ChunkRequest {
        expected_tokens: is_known.then_some(100),
        ..chunk(bench, &prompt(beginning), 200)
    }
}

#[tokio::test]
async fn a_prompt_that_returns_drafts_from_its_own_outputs_and_no_others() {
    let before = bench(FakeEngine::new(by_beginning), |_| {}).await;
    let mut outputs = Vec::new();
    for beginning in 1..=6 {
        outputs.push(
            run(&before, returning(&before, beginning, false))
                .await
                .tokens,
        );
    }
    assert_eq!(before.store.history_calls.load(Ordering::SeqCst), 0);
    let store = before.store.clone();
    eventually("the outputs are stored", || {
        let documents = store.documents.lock().unwrap();
        documents
            .values()
            .filter(|stored| stored.finish.is_some())
            .count()
            == 6
    })
    .await;
    // Another worker, whose replica never gets the documents.
    let after = bench_on(store.clone(), FakeEngine::new(by_beginning), |_| {}).await;
    for beginning in [4, 2] {
        // The first steps do not wait for the history, so that it may come too late for one of these.
        let mut found = false;
        for _ in 0..100 {
            let again = run(&after, returning(&after, beginning, true)).await;
            assert_eq!(again.tokens, outputs[beginning as usize - 1]);
            if again.scopes.contains(&DraftScope::History) {
                found = true;
                break;
            }
        }
        assert!(found, "no draft of a history");
    }
    let calls = store.history_calls.load(Ordering::SeqCst);
    assert!(calls >= 2);
    let fetches = after.figure("refrain_replica_history_fetches_total{outcome=\"found\"}");
    assert!(fetches >= 2.0);
    // Nobody is asked where the gateway knows of no output.
    run(&after, returning(&after, 5, false)).await;
    assert_eq!(store.history_calls.load(Ordering::SeqCst), calls);
}
