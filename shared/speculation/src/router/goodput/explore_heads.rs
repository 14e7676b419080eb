//! Trials of the head in a step, for requests whose namespace has not had it for long.

use std::collections::HashMap;
use std::hash::Hash;

use super::{Asking, Goodput};
use crate::router::{Frame, HeadDraft};

impl<N: Copy + Hash + Eq> Goodput<N> {
    /// Has requests try the head where no request of their namespace has had it for long, first those without a
    /// suffix draft. Notes which requests do, and returns what is left of the step.
    pub(super) fn explore_heads<K>(
        &mut self,
        asking: &mut [Asking<K, N>],
        mut frame: Frame,
    ) -> Frame {
        if !self.may_explore(asking) {
            return frame;
        }
        let with_head = asking.iter_mut();
        let mut order: Vec<(&mut Asking<K, N>, HeadDraft)> = with_head
            .filter_map(|of| of.head.map(|head| (of, head)))
            .collect();
        order.sort_by_key(|(of, _)| of.prospect.candidate.is_some());
        let mut offered: HashMap<N, u32> = HashMap::new();
        for (of, _) in &order {
            *offered.entry(of.prospect.namespace).or_default() += 1;
        }
        let step_seconds = self.cost.seconds(frame.tokens, frame.kv_tokens);
        // Requests of each namespace that may still try it.
        let mut left: HashMap<N, u32> = HashMap::new();
        for (of, head) in order {
            let namespace = of.prospect.namespace;
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
            of.is_on_trial = true;
        }
        frame
    }

    /// Whether a trial would be due in any namespace if it took no time. In most steps none is.
    fn may_explore<K>(&self, asking: &[Asking<K, N>]) -> bool {
        let with_head = asking.iter().filter(|of| of.head.is_some());
        // Requests of one namespace often stand together.
        let mut last = None;
        let mut namespaces = with_head
            .map(|of| of.prospect.namespace)
            .filter(|namespace| last.replace(*namespace) != Some(*namespace));
        namespaces.any(|namespace| {
            let learnt = self.namespaces.peek(&namespace);
            learnt.is_some_and(|learnt| learnt.head_exploration.is_due(0.0))
        })
    }
}
