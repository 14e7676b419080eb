//! Grants leases for as long as some waiting request can be placed.

use refrain_protocol::WorkerId;
use refrain_protocol::scheduling::{Lease, RequestClass};

use super::Dispatch;
use super::events::{DispatchEffect, Placed};
use super::fair_queue::{HeldLine, LeaseCallId, WaitingRequest};
use super::lease_table::{RunningLease, lease_id};
use super::live_worker::LiveWorker;
use super::pool_key::PoolKey;
use crate::config::PlacementPolicy;
use crate::placement::{Candidate, Choice, Demand, Session, choose};

/// Fencing epochs advance by this many per millisecond of the clock, see [`Dispatch::next_epoch`].
const EPOCHS_PER_MS: u64 = 1_000;
/// Maximum number of milliseconds by which an epoch that others tell may be ahead of the clock, to be believed for
/// all leases. One damaged number must not push all epochs to the end of their range, which has no way back. All
/// hosts of a mesh may have had a clock that was ahead by more. Then the requests of that time still get epochs above
/// their own.
const EPOCH_LEAD_MS_MAX: u64 = 24 * 3_600 * 1_000;
/// Maximum number of waiting requests of a pool that are looked at for one slot. All have room in some KV cache.
/// Those that no free worker can take for another reason are passed over.
const LOOKED_AT_MAX: usize = 128;
/// How long the first request in line waits for room in a KV cache, until a worker is kept free for it.
const ROOM_PATIENCE_MS: u64 = 1_000;

impl Dispatch {
    /// Grants leases until no waiting request can be placed.
    pub(super) fn grant_all(&mut self, effects: &mut Vec<DispatchEffect>) {
        for pool in self.queue.pools_waiting() {
            self.check_reservation(&pool);
            while let Some((call, choice)) = self.next_grant(&pool) {
                self.grant(call, choice, effects);
            }
            self.reserve(&pool);
        }
    }

    /// The first request of a pool, in the order of the queue, that a free worker can take.
    pub(super) fn next_grant(&self, pool: &PoolKey) -> Option<(LeaseCallId, Choice)> {
        let queue = self.queue.pool(pool)?;
        if !self.workers.has_free(pool) {
            return None;
        }
        let (owner, kept) = queue.reserved.unzip();
        let (context_max, room_tokens) = self.workers.free_limits(pool, kept);
        let slots = self.workers.headroom(pool).slots;
        let owner = owner.and_then(|call| self.queue.get(call));
        let waiting = self.queue.in_order(pool, slots, room_tokens);
        // This cheap filter spares most requests the look at every free worker.
        let fits = |waiting: &&WaitingRequest| {
            waiting.request.context_tokens < context_max && waiting.kv_tokens <= room_tokens
        };
        let held = queue.held_at(self.now_ms);
        let is_held = |waiting: &WaitingRequest| {
            waiting.request.class == RequestClass::Rollout
                && held.is_some_and(|held| waiting.submitted_ms < held.before_ms)
        };
        let waiting = waiting
            .filter(|waiting| !is_held(waiting))
            .take(LOOKED_AT_MAX)
            .filter(fits);
        owner
            .into_iter()
            .chain(waiting)
            .find_map(|waiting| Some((waiting.place.call, self.place(pool, waiting)?)))
    }

    /// Lets rollouts wait for more workers to report, if the first worker of their model has just joined.
    ///
    /// A long line can wait by then, after a restart of the scheduler for instance. It would fill that worker, and
    /// the next ones would be idle. All live workers report within one interval of heartbeats. So a line that is
    /// longer than the worker's slots waits for that time, and is then spread over the workers that have reported.
    pub(super) fn hold_rollouts(&mut self, worker: &WorkerId) {
        let Some(live) = self.workers.get(worker) else {
            return;
        };
        let pool = live.pool.clone();
        let is_first = self.workers.members(&pool).count() == 1;
        if is_first && self.queue.rollouts_waiting(&pool) > u64::from(live.heartbeat.max_running) {
            let until_ms = self.now_ms + self.config.heartbeat_interval_ms();
            if let Some(queue) = self.queue.pool_mut(&pool) {
                queue.held = Some(HeldLine {
                    before_ms: self.now_ms,
                    until_ms,
                });
            }
        }
    }

    /// The best of the free workers that can take a request.
    fn place(&self, pool: &PoolKey, waiting: &WaitingRequest) -> Option<Choice> {
        let queue = self.queue.pool(pool)?;
        let request = &waiting.request;
        let policy = self.config.placement;
        let kept = queue
            .reserved
            .filter(|(owner, _)| *owner != waiting.place.call);
        let able = self
            .workers
            .free(pool, waiting.kv_tokens)
            .filter(|(index, _)| kept.is_none_or(|(_, kept)| *index != kept))
            .filter(|(_, worker)| worker.suits(request, waiting.submitted_ms));
        let able: Vec<(usize, &LiveWorker)> = able.collect();
        if able.is_empty() {
            return None;
        }
        let held = match policy {
            PlacementPolicy::Kv | PlacementPolicy::CacheAware => {
                let indexes: Vec<usize> = able.iter().map(|(index, _)| *index).collect();
                self.prefixes.held_tokens(&request.prefixes, &indexes)
            }
            PlacementPolicy::LeastLoaded | PlacementPolicy::RoundRobin => vec![0; able.len()],
        };
        let price = self.config.prefill_ms_per_1k;
        let candidates = able
            .iter()
            .zip(&held)
            .map(|((index, worker), held)| Candidate {
                sessions: self.sessions.count(*index),
                ..worker.candidate(*index, *held, price)
            });
        let session = match request.session.map(|session| self.sessions.home(session)) {
            None => Session::Unnamed,
            Some(None) => Session::New,
            // Turns at once are no conversation, whatever their name: they could be a flood.
            Some(Some(home)) if self.leases.get(home.lease).is_some() => Session::Unnamed,
            Some(Some(home)) => Session::LivesOn(home.worker),
        };
        let demand = Demand {
            context_tokens: request.context_tokens,
            prefer: request.prefer.as_ref(),
            session,
            transferred: request.transferred,
        };
        let mut load = self.workers.load(
            pool,
            self.queue.service_ms(pool),
            queue.last_worker,
            policy == PlacementPolicy::CacheAware,
        );
        if session == Session::New {
            let members = self.workers.members(pool);
            let sessions = members.map(|(index, _)| u64::from(self.sessions.count(index)));
            load.sessions = sessions.sum();
        }
        choose(
            policy,
            self.config.load_imbalance_max,
            &demand,
            &load,
            candidates,
        )
    }

    fn grant(&mut self, call: LeaseCallId, choice: Choice, effects: &mut Vec<DispatchEffect>) {
        let seen = self.queue.get(call);
        let seen = seen.map_or(0, |waiting| waiting.request.epoch_seen);
        let epoch = self.next_epoch_after(seen);
        let Some(live) = self.workers.at(choice.index) else {
            return;
        };
        let (worker, url) = (live.heartbeat.worker.clone(), live.heartbeat.url.clone());
        let capacity_tokens = live.capacity_tokens();
        let context_tokens = self
            .queue
            .get(call)
            .map_or(0, |waiting| waiting.request.context_tokens);
        let missing_tokens = context_tokens.saturating_sub(choice.held_tokens);
        let Some((waiting, charge)) = self.queue.take(call, missing_tokens) else {
            return;
        };
        let facts = self.starts(&waiting);
        let (request, pool) = (waiting.request, waiting.pool);
        self.waiting_by_request.remove(&request.request);
        let lease = lease_id(epoch, request.request);
        if let Some(queue) = self.queue.pool_mut(&pool) {
            queue.last_worker = Some(choice.index);
            queue.reserved = queue.reserved.filter(|(owner, _)| *owner != call);
        }
        if let Some(session) = request.session {
            self.sessions
                .moves(session, choice.index, lease, self.now_ms);
        }
        self.prefixes
            .sent(choice.index, &request.prefixes, capacity_tokens);
        self.workers.add_lease(&worker, lease, waiting.kv_tokens);
        let moved = request.generated_tokens > 0
            && request
                .prefer
                .as_ref()
                .is_some_and(|prefer| *prefer != worker);
        self.leases.insert(
            lease,
            RunningLease {
                request: request.request,
                worker: worker.clone(),
                pool,
                tenant: request.namespace.namespace.tenant_name().to_owned(),
                class: request.class,
                group: waiting.group,
                had_reference: facts.has_reference(),
                charge,
                arrival: waiting.place.arrival,
                age_ms: request.age_ms,
                context_tokens,
                generated_tokens: request.generated_tokens,
                expected_tokens: request.expected_tokens,
                kv_tokens: waiting.kv_tokens,
                bounded: waiting.chunk_tokens.is_some(),
                granted_ms: self.now_ms,
                last_seen_ms: self.now_ms,
                preempted: false,
            },
        );
        effects.push(DispatchEffect::Grant {
            call,
            waited_ms: self.now_ms.saturating_sub(waiting.submitted_ms),
            placed: Placed {
                request: request.request,
                class: request.class,
                generated_tokens: request.generated_tokens,
                probe: facts.is_probe,
                estimated_tokens: facts.estimate(self.config.order),
                moved,
                held_tokens: choice.held_tokens,
                missing_tokens,
            },
            lease: Lease {
                lease,
                epoch,
                worker,
                url,
                ttl_ms: self.config.lease_ttl_ms,
                chunk_tokens: waiting.chunk_tokens,
            },
        });
    }

    /// Maximum number of tokens of the chunk that a request will get.
    pub(super) fn chunk_tokens(&self, class: RequestClass, wish: Option<u32>) -> Option<u32> {
        let own = match class {
            RequestClass::Interactive => None,
            RequestClass::Rollout => Some(self.config.chunk_tokens),
        };
        own.into_iter()
            .chain(wish)
            .filter(|tokens| *tokens > 0)
            .min()
    }

    /// Keeps a worker free for the first request in line, if room in a KV cache is all that it lacks. Otherwise
    /// smaller requests would take all room that becomes free, again and again.
    fn reserve(&mut self, pool: &PoolKey) {
        let slots = self.workers.headroom(pool).slots;
        // A line that is held waits for workers, not for room.
        let is_settled = |queue: &super::fair_queue::PoolQueue| {
            queue.reserved.is_some() || queue.held_at(self.now_ms).is_some()
        };
        if self.queue.pool(pool).is_none_or(is_settled) {
            return;
        }
        let Some(first) = self.queue.in_order(pool, slots, u64::MAX).next() else {
            return;
        };
        if self.now_ms < first.submitted_ms.saturating_add(ROOM_PATIENCE_MS) {
            return;
        }
        let suitable = self
            .workers
            .members(pool)
            .filter(|(_, worker)| worker.suits(&first.request, first.submitted_ms));
        let lacks_room = suitable
            .clone()
            .any(|(_, worker)| worker.has_slot() && !worker.has_room(first.kv_tokens));
        if !lacks_room {
            return;
        }
        let roomiest = suitable.max_by_key(|(_, worker)| worker.room_tokens());
        let reserved = roomiest.map(|(index, _)| (first.place.call, index));
        if let Some(queue) = self.queue.pool_mut(pool) {
            queue.reserved = reserved;
        }
    }

    /// Gives up a reservation whose request or worker is gone.
    fn check_reservation(&mut self, pool: &PoolKey) {
        let Some((call, index)) = self.queue.pool(pool).and_then(|queue| queue.reserved) else {
            return;
        };
        let holds = self.queue.get(call).is_some_and(|waiting| {
            let mut members = self.workers.members(pool);
            members.any(|(member, worker)| {
                member == index && worker.suits(&waiting.request, waiting.submitted_ms)
            })
        });
        if !holds && let Some(queue) = self.queue.pool_mut(pool) {
            queue.reserved = None;
        }
    }

    /// The next fencing epoch.
    ///
    /// One counter serves all requests: a number that grows over all leases also grows over those of each request, so
    /// nothing has to be remembered per request. The counter follows the clock, so that it goes on growing after a
    /// restart, which remembers nothing. Below a million leases per second it never runs ahead of the clock. A clock
    /// that is behind that of the process before is made up for by [`Dispatch::note_epoch`].
    fn next_epoch(&mut self) -> u64 {
        let clock = self.now_ms.saturating_mul(EPOCHS_PER_MS);
        self.epoch_last = clock.max(self.epoch_last.saturating_add(1));
        self.epoch_last
    }

    /// The next epoch of a request that has had leases up to the epoch `seen`. That one may be too far ahead of the
    /// clock for [`Dispatch::note_epoch`]: only this request goes on above it then, since workers would refuse it
    /// otherwise.
    fn next_epoch_after(&mut self, seen: u64) -> u64 {
        let next = self.next_epoch();
        if seen < next {
            return next;
        }
        // A request whose answer was lost asks once more with the same number, and must not get the same lease.
        self.far_grants += 1;
        seen.saturating_add(self.far_grants)
    }

    /// Notes an epoch that a worker or a gateway has seen. All later ones are higher, unless it is implausible.
    pub(super) fn note_epoch(&mut self, epoch: u64) {
        let latest_ms = self.now_ms.saturating_add(EPOCH_LEAD_MS_MAX);
        if epoch <= latest_ms.saturating_mul(EPOCHS_PER_MS) {
            self.epoch_last = self.epoch_last.max(epoch);
        }
    }
}
