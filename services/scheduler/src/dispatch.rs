//! The dispatcher's core: queues, leases and the worker table, changed by one event at a time.
//!
//! [`Dispatch::apply`] takes what happened and the time, and returns what has to be done about it. It has no
//! clock and does no I/O, so a test is a list of events with made-up instants. Between two calls the
//! following holds:
//!
//! * no waiting request could be placed: whatever frees a slot also fills it;
//! * a worker holds at most as many leases as it had slots when the last of them was granted, where a lease
//!   counts from the grant on, not only once a heartbeat names it;
//! * a request has at most one lease and waits at most once;
//! * every submitted ticket is still waiting, or was answered exactly once, or was withdrawn.
//!
//! Read on in `queue` (who is next), [`crate::placement`] (where), `leases` and `workers` (what is known).

pub(crate) mod actor;
mod event;
mod leases;
mod queue;
pub(crate) mod refusal;
mod workers;

#[cfg(test)]
mod properties;
#[cfg(test)]
mod scripts;

use std::collections::{BTreeSet, HashMap};

use refrain_protocol::scheduling::{
    Heartbeat, HeartbeatReply, Lease, LeaseFinish, LeaseOutcome, LeaseRequest, ServedModel,
};
use refrain_protocol::{ApiError, LeaseId, RequestId, WorkerId};

pub use self::event::{DispatchState, Effect, Event};
pub use self::leases::LeaseEnd;
pub use self::queue::{PoolState, TenantState, Ticket};
pub use self::refusal::Refusal;
pub use self::workers::WorkerState;

use self::leases::{LeaseTable, RunningLease};
use self::queue::{FairQueue, PoolKey, Waiting};
use self::workers::{Beat, Headroom, WorkerTable};
use crate::config::SchedulerConfig;
use crate::placement::{Need, Placement, place};

/// Fencing epochs count in steps of a thousandth of the clock's millisecond, see [`Dispatch::epoch`].
const EPOCHS_PER_MS: u64 = 1_000;

/// Queues, leases and the worker table.
#[derive(Debug)]
pub struct Dispatch {
    config: SchedulerConfig,
    queue: FairQueue,
    leases: LeaseTable,
    workers: WorkerTable,
    /// The ticket that a request waits with.
    waiting_by_request: HashMap<RequestId, Ticket>,
    /// The epoch of the newest lease of all.
    epoch_last: u64,
    /// The latest time it was told: time never runs backwards in here.
    now_ms: u64,
    draining: bool,
}

impl Dispatch {
    /// Nobody waits, nobody is known. `now_ms` is in milliseconds since 1970, here and in
    /// [`Dispatch::apply`]. `epoch_last` is the newest epoch that a predecessor in this process granted: a
    /// rebuild can take less than the clock's millisecond, a restart of the process cannot, and passes 0.
    pub fn new(config: SchedulerConfig, now_ms: u64, epoch_last: u64) -> Self {
        Dispatch {
            queue: FairQueue::new(config.tenants_tracked_max),
            leases: LeaseTable::new(config.ended_leases_max),
            workers: WorkerTable::default(),
            waiting_by_request: HashMap::new(),
            epoch_last,
            now_ms,
            draining: false,
            config,
        }
    }

    /// Takes an event in and says what has to be done, in order.
    pub fn apply(&mut self, event: Event, now_ms: u64) -> Vec<Effect> {
        self.now_ms = self.now_ms.max(now_ms);
        let mut effects = Vec::new();
        match event {
            Event::Submit { ticket, request } => self.submit(ticket, request, &mut effects),
            Event::Withdraw { ticket } => {
                self.take_out(ticket);
            }
            Event::Undelivered { lease } => {
                self.end(lease, LeaseEnd::Undelivered, true, &mut effects);
                self.fill(&mut effects);
            }
            Event::Finish(finish) => {
                self.finish(finish, &mut effects);
                self.fill(&mut effects);
            }
            Event::Heartbeat(heartbeat) => {
                let answer = self.heartbeat(heartbeat, &mut effects);
                effects.push(Effect::Beat(answer));
                self.fill(&mut effects);
            }
            Event::Tick => self.tick(&mut effects),
            Event::Drain => self.drain(&mut effects),
        }
        effects
    }

    /// When [`Event::Tick`] is due, if nothing happens before: while somebody waits, soon, else when the first worker or
    /// lease may have been silent for too long. `None`: nothing here can run out.
    pub fn due_ms(&self) -> Option<u64> {
        if self.queue.len() > 0 {
            return Some(self.now_ms.saturating_add(self.config.tick_ms));
        }
        let worker = self.workers.heard_first_ms();
        let worker = worker.map(|heard| heard.saturating_add(self.config.worker_ttl_ms));
        let lease = self.leases.seen_first_ms();
        let lease = lease.map(|seen| seen.saturating_add(self.config.lease_ttl_ms));
        worker.into_iter().chain(lease).min()
    }

    /// Requests that wait.
    pub fn queue_length(&self) -> usize {
        self.queue.len()
    }

    /// Leases that run.
    pub fn leases_running(&self) -> usize {
        self.leases.len()
    }

    /// Workers that report.
    pub fn workers(&self) -> usize {
        self.workers.len()
    }

    /// The models that live workers serve.
    pub fn models(&self) -> Vec<ServedModel> {
        self.workers.models()
    }

    /// The state, for people.
    pub fn observe(&self) -> DispatchState {
        DispatchState {
            draining: self.draining,
            queue_length: self.queue.len(),
            leases_running: self.leases.len(),
            leases_ended_remembered: self.leases.ended_len(),
            workers: self.workers.observe(self.now_ms),
            pools: self.queue.observe(),
        }
    }

    fn submit(&mut self, ticket: Ticket, request: LeaseRequest, effects: &mut Vec<Effect>) {
        if self.draining {
            return effects.push(self.refuse(ticket, &request, Refusal::Draining));
        }
        if request.exclude.len() > self.config.exclude_max {
            return effects.push(self.refuse(ticket, &request, Refusal::ExcludeLimit));
        }
        // A request is in one place at a time. That it asks again means that whoever waited, or held the
        // lease, is gone: its answer got lost, or its `finish` is still on the way.
        if let Some(earlier) = self.waiting_by_request.get(&request.request).copied()
            && let Some(waiting) = self.take_out(earlier)
        {
            effects.push(self.refuse(earlier, &waiting.request, Refusal::Superseded));
        }
        if let Some(lease) = self.leases.of_request(request.request) {
            self.end(lease, LeaseEnd::Superseded, false, effects);
        }

        let pool = PoolKey::of(&request);
        let tenant = request.namespace.namespace.tenant.clone();
        self.waiting_by_request.insert(request.request, ticket);
        self.queue.push(ticket, request, self.now_ms);
        self.fill(effects);
        if !self.queue.contains(ticket) {
            return;
        }
        let headroom = self.workers.headroom(&pool);
        self.mark_stranded(ticket, headroom);
        // The limits are looked at last, so that a full queue of one model does not refuse what an idle
        // worker of another can take.
        let refusal = if self.queue.len() > self.config.queue_max {
            Refusal::QueueFull
        } else if self.queue.waiting_of_tenant(&tenant) > self.config.tenant_queue_max {
            Refusal::TenantQueueFull
        } else {
            return;
        };
        self.refuse_waiting(ticket, refusal, effects);
    }

    fn finish(&mut self, finish: LeaseFinish, effects: &mut Vec<Effect>) {
        let LeaseFinish {
            lease,
            outcome,
            emitted_tokens,
        } = finish;
        if let Some(running) = self.end(lease, LeaseEnd::Finished(outcome), true, effects) {
            self.queue.settle(
                &running.pool,
                &running.tenant,
                running.charge,
                emitted_tokens,
            );
            if outcome == LeaseOutcome::WorkerFailed {
                // Its slot is free on paper; without this the next request would be sent there to fail too, and being idle
                // it would be preferred to those that work. It is waited for even where there is no other: one that has
                // died comes back later than a request has attempts. Its next report, or an output that it brings to
                // its end, says that it lives, so that one request which the engine fails at holds the others up for
                // a heartbeat's time at most.
                self.workers.suspect(&running.worker);
            } else {
                if outcome == LeaseOutcome::Done && emitted_tokens > 0 {
                    self.workers.trust(&running.worker);
                }
                let held_ms = self.now_ms.saturating_sub(running.granted_ms);
                self.queue.note_service(&running.pool, held_ms);
            }
        } else if let Some((pool, tenant, charge)) = self.leases.settle_ended(lease) {
            self.queue.settle(&pool, &tenant, charge, emitted_tokens);
        } else if self.workers.end_foreign(lease) {
            self.leases.end_foreign(lease, self.now_ms);
        }
    }

    fn heartbeat(
        &mut self,
        heartbeat: Heartbeat,
        effects: &mut Vec<Effect>,
    ) -> Result<HeartbeatReply, ApiError> {
        let worker = heartbeat.worker.clone();
        match self.workers.beat(&heartbeat, &self.config, self.now_ms)? {
            Beat::Same => {}
            Beat::Joined => effects.push(Effect::WorkerJoined(worker.clone())),
            Beat::Restarted(lost) => {
                effects.push(Effect::WorkerRestarted(worker.clone()));
                for lease in lost {
                    self.end(lease, LeaseEnd::WorkerLost, false, effects);
                }
            }
        }
        let grace_ms = self.config.lease_grace_ms;
        let mut foreign = BTreeSet::new();
        for lease in heartbeat.running {
            // What ended a moment ago was still running when the heartbeat was written.
            if !self.leases.renew(lease, &worker, self.now_ms)
                && !self.leases.ended_within(lease, self.now_ms, grace_ms)
            {
                foreign.insert(lease);
            }
        }
        self.workers.set_foreign(&worker, foreign);
        let unnamed = |lease: &LeaseId| {
            self.leases
                .get(*lease)
                .is_some_and(|running| self.now_ms >= running.seen_ms.saturating_add(grace_ms))
        };
        let gone: Vec<LeaseId> = match self.workers.get_mut(&worker) {
            Some(worker) => worker.leases.iter().copied().filter(unnamed).collect(),
            None => Vec::new(),
        };
        for lease in gone {
            self.end(lease, LeaseEnd::Healed, false, effects);
        }
        Ok(HeartbeatReply {
            next_in_ms: self.config.heartbeat_interval_ms,
            fallback: self.workers.fallback(&worker),
        })
    }

    fn tick(&mut self, effects: &mut Vec<Effect>) {
        for (worker, lost) in self
            .workers
            .remove_silent(self.now_ms, self.config.worker_ttl_ms)
        {
            effects.push(Effect::WorkerLost(worker));
            for lease in lost {
                self.end(lease, LeaseEnd::WorkerLost, false, effects);
            }
        }
        for lease in self
            .leases
            .silent_for(self.now_ms, self.config.lease_ttl_ms)
        {
            self.end(lease, LeaseEnd::Expired, false, effects);
        }
        self.fill(effects);
        self.refuse_late(effects);
        self.queue.forget_pools(|pool| self.workers.serves(pool));
    }

    fn drain(&mut self, effects: &mut Vec<Effect>) {
        self.draining = true;
        for ticket in self.queue.tickets() {
            self.refuse_waiting(ticket, Refusal::Draining, effects);
        }
    }

    /// Refuses those that have waited long enough.
    fn refuse_late(&mut self, effects: &mut Vec<Effect>) {
        for pool in self.queue.pools_waiting() {
            let headroom = self.workers.headroom(&pool);
            let tickets: Vec<Ticket> = self
                .queue
                .in_order(&pool)
                .map(|(ticket, _)| ticket)
                .collect();
            for ticket in tickets {
                let stranded_since_ms = self.mark_stranded(ticket, headroom);
                let Some(waiting) = self.queue.get(ticket) else {
                    continue;
                };
                let waited_ms = self.now_ms.saturating_sub(waiting.submitted_ms);
                let stranded_ms = stranded_since_ms.map(|since| self.now_ms.saturating_sub(since));
                if stranded_ms.is_some_and(|stranded| stranded >= self.config.worker_wait_ms) {
                    self.refuse_waiting(ticket, Refusal::NoWorker, effects);
                } else if waited_ms >= self.config.queue_wait_ms_max {
                    self.refuse_waiting(ticket, Refusal::QueueWait, effects);
                }
            }
        }
    }

    /// Notes whether any live worker could serve a waiting request, full or not. Returns since when none can.
    fn mark_stranded(&mut self, ticket: Ticket, headroom: Headroom) -> Option<u64> {
        let waiting = self.queue.get(ticket)?;
        let stranded = if waiting.request.exclude.is_empty() {
            waiting.request.context_tokens >= headroom.open_context_max
        } else {
            self.place(waiting) == Placement::Nobody
        };
        let now_ms = self.now_ms;
        let waiting = self.queue.get_mut(ticket)?;
        waiting.stranded_since_ms = stranded.then(|| waiting.stranded_since_ms.unwrap_or(now_ms));
        waiting.stranded_since_ms
    }

    /// Grants leases until no waiting request can be placed.
    fn fill(&mut self, effects: &mut Vec<Effect>) {
        for pool in self.queue.pools_waiting() {
            while let Some((ticket, worker)) = self.next_grant(&pool) {
                self.grant(ticket, worker, effects);
            }
        }
    }

    /// The first request of a pool, in order, for which there is a slot.
    fn next_grant(&self, pool: &PoolKey) -> Option<(Ticket, WorkerId)> {
        let free_context_max = self.workers.headroom(pool).free_context_max;
        if free_context_max == 0 {
            return None;
        }
        self.queue
            .in_order(pool)
            // Cheap, and spares most of a long queue the look at every worker.
            .filter(|(_, waiting)| waiting.request.context_tokens < free_context_max)
            .find_map(|(ticket, waiting)| match self.place(waiting) {
                Placement::On(worker) => Some((ticket, worker.clone())),
                Placement::Full | Placement::Nobody => None,
            })
    }

    fn place(&self, waiting: &Waiting) -> Placement<'_> {
        let request = &waiting.request;
        let need = Need {
            model: &request.namespace.namespace.model,
            tokenizer: &request.namespace.namespace.tokenizer,
            context_tokens: request.context_tokens,
            prefer: request.prefer.as_ref(),
            handed_over: request.handed_over,
            exclude: &request.exclude,
            submitted_ms: waiting.submitted_ms,
        };
        place(
            self.workers.candidates(),
            &need,
            self.config.prefer_load_slack,
        )
    }

    fn grant(&mut self, ticket: Ticket, worker: WorkerId, effects: &mut Vec<Effect>) {
        let epoch = self.epoch();
        let Some(url) = self.workers.url(&worker).map(str::to_owned) else {
            return;
        };
        let reads_context = self.queue.get(ticket).is_none_or(|waiting| {
            let request = &waiting.request;
            request.handed_over || request.prefer.as_ref() != Some(&worker)
        });
        let Some((waiting, charge)) = self.queue.take(ticket, reads_context) else {
            return;
        };
        let request = waiting.request;
        self.waiting_by_request.remove(&request.request);
        // Unique because epochs are; the low half tells a reader of logs which request it was.
        let lease = LeaseId((u128::from(epoch) << 64) | (request.request.0 & u128::from(u64::MAX)));
        let pool = PoolKey::of(&request);
        self.leases.insert(
            lease,
            RunningLease {
                request: request.request,
                worker: worker.clone(),
                pool,
                tenant: request.namespace.namespace.tenant,
                charge,
                granted_ms: self.now_ms,
                seen_ms: self.now_ms,
            },
        );
        if let Some(worker) = self.workers.get_mut(&worker) {
            worker.leases.insert(lease);
        }
        effects.push(Effect::Grant {
            ticket,
            waited_ms: self.now_ms.saturating_sub(waiting.submitted_ms),
            lease: Lease {
                lease,
                epoch,
                worker,
                url,
                ttl_ms: self.config.lease_ttl_ms,
            },
        });
    }

    /// The next fencing epoch. One count serves all requests: what grows over all leases grows over those of
    /// each request, and there is nothing to remember per request. It follows the clock, so that it goes on
    /// growing after a restart, which remembers nothing; at fewer than a million leases a second it never
    /// runs ahead of it.
    fn epoch(&mut self) -> u64 {
        let clock = self.now_ms.saturating_mul(EPOCHS_PER_MS);
        self.epoch_last = clock.max(self.epoch_last.saturating_add(1));
        self.epoch_last
    }

    /// Ends a running lease. `settled`: its tokens are known, a later `finish` counts none.
    fn end(
        &mut self,
        lease: LeaseId,
        end: LeaseEnd,
        settled: bool,
        effects: &mut Vec<Effect>,
    ) -> Option<RunningLease> {
        let running = self.leases.end(lease, self.now_ms, settled)?;
        if let Some(worker) = self.workers.get_mut(&running.worker) {
            worker.leases.remove(&lease);
        }
        self.queue.ended(&running.pool, &running.tenant);
        effects.push(Effect::LeaseEnded {
            lease,
            worker: running.worker.clone(),
            end,
        });
        Some(running)
    }

    fn take_out(&mut self, ticket: Ticket) -> Option<Waiting> {
        let waiting = self.queue.remove(ticket)?;
        self.waiting_by_request.remove(&waiting.request.request);
        Some(waiting)
    }

    fn refuse_waiting(&mut self, ticket: Ticket, refusal: Refusal, effects: &mut Vec<Effect>) {
        if let Some(waiting) = self.take_out(ticket) {
            effects.push(self.refuse(ticket, &waiting.request, refusal));
        }
    }

    fn refuse(&self, ticket: Ticket, request: &LeaseRequest, refusal: Refusal) -> Effect {
        let pool = PoolKey::of(request);
        let error = refusal.error(request, &self.config, self.turn_in_ms(&pool));
        Effect::Reject {
            ticket,
            error,
            refusal,
        }
    }

    /// When a request that came now would have its turn: the queue ahead of it, at the pace of recent chunks.
    fn turn_in_ms(&self, pool: &PoolKey) -> u64 {
        let slots = self.workers.headroom(pool).slots.max(1);
        let ahead = self.queue.waiting_in_pool(pool) + 1;
        let turn_in_ms = ahead as f64 * self.queue.service_ms(pool) / slots as f64;
        (turn_in_ms as u64).clamp(1, self.config.retry_after_ms_max)
    }
}
