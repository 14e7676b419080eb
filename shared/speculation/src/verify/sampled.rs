//! Speculative sampling, the classic rule for drafts that were drawn from a drafter's own distribution.
//!
//! A drafter that knows its distribution q can draw from it instead of offering its most probable token. The target
//! has the distribution p. It keeps the token x with probability min(1, p(x) / q(x)), and otherwise draws from max(0,
//! p - q), normalised. Then the outcome has the distribution p, and a token is kept with probability Σ min(p, q),
//! more often than a fixed token (Leviathan et al., arXiv 2211.17192, theorem 3.5; Chen et al., arXiv 2302.01318).
//! The rule is lossless in distribution, but not token for token: the emitted tokens depend on the draft as well as
//! on the noise.

use refrain_suffix_index::Token;

/// A token and its weight in a distribution. The weights of a distribution need not add up to 1.
pub type Weight = (Token, f32);

/// Draws from a distribution, given as the weight of each token id, by inverting its cumulative sum at `uniform`, in
/// [0, 1). `None` if no token has weight.
pub fn draw(weights: &[f32], uniform: f64) -> Option<Token> {
    let target = uniform * sum(weights.iter().copied());
    let mut below = 0.0;
    let mut last = None;
    for (token, weight) in weights.iter().enumerate() {
        if *weight > 0.0 {
            last = Some(token as Token);
            below += f64::from(*weight);
            if below > target {
                break;
            }
        }
    }
    last
}

/// The token at a position where `drafted` was drawn from `draft`: `drafted` itself if it is kept, else another one.
/// `target` holds the target's weight of each token id, and is changed.
///
/// `keep` and `redraw` are uniform in [0, 1) and independent of the draw of `drafted`. `None` if the target has no
/// weight anywhere.
pub fn judge(
    target: &mut [f32],
    draft: &[Weight],
    drafted: Token,
    keep: f64,
    redraw: f64,
) -> Option<Token> {
    let all = sum(target.iter().copied());
    let drafted_all = sum(draft.iter().map(|(_, weight)| *weight));
    let weight = draft.iter().find(|(token, _)| *token == drafted);
    let chance = weight.map_or(0.0, |(_, weight)| f64::from(*weight) / drafted_all);
    if !(all > 0.0 && chance > 0.0) {
        // The token cannot have been drawn from `draft`, so the target draws by itself.
        return draw(target, redraw);
    }
    let wanted = target
        .get(drafted as usize)
        .map_or(0.0, |weight| f64::from(*weight) / all);
    if keep * chance < wanted {
        return Some(drafted);
    }
    for (token, weight) in draft {
        if let Some(left) = target.get_mut(*token as usize) {
            let more = f64::from(*left) - f64::from(*weight) / drafted_all * all;
            *left = more.max(0.0) as f32;
        }
    }
    // If p equals q but for rounding, hardly any token is rejected, and a rejected one may be kept after all.
    draw(target, redraw).or((wanted > 0.0).then_some(drafted))
}

fn sum(weights: impl Iterator<Item = f32>) -> f64 {
    weights.map(f64::from).sum()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Points of the unit interval, in the middles of equal parts.
    fn grid(points: usize) -> impl Iterator<Item = f64> {
        (0..points).map(move |at| (at as f64 + 0.5) / points as f64)
    }

    fn share(weights: &[f32], token: usize) -> f64 {
        f64::from(weights[token]) / sum(weights.iter().copied())
    }

    fn pairs(weights: &[f32]) -> Vec<Weight> {
        let has_weight = |(_, weight): &(usize, &f32)| **weight > 0.0;
        let weights = weights.iter().enumerate().filter(has_weight);
        weights
            .map(|(token, weight)| (token as Token, *weight))
            .collect()
    }

    /// (p, q), none of them normalised.
    fn cases() -> Vec<(Vec<f32>, Vec<f32>)> {
        vec![
            (vec![1.0, 2.0, 3.0, 4.0], vec![4.0, 3.0, 2.0, 1.0]),
            (vec![0.5, 0.5, 0.0, 0.0], vec![0.0, 0.1, 0.2, 0.3]),
            (vec![1.0, 0.0, 0.0, 0.0], vec![1.0, 1.0, 1.0, 1.0]),
            (vec![3.0, 1.0, 1.0, 3.0], vec![0.0, 0.0, 7.0, 0.0]),
            (vec![2.0, 1.0, 1.0, 4.0], vec![4.0, 2.0, 2.0, 8.0]),
            (vec![1.0, 1.0, 0.0, 0.0], vec![0.0, 0.0, 1.0, 1.0]),
        ]
    }

    #[test]
    fn a_draw_has_the_law_of_its_weights() {
        for (weights, _) in cases() {
            let mut seen = [0.0; 4];
            for uniform in grid(1000) {
                seen[draw(&weights, uniform).unwrap() as usize] += 1e-3;
            }
            for (token, seen) in seen.into_iter().enumerate() {
                assert!((seen - share(&weights, token)).abs() < 2e-3);
            }
        }
        assert_eq!(draw(&[0.0, f32::NAN], 0.5), None);
        assert_eq!(draw(&[0.0, 1.0], 0.999_999_999_999_999_9), Some(1));
    }

    /// Over all draws of the draft and all noise, the outcome has the target's distribution. A draft is kept with the
    /// probability that the two distributions have in common.
    #[test]
    fn the_outcome_has_the_law_of_the_target() {
        const POINTS: usize = 240;
        for (target, draft) in cases() {
            let (mut seen, mut kept) = ([0.0; 4], 0.0);
            for drafted in 0..4 {
                let weight = share(&draft, drafted) / (POINTS * POINTS) as f64;
                if weight == 0.0 {
                    continue;
                }
                for keep in grid(POINTS) {
                    for redraw in grid(POINTS) {
                        let mut weights = target.clone();
                        let drafted = drafted as Token;
                        let token =
                            judge(&mut weights, &pairs(&draft), drafted, keep, redraw).unwrap();
                        seen[token as usize] += weight;
                        kept += if token == drafted { weight } else { 0.0 };
                    }
                }
            }
            let mut common = 0.0;
            for (token, seen) in seen.into_iter().enumerate() {
                let wanted = share(&target, token);
                common += wanted.min(share(&draft, token));
                assert!(
                    (seen - wanted).abs() < 0.02,
                    "{target:?} {draft:?}: {token} has {seen}, not {wanted}"
                );
            }
            assert!((kept - common).abs() < 0.02, "{target:?} {draft:?}: {kept}");
        }
    }

    #[test]
    fn what_makes_no_sense_does_no_harm() {
        let judge = |target: &[f32], draft: &[Weight], drafted| {
            judge(&mut target.to_vec(), draft, drafted, 0.0, 0.3)
        };
        // The cases are an empty draft distribution, a token without weight in it, a token beyond the vocabulary, and
        // a target without weight.
        assert_eq!(judge(&[0.0, 1.0], &[], 0), Some(1));
        assert_eq!(judge(&[0.0, 1.0], &[(1, 1.0)], 0), Some(1));
        assert_eq!(judge(&[0.0, 1.0], &[(9, 1.0)], 9), Some(1));
        assert_eq!(judge(&[0.0, 0.0], &[(0, 1.0)], 0), None);
    }
}
