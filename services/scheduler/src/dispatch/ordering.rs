//! Keeps the ranks of waiting rollouts in step with what is known about lengths and drafts.

use refrain_protocol::scheduling::{LeaseFinish, LeaseOutcome, LeaseRequest, RequestClass};

use super::Dispatch;
use super::events::DispatchEffect;
use super::fair_queue::{LeaseCallId, Place, WaitingRequest};
use super::group_key::GroupKey;
use super::lease_table::RunningLease;
use super::pool_key::PoolKey;
use crate::config::OrderPolicy;
use crate::order::{Evidence, Facts, Pays, Rank, rank};

impl Dispatch {
    /// The group and the rank of a request that is about to wait.
    pub(super) fn enters_line(
        &mut self,
        request: &LeaseRequest,
        pool: &PoolKey,
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
        let policy = self.config.order;
        if policy == OrderPolicy::Arrival {
            return (group, Rank::default());
        }
        let facts = self.facts(request, group.as_ref(), place);
        let window_ms = self.windows.of(place.arrival.ms);
        let rank = rank(policy, self.pays(pool), window_ms, &facts);
        (group, rank)
    }

    /// The orders that pay, by what was seen in the pool.
    fn pays(&self, pool: &PoolKey) -> Pays {
        let pool = self.queue.pool(pool);
        pool.map_or_else(|| Evidence::default().pays(), |pool| pool.evidence.pays())
    }

    fn facts(&self, request: &LeaseRequest, group: Option<&GroupKey>, place: Place) -> Facts {
        let of = group.map(|group| self.groups.look_up(group, request.request, place));
        Facts {
            generated_tokens: request.generated_tokens,
            max_new_tokens: request.max_new_tokens,
            expected_tokens: request.expected_tokens,
            is_probe: of.is_some_and(|of| of.is_probe),
            group: of.map(|of| of.lengths),
            number: of.map_or(0, |of| of.number),
        }
    }

    /// Ranks the waiting members of a group anew.
    fn rerank(&mut self, group: &GroupKey) {
        if self.config.order == OrderPolicy::Arrival {
            return;
        }
        let calls: Vec<LeaseCallId> = self.groups.waiting(group).map(|place| place.call).collect();
        self.rerank_calls(calls);
    }

    fn rerank_calls(&mut self, calls: Vec<LeaseCallId>) {
        for call in calls {
            let Some(waiting) = self.queue.get(call) else {
                continue;
            };
            if waiting.request.class == RequestClass::Interactive {
                continue;
            }
            let facts = self.facts(&waiting.request, waiting.group.as_ref(), waiting.place);
            let pays = self.pays(&waiting.pool);
            let window_ms = self.windows.of(waiting.place.arrival.ms);
            let rank = rank(self.config.order, pays, window_ms, &facts);
            self.queue.rerank(call, rank);
        }
    }

    /// Notes evidence. All waiting rollouts of the pool get new ranks where it changes their order, which is seldom.
    fn note(&mut self, pool: &PoolKey, note: impl FnOnce(&mut Evidence)) {
        let Some(queue) = self.queue.pool_mut(pool) else {
            return;
        };
        let before = queue.evidence.pays();
        note(&mut queue.evidence);
        if self.config.order == OrderPolicy::Auto && queue.evidence.pays() != before {
            self.rerank_calls(self.queue.calls_in(pool));
        }
    }

    /// A waiting request gets its lease. Returns the facts by which it was ordered.
    pub(super) fn starts(&mut self, waiting: &WaitingRequest) -> Facts {
        let request = &waiting.request;
        let facts = self.facts(request, waiting.group.as_ref(), waiting.place);
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
        finish: &LeaseFinish,
        effects: &mut Vec<DispatchEffect>,
    ) {
        if running.class == RequestClass::Interactive {
            return;
        }
        let (outcome, emitted_tokens) = (finish.outcome, finish.emitted_tokens);
        let accepted_tokens = finish.accepted_tokens;
        let tokens = running.generated_tokens.saturating_add(emitted_tokens);
        let group = running.group.as_ref();
        if group.is_some() {
            self.note(&running.pool, |evidence| {
                evidence.note_chunk(running.had_reference, emitted_tokens, accepted_tokens);
            });
        }
        let (estimate, others_change) = match (outcome, group) {
            (LeaseOutcome::Finished, Some(group)) => {
                let finish = self.groups.finishes(group, running.request, tokens);
                if let Some((first, second)) = finish.siblings {
                    self.note(&running.pool, |evidence| {
                        evidence.note_siblings(first, second);
                    });
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
        {
            self.note(&running.pool, |evidence| {
                evidence.note_history(expected_tokens, tokens);
            });
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
