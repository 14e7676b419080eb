//! A scripted engine with the Refrain plugin inside, and the fields that it receives.

use refrain_protocol::chunk::{DraftRules, Speculation};
use refrain_protocol::document::FinishReason;

use crate::bench::*;
use crate::fake_stream::{FakeStream, listening, stored};

#[tokio::test]
async fn an_attached_engine_receives_the_document_and_the_worker_uploads_it() {
    let (engine, bench) = listening(FakeStream::new(stopping), |config| {
        config.engine.attached = true;
    })
    .await;
    let mut request = chunk(&bench, &[1, 2, 3], 50);
    request.group = Some("g".into());
    request.epoch = 5;
    let received = run(&bench, request.clone()).await;
    let attached = engine.last_asked().attached.unwrap();
    let token = refrain_service_kit::mesh::token_of(&request.namespace).unwrap();
    assert_eq!((attached.token, attached.epoch), (token, 5));
    assert_eq!(attached.group.as_deref(), Some("g"));
    // The engine receives the document that the worker uploads; its end is the one that the reader received.
    let output = (received.tokens, Some(FinishReason::Stop));
    eventually("the store has it", || {
        stored(&bench, &request).as_ref() == Some(&output)
    })
    .await;
    let documents = bench.store.documents();
    assert_eq!(documents.len(), 1);
    let head = &documents[&attached.document].head;
    assert_eq!(head.group.as_deref(), Some("g"));
}

#[tokio::test]
async fn an_attached_engine_receives_the_rules_of_drafts() {
    let (engine, bench) = listening(FakeStream::new(stopping), |config| {
        config.engine.attached = true;
    })
    .await;
    let of_tenant = DraftRules {
        alpha: Some(2.0),
        max_spec_tokens: Some(7),
        ..DraftRules::default()
    };
    for (speculation, passed_on) in [
        (Speculation::Auto, of_tenant),
        (Speculation::Suffix, of_tenant),
        (Speculation::Off, DraftRules::NO_DRAFTS),
    ] {
        let mut request = chunk(&bench, &[1, 2, 3], 50);
        (request.speculation, request.drafts) = (speculation, of_tenant);
        run(&bench, request).await;
        let attached = engine.last_asked().attached.unwrap();
        assert_eq!(attached.drafts, passed_on, "{speculation:?}");
    }
}
