//! Keeps the ranks of waiting rollouts in step with what is known about lengths.

use refrain_protocol::scheduling::{LeaseOutcome, LeaseRequest, RequestClass};

use super::Dispatch;
use super::events::DispatchEffect;
use super::fair_queue::{Place, WaitingRequest};
use super::group_key::GroupKey;
use super::lease_table::RunningLease;
use crate::config::OrderPolicy;
use crate::order::{Facts, Rank, rank};

impl Dispatch {
    /// The group and the rank of a request that is about to wait.
    pub(super) fn enters_line(
        &mut self,
        request: &LeaseRequest,
        place: Place,
    ) -> (Option<GroupKey>, Rank) {
        if request.class == RequestClass::Interactive {
            return (None, Rank::default());
        }
        let group = GroupKey::of_request(request);
        if let Some(group) = &group {
            let generated_tokens = request.generated_tokens;
            let others_change = self
                .groups
                .waits(group, request.request, place, generated_tokens);
            if others_change {
                self.rerank(group);
            }
        }
        let rank = self.rank(request, place, group.as_ref());
        (group, rank)
    }

    fn rank(&mut self, request: &LeaseRequest, place: Place, group: Option<&GroupKey>) -> Rank {
        let policy = self.config.order;
        if policy == OrderPolicy::Arrival {
            return Rank::default();
        }
        let window_ms = self.windows.of(place.arrival.ms);
        rank(policy, window_ms, &self.facts(request, group))
    }

    fn facts(&self, request: &LeaseRequest, group: Option<&GroupKey>) -> Facts {
        let known = group.map(|group| self.groups.look_up(group, request.request));
        Facts {
            generated_tokens: request.generated_tokens,
            max_new_tokens: request.max_new_tokens,
            expected_tokens: request.expected_tokens,
            is_probe: known.is_some_and(|(_, is_probe)| is_probe),
            group: known.map(|(lengths, _)| lengths),
        }
    }

    /// Ranks the waiting members of a group anew.
    fn rerank(&mut self, group: &GroupKey) {
        if self.config.order == OrderPolicy::Arrival {
            return;
        }
        let places: Vec<Place> = self.groups.waiting(group).collect();
        for place in places {
            let Some(waiting) = self.queue.get(place.call) else {
                continue;
            };
            let facts = self.facts(&waiting.request, Some(group));
            let window_ms = self.windows.of(place.arrival.ms);
            let rank = rank(self.config.order, window_ms, &facts);
            self.queue.rerank(place.call, rank);
        }
    }

    /// A waiting request gets its lease. Returns the facts by which it was ordered.
    pub(super) fn starts(&mut self, waiting: &WaitingRequest) -> Facts {
        let request = &waiting.request;
        let facts = self.facts(request, waiting.group.as_ref());
        if let Some(group) = &waiting.group {
            let estimate = facts.estimate(self.config.order);
            self.groups
                .starts(group, request.request, waiting.place, estimate);
        }
        facts
    }

    /// A waiting request is taken out of the queue.
    pub(super) fn leaves_line(&mut self, waiting: &WaitingRequest) {
        if let Some(group) = &waiting.group
            && self
                .groups
                .withdraws(group, waiting.request.request, waiting.place)
        {
            self.rerank(group);
        }
    }

    /// Learns from the end of a chunk. Only finished outputs tell a length.
    pub(super) fn learn(
        &mut self,
        running: &RunningLease,
        outcome: LeaseOutcome,
        emitted_tokens: u32,
        effects: &mut Vec<DispatchEffect>,
    ) {
        if running.class == RequestClass::Interactive {
            return;
        }
        let tokens = running.generated_tokens.saturating_add(emitted_tokens);
        let group = running.group.as_ref();
        let (estimate, others_change) = match (outcome, group) {
            (LeaseOutcome::Finished, Some(group)) => {
                let finish = self.groups.finishes(group, running.request, tokens);
                if let (Some((first, second)), Some(queue)) =
                    (finish.siblings, self.queue.pool_mut(&running.pool))
                {
                    queue.estimates.note_siblings(first, second);
                }
                (finish.estimate, finish.others_change)
            }
            (LeaseOutcome::Finished, None) => (running.expected_tokens, false),
            (LeaseOutcome::Continues, Some(group)) => (None, self.groups.grows(group, tokens)),
            (LeaseOutcome::GivenUp | LeaseOutcome::Aborted, Some(group)) => {
                (None, self.groups.leaves(group, running.request))
            }
            (LeaseOutcome::WorkerFailed, _) | (_, None) => (None, false),
        };
        if outcome == LeaseOutcome::Finished
            && let Some(expected_tokens) = running.expected_tokens
            && let Some(queue) = self.queue.pool_mut(&running.pool)
        {
            queue.estimates.note_history(expected_tokens, tokens);
        }
        if let Some(estimated_tokens) = estimate {
            effects.push(DispatchEffect::LengthLearned {
                estimated_tokens,
                tokens,
            });
        }
        if others_change && let Some(group) = group {
            self.rerank(group);
        }
    }
}
