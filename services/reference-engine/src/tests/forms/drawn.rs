//! Tests of drafts that are drawn at random, with forms: outputs have the form, and the odds of those without drafts.

use super::*;

const TRIALS: u64 = 600;

/// Decodes an output with drawn drafts, or without. Returns it, and the number of accepted nodes.
fn decode(sampling: &Sampling, depth: u32) -> (Vec<TokenId>, usize) {
    let mut engine = engine(Some(4));
    engine.core.set_mask_threads(sampling.seed as usize % 2);
    let (mut output, mut accepted) = (Vec::new(), 0);
    while output.len() < OUTPUT_MAX {
        let mut item = match output.len() {
            0 => opening_for_drafts(1, sampling, &[40, 41]),
            len => item(1, 2 + len, &[]),
        };
        if let Some(spec) = &mut item.open {
            spec.prompt_len = 2;
        }
        item.max_emit = depth + 1;
        item.self_draft = (depth > 0).then_some(SelfDraft {
            depth,
            top_k: 1,
            tokens_max: depth,
            path_prob_min: 0.0,
            sampled: true,
        });
        let step = engine.try_step(item).unwrap();
        accepted += step.accepted_nodes.len();
        output.extend(&step.emitted);
        if step.stopped {
            break;
        }
    }
    (output, accepted)
}

fn sampling(form: &OutputForm, seed: u64) -> Sampling {
    compiled(&byte_model().grammars, form);
    Sampling {
        temperature: 1.0,
        seed,
        stop_token_ids: vec![IM_END],
        form: Some(Box::new(form.clone())),
        ..Sampling::default()
    }
}

#[test]
fn drawn_drafts_keep_the_form() {
    let mut random = Random(11);
    let (mut ended, mut accepted) = (0, 0);
    for seed in 0..60 {
        let kind = Kind::random(&mut random);
        let sampling = Sampling {
            logit_bias: kind.biases(),
            ..sampling(&kind.form, seed)
        };
        let (output, nodes) = decode(&sampling, 1 + seed as u32 % 6);
        accepted += nodes;
        if output.last() == Some(&IM_END) {
            kind.validate(&output[..output.len() - 1]);
            ended += 1;
        }
    }
    assert!(
        ended > 45 && accepted > 100,
        "{ended} ended, {accepted} accepted"
    );
}

#[test]
fn drawn_drafts_keep_the_odds() {
    let form = OutputForm::new(TextForm::Choice(vec![
        "ab".into(),
        "ad".into(),
        "cd".into(),
        "ef".into(),
    ]));
    let odds = |depth: u32| {
        let mut counts: HashMap<Vec<TokenId>, f64> = HashMap::new();
        for seed in 0..TRIALS {
            let (output, _) = decode(&sampling(&form, seed), depth);
            *counts.entry(output).or_default() += 1.0 / TRIALS as f64;
        }
        counts
    };
    let (plain, drawn) = (odds(0), odds(3));
    assert!(plain.len() == 4 && drawn.len() == 4, "{plain:?}, {drawn:?}");
    for (output, odds) in &plain {
        // Five standard deviations of the difference.
        let most = 5.0 * (2.0 * odds * (1.0 - odds) / TRIALS as f64).sqrt();
        let other = drawn.get(output).copied().unwrap_or_default();
        assert!((odds - other).abs() < most, "{output:?}: {odds}, {other}");
    }
}
