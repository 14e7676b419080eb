//! The worth of a request's draft tokens: its weight, and more for the tokens that it needs for its pace.

use super::{BudgetRequest, HeadOption};

/// How many times more a token counts that a request needs for its pace.
const DUE_WEIGHT: f32 = 4.0;

impl BudgetRequest<'_> {
    /// Appends the worth of each node by itself, then the worth of each node beside the head's draft.
    pub(super) fn worths(&self, into: &mut Vec<f32>) {
        let missing = self.due_tokens - 1.0;
        let by_head = self.head.map_or(0.0, |head| head.gain);
        self.raised(self.tree, missing, into);
        self.raised(self.beside, missing - by_head, into);
    }

    /// Appends the worth of nodes with these probabilities, where so many tokens are `missing` for the pace.
    fn raised(&self, nodes: &[f32], mut missing: f32, into: &mut Vec<f32>) {
        let first = into.len();
        into.extend(nodes.iter().map(|f| self.weight * f));
        if missing > 0.0 {
            // The likeliest come first, and parents before children among equals, so that the raised nodes are a
            // tree, too.
            let mut order: Vec<usize> = (0..nodes.len()).collect();
            order.sort_by(|a, b| nodes[*b].total_cmp(&nodes[*a]));
            for at in order {
                if missing <= 0.0 {
                    break;
                }
                into[first + at] *= DUE_WEIGHT;
                missing -= nodes[at];
            }
        }
    }

    /// The worth of the head's draft.
    pub(super) fn head_worth(&self, head: &HeadOption) -> f64 {
        let due = head.gain.min(self.due_tokens - 1.0).max(0.0);
        f64::from(self.weight * (head.gain + (DUE_WEIGHT - 1.0) * due))
    }
}
