//! Seer's rule for the length of drafts (arXiv 2511.14617 v3, "marginal-benefit-aware"), for comparison.
//!
//! A model of the step's time gives the length at which a token is cheapest, and so a budget for the batch. The
//! budget is then divided between requests of high and of low priority.
//!
//! Two faults of the published rule are mended. It takes the drop of the acceptance from one position to the next for
//! the benefit of a token; here it is the probability that the token is accepted. And it reads an acceptance at
//! position 0, which does not exist; it is 1 here. A third fault stays: all requests of a priority get one length,
//! however different their matches are.

use refrain_speculation::draft::{Candidate, DraftTree};

/// Longest draft.
pub(crate) const DRAFT_TOKENS_MAX: usize = 8;
/// A token of a request of high priority is worth as much as this many of others.
const PRIORITY_WEIGHT: f64 = 2.0;
/// Drafted tokens that count from the start as half accepted, at each position.
const PRIOR_TOKENS: f64 = 16.0;
/// The weight of a count one draft later, so that the rule follows the text.
const DECAY: f64 = 0.999;

/// Expected tokens of a step with a draft of `depth` tokens, the bonus token included. `acceptance` has, for each
/// position, the probability that its token is accepted if all before it were.
pub(crate) fn expected_tokens(acceptance: &[f64], depth: usize) -> f64 {
    let mut path = 1.0;
    let accepted = acceptance.iter().take(depth).map(|accepts| {
        path *= accepts;
        path
    });
    1.0 + accepted.sum::<f64>()
}

/// The draft lengths of the requests of high and of low priority. `step_seconds` is the time of a step that verifies
/// so many tokens.
pub(crate) fn draft_tokens(
    (high, low): (usize, usize),
    acceptance: &[f64],
    step_seconds: impl Fn(usize) -> f64,
) -> (usize, usize) {
    let batch = high + low;
    let depth_max = DRAFT_TOKENS_MAX.min(acceptance.len());
    let token_seconds =
        |depth: usize| step_seconds(batch * (1 + depth)) / expected_tokens(acceptance, depth);
    let best = (0..=depth_max)
        .min_by(|a, b| token_seconds(*a).total_cmp(&token_seconds(*b)))
        .unwrap_or(0);
    let budget = best * batch;
    if budget == 0 || budget < high {
        return (0, 0);
    }
    let benefit = |requests: usize, depth: usize| {
        requests as f64
            * (expected_tokens(acceptance, depth + 1) - expected_tokens(acceptance, depth))
    };
    let (mut of_high, mut of_low, mut left) = (0, 0, budget);
    loop {
        let (by_high, by_low) = (benefit(high, of_high), benefit(low, of_low));
        if high > 0 && of_high < depth_max && left >= high && by_high * PRIORITY_WEIGHT >= by_low {
            of_high += 1;
            left -= high;
        } else if low > 0 && of_low < depth_max && left >= low {
            of_low += 1;
            left -= low;
        } else {
            return (of_high, of_low);
        }
    }
}

/// The nodes of a draft down to this depth; `None` if that is nothing.
pub(super) fn within_depth(found: &Candidate, depth: usize) -> Option<Candidate> {
    let depths = depths(&found.tree);
    let nodes: Vec<u32> = (0u32..)
        .zip(&depths)
        .filter(|(_, of_node)| **of_node <= depth)
        .map(|(node, _)| node)
        .collect();
    (!nodes.is_empty()).then(|| found.part(&nodes))
}

/// The depth of each node, 1 for a child of the root.
fn depths(tree: &DraftTree) -> Vec<usize> {
    let mut depths: Vec<usize> = Vec::with_capacity(tree.len());
    for parent in tree.parents() {
        depths.push(1 + parent.map_or(0, |parent| depths[parent as usize]));
    }
    depths
}

/// How often the tokens at each position were drafted and accepted.
#[derive(Clone, Debug, Default)]
pub(super) struct Positions {
    drafted: [f64; DRAFT_TOKENS_MAX],
    accepted: [f64; DRAFT_TOKENS_MAX],
}

impl Positions {
    pub(super) fn record(&mut self, tree: &DraftTree, accepted: usize) {
        let depth = depths(tree).into_iter().max().unwrap_or(0);
        for position in 0..depth.min(DRAFT_TOKENS_MAX).min(accepted + 1) {
            let was_accepted = if position < accepted { 1.0 } else { 0.0 };
            self.drafted[position] = self.drafted[position] * DECAY + 1.0;
            self.accepted[position] = self.accepted[position] * DECAY + was_accepted;
        }
    }

    pub(super) fn acceptance(&self) -> [f64; DRAFT_TOKENS_MAX] {
        std::array::from_fn(|position| {
            let drafted = self.drafted[position] + PRIOR_TOKENS;
            (self.accepted[position] + PRIOR_TOKENS / 2.0) / drafted
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn expected_tokens_are_those_of_the_geometric_series() {
        let acceptance = [0.6; 8];
        for depth in 0..=8 {
            let series = (1.0 - 0.6f64.powi(depth as i32 + 1)) / (1.0 - 0.6);
            assert!((expected_tokens(&acceptance, depth) - series).abs() < 1e-12);
        }
    }

    #[test]
    fn drafts_are_as_long_as_tokens_get_cheaper() {
        let acceptance = [0.7; 8];
        // All tokens of a step up to 64 cost the same.
        let flat = |tokens: usize| 1.0 + tokens.saturating_sub(64) as f64;
        assert_eq!(draft_tokens((4, 0), &acceptance, flat), (8, 0));
        assert_eq!(draft_tokens((16, 0), &acceptance, flat), (3, 0));
        assert_eq!(draft_tokens((64, 0), &acceptance, flat), (0, 0));
        assert_eq!(
            draft_tokens((4, 0), &[0.0; 8], |tokens| tokens as f64),
            (0, 0)
        );
    }

    #[test]
    fn high_priority_gets_the_longer_drafts_within_the_budget() {
        let flat = |tokens: usize| 1.0 + tokens.saturating_sub(64) as f64;
        let (high, low) = draft_tokens((8, 8), &[0.7; 8], flat);
        assert!(high > low, "{high} {low}");
        assert!(8 * (high + low) <= 48, "{high} {low}");
    }
}
