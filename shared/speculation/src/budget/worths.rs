//! What a request's draft tokens are worth to a step: its weight, and more for those that it needs for its pace.

use super::{BudgetRequest, HeadOffer};

/// What the tokens that a request needs for its pace count more than others.
const DUE_WEIGHT: f32 = 4.0;

/// What each node of a request is worth.
pub(super) struct Worths {
    /// Of those that stand alone.
    pub(super) tree: Vec<f32>,
    /// Of those that stand beside the head's draft.
    pub(super) beside: Vec<f32>,
}

impl BudgetRequest<'_> {
    pub(super) fn worths(&self) -> Worths {
        let missing = self.due_tokens - 1.0;
        let by_head = self.head.map_or(0.0, |head| head.gain);
        Worths {
            tree: self.raised(self.tree, missing),
            beside: self.raised(self.beside, missing - by_head),
        }
    }

    /// What nodes are worth that bring so much, of which so many tokens are `missing` for its pace.
    fn raised(&self, nodes: &[f32], mut missing: f32) -> Vec<f32> {
        let mut worths: Vec<f32> = nodes.iter().map(|f| self.weight * f).collect();
        if missing > 0.0 {
            // Likeliest first, and parents before children among equals: what is raised is a tree, too.
            let mut order: Vec<usize> = (0..nodes.len()).collect();
            order.sort_by(|a, b| nodes[*b].total_cmp(&nodes[*a]));
            for at in order {
                if missing <= 0.0 {
                    break;
                }
                worths[at] *= DUE_WEIGHT;
                missing -= nodes[at];
            }
        }
        worths
    }

    /// What the head's draft is worth.
    pub(super) fn head_worth(&self, head: &HeadOffer) -> f64 {
        let due = head.gain.min(self.due_tokens - 1.0).max(0.0);
        f64::from(self.weight * (head.gain + (DUE_WEIGHT - 1.0) * due))
    }
}
