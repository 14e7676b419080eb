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
//! Read on in `queue` (who is next), [`crate::placement`] (where), `granting` and `refusal` (what comes of it),
//! `turns` (who gives way), `leases` and `workers` (what is known).

pub(crate) mod actor;
mod event;
mod granting;
mod leases;
mod queue;
pub(crate) mod refusal;
mod turns;
mod workers;

#[cfg(test)]
mod properties;
#[cfg(test)]
mod scripts;

use std::collections::{BTreeSet, HashMap};

use refrain_protocol::scheduling::{
    Heartbeat, HeartbeatReply, LeaseFinish, LeaseOutcome, LeaseRequest, ServedModel,
};
use refrain_protocol::{ApiError, LeaseId, RequestId};

pub use self::event::{DispatchState, Effect, Event};
pub use self::leases::LeaseEnd;
pub use self::queue::{PoolState, TenantState, Ticket};
pub use self::refusal::Refusal;
pub use self::workers::WorkerState;

use self::leases::{LeaseTable, RunningLease};
use self::queue::{FairQueue, PoolKey, Waiting};
use self::workers::{Beat, WorkerTable};
use crate::config::SchedulerConfig;

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

    /// No deadline that the last event brought comes before this. Where a tick is due by then, [`Dispatch::due_ms`] need not be
    /// asked, which looks at every worker and lease.
    pub fn due_ms_min(&self) -> u64 {
        let config = &self.config;
        let soonest_ms = match self.queue.len() {
            0 => config.worker_ttl_ms.min(config.lease_ttl_ms),
            _ => config.tick_ms,
        };
        self.now_ms.saturating_add(soonest_ms)
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

    /// The state, for people who look at it now.
    pub fn observe(&self, now_ms: u64) -> DispatchState {
        DispatchState {
            draining: self.draining,
            queue_length: self.queue.len(),
            leases_running: self.leases.len(),
            leases_ended_remembered: self.leases.ended_len(),
            workers: self.workers.observe(self.now_ms.max(now_ms)),
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
            worker_ended_ms_ago,
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
                // died comes back later than a request has attempts. Its next report, or a chunk that it brings to its end
                // from now on, says that it lives, so that one request which the engine fails at holds the others up for
                // a heartbeat's time at most.
                self.workers.suspect(&running.worker, self.now_ms);
            } else {
                if let Some(ended_ms_ago) = worker_ended_ms_ago
                    && emitted_tokens > 0
                {
                    let ended_ms = self.now_ms.saturating_sub(ended_ms_ago);
                    self.workers.trust(&running.worker, ended_ms);
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
        let mut named = BTreeSet::new();
        for lease in heartbeat.running {
            if self.leases.renew(lease, &worker, self.now_ms) {
                named.insert(lease);
            // What ended a moment ago was still running when the heartbeat was written.
            } else if !self.leases.ended_within(lease, self.now_ms, grace_ms) {
                foreign.insert(lease);
            }
        }
        self.workers.set_foreign(&worker, foreign);
        let unnamed = |lease: &LeaseId| {
            self.leases.get(*lease).is_some_and(|running| {
                // What was to give way was named before, so it has: its reader may not read on for a long time.
                let has_given_way = running.gives_way && !named.contains(lease);
                has_given_way || self.now_ms >= running.seen_ms.saturating_add(grace_ms)
            })
        };
        let gone: Vec<LeaseId> = match self.workers.get_mut(&worker) {
            Some(worker) => worker.leases.iter().copied().filter(unnamed).collect(),
            None => Vec::new(),
        };
        for lease in gone {
            self.end(lease, LeaseEnd::Healed, false, effects);
        }
        let give_way = self.give_way(&worker, &named);
        Ok(HeartbeatReply {
            next_in_ms: self.next_beat_ms(&worker),
            fallback: self.workers.fallback(&worker),
            give_way,
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
}
