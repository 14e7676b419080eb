//! Tests that the drafter drafts under the form: only what it allows, and all that it forces.

use super::*;

/// Longest draft.
const DEPTH: u32 = 6;

/// The drafts for an output.
#[derive(Debug, Default)]
struct Drafted {
    nodes: usize,
    forced: usize,
    accepted: usize,
}

/// Decodes an output, and checks each draft against the form.
fn decode(kind: &Kind, seed: u64, sampled: bool) -> Drafted {
    let form = &kind.form;
    compiled(&byte_model().grammars, form);
    let sampling = Sampling {
        temperature: 1.0,
        seed,
        stop_token_ids: vec![IM_END],
        form: Some(Box::new(form.clone())),
        logit_bias: kind.biases(),
        ..Sampling::default()
    };
    // The drafter has other weights, so without the form it would seldom be right.
    let mut engine = engine(Some(4));
    let matcher = || byte_model().grammars.compile(form).unwrap().matcher();
    let (mut drafted, mut output) = (Drafted::default(), Vec::new());
    while output.len() < 100 {
        let mut item = match output.len() {
            0 => opening_for_drafts(1, &sampling, &[40, 41]),
            len => item(1, 2 + len, &[]),
        };
        if let Some(spec) = &mut item.open {
            spec.prompt_len = 2;
        }
        item.max_emit = DEPTH + 1;
        item.self_draft = Some(SelfDraft {
            depth: DEPTH,
            top_k: if sampled { 1 } else { 3 },
            tokens_max: 16,
            path_prob_min: 0.0,
            sampled,
        });
        let request = StepRequest { items: vec![item] };
        let mut batch = engine.core.begin(request, engine.now).unwrap();
        engine.core.draft(&mut batch);
        for draft in batch.drafts() {
            drafted.nodes += draft.tokens.len();
            drafted.forced += check_draft(draft, &output, &matcher);
        }
        let report = engine.core.verify(batch, engine.now);
        let step = report.results.into_iter().next().unwrap().unwrap();
        drafted.accepted += step.accepted_nodes.len();
        output.extend(&step.emitted);
        if step.stopped {
            break;
        }
    }
    drafted
}

/// Checks that a draft has only what the form allows, and a child wherever one is forced, up to the longest draft.
/// Returns the number of forced tokens in it.
fn check_draft(draft: &Draft, output: &[TokenId], matcher: &impl Fn() -> Matcher) -> usize {
    let mut forced = 0;
    for (node, token) in draft.tokens.iter().enumerate() {
        let mut path = vec![*token];
        let mut at = draft.parents[node];
        while let Some(parent) = at {
            path.insert(0, draft.tokens[parent as usize]);
            at = draft.parents[parent as usize];
        }
        let mut matcher = matcher();
        matcher.advance(output).unwrap();
        let (last, before) = path.split_last().unwrap();
        matcher.advance(before).unwrap();
        let allowed = matcher.allowed().unwrap().cloned();
        assert!(
            allowed.as_ref().is_none_or(|mask| mask.contains(*last)),
            "{path:?}"
        );
        if allowed.is_some_and(|mask| mask.only().is_some()) {
            forced += 1;
            let siblings = draft
                .parents
                .iter()
                .filter(|other| **other == draft.parents[node]);
            assert_eq!(siblings.count(), 1, "{path:?}");
        }
    }
    forced
}

#[test]
fn a_drafter_drafts_only_what_the_form_allows() {
    let mut random = Random(3);
    let mut all = Drafted::default();
    for seed in 0..40 {
        let kind = Kind::random(&mut random);
        let own = decode(&kind, seed, seed % 2 == 1);
        all.nodes += own.nodes;
        all.forced += own.forced;
        all.accepted += own.accepted;
    }
    assert!(
        all.nodes > 2_000 && all.forced > 1_000 && all.accepted > 1_000,
        "{all:?}"
    );
}

#[test]
fn a_drafter_drafts_a_forced_text_to_its_end() {
    let text = "{\"hello\": \"hello\", \"kind\": \"fixed\"}";
    let tokens = byte_model().tokenizer.encode(text).unwrap();
    for sampled in [false, true] {
        let kind = Kind::fixed(text);
        let own = decode(&kind, 1, sampled);
        // The end token is forced as well.
        let steps = (tokens.len() + 1).div_ceil(DEPTH as usize + 1);
        assert_eq!(own.accepted, tokens.len() + 1 - steps, "{own:?}");
        assert!(own.forced >= own.accepted, "{own:?}");
    }
}
