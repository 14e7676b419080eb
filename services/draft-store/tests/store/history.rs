//! Lengths of earlier outputs to a prompt.

use refrain_protocol::admin::EraseRequest;
use refrain_protocol::history::{OutputLengths, OutputLengthsRequest, PromptHash};
use refrain_rpc::StoreAdmin as _;

use super::*;

const PROMPT: [TokenId; 3] = [1, 2, 3];

async fn lengths(store: &Store, tenant: &str) -> OutputLengths {
    let request = OutputLengthsRequest {
        namespace: store.sign(tenant),
        prompt: PromptHash::of(&PROMPT),
    };
    store.handle().output_lengths(request).await.unwrap()
}

/// An output of `len` tokens to the prompt.
fn output(document: u128, len: usize, finish: Option<FinishReason>) -> DocumentUpdate {
    let mut update = update(document, 0, &vec![document as u32; len]);
    update.head.session = Some(format!("session-{document}"));
    update.head.prompt_hash = Some(PromptHash::of(&PROMPT));
    update.finish = finish;
    update
}

fn of(count: u32, median: u32, longest: u32) -> OutputLengths {
    OutputLengths {
        count,
        median,
        longest,
    }
}

#[tokio::test]
async fn lengths_are_those_of_complete_outputs_to_the_prompt() {
    let dir = tempfile::tempdir().unwrap();
    let config = config(dir.path());
    let store = Store::start(config.clone()).await;
    assert_eq!(lengths(&store, "a").await, OutputLengths::default());
    let mut other = output(9, 500, Some(FinishReason::Stop));
    other.head.prompt_hash = Some(PromptHash::of(&PROMPT[..2]));
    let sent = vec![
        output(1, 10, Some(FinishReason::Stop)),
        output(2, 30, Some(FinishReason::Length)),
        output(3, 20, Some(FinishReason::Stop)),
        // Partial, running, of another prompt, and of an unknown one.
        output(4, 90, Some(FinishReason::Cancelled)),
        output(5, 90, Some(FinishReason::Failed)),
        output(6, 70, None),
        other,
        finished(update(10, 0, &[7; 60])),
    ];
    store.append("a", sent).await.unwrap();
    assert_eq!(lengths(&store, "a").await, of(3, 20, 30));
    assert_eq!(lengths(&store, "b").await, OutputLengths::default());
    // An output is cut where a stop string ended: its length follows.
    let mut cut = output(2, 0, Some(FinishReason::Stop));
    (cut.prev_len, cut.epoch) = (25, 2);
    store.append("a", vec![cut]).await.unwrap();
    assert_eq!(lengths(&store, "a").await, of(3, 20, 25));
    // The running one ends. Its hash came with its first piece.
    let mut end = update(6, 70, &[6; 5]);
    end.finish = Some(FinishReason::Stop);
    store.append("a", vec![end]).await.unwrap();
    assert_eq!(lengths(&store, "a").await, of(4, 25, 75));

    // A rewrite of the log, sealing, and a restart keep what is known.
    store.handle().compact().await.unwrap();
    assert_eq!(lengths(&store, "a").await, of(4, 25, 75));
    store.stop().await;
    let store = Store::start(config.clone()).await;
    assert_eq!(lengths(&store, "a").await, of(4, 25, 75));
    // An erased output is forgotten, at once and after a restart, and from segments as well as from the log.
    let erased = EraseRequest {
        tenant: Some("a".into()),
        session: Some("session-6".into()),
        ..EraseRequest::default()
    };
    store.handle().erase(erased).await.unwrap();
    assert_eq!(lengths(&store, "a").await, of(3, 20, 25));
    store.stop().await;
    let store = Store::start(config).await;
    assert_eq!(lengths(&store, "a").await, of(3, 20, 25));
    store.stop().await;
}

#[tokio::test]
async fn sealed_outputs_count_and_only_the_newest_do() {
    let dir = tempfile::tempdir().unwrap();
    let config = sealing(dir.path());
    let store = Store::start(config.clone()).await;
    for document in 0..100 {
        let sent = output(document, 40 + document as usize, Some(FinishReason::Stop));
        store.append("a", vec![sent]).await.unwrap();
    }
    // 64 of the 100: those of 76 to 139 tokens.
    assert_eq!(lengths(&store, "a").await, of(64, 108, 139));
    eventually(async || store.metric("refrain_draft_store_segments") > 0.0).await;
    assert_eq!(lengths(&store, "a").await, of(64, 108, 139));
    store.stop().await;
    let store = Store::start(config).await;
    assert!(store.metric("refrain_draft_store_segments") > 0.0);
    assert_eq!(lengths(&store, "a").await, of(64, 108, 139));
    store.stop().await;
}

#[tokio::test]
async fn the_length_of_an_aborted_output_is_not_learnt() {
    let dir = tempfile::tempdir().unwrap();
    let store = Store::start(config(dir.path())).await;
    // The worker tells of the abort after the tokens, or after a stop id that its caller did not take.
    let mut cut = output(1, 0, Some(FinishReason::Cancelled));
    (cut.prev_len, cut.epoch) = (40, 2);
    let sent = vec![output(1, 50, Some(FinishReason::Stop)), cut];
    store.append("a", sent).await.unwrap();
    assert_eq!(lengths(&store, "a").await, OutputLengths::default());
    let whole = vec![output(2, 300, Some(FinishReason::Stop))];
    store.append("a", whole).await.unwrap();
    let aborted = (3..90).map(|document| output(document, 7, Some(FinishReason::Cancelled)));
    store.append("a", aborted.collect()).await.unwrap();
    // However many are aborted, the complete one is found.
    assert_eq!(lengths(&store, "a").await, of(1, 300, 300));
    store.stop().await;
}
