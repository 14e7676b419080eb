//! A request of a step, and the worth of its draft tokens: its weight, and more for the tokens that it needs for its
//! pace.

/// How many times more a token counts that a request needs for its pace.
const DUE_WEIGHT: f32 = 4.0;

/// One request of a step.
#[derive(Clone, Copy, Debug)]
pub(in crate::router) struct BudgetRequest<'a> {
    /// The worth of one of its tokens; above 0. Only ratios between requests and to the rate matter.
    pub(in crate::router) weight: f32,
    /// Tokens that the step should bring it, the bonus token included; up to 1 asks for nothing. See
    /// [`Pace`](crate::router::Pace).
    pub(in crate::router) due_tokens: f32,
    /// The path probability of each node of its draft, parents first and never above their parents; empty without a
    /// draft. See [`path_probabilities`](crate::statistics::AcceptanceStatistics::path_probabilities).
    pub(in crate::router) tree: &'a [f32],
    /// The draft that the engine's head would make instead, if it may.
    pub(in crate::router) head: Option<HeadOption>,
    /// Expected accepted tokens that each node of the draft adds to the head's draft, never more than its parent
    /// adds; empty if the two cannot be merged.
    pub(in crate::router) merged: &'a [f32],
}

/// A draft of the engine's head, before it is made.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(in crate::router) struct HeadOption {
    /// Passes of the head.
    pub(in crate::router) depth: u32,
    /// Tokens that it is expected to have, all of which are verified.
    pub(in crate::router) slots: f32,
    /// Maximum number of tokens that it may have: the step needs room for them.
    pub(in crate::router) slots_max: u32,
    /// Expected number of accepted tokens.
    pub(in crate::router) gain: f32,
    /// Seconds beside the passes that it shares with others, for text that the head has to read first.
    pub(in crate::router) own_seconds: f64,
}

impl BudgetRequest<'_> {
    /// Appends the worth of each node by itself, then the worth of each node beside the head's draft.
    pub(super) fn worths(&self, into: &mut Vec<f32>) {
        let missing = self.due_tokens - 1.0;
        let by_head = self.head.map_or(0.0, |head| head.gain);
        self.raised(self.tree, missing, into);
        self.raised(self.merged, missing - by_head, into);
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
