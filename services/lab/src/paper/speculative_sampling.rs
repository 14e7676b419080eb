//! Speculative sampling (Leviathan et al., arXiv 2211.17192; Chen et al., arXiv 2302.01318).

use refrain_speculation::verify::sampled::{self, Weight};

use super::experiment::{Experiment, Paper};
use super::input::Input;
use super::needs::Needs;
use super::report::{Cell, Column, Findings, Row};
use crate::simulate::Random;

pub(super) const PAPER: Paper = Paper {
    title: "Speculative sampling",
    version: "arXiv 2211.17192 and 2302.01318",
    experiments: &[Experiment::new(
        "speculative-sampling",
        "equation 1 of 2211.17192",
        "Tokens per step by gamma and temperature",
        "A draft of gamma tokens, each accepted with probability a, brings (1 - a^(gamma + 1)) / (1 - a) tokens.",
        Needs::Nothing,
        by_gamma,
    )],
};

const TEMPERATURES: [f64; 5] = [0.0, 0.5, 1.0, 1.5, 2.0];
const GAMMAS: [usize; 6] = [1, 2, 3, 5, 7, 10];
/// Tokens of the vocabulary.
const VOCABULARY: usize = 64;
/// Spread of the target's logits, and of what the drafter adds to them.
const LOGIT_SPREAD: f64 = 2.0;
const DRAFTER_ERROR: f64 = 1.0;
/// Steps of each figure.
const STEPS: usize = 2_000;

fn by_gamma(input: &Input<'_>) -> anyhow::Result<Findings> {
    let steps = input.options.docs.unwrap_or(STEPS);
    let mut rows = Vec::new();
    for temperature in TEMPERATURES {
        for gamma in GAMMAS {
            let seeds: Vec<Drawn> = (1..=input.options.seeds)
                .map(|seed| draw_steps(temperature, gamma, steps, seed))
                .collect();
            let over =
                |value: fn(&Drawn) -> f64| Cell::over(seeds.iter().map(|of| Some(value(of))));
            let acceptance = over(|of| of.acceptance);
            let formula = acceptance.map(|of| expected_tokens(of.mean, gamma));
            let cells = vec![
                acceptance,
                formula.and_then(Cell::exact),
                over(|of| of.tokens_per_step),
                over(|of| of.fixed_acceptance),
            ];
            let name = format!("temperature {temperature}, gamma {gamma}");
            let kind = format!("temperature {temperature}");
            rows.push(Row::new(name, cells).of(kind).at(gamma as f64));
        }
    }
    Ok(Findings::new(
        "",
        &[
            Column::measured("acceptance a", 3),
            Column::published("tokens per step", 3),
            Column::measured("tokens per step", 3).drawn(),
            Column::measured("acceptance of the most probable token", 3),
        ],
        rows,
        ("gamma", "tokens per step"),
        format!(
            "The verifier of the mesh, on distributions over {VOCABULARY} tokens that are drawn anew at each position. \
             The target's logits are normal with a spread of {LOGIT_SPREAD}, and the drafter's are off by a spread of \
             {DRAFTER_ERROR}. The last column is a drafter that offers its most probable token."
        ),
    ))
}

/// Expected tokens of a step.
fn expected_tokens(acceptance: f64, gamma: usize) -> f64 {
    (0..=gamma).map(|nth| acceptance.powi(nth as i32)).sum()
}

/// The outcome of the steps of a seed.
struct Drawn {
    /// The mean of what target and drafter have in common.
    acceptance: f64,
    tokens_per_step: f64,
    fixed_acceptance: f64,
}

fn draw_steps(temperature: f64, gamma: usize, steps: usize, seed: u64) -> Drawn {
    let mut random = Random::new(seed, gamma as u64);
    let (mut common, mut fixed, mut positions, mut tokens) = (0.0, 0.0, 0usize, 0usize);
    for _ in 0..steps {
        // Positions after a rejected token are not verified, but count in the mean, so that it is that of all.
        let mut is_going = true;
        tokens += 1;
        for _ in 0..gamma {
            let logits: Vec<f64> = (0..VOCABULARY)
                .map(|_| LOGIT_SPREAD * random.normal())
                .collect();
            let target = distribution(&logits, temperature);
            let drafter: Vec<f64> = logits
                .iter()
                .map(|logit| logit + DRAFTER_ERROR * random.normal())
                .collect();
            let drafter = distribution(&drafter, temperature);
            let pairs = target.iter().zip(&drafter);
            common += pairs.map(|(p, q)| f64::from(p.min(*q))).sum::<f64>();
            fixed += f64::from(target[most_probable(&drafter)]);
            positions += 1;
            if is_going {
                is_going = is_kept(target, &drafter, &mut random);
                tokens += usize::from(is_going);
            }
        }
    }
    let positions = positions.max(1) as f64;
    Drawn {
        acceptance: common / positions,
        tokens_per_step: tokens as f64 / steps.max(1) as f64,
        fixed_acceptance: fixed / positions,
    }
}

/// Whether the verifier keeps a token that was drawn from the drafter's distribution.
fn is_kept(mut target: Vec<f32>, drafter: &[f32], random: &mut Random) -> bool {
    let weights: Vec<Weight> = (0..).zip(drafter.iter().copied()).collect();
    let Some(drafted) = sampled::draw(drafter, random.uniform()) else {
        return false;
    };
    let (keep, redraw) = (random.uniform(), random.uniform());
    let token = sampled::judge(&mut target, &weights, drafted, keep, redraw);
    token == Some(drafted)
}

/// The probabilities of these logits at a temperature; at 0 the most probable token is certain.
fn distribution(logits: &[f64], temperature: f64) -> Vec<f32> {
    let most = logits.iter().copied().fold(f64::NEG_INFINITY, f64::max);
    let weight = |logit: &f64| match temperature > 0.0 {
        true => ((logit - most) / temperature).exp(),
        false => f64::from(u8::from(*logit == most)),
    };
    let weights: Vec<f64> = logits.iter().map(weight).collect();
    let sum: f64 = weights.iter().sum();
    weights.iter().map(|weight| (weight / sum) as f32).collect()
}

fn most_probable(weights: &[f32]) -> usize {
    let tokens = weights.iter().enumerate();
    let most = tokens.max_by(|a, b| a.1.total_cmp(b.1));
    most.map_or(0, |(token, _)| token)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_verifier_brings_the_tokens_of_the_formula() {
        for (temperature, gamma) in [(0.0, 3), (1.0, 1), (1.0, 5), (2.0, 5)] {
            let drawn = draw_steps(temperature, gamma, 4_000, 3);
            let expected = expected_tokens(drawn.acceptance, gamma);
            let found = drawn.tokens_per_step;
            assert!(
                (found - expected).abs() < 0.12,
                "{temperature} {gamma}: {found} {expected}"
            );
            assert!(drawn.acceptance >= drawn.fixed_acceptance - 1e-9);
        }
        assert!((expected_tokens(0.8, 4) - (1.0 - 0.8f64.powi(5)) / 0.2).abs() < 1e-12);
    }
}
