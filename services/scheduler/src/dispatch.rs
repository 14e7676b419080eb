//! The core of the scheduler: queue, leases and worker table, changed by one event at a time.
//!
//! [`Dispatch::apply`] takes an event and the time, and returns the effects that the caller has to carry out. It has
//! no clock and does no I/O, so a test is a list of events with made-up instants. Between two calls, these invariants
//! hold:
//!
//! * No waiting request could be placed: every event that frees a slot also fills it. Three bounds limit this. Only
//!   the first dozens of each line that have room in some KV cache are looked at. A worker can be kept free for a
//!   request that needs much of its KV cache. And a long line waits for more workers after the first one has
//!   reported.
//! * A worker holds at most as many leases as it had slots when the last of them was granted. A lease counts from its
//!   grant, before any heartbeat names it.
//! * The leases of a worker plan for no more KV tokens than it had when the last of them was granted, or there is
//!   only one.
//! * A request has at most one lease, and waits at most once.
//! * Every submitted call still waits, was answered exactly once, or was withdrawn.
//!
//! `fair_queue` keeps the order of waiting requests, in which `ordering` keeps rollouts by [`crate::order`], and
//! [`crate::placement`] chooses a worker. `granting`, `refusing` and `preemption` are further methods of
//! [`Dispatch`]. `lease_table`, `worker_table` and `groups` are its state.

mod events;
mod fair_queue;
mod granting;
mod group_key;
mod groups;
mod lease_table;
mod live_worker;
mod ordering;
mod pool_key;
mod preemption;
mod refusal;
mod refusing;
mod worker_table;

#[cfg(test)]
mod fairness_tests;
#[cfg(test)]
mod property_tests;
#[cfg(test)]
mod script_tests;
#[cfg(test)]
mod simulation_tests;

use std::collections::{BTreeSet, HashMap};

use lru::LruCache;
use refrain_protocol::prefix::PREFIXES_MAX;
use refrain_protocol::scheduling::{
    Heartbeat, HeartbeatReply, LeaseFinish, LeaseOutcome, LeaseRequest, RequestClass, ServedModel,
    WorkerReport,
};
use refrain_protocol::{ApiError, LeaseId, RequestId, WorkerId};

pub use self::events::{DispatchEffect, DispatchEvent, DispatchState, Placed};
pub use self::fair_queue::{LeaseCallId, PoolState};
pub use self::lease_table::LeaseEnd;
pub use self::refusal::LeaseRefusal;
pub(crate) use self::refusal::scheduler_unavailable;
pub use self::worker_table::WorkerState;

use self::fair_queue::{Arrival, FairQueue, Place, Spent, WaitingRequest};
use self::groups::GroupTable;
use self::lease_table::{LeaseTable, RunningLease, epoch_of};
use self::pool_key::PoolKey;
use self::refusal::EXCLUDE_MAX;
use self::worker_table::{Registration, WorkerTable};
use crate::config::SchedulerConfig;
use crate::order::Windows;
use crate::placement::{PrefixTable, SessionHomes};

/// How often deadlines are checked while requests wait. A deadline is late by at most this time.
const TICK_MS: u64 = 100;

/// Queue, leases and worker table.
#[derive(Debug)]
pub struct Dispatch {
    config: SchedulerConfig,
    queue: FairQueue,
    leases: LeaseTable,
    workers: WorkerTable,
    groups: GroupTable,
    windows: Windows,
    prefixes: PrefixTable,
    sessions: SessionHomes,
    /// The call with which each request waits.
    waiting_by_request: HashMap<RequestId, LeaseCallId>,
    /// When the requests first asked that hold no lease now and may ask again.
    arrivals: LruCache<RequestId, Arrival>,
    /// The highest epoch that was granted, here or, as far as is known, by an earlier process.
    epoch_last: u64,
    /// Number of leases with an epoch of their own, far ahead of the clock.
    far_grants: u64,
    /// The latest time of all events, so that time never runs backwards here.
    now_ms: u64,
    draining: bool,
}

impl Dispatch {
    /// Creates a core without requests and workers.
    ///
    /// All times are milliseconds since 1970. `epoch_last` is the newest epoch that a predecessor in this process
    /// granted: a rebuild can take less than a millisecond of the clock. A new process passes 0, and learns the
    /// epochs of earlier ones from workers and gateways.
    pub fn new(config: SchedulerConfig, now_ms: u64, epoch_last: u64) -> Self {
        Dispatch {
            queue: FairQueue::new(&config),
            groups: GroupTable::new(config.groups_tracked_max),
            windows: Windows::new(config.overtake_ms_max),
            prefixes: PrefixTable::new(config.prefixes_tracked_max),
            sessions: SessionHomes::new(config.sessions_tracked_max),
            leases: LeaseTable::new(config.ended_leases_max),
            workers: WorkerTable::default(),
            waiting_by_request: HashMap::new(),
            arrivals: LruCache::unbounded(),
            epoch_last,
            far_grants: 0,
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
                self.mark_all_stranded();
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

    /// Requests of a class that wait.
    pub fn waiting(&self, class: RequestClass) -> usize {
        self.queue.waiting_of_class(class)
    }

    /// Groups whose lengths are remembered.
    pub fn groups_tracked(&self) -> usize {
        self.groups.len()
    }

    /// Prefixes that are known to lie on some worker.
    pub fn prefixes_tracked(&self) -> usize {
        self.prefixes.len()
    }

    /// Named sessions whose worker is remembered.
    pub fn sessions_tracked(&self) -> usize {
        self.sessions.len()
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

    /// The live workers at `now_ms`, for operators.
    pub fn worker_reports(&self, now_ms: u64) -> Vec<WorkerReport> {
        self.workers.reports(self.now_ms.max(now_ms))
    }

    /// A snapshot of the state at `now_ms`.
    pub fn observe(&self, now_ms: u64) -> DispatchState {
        DispatchState {
            draining: self.draining,
            queue_length: self.queue.len(),
            leases_running: self.leases.len(),
            leases_ended_remembered: self.leases.ended_len(),
            groups_tracked: self.groups.len(),
            prefixes_tracked: self.prefixes.len(),
            sessions_tracked: self.sessions.len(),
            workers: self.workers.observe(self.now_ms.max(now_ms)),
            pools: self.queue.observe(),
        }
    }

    fn submit(
        &mut self,
        call: LeaseCallId,
        mut request: LeaseRequest,
        effects: &mut Vec<DispatchEffect>,
    ) {
        self.note_epoch(request.epoch_seen);
        // One call ends a chunk and asks for the next. Nobody gets the slot in between: the request may be the next
        // in line itself.
        if let Some(ended) = request.ended.take() {
            let held_by = self.leases.get(ended.lease);
            if request.prefer.is_none() && ended.outcome == LeaseOutcome::Continues {
                request.prefer = held_by.map(|running| running.worker.clone());
            }
            self.finish(ended, effects);
        }
        let refusal = if self.draining {
            Some(LeaseRefusal::Draining)
        } else if request.exclude.len() > EXCLUDE_MAX {
            Some(LeaseRefusal::ExcludeLimit)
        } else if request.prefixes.len() > PREFIXES_MAX {
            Some(LeaseRefusal::PrefixLimit)
        } else {
            None
        };
        if let Some(refusal) = refusal {
            effects.push(self.refuse(call, &request, refusal));
            return self.grant_all(effects);
        }
        // A request is in one place at a time. If it asks again, its earlier caller or holder is gone: either the
        // answer was lost, or the `finish` is still on its way. Calls that arrived while this process stood still are
        // taken in any order, so the later one may already be here.
        let earlier = self.waiting_by_request.get(&request.request).copied();
        if self
            .newest_age_ms(&request, earlier)
            .is_some_and(|age_ms| request.age_ms < age_ms)
        {
            effects.push(self.refuse(call, &request, LeaseRefusal::Superseded));
            return self.grant_all(effects);
        }
        if let Some(earlier) = earlier
            && let Some(waiting) = self.take_out(earlier)
        {
            effects.push(self.refuse(earlier, &waiting.request, LeaseRefusal::Superseded));
            self.remember_arrival(request.request, waiting.place.arrival);
        }
        if let Some(lease) = self.leases.of_request(request.request) {
            self.end(lease, LeaseEnd::Superseded, false, effects);
        }

        let (tenant, class) = (
            request.namespace.namespace.tenant_name().to_owned(),
            request.class,
        );
        // A request that has begun is let in again: it was let in before, and giving it up would waste its output.
        let is_admitted = class == RequestClass::Rollout && request.generated_tokens > 0;
        self.waits(call, request);
        self.grant_all(effects);
        if !self.queue.contains(call) {
            return;
        }
        self.mark_stranded(call);
        // The limits are checked last: a full queue of one model must not refuse a request that an idle worker of
        // another model can take.
        let config = &self.config;
        let (queue_max, tenant_queue_max, refusals) = match class {
            RequestClass::Interactive => (
                config.queue_max,
                config.tenant_queue_max,
                [LeaseRefusal::QueueFull, LeaseRefusal::TenantQueueFull],
            ),
            RequestClass::Rollout => (
                config.rollout_queue_max,
                config.tenant_rollout_queue_max,
                [
                    LeaseRefusal::RolloutQueueFull,
                    LeaseRefusal::TenantRolloutQueueFull,
                ],
            ),
        };
        let refusal = if is_admitted {
            return;
        } else if self.queue.waiting_of_class(class) > queue_max {
            refusals[0]
        } else if self.queue.waiting_of_tenant(&tenant, class) > tenant_queue_max {
            refusals[1]
        } else {
            return;
        };
        self.refuse_waiting(call, refusal, effects);
    }

    /// The age that a request had when it made the call that waits or holds a lease.
    fn newest_age_ms(&self, request: &LeaseRequest, waiting: Option<LeaseCallId>) -> Option<u64> {
        let waiting = waiting.and_then(|call| self.queue.get(call));
        let held = self.leases.of_request(request.request);
        let held = held.and_then(|lease| self.leases.get(lease));
        waiting
            .map(|waiting| waiting.request.age_ms)
            .max(held.map(|held| held.age_ms))
    }

    /// Puts a request into the queue.
    fn waits(&mut self, call: LeaseCallId, request: LeaseRequest) {
        let place = Place {
            arrival: self.arrivals.pop(&request.request).unwrap_or(Arrival {
                ms: self.now_ms.saturating_sub(request.age_ms),
                call,
            }),
            call,
        };
        let pool = PoolKey::of_request(&request);
        let (group, rank) = self.enters_line(&request, &pool, place);
        let chunk_tokens = self.chunk_tokens(request.class, request.chunk_tokens);
        let left = request
            .max_new_tokens
            .saturating_sub(request.generated_tokens);
        let usual_tokens = self.queue.usual_output_tokens(&pool);
        let writes = chunk_tokens.unwrap_or(usual_tokens).min(left);
        self.waiting_by_request.insert(request.request, call);
        self.queue.push(WaitingRequest {
            place,
            rank,
            group,
            chunk_tokens,
            kv_tokens: u64::from(request.context_tokens) + u64::from(writes),
            submitted_ms: self.now_ms,
            stranded_since_ms: None,
            deadline_ms: self.waits_until_ms(request.class, self.now_ms),
            request,
            pool,
        });
    }

    fn finish(&mut self, finish: LeaseFinish, effects: &mut Vec<DispatchEffect>) {
        let LeaseFinish {
            lease,
            outcome,
            emitted_tokens,
            worker_ended_ms_ago,
            cached_tokens,
            rejected_tokens,
            accepted_tokens: _,
        } = finish;
        self.note_epoch(epoch_of(lease));
        let spent = |running: &RunningLease| Spent {
            emitted_tokens,
            rejected_tokens,
            read_tokens: cached_tokens.map(|cached| running.context_tokens.saturating_sub(cached)),
        };
        if let Some(running) = self.end(lease, LeaseEnd::Finished(outcome), true, effects) {
            if let Some(pool) = self.queue.pool_mut(&running.pool) {
                pool.settle(&running.tenant, running.charge, spent(&running));
                if outcome != LeaseOutcome::WorkerFailed {
                    pool.note_service(self.now_ms.saturating_sub(running.granted_ms));
                }
            }
            self.learn(&running, &finish, effects);
            let now_ms = self.now_ms;
            self.workers.change(&running.worker, |worker| {
                if outcome == LeaseOutcome::WorkerFailed {
                    // The worker's slot is free on paper. Without this mark, the next request would be sent there to
                    // fail as well, since an idle worker is preferred to busy ones. Requests wait for it even if
                    // there is no other worker: a dead worker comes back later than a request's attempts last. Its
                    // next heartbeat clears the mark, and so does a chunk that it completes from now on. So a request
                    // on which the engine always fails delays the other requests by one heartbeat at most.
                    worker.suspect(now_ms);
                } else if let Some(ended_ms_ago) = worker_ended_ms_ago
                    && emitted_tokens > 0
                {
                    worker.trust(now_ms.saturating_sub(ended_ms_ago));
                }
            });
        } else if let Some(running) = self.leases.settle_ended(lease) {
            if let Some(pool) = self.queue.pool_mut(&running.pool) {
                pool.settle(&running.tenant, running.charge, spent(&running));
            }
            self.learn(&running, &finish, effects);
        } else if self.workers.end_foreign(lease) {
            self.leases.remember_ended(lease, self.now_ms, None);
        }
    }

    fn heartbeat(
        &mut self,
        mut heartbeat: Heartbeat,
        effects: &mut Vec<DispatchEffect>,
    ) -> Result<HeartbeatReply, ApiError> {
        let worker = heartbeat.worker.clone();
        if heartbeat.leaves {
            if let Some((index, lost)) = self.workers.leave(&worker, heartbeat.incarnation) {
                self.forget_worker(worker, index, lost, effects);
            }
            return Ok(HeartbeatReply {
                next_in_ms: self.config.worker_ttl_ms,
                fallback: None,
                give_way: Vec::new(),
            });
        }
        // The worker table keeps neither list.
        let running = std::mem::take(&mut heartbeat.running);
        // A worker of an earlier version names the epochs of its leases alone.
        let running_epochs = running.iter().copied().map(epoch_of);
        let epoch_seen = running_epochs.max().max(Some(heartbeat.epoch_seen));
        let held = heartbeat.kv.as_mut().and_then(|kv| kv.held.take());
        match self
            .workers
            .register(heartbeat, &self.config, self.now_ms)?
        {
            Registration::Renewed => {}
            Registration::Joined => {
                self.hold_rollouts(&worker);
                effects.push(DispatchEffect::WorkerJoined(worker.clone()));
            }
            Registration::Restarted(lost) => {
                self.forget_prefixes(&worker);
                effects.push(DispatchEffect::WorkerRestarted(worker.clone()));
                for lease in lost {
                    self.end(lease, LeaseEnd::WorkerLost, false, effects);
                }
            }
        }
        if let Some(epoch) = epoch_seen {
            self.note_epoch(epoch);
        }
        let grace_ms = self.config.lease_grace_ms();
        let mut foreign = BTreeSet::new();
        let mut reported = BTreeSet::new();
        for lease in running {
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
        let live = self.workers.get(&worker).into_iter();
        let leases = live.flat_map(|worker| worker.leases());
        let ended: Vec<LeaseId> = leases.filter(has_ended).collect();
        for lease in ended {
            self.end(lease, LeaseEnd::Healed, false, effects);
        }
        self.workers.set_foreign(&worker, foreign);
        if let (Some(held), Some(index)) = (held, self.workers.index(&worker)) {
            self.prefixes.reported(index, held);
        }
        let give_way = self.preempt(&worker, &reported);
        Ok(HeartbeatReply {
            next_in_ms: self.next_heartbeat_in_ms(&worker),
            fallback: self.workers.fallback(&worker),
            give_way,
        })
    }

    fn tick(&mut self, effects: &mut Vec<DispatchEffect>) {
        let (now_ms, ttl_ms) = (self.now_ms, self.config.worker_ttl_ms);
        for (worker, index, lost) in self.workers.remove_silent(now_ms, ttl_ms) {
            self.forget_worker(worker, index, lost, effects);
        }
        for lease in self
            .leases
            .silent_for(self.now_ms, self.config.lease_ttl_ms)
        {
            self.end(lease, LeaseEnd::Expired, false, effects);
        }
        self.grant_all(effects);
        self.mark_all_stranded();
        self.refuse_expired(effects);
        self.queue.forget_pools(|pool| self.workers.serves(pool));
    }

    /// Ends what a worker held that was at this place in the table.
    fn forget_worker(
        &mut self,
        worker: WorkerId,
        index: usize,
        lost: Vec<LeaseId>,
        effects: &mut Vec<DispatchEffect>,
    ) {
        self.prefixes.forget(index);
        self.sessions.forget(index);
        effects.push(DispatchEffect::WorkerLost(worker));
        for lease in lost {
            self.end(lease, LeaseEnd::WorkerLost, false, effects);
        }
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
        self.workers
            .end_lease(&running.worker, lease, running.kv_tokens);
        if let Some(pool) = self.queue.pool_mut(&running.pool) {
            pool.chunk_ended(&running.tenant, running.class, running.preempted);
        }
        if let Some(group) = &running.group {
            self.groups.stops(group);
        }
        if end.may_go_on() {
            self.remember_arrival(running.request, running.arrival);
        }
        effects.push(DispatchEffect::LeaseEnded {
            lease,
            worker: running.worker.clone(),
            end,
        });
        Some(running)
    }

    fn remember_arrival(&mut self, request: RequestId, arrival: Arrival) {
        self.arrivals.put(request, arrival);
        while self.arrivals.len() > self.config.ended_leases_max {
            self.arrivals.pop_lru();
        }
    }

    fn take_out(&mut self, call: LeaseCallId) -> Option<WaitingRequest> {
        let waiting = self.queue.remove(call)?;
        self.waiting_by_request.remove(&waiting.request.request);
        self.leaves_line(&waiting);
        Some(waiting)
    }

    fn forget_prefixes(&mut self, worker: &WorkerId) {
        if let Some(index) = self.workers.index(worker) {
            self.prefixes.forget(index);
            self.sessions.forget(index);
        }
    }
}
