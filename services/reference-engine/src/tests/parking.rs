//! Tests that a parked session goes on with the same bits, and costs only its new tokens.

use refrain_protocol::engine::{CloseRequest, Sampling, StepItem, StepRequest, TokenLogprob};
use refrain_protocol::prefix::prefix_hashes;
use refrain_protocol::{EngineSessionId, ErrorKind, NamespaceId, TokenId};

use super::eagle3::tiny_head;
use super::self_drafts::{drafting, opening_for_drafts, wanted};
use super::support::{Random, TestEngine, engine, engine_with_head, item, opening};
use crate::config::EngineConfig;

const PROMPT_TOKENS: usize = 70;
const OUTPUT_TOKENS: usize = 48;

/// The fate of a session after every eighth token.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Between {
    Nothing,
    Parks,
    /// It is parked, and another session needs its room.
    Yields,
}

/// The output of a session, and the work that it took.
#[derive(Debug, Default, PartialEq)]
struct Outcome {
    emitted: Vec<TokenId>,
    logprobs: Vec<TokenLogprob>,
    computed: usize,
    head_rows: usize,
    evicted: u64,
}

fn run(sampling: &Sampling, self_drafts: bool, between: Between) -> Outcome {
    let mut engine = engine_with_head(
        tiny_head(),
        EngineConfig {
            kv_tokens_max: 256,
            ..EngineConfig::default()
        },
    );
    let prompt = Random(5).tokens(PROMPT_TOKENS);
    let mut outcome = Outcome::default();
    let mut text = prompt;
    let (mut session, mut next_stop) = (1, 8);
    let mut next = opening_for_drafts(session, sampling, &text);
    while outcome.emitted.len() < OUTPUT_TOKENS {
        next.max_emit = (OUTPUT_TOKENS - outcome.emitted.len()) as u32;
        match step(&mut engine, next, &mut outcome) {
            Ok(emitted) => text.extend(emitted),
            Err(kind) => {
                // As a worker does, with the whole text.
                assert_eq!((kind, between), (ErrorKind::NotFound, Between::Yields));
                session += 1;
                next = opening_for_drafts(session, sampling, &text);
                if let Some(spec) = &mut next.open {
                    spec.prompt_len = PROMPT_TOKENS as u32;
                }
                continue;
            }
        }
        if between != Between::Nothing && outcome.emitted.len() >= next_stop {
            next_stop = outcome.emitted.len() + 8;
            let parked = [EngineSessionId(session)];
            engine.core.park(&parked, engine.now);
            if between == Between::Yields {
                press(&mut engine);
            }
        }
        next = match self_drafts {
            true => drafting(session, text.len(), wanted(3, 2, 6)),
            false => item(session, text.len(), &[]),
        };
    }
    outcome.evicted = engine.core.take_parked_evicted();
    outcome
}

/// A step of one item.
fn step(
    engine: &mut TestEngine,
    item: StepItem,
    outcome: &mut Outcome,
) -> Result<Vec<TokenId>, ErrorKind> {
    let request = StepRequest { items: vec![item] };
    let mut report = engine.core.step(request, engine.now).unwrap();
    let output = report.results.remove(0).map_err(|error| error.kind)?;
    outcome.computed += report.computed_tokens;
    outcome.head_rows += report.draft_rows.text;
    outcome.emitted.extend(&output.emitted);
    outcome.logprobs.extend(output.logprobs.unwrap_or_default());
    Ok(output.emitted)
}

/// Fills the cache with a session of another namespace, which leaves nothing behind.
fn press(engine: &mut TestEngine) {
    let mut other = opening(999, &Sampling::default(), &Random(9).tokens(190));
    if let Some(spec) = &mut other.open {
        spec.namespace = NamespaceId(2);
    }
    engine.step(other);
    engine.core.close(&CloseRequest {
        sessions: vec![EngineSessionId(999)],
        keep_kv: false,
        parks: false,
    });
}

#[test]
fn a_parked_session_goes_on_with_the_same_bits_and_only_its_new_tokens() {
    let greedy = Sampling {
        top_logprobs: Some(3),
        ..Sampling::default()
    };
    let drawn = Sampling {
        temperature: 0.9,
        seed: 7,
        presence_penalty: 0.5,
        frequency_penalty: 0.25,
        repetition_penalty: 1.2,
        top_logprobs: Some(2),
        ..Sampling::default()
    };
    for sampling in [&greedy, &drawn] {
        for self_drafts in [false, true] {
            let plain = run(sampling, self_drafts, Between::Nothing);
            assert_eq!(plain.emitted.len(), OUTPUT_TOKENS);
            assert_eq!(plain.logprobs.len(), OUTPUT_TOKENS);
            assert_eq!(self_drafts, plain.head_rows > 0);
            // The same output and the same work, also of the head, whose state is parked as well.
            assert_eq!(run(sampling, self_drafts, Between::Parks), plain);
            let yields = run(sampling, self_drafts, Between::Yields);
            assert!(yields.evicted >= 4 && yields.computed > plain.computed);
            assert_eq!(yields.emitted, plain.emitted);
            assert_eq!(yields.logprobs, plain.logprobs);
        }
    }
}

#[test]
fn a_step_never_takes_the_room_of_its_own_sessions() {
    let mut engine = engine(EngineConfig {
        kv_tokens_max: 128,
        ..EngineConfig::default()
    });
    let greedy = Sampling::default();
    let (one, two) = (Random(1).tokens(33), Random(2).tokens(33));
    let first = engine.step(opening(1, &greedy, &one));
    engine.step(opening(2, &greedy, &two));
    let more = Random(3).tokens(40);
    let grows = || StepItem {
        sample: false,
        ..item(1, 34, &more)
    };
    let (both, second) = ([1, 2].map(EngineSessionId), [EngineSessionId(2)]);
    engine.core.park(&both, engine.now);
    // The first item has too little room, though the session of the second one was parked.
    let results = engine.steps(vec![grows(), item(2, 34, &[])]);
    assert_eq!(results[0].as_ref().unwrap_err().kind, ErrorKind::Overloaded);
    assert_eq!(results[1].as_ref().unwrap().emitted.len(), 1);
    assert_eq!(engine.core.take_parked_evicted(), 0);
    engine.core.park(&second, engine.now);
    engine.step(grows());
    assert_eq!(engine.core.take_parked_evicted(), 1);
    let report = engine.core.kv_report();
    let text = [one, first.emitted, more].concat();
    assert_eq!(report.held, Some(prefix_hashes(&NamespaceId(1), &text)));
    assert_eq!((report.running_tokens, report.kept_tokens), (96, 0));
}
