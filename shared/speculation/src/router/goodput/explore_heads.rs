//! Trials of the head in a step, for requests whose namespace has not had it for long.

use std::collections::HashMap;
use std::hash::Hash;

use super::Goodput;
use crate::router::{Frame, HeadDraft, Prospect};

impl<N: Copy + Hash + Eq> Goodput<N> {
    /// Has requests try the head where no request of their namespace has had it for long, first those without a
    /// suffix draft. Returns which requests do, and what is left of the step.
    pub(super) fn explore_heads(
        &mut self,
        prospects: &[Prospect<N>],
        heads: &[Option<HeadDraft>],
        mut frame: Frame,
    ) -> (Vec<bool>, Frame) {
        let mut on_trial = vec![false; prospects.len()];
        if !self.may_explore(prospects, heads) {
            return (on_trial, frame);
        }
        let mut order: Vec<(usize, HeadDraft)> = (0..prospects.len())
            .filter_map(|at| Some((at, heads[at]?)))
            .collect();
        order.sort_by_key(|(at, _)| prospects[*at].candidate.is_some());
        let mut offered: HashMap<N, u32> = HashMap::new();
        for (at, _) in &order {
            *offered.entry(prospects[*at].namespace).or_default() += 1;
        }
        let step_seconds = self.cost.seconds(frame.tokens, frame.kv_tokens);
        // Requests of each namespace that may still try it.
        let mut left: HashMap<N, u32> = HashMap::new();
        for (at, head) in order {
            let namespace = prospects[at].namespace;
            if head.tokens_max > frame.slots_max {
                continue;
            }
            let is_first = !left.contains_key(&namespace);
            if is_first {
                let trials = self.learnt(namespace).head_exploration;
                let width = trials.width().min(offered[&namespace]);
                let cost = self.head_cost.seconds(width, head.depth) / step_seconds;
                left.insert(namespace, if trials.is_due(cost) { width } else { 0 });
            }
            let left = left.entry(namespace).or_default();
            if *left == 0 {
                continue;
            }
            *left -= 1;
            if is_first {
                let learnt = self.learnt(namespace);
                learnt.head_exploration.tried();
                learnt.readings.tried();
            }
            frame.slots_max -= head.tokens_max;
            frame.tokens += head.tokens_max;
            on_trial[at] = true;
        }
        (on_trial, frame)
    }

    /// Whether a trial would be due in any namespace if it took no time. In most steps none is.
    fn may_explore(&self, prospects: &[Prospect<N>], heads: &[Option<HeadDraft>]) -> bool {
        let with_head = prospects
            .iter()
            .zip(heads)
            .filter(|(_, head)| head.is_some());
        // Requests of one namespace often stand together.
        let mut last = None;
        let mut namespaces = with_head
            .map(|(prospect, _)| prospect.namespace)
            .filter(|namespace| last.replace(*namespace) != Some(*namespace));
        namespaces.any(|namespace| {
            let learnt = self.namespaces.peek(&namespace);
            learnt.is_some_and(|learnt| learnt.head_exploration.is_due(0.0))
        })
    }
}
