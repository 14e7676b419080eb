//! Forms of outputs with engines that generate by themselves.

use refrain_protocol::engine::{OutputForm, TextForm};
use refrain_protocol::{ErrorKind, TokenId};
use refrain_rpc::Worker;
use refrain_worker::FormAbilities;

use crate::bench::*;
use crate::fake_stream::{FakeStream, listening};
use crate::fakes::FakeEngine;

/// Counts on from the last token.
fn counting(text: &[TokenId]) -> TokenId {
    text.last().map_or(1, |last| last + 1)
}

fn engine(piece: usize) -> FakeStream {
    let mut engine = FakeStream::new(counting);
    engine.piece = piece;
    engine.capabilities.forms = FormAbilities {
        json: true,
        ..FormAbilities::default()
    };
    engine
}

fn form(after: Option<TokenId>, opened_by: Option<TokenId>) -> Option<Box<OutputForm>> {
    Some(Box::new(OutputForm {
        after,
        opened_by,
        text: TextForm::JsonObject,
    }))
}

#[tokio::test]
async fn reasoning_before_a_form_is_a_call_of_its_own() {
    let free = |tokens: &[TokenId]| (tokens.to_vec(), false);
    let bound = |tokens: &[TokenId]| (tokens.to_vec(), true);
    for piece in [1, 3, 100] {
        for (wanted, calls) in [
            (form(None, None), vec![bound(&[1, 2, 3])]),
            // It reasons up to 6, and the engine goes past it.
            (
                form(Some(6), None),
                vec![free(&[1, 2, 3]), bound(&[1, 2, 3, 4, 5, 6])],
            ),
            (
                form(Some(6), Some(4)),
                vec![free(&[1, 2, 3]), bound(&[1, 2, 3, 4, 5, 6])],
            ),
            // It could reason, and does not.
            (
                form(Some(6), Some(9)),
                vec![free(&[1, 2, 3]), bound(&[1, 2, 3])],
            ),
            // Its reasoning does not end.
            (form(Some(90), None), vec![free(&[1, 2, 3])]),
        ] {
            let (engine, bench) = listening(engine(piece), |_| {}).await;
            let mut request = chunk(&bench, &[1, 2, 3], 10);
            request.sampling.form.clone_from(&wanted);
            request.sampling.min_tokens = 5;
            let received = run(&bench, request).await;
            assert_eq!(received.tokens, (4..14).collect::<Vec<_>>(), "{wanted:?}");
            // The second call finds in the cache what the first one left there.
            assert_eq!(received.end.unwrap().cached_tokens, 2);
            let asked = engine.asked.lock().unwrap();
            let found = asked.iter().map(|call| {
                let has_form = call.sampling.form.is_some();
                let after = wanted.as_ref().and_then(|form| form.after);
                let stops =
                    after.is_some_and(|after| call.sampling.stop_token_ids.contains(&after));
                assert_eq!(stops, !has_form);
                // A least length would forbid the end of the reasoning.
                let min_tokens = if has_form { 5 } else { 0 };
                assert_eq!(call.sampling.min_tokens, min_tokens);
                (call.tokens.clone(), has_form)
            });
            assert_eq!(found.collect::<Vec<_>>(), calls, "{wanted:?}");
        }
    }
}

#[tokio::test]
async fn an_output_within_its_form_is_not_continued() {
    for (after, holds) in [
        (None, false),
        (Some(2), false),
        (Some(3), true),
        (Some(9), true),
    ] {
        let (engine, bench) = listening(engine(1), |_| {}).await;
        let mut request = chunk(&bench, &[1, 2, 3], 4);
        // The last two tokens are the output so far.
        request.prompt_len = 1;
        request.sampling.form = form(after, None);
        let received = run(&bench, request).await;
        match received.error {
            None => assert!(holds, "{after:?}"),
            Some(error) => {
                assert!(!holds, "{after:?}: {error}");
                assert_eq!(error.kind, ErrorKind::InvalidRequest);
                assert_eq!(error.code.as_deref(), Some("unsupported_by_engine"));
                assert!(engine.asked.lock().unwrap().is_empty());
            }
        }
    }
}

#[tokio::test]
async fn forms_that_the_engine_does_not_know_are_refused_before_it_is_asked() {
    let (engine, bench) = listening(engine(1), |_| {}).await;
    let mut request = chunk(&bench, &[1], 5);
    request.sampling.form = Some(Box::new(OutputForm::new(TextForm::Regex("a".into()))));
    let error = bench.worker.handle().chunk(request).await.err().unwrap();
    assert_eq!(error.kind, ErrorKind::InvalidRequest);
    assert_eq!(error.param.as_deref(), Some("structured_outputs.regex"));
    assert!(engine.asked.lock().unwrap().is_empty());
}

#[tokio::test]
async fn an_engine_that_knows_no_forms_is_not_asked() {
    let bench = bench(FakeEngine::new(counting), |_| {}).await;
    let mut request = chunk(&bench, &[1, 2, 3], 10);
    request.sampling.form = form(None, None);
    let Err(error) = bench.worker.handle().chunk(request).await else {
        panic!("the form was ignored");
    };
    assert_eq!(error.kind, ErrorKind::InvalidRequest);
    assert!(error.has_code("unsupported_by_engine"));
    assert_eq!(error.param.as_deref(), Some("sampling.form"));
}
