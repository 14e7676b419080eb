//! Tests near the limits of grammars, where drafts must not cost an output that is fine without them.

use refrain_protocol::ApiError;

use super::*;

/// Every length of a string is a state of the grammar, and every draft a way to more of them.
const SCHEMA: &str = r#"{"type":"object","properties":{"a":{"type":"string","minLength":30,"maxLength":60},"b":{"enum":["one","other"]}},"required":["a","b"],"additionalProperties":false}"#;

fn grammars(limits: GrammarLimits) -> Arc<GrammarCompiler> {
    let tokenizer = byte_model().tokenizer.clone();
    let vocab_size = tokenizer.vocab_size();
    let grammars = GrammarCompiler::new(tokenizer, vocab_size, &[IM_END], limits);
    Arc::new(grammars.unwrap())
}

fn sampling(seed: u64) -> Sampling {
    let form = OutputForm::new(TextForm::JsonSchema(SCHEMA.to_owned()));
    Sampling {
        temperature: 1.0,
        seed,
        stop_token_ids: vec![IM_END],
        form: Some(Box::new(form)),
        ..Sampling::default()
    }
}

/// Decodes with the drafts that `draft` makes for the output so far.
fn decode(
    limits: &GrammarLimits,
    seed: u64,
    drafter_seed: Option<u64>,
    mut draft: impl FnMut(&[TokenId]) -> Option<Draft>,
) -> Result<Vec<TokenId>, ApiError> {
    let sampling = sampling(seed);
    let grammars = grammars(limits.clone());
    compiled(&grammars, sampling.form.as_deref().unwrap());
    let mut engine = engine_with(drafter_seed, grammars);
    engine.core.set_mask_threads(seed as usize % 2);
    let mut output = Vec::new();
    while output.len() < OUTPUT_MAX {
        let mut item = match output.len() {
            0 => opening_for_drafts(1, &sampling, &[40, 41]),
            len => item(1, 2 + len, &[]),
        };
        if let Some(spec) = &mut item.open {
            spec.prompt_len = 2;
        }
        item.max_emit = 8;
        item.draft = draft(&output);
        if drafter_seed.is_some() && item.draft.is_some() {
            item.self_draft = Some(SelfDraft {
                depth: 4,
                top_k: 4,
                tokens_max: 12,
                path_prob_min: 0.0,
                sampled: false,
            });
        }
        let step = engine.try_step(item)?;
        output.extend(&step.emitted);
        if step.stopped {
            break;
        }
    }
    Ok(output)
}

#[test]
fn drafts_cost_no_output_near_a_limit() {
    let mut cut = 0;
    for seed in 0..6 {
        let limits = |states_max| GrammarLimits {
            states_max,
            ..GrammarLimits::default()
        };
        let plain = |states_max| decode(&limits(states_max), seed, None, |_| None);
        // The least limit that plain decoding keeps.
        let (mut low, mut high) = (1, 5_000);
        let truth = plain(high).unwrap();
        while high - low > 1 {
            let middle = usize::midpoint(low, high);
            match plain(middle) {
                Ok(output) => {
                    assert_eq!(output, truth);
                    high = middle;
                }
                Err(_) => low = middle,
            }
        }
        let mut random = Random(seed);
        let mut tree = |output: &[TokenId]| {
            let left = &truth[output.len()..];
            let mut tokens = left[..random.below(4).min(left.len())].to_vec();
            let mut parents: Vec<Option<u32>> = (0..tokens.len() as u32)
                .map(|node| node.checked_sub(1))
                .collect();
            for _ in 0..12 {
                parents.push((random.below(tokens.len() + 1) as u32).checked_sub(1));
                tokens.push(random.below(200) as TokenId);
            }
            let mut merged = Draft::default();
            merged.merge(&Draft { tokens, parents });
            Some(merged)
        };
        for states_max in [high, high + 3, high + 20] {
            let drafted = decode(&limits(states_max), seed, Some(4), &mut tree).unwrap();
            assert_eq!(
                drafted[..truth.len()],
                truth,
                "seed {seed}, {states_max} states"
            );
        }
        cut += usize::from(plain(high - 1).is_err());
    }
    assert_eq!(cut, 6);
}
