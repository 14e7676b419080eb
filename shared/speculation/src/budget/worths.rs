//! What a request's draft tokens are worth to a step: its weight, and more for those that it needs for its pace.

use super::{BudgetRequest, HeadOffer};

/// What the tokens that a request needs for its pace count more than others.
const DUE_WEIGHT: f32 = 4.0;

impl BudgetRequest<'_> {
    /// Adds what each node is worth that stands alone, then what each is that stands beside the head's draft.
    pub(super) fn worths(&self, into: &mut Vec<f32>) {
        let missing = self.due_tokens - 1.0;
        let by_head = self.head.map_or(0.0, |head| head.gain);
        self.raised(self.tree, missing, into);
        self.raised(self.beside, missing - by_head, into);
    }

    /// What nodes are worth that bring so much, of which so many tokens are `missing` for its pace.
    fn raised(&self, nodes: &[f32], mut missing: f32, into: &mut Vec<f32>) {
        let first = into.len();
        into.extend(nodes.iter().map(|f| self.weight * f));
        if missing > 0.0 {
            // Likeliest first, and parents before children among equals: what is raised is a tree, too.
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

    /// What the head's draft is worth.
    pub(super) fn head_worth(&self, head: &HeadOffer) -> f64 {
        let due = head.gain.min(self.due_tokens - 1.0).max(0.0);
        f64::from(self.weight * (head.gain + (DUE_WEIGHT - 1.0) * due))
    }
}
