//! Tests of costly forms, whose work is done beside the steps.

use std::sync::Barrier;

use refrain_protocol::ApiError;

use super::*;
use crate::engine::FORM_WORKING;

/// A rule of two of itself: the work for a token grows with the output.
const AMBIGUOUS: &str = "start: s\ns: s s | \"a\" | \"b\"";

fn letter() -> TokenId {
    byte_model().tokenizer.encode("a").unwrap()[0]
}

/// An ambiguous form, and an output of one letter again and again.
fn sampling() -> Sampling {
    let form = OutputForm::new(TextForm::Lark(AMBIGUOUS.to_owned()));
    Sampling {
        stop_token_ids: vec![IM_END],
        form: Some(Box::new(form)),
        logit_bias: vec![(letter(), 1_000.0)],
        ..Sampling::default()
    }
}

fn grammars(limits: GrammarLimits) -> Arc<GrammarCompiler> {
    let tokenizer = byte_model().tokenizer.clone();
    let vocab_size = tokenizer.vocab_size();
    let grammars = GrammarCompiler::new(tokenizer, vocab_size, &[IM_END], limits).unwrap();
    compiled(&grammars, sampling().form.as_deref().unwrap());
    Arc::new(grammars)
}

/// An engine whose budget for an output is soon spent.
fn small_engine(leaves: bool) -> TestEngine {
    let limits = GrammarLimits {
        output_work_max: 20_000_000,
        ..GrammarLimits::default()
    };
    let grammars = grammars(limits);
    match leaves {
        false => engine_with(None, grammars),
        true => leaving_engine(grammars),
    }
}

/// An engine that leaves costly work of forms to other threads.
fn leaving_engine(grammars: Arc<GrammarCompiler>) -> TestEngine {
    let engine = engine_with(None, grammars);
    TestEngine {
        core: engine.core.with_leaving_forms(),
        ..engine
    }
}

/// Sends an item whose form has to be worked on first, again until it has a result. Returns the emitted tokens.
fn emitted_later(engine: &mut TestEngine, item: impl Fn() -> StepItem) -> Vec<TokenId> {
    let first = engine.try_step(item());
    assert!(is_working(&first), "{first:?}");
    loop {
        let result = engine.try_step(item());
        if !is_working(&result) {
            return result.unwrap().emitted;
        }
        std::thread::yield_now();
    }
}

fn is_working(result: &Result<refrain_protocol::engine::StepOutput, ApiError>) -> bool {
    let code = result
        .as_ref()
        .err()
        .and_then(|error| error.code.as_deref());
    code == Some(FORM_WORKING)
}

/// Decodes until the budget is spent, beside a session without a form. Returns the output, its error, and how often
/// the work for it was left to another thread.
fn decode(leaves: bool, draft_tokens: usize) -> (Vec<TokenId>, ApiError, usize) {
    let mut engine = small_engine(leaves);
    let mut output = Vec::new();
    let (mut plain_len, mut left) = (0, 0);
    loop {
        let form = match output.len() {
            0 => opening(1, &sampling(), &[40, 41]),
            len => item(1, 2 + len, &[]),
        };
        let plain = match plain_len {
            0 => opening(2, &Sampling::default(), &[40, 41]),
            len => item(2, 2 + len, &[]),
        };
        let draft = (draft_tokens > 0).then(|| chain(&vec![letter(); draft_tokens]));
        let mut results = engine.steps(vec![StepItem { draft, ..form }, plain]);
        // The other session goes on in every step.
        plain_len += results[1].as_ref().unwrap().emitted.len();
        if plain_len > 300 {
            engine.core.close(&CloseRequest {
                sessions: vec![EngineSessionId(2)],
                keep_kv: false,
                parks: false,
            });
            plain_len = 0;
        }
        let result = results.remove(0);
        if is_working(&result) {
            left += 1;
            std::thread::yield_now();
            continue;
        }
        match result {
            Ok(step) => output.extend(step.emitted),
            Err(error) => return (output, error, left),
        }
    }
}

#[test]
fn the_budget_ends_an_output_at_the_same_token_whoever_does_the_work() {
    let (output, error, left) = decode(false, 0);
    assert_eq!(error.code.as_deref(), Some("output_form"));
    assert_eq!(error.kind, refrain_protocol::ErrorKind::InvalidRequest);
    assert!(output.len() > 10 && left == 0, "{}", output.len());
    for (leaves, draft_tokens) in [(true, 0), (false, 5), (true, 5)] {
        let (own, own_error, left) = decode(leaves, draft_tokens);
        assert_eq!(own, output, "leaves: {leaves}, draft of {draft_tokens}");
        assert_eq!(own_error.message, error.message);
        assert_eq!(
            left > 0,
            leaves,
            "leaves: {leaves}, draft of {draft_tokens}"
        );
    }
}

/// An item that opens a session with an output of many tokens.
fn opening_with_output() -> StepItem {
    let mut tokens = vec![40, 41];
    tokens.extend(vec![letter(); 100]);
    let mut item = opening(1, &sampling(), &tokens);
    if let Some(spec) = &mut item.open {
        spec.prompt_len = 2;
    }
    item
}

#[test]
fn a_session_opens_with_a_long_output_once_its_form_has_followed_it() {
    let mut engine = leaving_engine(grammars(GrammarLimits::default()));
    let emitted = emitted_later(&mut engine, opening_with_output);
    assert_eq!(emitted, [letter()]);
}

#[test]
fn an_item_whose_draft_meets_a_limit_opens_its_session_again() {
    // The row after some letters is too long, which a draft of many letters finds out.
    let limits = GrammarLimits {
        row_items_max: 60,
        ..GrammarLimits::default()
    };
    let mut engine = leaving_engine(grammars(limits));
    let item = || StepItem {
        draft: Some(chain(&[letter(); 30])),
        ..opening(1, &sampling(), &[40, 41])
    };
    assert_eq!(emitted_later(&mut engine, item), [letter()]);
}

#[test]
fn the_work_for_a_form_ends_with_its_session() {
    let grammars = grammars(GrammarLimits {
        threads_max: 1,
        ..GrammarLimits::default()
    });
    // The only thread waits at the gate, so the form stays away.
    let gate = Arc::new(Barrier::new(2));
    let held = gate.clone();
    let work = Box::new(move || {
        held.wait();
    });
    assert!(grammars.work(TenantId(1), work).is_ok());
    let mut engine = leaving_engine(grammars);
    let close = |engine: &mut TestEngine| {
        engine.core.close(&CloseRequest {
            sessions: vec![EngineSessionId(1)],
            keep_kv: true,
            parks: false,
        });
    };
    assert!(is_working(&engine.try_step(opening_with_output())));
    let stops = engine.core.stops_of_opening_forms();
    assert!(stops.len() == 1 && !stops[0].is_set());
    close(&mut engine);
    assert!(stops[0].is_set());
    // Nor does it go on where nobody asks again.
    assert!(is_working(&engine.try_step(opening_with_output())));
    let stops = engine.core.stops_of_opening_forms();
    engine
        .core
        .expire(engine.now + std::time::Duration::from_secs(60));
    assert!(stops.len() == 1 && stops[0].is_set());
    gate.wait();
}
