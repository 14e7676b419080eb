use super::*;
use crate::relay::parsing::Parsing;
use refrain_protocol::chunk::{DraftScope, DraftSource};
use refrain_tokenization::testing::{FIRST_BYTE, IM_END, byte_level_files};

fn choice(stops: &[&str], max_new_tokens: u32) -> ChoiceState {
    choice_with(stops, max_new_tokens, &[], 0)
}

fn choice_with(
    stops: &[&str],
    max_new_tokens: u32,
    forced: &[TokenId],
    min_tokens: u32,
) -> ChoiceState {
    let tokenizer = Arc::new(byte_level_files().tokenizer().unwrap());
    let stops: Vec<String> = stops.iter().map(|stop| (*stop).to_owned()).collect();
    let plan = ChoicePlan {
        prompt: vec![5, 6].into(),
        max_new_tokens,
        stop_token_ids: vec![IM_END],
        wants_logprobs: false,
        forced: forced.into(),
        min_tokens,
        keeps_steps: false,
    };
    let mut choice = ChoiceState::new(
        plan,
        OutputText::new(tokenizer, stops.into(), Parsing::default()),
    );
    choice.begin_chunk(Duration::from_secs(1));
    choice
}

fn message(sequence: u64, tokens: Vec<TokenId>) -> StepMessage {
    StepMessage {
        sequence,
        tokens,
        logprobs: None,
        weight_version: 0,
        source: DraftSource::Suffix,
        scope: DraftScope::Tenant,
        drafted: 4,
        accepted: 3,
        merged: None,
        forced: None,
    }
}

/// The visible text of events.
fn text(events: &[Event]) -> String {
    let text = |event: &Event| match event {
        Event::Text(text) => text.clone(),
        other => panic!("{other:?}"),
    };
    events.iter().map(text).collect()
}

fn bytes(text: &str) -> Vec<TokenId> {
    text.bytes()
        .map(|byte| FIRST_BYTE + u32::from(byte))
        .collect()
}

fn end(reason: ChunkEndReason) -> ChunkEnd {
    ChunkEnd {
        next_worker: None,
        reason,
        cached_tokens: 1,
        prefill_s: 0.5,
        decode_s: f64::NAN,
        decode_tokens: 2,
    }
}

#[test]
fn a_stop_text_across_steps_cuts_at_the_token_that_completes_it() {
    let mut choice = choice(&["END"], 100);
    let first = choice
        .step(Duration::from_secs(2), message(0, bytes("abE")))
        .unwrap();
    assert_eq!(
        (
            text(&first.events).as_str(),
            first.tokens.len(),
            first.needs_cut
        ),
        ("ab", 3, false)
    );
    let second = choice
        .step(Duration::from_secs(3), message(1, bytes("NDxyz")))
        .unwrap();
    assert_eq!(
        (text(&second.events).as_str(), second.tokens.len()),
        ("", 2)
    );
    assert_eq!(
        (second.finish, second.needs_cut),
        (Some(FinishReason::Stop), true)
    );
    assert_eq!(choice.output_len(), 5);
    let summary = choice.summary();
    assert_eq!(summary.completion_tokens, 5);
    assert_eq!(
        (summary.timings.prefill_s, summary.timings.decode_s),
        (1.0, 1.0)
    );
    assert_eq!(summary.counts[&DraftSource::Suffix].emitted, 5);
    assert!(
        choice
            .step(Duration::from_secs(4), message(2, bytes("q")))
            .is_err()
    );
}

#[test]
fn an_end_token_gives_no_text_and_waits_for_the_workers_end() {
    let mut choice = choice(&["zz"], 100);
    let mut tokens = bytes("hiz");
    tokens.push(IM_END);
    let step = choice
        .step(Duration::from_secs(2), message(0, tokens))
        .unwrap();
    assert_eq!(
        (text(&step.events).as_str(), step.tokens.len(), step.finish),
        ("hi", 4, None)
    );
    let last = choice.end(&end(ChunkEndReason::Stop));
    assert_eq!(
        (text(&last.events).as_str(), last.finish),
        ("z", Some(FinishReason::Stop))
    );
    let summary = choice.summary();
    assert_eq!(
        (summary.timings.prefill_s, summary.timings.decode_s),
        (0.5, 0.0)
    );
    assert_eq!(summary.cached_tokens, 1);
}

#[test]
fn a_worker_lost_after_the_end_token_is_not_asked_again() {
    let mut stopped = choice(&[], 100);
    stopped
        .step(Duration::from_secs(2), message(0, vec![IM_END]))
        .unwrap();
    assert_eq!(stopped.lost().finish, Some(FinishReason::Stop));
    let mut full = choice(&[], 2);
    full.step(Duration::from_secs(2), message(0, bytes("ab")))
        .unwrap();
    assert_eq!(full.lost().finish, Some(FinishReason::Length));
    let mut open = choice(&[], 3);
    open.step(Duration::from_secs(2), message(0, bytes("ab")))
        .unwrap();
    assert_eq!(open.lost().finish, None);
    assert_eq!(open.context(), [vec![5, 6], bytes("ab")].concat());
}

#[test]
fn tokens_past_the_limit_are_cut() {
    let mut choice = choice(&[], 2);
    let step = choice
        .step(Duration::from_secs(2), message(0, bytes("abc")))
        .unwrap();
    assert_eq!(
        (text(&step.events).as_str(), step.finish, step.needs_cut),
        ("ab", Some(FinishReason::Length), true)
    );
    assert_eq!(choice.output_len(), 2);
}

#[test]
fn chunks_go_on_until_the_limit() {
    let mut choice = choice(&[], 3);
    choice
        .step(Duration::from_secs(2), message(0, bytes("ab")))
        .unwrap();
    assert_eq!(choice.end(&end(ChunkEndReason::ChunkLimit)).finish, None);
    choice.begin_chunk(Duration::from_secs(3));
    assert_eq!(choice.chunk_output_len(), 0);
    choice
        .step(Duration::from_secs(4), message(0, bytes("c")))
        .unwrap();
    assert_eq!(choice.chunk_output_len(), 1);
    assert_eq!(
        choice.end(&end(ChunkEndReason::ChunkLimit)).finish,
        Some(FinishReason::Length)
    );
    assert_eq!(choice.summary().timings.chunks, 2);
}

#[test]
fn gaps_and_empty_steps_are_faults() {
    let mut choice = choice(&[], 3);
    assert!(choice.step(Duration::ZERO, message(1, bytes("a"))).is_err());
    assert!(choice.step(Duration::ZERO, message(0, Vec::new())).is_err());
    assert_eq!(choice.output_len(), 0);
    let mut wanting = ChoiceState {
        plan: ChoicePlan {
            wants_logprobs: true,
            ..choice.plan.clone()
        },
        ..choice
    };
    assert!(
        wanting
            .step(Duration::ZERO, message(0, bytes("a")))
            .is_err()
    );
}

#[test]
fn accepted_tokens_never_exceed_drafted_ones_whatever_a_worker_sends() {
    let mut choice = choice(&[], 100);
    let mut step = message(0, bytes("abcd"));
    (step.drafted, step.accepted) = (1, u32::MAX);
    choice.step(Duration::from_secs(2), step).unwrap();
    let counts = choice.summary().counts[&DraftSource::Suffix];
    assert_eq!((counts.drafted, counts.accepted), (1, 1));
}

#[test]
fn the_rest_of_a_scored_prompt_is_no_output() {
    let forced = [IM_END, FIRST_BYTE];
    let mut choice = choice_with(&["ab"], 5, &forced, 0);
    let step = |tokens: &[TokenId]| message(0, tokens.to_vec());
    let other = choice.step(Duration::from_secs(2), step(&[IM_END, 7]));
    assert_eq!(other, Err("the engine does not score prompts"));
    let progress = choice
        .step(
            Duration::from_secs(2),
            step(&[&forced[..], &bytes("xab")].concat()),
        )
        .unwrap();
    assert_eq!((progress.prompt.len(), progress.tokens.len()), (2, 3));
    assert_eq!(
        (&*text(&progress.events), progress.finish),
        ("x", Some(FinishReason::Stop))
    );
    assert_eq!(choice.summary().completion_tokens, 3);
}

#[test]
fn nothing_but_a_scored_prompt_ends_by_its_length() {
    let forced = bytes("ab");
    let mut choice = choice_with(&["ab"], 2, &forced, 0);
    let progress = choice
        .step(Duration::from_secs(2), message(0, forced))
        .unwrap();
    assert_eq!((progress.prompt.len(), progress.tokens.len()), (2, 0));
    let end = choice.end(&end(ChunkEndReason::Length));
    assert_eq!(
        (&*text(&end.events), end.finish),
        ("", Some(FinishReason::Length))
    );
    assert_eq!(choice.summary().completion_tokens, 0);
}

#[test]
fn stop_texts_wait_for_the_least_length() {
    let mut choice = choice_with(&["b"], 9, &[], 3);
    let progress = choice
        .step(Duration::from_secs(2), message(0, bytes("abbab")))
        .unwrap();
    assert_eq!(
        (&*text(&progress.events), progress.tokens.len()),
        ("abba", 5)
    );
    assert_eq!(progress.finish, Some(FinishReason::Stop));
}

#[test]
fn output_that_arrived_together_is_one_progress() {
    let token = |id| OutputToken {
        id,
        logprob: None,
        weight_version: 0,
    };
    let part = |text: &str, id, finish| ChoiceProgress {
        events: vec![Event::Text(text.into())],
        tokens: vec![token(id)],
        finish,
        ..ChoiceProgress::default()
    };
    let mut all = ChoiceProgress::default();
    all.append(part("a", 1, None));
    all.append(part("b", 2, Some(FinishReason::Length)));
    let mut expected = part("ab", 1, Some(FinishReason::Length));
    expected.tokens.push(token(2));
    assert_eq!(all, expected);
}
