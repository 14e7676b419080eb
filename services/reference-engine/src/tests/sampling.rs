//! Tests that sampling follows the distribution of the parameters, and depends on nothing else.

use refrain_protocol::engine::Sampling;

use crate::sampler::{History, Sampler, validate};

fn sampling(temperature: f32) -> Sampling {
    Sampling {
        temperature,
        seed: 7,
        ..Sampling::default()
    }
}

/// Returns how often each token is sampled over many positions.
fn counts(logits: &[f32], sampling: &Sampling, draws: u32) -> Vec<u32> {
    let mut sampler = Sampler::default();
    let mut counts = vec![0; logits.len()];
    for position in 0..draws {
        counts[sampler
            .sample(logits, sampling, position, &History::default(), None, None)
            .token as usize] += 1;
    }
    counts
}

fn drawn(logits: &[f32], sampling: &Sampling) -> Vec<usize> {
    let counts = counts(logits, sampling, 3000);
    (0..logits.len())
        .filter(|token| counts[*token] > 0)
        .collect()
}

#[test]
fn greedy_takes_the_lowest_id_among_equals_and_never_nan() {
    let mut sampler = Sampler::default();
    let token = |sampler: &mut Sampler, logits: &[f32]| {
        sampler
            .sample(logits, &sampling(0.0), 3, &History::default(), None, None)
            .token
    };
    assert_eq!(token(&mut sampler, &[1.0, 5.0, 5.0]), 1);
    assert_eq!(token(&mut sampler, &[f32::NAN, 1.0, 2.0]), 2);
    assert_eq!(token(&mut sampler, &[1.0, f32::INFINITY, 2.0]), 1);
    assert_eq!(token(&mut sampler, &[f32::NAN, f32::NEG_INFINITY]), 1);
    assert_eq!(token(&mut sampler, &[f32::NAN, f32::NAN]), 0);
}

#[test]
fn near_ties_of_the_likeliest_token_are_counted() {
    let mut sampler = Sampler::default();
    let mut ties = |logits: &[f32], temperature: f32| {
        sampler.sample(
            logits,
            &sampling(temperature),
            3,
            &History::default(),
            None,
            None,
        );
        sampler.take_near_ties()
    };
    assert_eq!(ties(&[1.0, 5.0, 4.995], 0.0), 1);
    assert_eq!(ties(&[1.0, 5.0, 4.9], 0.0), 0);
    assert_eq!(ties(&[f32::NAN, 5.0, f32::NEG_INFINITY], 0.0), 0);
    // A draw is another question.
    assert_eq!(ties(&[5.0, 5.0], 1.0), 0);
}

#[test]
fn draws_follow_the_distribution() {
    for (temperature, choice) in [(1.0, 0), (0.8, 1), (2.0, 2)] {
        let logits = [
            0.0f32,
            1.0,
            -1.0,
            2.0,
            0.5,
            f32::NEG_INFINITY,
            f32::NAN,
            1.5,
        ];
        let sampling = Sampling {
            choice,
            ..sampling(temperature)
        };
        let draws = 40_000u32;
        let counts = counts(&logits, &sampling, draws);
        let weights: Vec<f64> = logits
            .iter()
            .map(|logit| {
                if logit.is_nan() {
                    0.0
                } else {
                    f64::from(logit / temperature).exp()
                }
            })
            .collect();
        let total: f64 = weights.iter().sum();
        let mut chi_square = 0.0;
        for (count, weight) in counts.iter().zip(&weights) {
            let expected = weight / total * f64::from(draws);
            if expected == 0.0 {
                assert_eq!(*count, 0);
            } else {
                chi_square += (f64::from(*count) - expected).powi(2) / expected;
            }
        }
        // With five degrees of freedom, 20.5 is exceeded once in a thousand. The seed is fixed.
        assert!(
            chi_square < 20.5,
            "chi-square {chi_square} at temperature {temperature}"
        );
    }
}

#[test]
fn top_k_keeps_exactly_k() {
    let logits = [1.0, 3.0, 2.0, 3.0, 2.0];
    let kept = |top_k| {
        drawn(
            &logits,
            &Sampling {
                top_k,
                ..sampling(1.0)
            },
        )
    };
    assert_eq!(kept(1), [1]);
    assert_eq!(kept(3), [1, 2, 3]);
    assert_eq!(kept(0), [0, 1, 2, 3, 4]);
    assert_eq!(kept(99), [0, 1, 2, 3, 4]);
}

#[test]
fn top_p_keeps_the_smallest_set_that_suffices() {
    // The probabilities are 0.5, 0.3, 0.15 and 0.05.
    let logits: Vec<f32> = [0.05f32, 0.5, 0.15, 0.3].iter().map(|p| p.ln()).collect();
    let kept = |top_p| {
        drawn(
            &logits,
            &Sampling {
                top_p,
                ..sampling(1.0)
            },
        )
    };
    assert_eq!(kept(0.0001), [1]);
    assert_eq!(kept(0.49), [1]);
    assert_eq!(kept(0.6), [1, 3]);
    assert_eq!(kept(0.9), [1, 2, 3]);
    assert_eq!(kept(0.96), [0, 1, 2, 3]);
    // After top-k, the share counts what top-k left: 0.5 of 0.8 is more than 0.6.
    let both = Sampling {
        top_k: 2,
        top_p: 0.6,
        ..sampling(1.0)
    };
    assert_eq!(drawn(&logits, &both), [1]);
}

#[test]
fn a_wide_nucleus_is_found_in_several_rounds() {
    let logits = vec![0.0f32; 1000];
    let counts = counts(
        &logits,
        &Sampling {
            top_p: 0.5,
            ..sampling(1.0)
        },
        20_000,
    );
    // Tokens of equal weight are ordered by id.
    assert!(counts[..500].iter().all(|count| *count > 0));
    assert!(counts[501..].iter().all(|count| *count == 0));
}

#[test]
fn min_p_is_relative_to_the_best() {
    let logits: Vec<f32> = [0.05f32, 0.5, 0.15, 0.3].iter().map(|p| p.ln()).collect();
    let kept = |min_p| {
        drawn(
            &logits,
            &Sampling {
                min_p,
                ..sampling(1.0)
            },
        )
    };
    assert_eq!(kept(1.0), [1]);
    assert_eq!(kept(0.5), [1, 3]);
    assert_eq!(kept(0.2), [1, 2, 3]);
}

#[test]
fn bias_comes_first_and_logprobs_before_any_cut() {
    let logits = [0.0f32, 0.0, 0.0, 0.0];
    let biased = Sampling {
        logit_bias: vec![(0, -100.0), (2, 100.0), (1, f32::NEG_INFINITY)],
        top_logprobs: Some(2),
        ..sampling(0.0)
    };
    let drawn = Sampler::default().sample(&logits, &biased, 0, &History::default(), None, None);
    assert_eq!(drawn.token, 2);
    let logprob = drawn.logprob.unwrap();
    assert!(logprob.logprob.abs() < 1e-6);
    assert_eq!(logprob.top[1], (3, -100.0));
    let cut = Sampling {
        top_k: 1,
        top_logprobs: Some(4),
        ..sampling(0.5)
    };
    let logprob = Sampler::default()
        .sample(&logits, &cut, 0, &History::default(), None, None)
        .logprob
        .unwrap();
    assert_eq!(logprob.top.len(), 4);
    assert!(
        logprob
            .top
            .iter()
            .all(|(_, value)| (value - 0.25f32.ln()).abs() < 1e-6)
    );
}

/// Returns the logits of five tokens as log-probabilities up to a constant, after this prompt and output.
fn adjusted(sampling: Sampling, prompt: &[u32], output: &[u32]) -> Vec<f32> {
    let sampling = Sampling {
        top_logprobs: Some(5),
        ..sampling
    };
    let text = [prompt, output].concat();
    let history = History::new(&sampling, &text, prompt.len());
    let logits = [2.0, 1.0, 0.0, -1.0, -2.0];
    let at = text.len() as u32;
    let sampled = Sampler::default().sample(&logits, &sampling, at, &history, None, None);
    let top = sampled.logprob.unwrap().top;
    let of = |token: u32| top.iter().find(|(id, _)| *id == token).unwrap().1;
    // Token 2 has the logit 0 in every case below.
    (0..5)
        .map(|token| match of(token) {
            -9999.0 => f32::NEG_INFINITY,
            logprob => ((logprob - of(2)) * 1e3).round() / 1e3,
        })
        .collect()
}

#[test]
fn penalties_count_what_openai_and_vllm_count() {
    let never = f32::NEG_INFINITY;
    let plain = Sampling::default;
    let bad = |words: &[&[u32]]| Sampling {
        bad_tokens: words.iter().map(|word| word.to_vec()).collect(),
        ..plain()
    };
    let ends = |min_tokens| Sampling {
        min_tokens,
        stop_token_ids: vec![4],
        ..plain()
    };
    type Case<'a> = (&'a str, Sampling, &'a [u32], &'a [u32], [f32; 5]);
    let cases: [Case<'_>; 11] = [
        (
            "presence counts the output only, once",
            Sampling {
                presence_penalty: 0.5,
                ..plain()
            },
            &[0],
            &[1, 1, 3],
            [2.0, 0.5, 0.0, -1.5, -2.0],
        ),
        (
            "frequency counts each time",
            Sampling {
                frequency_penalty: 0.5,
                ..plain()
            },
            &[0],
            &[1, 1, 3],
            [2.0, 0.0, 0.0, -1.5, -2.0],
        ),
        (
            "repetition counts prompt and output, once",
            Sampling {
                repetition_penalty: 2.0,
                ..plain()
            },
            &[0, 3],
            &[3, 1, 1],
            [1.0, 0.5, 0.0, -2.0, -2.0],
        ),
        (
            "repetition comes after a bias and before the others",
            Sampling {
                repetition_penalty: 2.0,
                presence_penalty: 1.0,
                logit_bias: vec![(1, 1.0)],
                ..plain()
            },
            &[],
            &[1],
            [2.0, 0.0, 0.0, -1.0, -2.0],
        ),
        (
            "a word of one token",
            bad(&[&[1]]),
            &[],
            &[],
            [2.0, never, 0.0, -1.0, -2.0],
        ),
        (
            "a word whose beginning was said",
            bad(&[&[3, 4, 1]]),
            &[],
            &[3, 4],
            [2.0, never, 0.0, -1.0, -2.0],
        ),
        (
            "a word whose beginning was not said",
            bad(&[&[3, 4, 1]]),
            &[],
            &[4, 3],
            [2.0, 1.0, 0.0, -1.0, -2.0],
        ),
        (
            "a word that begins in the prompt",
            bad(&[&[3, 1]]),
            &[3],
            &[],
            [2.0, 1.0, 0.0, -1.0, -2.0],
        ),
        (
            "no end token before the least length",
            ends(2),
            &[0, 0],
            &[0],
            [2.0, 1.0, 0.0, -1.0, never],
        ),
        (
            "an end token from there on",
            ends(2),
            &[0],
            &[0, 0],
            [2.0, 1.0, 0.0, -1.0, -2.0],
        ),
        (
            "forced tokens count as prompt",
            Sampling {
                presence_penalty: 1.0,
                repetition_penalty: 2.0,
                forced_output: vec![0],
                ..ends(2)
            },
            &[],
            &[0, 1],
            [1.0, -0.5, 0.0, -1.0, never],
        ),
    ];
    for (name, sampling, prompt, output, expected) in cases {
        assert_eq!(adjusted(sampling, prompt, output), expected, "{name}");
    }
}

#[test]
fn forced_tokens_are_scored_as_they_are() {
    let sampling = Sampling {
        forced_output: vec![3],
        logit_bias: vec![(3, 50.0)],
        top_logprobs: Some(1),
        ..sampling(1.0)
    };
    let logits = [5.0f32, 0.0, 0.0, 0.0];
    let history = History::new(&sampling, &[7], 1);
    let first = Sampler::default().sample(&logits, &sampling, 1, &history, None, None);
    assert_eq!(first.token, 3);
    let logprob = first.logprob.unwrap();
    assert!(logprob.logprob < -5.0 && logprob.top[0].0 == 0);
    let history = History::new(&sampling, &[7, 3], 1);
    let next = Sampler::default().sample(&logits, &sampling, 2, &history, None, None);
    assert!(next.logprob.unwrap().logprob > -1e-6);
}

#[test]
fn noise_is_keyed_by_seed_choice_and_position() {
    let logits: Vec<f32> = (0..50).map(|i| (i % 7) as f32 * 0.1).collect();
    let run = |seed, choice| {
        let sampling = Sampling {
            seed,
            choice,
            ..sampling(1.0)
        };
        (0..64)
            .map(|position| {
                Sampler::default()
                    .sample(
                        &logits,
                        &sampling,
                        position,
                        &History::default(),
                        None,
                        None,
                    )
                    .token
            })
            .collect::<Vec<_>>()
    };
    assert_eq!(run(1, 0), run(1, 0));
    assert_ne!(run(1, 0), run(2, 0));
    assert_ne!(run(1, 0), run(1, 1));
}

#[test]
fn parameters_out_of_range_are_named() {
    let check = |sampling: Sampling| validate(&sampling, 10).unwrap_err().param.unwrap();
    assert_eq!(
        check(Sampling {
            temperature: f32::NAN,
            ..Sampling::default()
        }),
        "sampling.temperature"
    );
    assert_eq!(
        check(Sampling {
            top_p: 0.0,
            ..Sampling::default()
        }),
        "sampling.top_p"
    );
    assert_eq!(
        check(Sampling {
            min_p: 1.5,
            ..Sampling::default()
        }),
        "sampling.min_p"
    );
    assert_eq!(
        check(Sampling {
            logit_bias: vec![(10, 0.0)],
            ..Sampling::default()
        }),
        "sampling.logit_bias"
    );
    assert_eq!(
        check(Sampling {
            stop_token_ids: vec![10],
            ..Sampling::default()
        }),
        "sampling.stop_token_ids"
    );
    assert_eq!(
        check(Sampling {
            top_logprobs: Some(1000),
            ..Sampling::default()
        }),
        "sampling.top_logprobs"
    );
    assert!(validate(&Sampling::default(), 10).is_ok());
}
