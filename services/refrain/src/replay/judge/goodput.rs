//! The policy `goodput`: it knows the engine by what its steps took, and divides each step by that.

use refrain_speculation::{
    BudgetRequest, BudgetStep, GoingRate, HeadCost, HeadDrafted, HeadOffer, Share, StepCost, divide,
};

use super::{Routed, StepLoad};

/// What was seen of the engine.
#[derive(Clone, Debug, Default)]
pub(super) struct Goodput {
    step_cost: StepCost,
    head_cost: HeadCost,
    going_rate: GoingRate,
}

impl Goodput {
    /// What each request does: `chances` has those of its tree's nodes, `heads` what a draft of the head, `depth` tokens
    /// deep, is expected to bring it.
    pub(super) fn divide(
        &self,
        chances: &[Vec<f32>],
        heads: impl Iterator<Item = f32>,
        depth: u32,
        kv_tokens: usize,
    ) -> Vec<Routed> {
        let requests: Vec<BudgetRequest<'_>> = chances
            .iter()
            .zip(heads)
            .map(|(tree, gain)| BudgetRequest {
                weight: 1.0,
                tree,
                head: (depth > 0).then(|| HeadOffer {
                    depth,
                    slots: self.head_cost.tokens(depth),
                    slots_max: depth,
                    gain,
                    // It reads what it missed in its first pass.
                    own_seconds: 0.0,
                }),
            })
            .collect();
        let batch = requests.len() as u32;
        let step = BudgetStep {
            tokens: batch,
            slots_max: u32::MAX,
            rate: self.going_rate.tokens_per_s(batch),
        };
        let seconds = self.step_cost.at_kv(kv_tokens as u64);
        let head_seconds = |requests, depth| self.head_cost.seconds(requests, depth);
        divide(&requests, &step, seconds, head_seconds)
            .shares
            .into_iter()
            .map(|share| match share {
                Share::Plain => Routed::Plain,
                Share::Tree(nodes) => Routed::Part(nodes),
                Share::Head => Routed::Head,
            })
            .collect()
    }

    /// A step took so long, the head's drafting before it apart, and brought so many tokens. `depths` are those of the
    /// head's drafts.
    pub(super) fn observe(
        &mut self,
        load: StepLoad,
        step_s: f64,
        depths: &[usize],
        head_s: f64,
        emitted: usize,
    ) {
        self.step_cost
            .observe(load.tokens as u32, load.kv_tokens as u64, step_s);
        let tokens = depths.iter().sum::<usize>() as u32;
        let deepest = depths.iter().max().map_or(0, |depth| *depth as u32);
        let drafted = HeadDrafted {
            tokens,
            asked_tokens: tokens,
            read_tokens: 0,
        };
        self.head_cost
            .observe(depths.len() as u32, deepest, drafted, head_s);
        let batch = load.requests as u32;
        self.going_rate
            .observe(batch, emitted as u32, step_s + head_s);
    }
}
