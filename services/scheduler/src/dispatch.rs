//! The core of the scheduler: queue, leases and worker table, changed by one event at a time.
//!
//! [`Dispatch::apply`] takes an event and the time, and returns the effects that the caller has to carry out. It has
//! no clock and does no I/O, so a test is a list of events with made-up instants. Between two calls, these invariants
//! hold:
//!
//! * No waiting request could be placed: every event that frees a slot also fills it.
//! * A worker holds at most as many leases as it had slots when the last of them was granted. A lease counts from its
//!   grant, before any heartbeat names it.
//! * A request has at most one lease, and waits at most once.
//! * Every submitted call still waits, was answered exactly once, or was withdrawn.
//!
//! `fair_queue` keeps the order of waiting requests, and [`crate::placement`] chooses a worker. `granting`,
//! `refusing` and `preemption` are further methods of [`Dispatch`]. `lease_table` and `worker_table` are its state.

mod events;
mod fair_queue;
mod granting;
mod lease_table;
mod pool_key;
mod preemption;
mod refusal;
mod refusing;
mod worker_table;

#[cfg(test)]
mod property_tests;
#[cfg(test)]
mod script_tests;

use std::collections::{BTreeSet, HashMap};

use refrain_protocol::scheduling::{
    Heartbeat, HeartbeatReply, LeaseFinish, LeaseOutcome, LeaseRequest, ServedModel,
};
use refrain_protocol::{ApiError, LeaseId, RequestId};

pub use self::events::{DispatchEffect, DispatchEvent, DispatchState};
pub use self::fair_queue::{LeaseCallId, PoolState};
pub use self::lease_table::LeaseEnd;
pub use self::refusal::LeaseRefusal;
pub(crate) use self::refusal::scheduler_unavailable;
pub use self::worker_table::WorkerState;

use self::fair_queue::{FairQueue, WaitingRequest};
use self::lease_table::{LeaseTable, RunningLease};
use self::pool_key::PoolKey;
use self::refusal::EXCLUDE_MAX;
use self::worker_table::{Registration, WorkerTable};
use crate::config::SchedulerConfig;

/// How often deadlines are checked while requests wait. A deadline is late by at most this time.
const TICK_MS: u64 = 100;

/// Queue, leases and worker table.
#[derive(Debug)]
pub struct Dispatch {
    config: SchedulerConfig,
    queue: FairQueue,
    leases: LeaseTable,
    workers: WorkerTable,
    /// The call with which each request waits.
    waiting_by_request: HashMap<RequestId, LeaseCallId>,
    /// The epoch of the newest lease.
    epoch_last: u64,
    /// The latest time of all events, so that time never runs backwards here.
    now_ms: u64,
    draining: bool,
}

impl Dispatch {
    /// Creates a core without requests and workers.
    ///
    /// All times are milliseconds since 1970. `epoch_last` is the newest epoch that a predecessor in this process
    /// granted: a rebuild can take less than a millisecond of the clock. A new process passes 0, since no process
    /// restarts that fast.
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

    /// Applies an event. Returns the effects to carry out, in order.
    pub fn apply(&mut self, event: DispatchEvent, now_ms: u64) -> Vec<DispatchEffect> {
        self.now_ms = self.now_ms.max(now_ms);
        let mut effects = Vec::new();
        match event {
            DispatchEvent::Submit { call, request } => self.submit(call, request, &mut effects),
            DispatchEvent::Withdraw { call } => {
                self.take_out(call);
            }
            DispatchEvent::Undelivered { lease } => {
                self.end(lease, LeaseEnd::Undelivered, true, &mut effects);
                self.grant_all(&mut effects);
            }
            DispatchEvent::Finish(finish) => {
                self.finish(finish, &mut effects);
                self.grant_all(&mut effects);
            }
            DispatchEvent::Heartbeat(heartbeat) => {
                let answer = self.heartbeat(heartbeat, &mut effects);
                effects.push(DispatchEffect::HeartbeatAnswer(answer));
                self.grant_all(&mut effects);
            }
            DispatchEvent::Tick => self.tick(&mut effects),
            DispatchEvent::Drain => self.drain(&mut effects),
        }
        effects
    }

    /// When the next [`DispatchEvent::Tick`] is due if no other event comes first. While requests wait it is due
    /// soon. Otherwise it is due when the first worker or lease may have been silent for too long. `None` means that
    /// nothing can time out.
    pub fn due_ms(&self) -> Option<u64> {
        if self.queue.len() > 0 {
            return Some(self.now_ms.saturating_add(TICK_MS));
        }
        let worker = self.workers.oldest_heartbeat_ms();
        let worker = worker.map(|reported| reported.saturating_add(self.config.worker_ttl_ms));
        let lease = self.leases.oldest_seen_ms();
        let lease = lease.map(|seen| seen.saturating_add(self.config.lease_ttl_ms));
        worker.into_iter().chain(lease).min()
    }

    /// A lower bound of any deadline that the last event added. If a tick is due by then, there is no need to call
    /// [`Dispatch::due_ms`], which looks at every worker and lease.
    pub fn due_ms_min(&self) -> u64 {
        let config = &self.config;
        let soonest_ms = match self.queue.len() {
            0 => config.worker_ttl_ms.min(config.lease_ttl_ms),
            _ => TICK_MS,
        };
        self.now_ms.saturating_add(soonest_ms)
    }

    /// Requests that wait.
    pub fn queue_length(&self) -> usize {
        self.queue.len()
    }

    /// Leases that are held.
    pub fn leases_running(&self) -> usize {
        self.leases.len()
    }

    /// Live workers.
    pub fn workers(&self) -> usize {
        self.workers.len()
    }

    /// The models that live workers serve.
    pub fn models(&self) -> Vec<ServedModel> {
        self.workers.models()
    }

    /// A snapshot of the state at `now_ms`.
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

    fn submit(
        &mut self,
        call: LeaseCallId,
        request: LeaseRequest,
        effects: &mut Vec<DispatchEffect>,
    ) {
        if self.draining {
            return effects.push(self.refuse(call, &request, LeaseRefusal::Draining));
        }
        if request.exclude.len() > EXCLUDE_MAX {
            return effects.push(self.refuse(call, &request, LeaseRefusal::ExcludeLimit));
        }
        // A request is in one place at a time. If it asks again, its earlier caller or holder is gone: either the
        // answer was lost, or the `finish` is still on its way.
        if let Some(earlier) = self.waiting_by_request.get(&request.request).copied()
            && let Some(waiting) = self.take_out(earlier)
        {
            effects.push(self.refuse(earlier, &waiting.request, LeaseRefusal::Superseded));
        }
        if let Some(lease) = self.leases.of_request(request.request) {
            self.end(lease, LeaseEnd::Superseded, false, effects);
        }

        let pool = PoolKey::of_request(&request);
        let tenant = request.namespace.namespace.tenant.clone();
        self.waiting_by_request.insert(request.request, call);
        self.queue.push(call, request, self.now_ms);
        self.grant_all(effects);
        if !self.queue.contains(call) {
            return;
        }
        let headroom = self.workers.headroom(&pool);
        self.mark_stranded(call, headroom);
        // The limits are checked last: a full queue of one model must not refuse a request that an idle worker of
        // another model can take.
        let refusal = if self.queue.len() > self.config.queue_max {
            LeaseRefusal::QueueFull
        } else if self.queue.waiting_of_tenant(&tenant) > self.config.tenant_queue_max {
            LeaseRefusal::TenantQueueFull
        } else {
            return;
        };
        self.refuse_waiting(call, refusal, effects);
    }

    fn finish(&mut self, finish: LeaseFinish, effects: &mut Vec<DispatchEffect>) {
        let LeaseFinish {
            lease,
            outcome,
            emitted_tokens,
            worker_ended_ms_ago,
            cached_tokens: _,
        } = finish;
        if let Some(running) = self.end(lease, LeaseEnd::Finished(outcome), true, effects) {
            if let Some(pool) = self.queue.pool_mut(&running.pool) {
                pool.settle(&running.tenant, running.charge, emitted_tokens);
                if outcome != LeaseOutcome::WorkerFailed {
                    pool.note_service(self.now_ms.saturating_sub(running.granted_ms));
                }
            }
            let Some(worker) = self.workers.get_mut(&running.worker) else {
                return;
            };
            if outcome == LeaseOutcome::WorkerFailed {
                // The worker's slot is free on paper. Without this mark, the next request would be sent there to fail
                // as well, since an idle worker is preferred to busy ones. Requests wait for it even if there is no
                // other worker: a dead worker comes back later than a request's attempts last. Its next heartbeat
                // clears the mark, and so does a chunk that it completes from now on. So a request on which the
                // engine always fails delays the other requests by one heartbeat at most.
                worker.suspect(self.now_ms);
            } else if let Some(ended_ms_ago) = worker_ended_ms_ago
                && emitted_tokens > 0
            {
                worker.trust(self.now_ms.saturating_sub(ended_ms_ago));
            }
        } else if let Some((pool, tenant, charge)) = self.leases.settle_ended(lease) {
            if let Some(pool) = self.queue.pool_mut(&pool) {
                pool.settle(&tenant, charge, emitted_tokens);
            }
        } else if self.workers.end_foreign(lease) {
            self.leases.remember_ended(lease, self.now_ms, None);
        }
    }

    fn heartbeat(
        &mut self,
        heartbeat: Heartbeat,
        effects: &mut Vec<DispatchEffect>,
    ) -> Result<HeartbeatReply, ApiError> {
        let worker = heartbeat.worker.clone();
        match self
            .workers
            .register(&heartbeat, &self.config, self.now_ms)?
        {
            Registration::Renewed => {}
            Registration::Joined => effects.push(DispatchEffect::WorkerJoined(worker.clone())),
            Registration::Restarted(lost) => {
                effects.push(DispatchEffect::WorkerRestarted(worker.clone()));
                for lease in lost {
                    self.end(lease, LeaseEnd::WorkerLost, false, effects);
                }
            }
        }
        let grace_ms = self.config.lease_grace_ms();
        let mut foreign = BTreeSet::new();
        let mut reported = BTreeSet::new();
        for lease in heartbeat.running {
            if self.leases.renew(lease, &worker, self.now_ms) {
                reported.insert(lease);
            // A lease that ended a moment ago was still running when the worker wrote the heartbeat.
            } else if !self.leases.ended_within(lease, self.now_ms, grace_ms) {
                foreign.insert(lease);
            }
        }
        let has_ended = |lease: &LeaseId| {
            self.leases.get(*lease).is_some_and(|running| {
                // An earlier heartbeat named a preempted lease, so it has ended once it is missing. Its `finish` may
                // take long, because its reader may not read on.
                let was_preempted = running.preempted && !reported.contains(lease);
                was_preempted || self.now_ms >= running.last_seen_ms.saturating_add(grace_ms)
            })
        };
        let mut ended: Vec<LeaseId> = Vec::new();
        if let Some(worker) = self.workers.get_mut(&worker) {
            worker.foreign = foreign;
            ended.extend(worker.leases.iter().copied().filter(has_ended));
        }
        for lease in ended {
            self.end(lease, LeaseEnd::Healed, false, effects);
        }
        let give_way = self.preempt(&worker, &reported);
        Ok(HeartbeatReply {
            next_in_ms: self.next_heartbeat_in_ms(&worker),
            fallback: self.workers.fallback(&worker),
            give_way,
        })
    }

    fn tick(&mut self, effects: &mut Vec<DispatchEffect>) {
        for (worker, lost) in self
            .workers
            .remove_silent(self.now_ms, self.config.worker_ttl_ms)
        {
            effects.push(DispatchEffect::WorkerLost(worker));
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
        self.grant_all(effects);
        self.refuse_expired(effects);
        self.queue.forget_pools(|pool| self.workers.serves(pool));
    }

    fn drain(&mut self, effects: &mut Vec<DispatchEffect>) {
        self.draining = true;
        for call in self.queue.calls() {
            self.refuse_waiting(call, LeaseRefusal::Draining, effects);
        }
    }

    /// Ends a running lease. `settled` says that its tokens are known, so that a later `finish` counts none.
    fn end(
        &mut self,
        lease: LeaseId,
        end: LeaseEnd,
        settled: bool,
        effects: &mut Vec<DispatchEffect>,
    ) -> Option<RunningLease> {
        let running = self.leases.end(lease, self.now_ms, settled)?;
        if let Some(worker) = self.workers.get_mut(&running.worker) {
            worker.leases.remove(&lease);
        }
        if let Some(pool) = self.queue.pool_mut(&running.pool) {
            pool.chunk_ended(&running.tenant);
        }
        effects.push(DispatchEffect::LeaseEnded {
            lease,
            worker: running.worker.clone(),
            end,
        });
        Some(running)
    }

    fn take_out(&mut self, call: LeaseCallId) -> Option<WaitingRequest> {
        let waiting = self.queue.remove(call)?;
        self.waiting_by_request.remove(&waiting.request.request);
        Some(waiting)
    }
}
