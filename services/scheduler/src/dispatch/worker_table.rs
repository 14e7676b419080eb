//! The table of live workers, built from their heartbeats alone.

use std::collections::{BTreeMap, BTreeSet};

use refrain_protocol::scheduling::{Eagle3Report, Heartbeat, KvUse, ServedModel, WorkerReport};
use refrain_protocol::{ApiError, ErrorKind, LeaseId, WorkerId};
use serde::Serialize;

use super::live_worker::LiveWorker;
use super::pool_key::PoolKey;
use crate::config::SchedulerConfig;
use crate::placement::PoolLoad;

/// Longest name of a worker, a model or a tokenizer, bytes.
const NAME_BYTES_MAX: usize = 512;
/// Longest URL of a worker, bytes.
const URL_BYTES_MAX: usize = 2_048;
/// Longest reason of a worker for taking no chunks, bytes.
const TROUBLE_BYTES_MAX: usize = 2_048;
/// Maximum number of chunks that a worker may run at once. It bounds the leases of one heartbeat; engines run far
/// fewer.
const WORKER_RUNNING_MAX: u32 = 4_096;

/// Maximum number of prefixes that a worker may report. It reports one for each context that it holds.
const HELD_MAX: usize = 16_384;

/// The effect of a heartbeat on the table.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Registration {
    /// The worker was unknown.
    Joined,
    /// The worker is known, and is the same process as before.
    Renewed,
    /// The worker is known, and is a new process. These leases were lost with the old one.
    Restarted(Vec<LeaseId>),
}

/// The capacity of a pool.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Headroom {
    /// Longest context among the workers that take new chunks, full or not. 0 if there is no such worker.
    pub(super) open_context_max: u32,
    /// Slots of all workers that take new chunks.
    pub(super) slots: u64,
}

/// The workers of a pool, by their places in the table.
#[derive(Debug, Default)]
struct PoolWorkers {
    members: BTreeSet<usize>,
    /// Those that take new chunks and have a free slot, by the room in their KV caches, tokens.
    free: BTreeSet<(u64, usize)>,
    /// The same workers by the longest context that they take.
    free_contexts: BTreeSet<(u32, usize)>,
    slots: u64,
    running: u64,
    open_context_max: u32,
    /// The table's version when a worker last came, went, or changed what it takes.
    version: u64,
}

/// The part of a pool that a worker brings.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Part {
    is_free: bool,
    is_open: bool,
    slots: u64,
    running: u64,
    max_context: u32,
    room_tokens: u64,
    registered_ms: u64,
}

impl Part {
    fn of(worker: &LiveWorker) -> Self {
        let is_open = worker.is_open();
        Part {
            is_free: is_open && worker.has_slot(),
            is_open,
            slots: if is_open {
                u64::from(worker.heartbeat.max_running)
            } else {
                0
            },
            running: if is_open {
                u64::from(worker.running())
            } else {
                0
            },
            max_context: if is_open {
                worker.heartbeat.max_context
            } else {
                0
            },
            room_tokens: worker.room_tokens(),
            registered_ms: worker.registered_ms,
        }
    }
}

/// All live workers. Each has a place in the table for as long as it lives, by which other tables name it.
#[derive(Debug, Default)]
pub(super) struct WorkerTable {
    places: Vec<Option<LiveWorker>>,
    vacant: Vec<usize>,
    names: BTreeMap<WorkerId, usize>,
    pools: BTreeMap<PoolKey, PoolWorkers>,
    /// Counts the changes of what workers take.
    version: u64,
}

impl WorkerTable {
    pub(super) fn len(&self) -> usize {
        self.names.len()
    }

    pub(super) fn index(&self, worker: &WorkerId) -> Option<usize> {
        self.names.get(worker).copied()
    }

    pub(super) fn get(&self, worker: &WorkerId) -> Option<&LiveWorker> {
        self.at(self.index(worker)?)
    }

    pub(super) fn at(&self, index: usize) -> Option<&LiveWorker> {
        self.places.get(index)?.as_ref()
    }

    fn all(&self) -> impl Iterator<Item = &LiveWorker> {
        self.names.values().filter_map(|index| self.at(*index))
    }

    /// Changes a worker, and keeps its pool in step.
    pub(super) fn change<R>(
        &mut self,
        worker: &WorkerId,
        change: impl FnOnce(&mut LiveWorker) -> R,
    ) -> Option<R> {
        let index = self.index(worker)?;
        let worker = self.places.get_mut(index)?.as_mut()?;
        let (pool, before) = (worker.pool.clone(), Part::of(worker));
        let result = change(worker);
        let after = Part::of(worker);
        if worker.pool == pool {
            self.move_part(&pool, index, before, after);
        } else {
            let pool_after = worker.pool.clone();
            self.leave_pool(&pool, index, before);
            self.join_pool(&pool_after, index, after);
        }
        Some(result)
    }

    fn join_pool(&mut self, pool: &PoolKey, index: usize, part: Part) {
        let workers = self.pools.entry(pool.clone()).or_default();
        workers.members.insert(index);
        self.move_part(pool, index, Part::default(), part);
    }

    fn leave_pool(&mut self, pool: &PoolKey, index: usize, part: Part) {
        if let Some(workers) = self.pools.get_mut(pool) {
            workers.members.remove(&index);
            self.move_part(pool, index, part, Part::default());
        }
        self.pools.retain(|_, workers| !workers.members.is_empty());
    }

    fn move_part(&mut self, pool: &PoolKey, index: usize, before: Part, after: Part) {
        let Some(workers) = self.pools.get_mut(pool) else {
            return;
        };
        if before == after {
            return;
        }
        if before.is_free {
            workers.free.remove(&(before.room_tokens, index));
            workers.free_contexts.remove(&(before.max_context, index));
        }
        if after.is_free {
            workers.free.insert((after.room_tokens, index));
            workers.free_contexts.insert((after.max_context, index));
        }
        workers.slots = workers.slots - before.slots + after.slots;
        workers.running = workers.running - before.running + after.running;
        let takes = |part: Part| (part.is_open, part.max_context, part.registered_ms);
        if takes(before) == takes(after) {
            return;
        }
        self.version += 1;
        workers.version = self.version;
        let members = workers.members.iter();
        let open = members
            .filter_map(|member| self.places.get(*member)?.as_ref())
            .filter(|worker| worker.is_open());
        let context_max = open.map(|worker| worker.heartbeat.max_context).max();
        workers.open_context_max = context_max.unwrap_or(0);
    }

    /// Stores a heartbeat, except for its list of leases and of prefixes.
    pub(super) fn register(
        &mut self,
        heartbeat: Heartbeat,
        config: &SchedulerConfig,
        now_ms: u64,
    ) -> Result<Registration, ApiError> {
        check(&heartbeat)?;
        let name = heartbeat.worker.clone();
        let Some(known) = self.get(&name) else {
            if self.len() >= config.workers_max {
                let message = format!(
                    "the scheduler has {} workers, its limit; raise scheduler.workers_max or stop some workers",
                    self.len()
                );
                return Err(ApiError::new(ErrorKind::Overloaded, message)
                    .with_code("workers_limit")
                    .with_retry_after_ms(config.worker_ttl_ms));
            }
            let worker = LiveWorker {
                pool: PoolKey::of_worker(&heartbeat),
                previous_incarnation: None,
                registered_ms: now_ms,
                reported_ms: now_ms,
                leases: BTreeSet::new(),
                foreign: BTreeSet::new(),
                planned_tokens: 0,
                unplanned_tokens: 0,
                suspect_since_ms: None,
                heartbeat,
            };
            self.add(worker);
            return Ok(Registration::Joined);
        };
        if known.previous_incarnation == Some(heartbeat.incarnation) {
            let message = format!(
                "a newer process reports as worker {name}; stop this process or give it another id"
            );
            return Err(ApiError::new(ErrorKind::Conflict, message).with_code("worker_name_taken"));
        }
        let registration = self.change(&name, |known| {
            known.reported_ms = now_ms;
            known.suspect_since_ms = None;
            known.pool = PoolKey::of_worker(&heartbeat);
            let before = std::mem::replace(&mut known.heartbeat, heartbeat);
            if before.incarnation == known.heartbeat.incarnation {
                return Registration::Renewed;
            }
            known.previous_incarnation = Some(before.incarnation);
            known.registered_ms = now_ms;
            known.foreign.clear();
            known.unplanned_tokens = 0;
            Registration::Restarted(known.leases().collect())
        });
        Ok(registration.unwrap_or(Registration::Renewed))
    }

    fn add(&mut self, worker: LiveWorker) {
        let index = self.vacant.pop().unwrap_or(self.places.len());
        let (pool, part) = (worker.pool.clone(), Part::of(&worker));
        self.names.insert(worker.heartbeat.worker.clone(), index);
        if index == self.places.len() {
            self.places.push(Some(worker));
        } else {
            self.places[index] = Some(worker);
        }
        self.join_pool(&pool, index, part);
    }

    fn remove(&mut self, name: &WorkerId) -> Option<(usize, LiveWorker)> {
        let index = self.names.remove(name)?;
        let worker = self.places.get_mut(index)?.take()?;
        self.vacant.push(index);
        self.leave_pool(&worker.pool, index, Part::of(&worker));
        Some((index, worker))
    }

    /// Notes a lease that was granted on a worker, with the KV tokens that are planned for it.
    pub(super) fn add_lease(&mut self, worker: &WorkerId, lease: LeaseId, kv_tokens: u64) {
        self.change(worker, |worker| {
            worker.leases.insert(lease);
            worker.planned_tokens = worker.planned_tokens.saturating_add(kv_tokens);
        });
    }

    /// Notes that a lease of a worker has ended.
    pub(super) fn end_lease(&mut self, worker: &WorkerId, lease: LeaseId, kv_tokens: u64) {
        self.change(worker, |worker| {
            if worker.leases.remove(&lease) {
                worker.planned_tokens = worker.planned_tokens.saturating_sub(kv_tokens);
            }
        });
    }

    /// Notes the leases that a worker named and that the lease table does not hold.
    pub(super) fn set_foreign(&mut self, worker: &WorkerId, foreign: BTreeSet<LeaseId>) {
        self.change(worker, |worker| {
            worker.foreign = foreign;
            let kv = worker.heartbeat.kv.as_ref();
            let running_tokens = kv.map_or(0, |kv| kv.running_tokens);
            worker.unplanned_tokens = running_tokens.saturating_sub(worker.planned_tokens);
        });
    }

    /// Removes a foreign lease from the worker that named it. Returns `false` if no worker did.
    pub(super) fn end_foreign(&mut self, lease: LeaseId) -> bool {
        let named = self.all().find(|worker| worker.foreign.contains(&lease));
        let named = named.map(|worker| worker.heartbeat.worker.clone());
        let removed =
            named.and_then(|name| self.change(&name, |worker| worker.foreign.remove(&lease)));
        removed.unwrap_or(false)
    }

    /// Removes a worker that leaves, unless a newer process reports under its name. Returns its place and the leases
    /// that are lost.
    pub(super) fn leave(
        &mut self,
        name: &WorkerId,
        incarnation: u64,
    ) -> Option<(usize, Vec<LeaseId>)> {
        self.get(name)
            .filter(|known| known.heartbeat.incarnation == incarnation)?;
        let (index, worker) = self.remove(name)?;
        Some((index, worker.leases().collect()))
    }

    /// The oldest of all workers' last heartbeats.
    pub(super) fn oldest_heartbeat_ms(&self) -> Option<u64> {
        self.all().map(|worker| worker.reported_ms).min()
    }

    /// Removes the workers that have been silent for `ttl_ms`. Returns them, with their places and the leases that
    /// are lost.
    pub(super) fn remove_silent(
        &mut self,
        now_ms: u64,
        ttl_ms: u64,
    ) -> Vec<(WorkerId, usize, Vec<LeaseId>)> {
        let silent = self
            .all()
            .filter(|worker| now_ms >= worker.reported_ms.saturating_add(ttl_ms));
        let silent: Vec<WorkerId> = silent
            .map(|worker| worker.heartbeat.worker.clone())
            .collect();
        let mut removed = Vec::new();
        for name in silent {
            if let Some((index, worker)) = self.remove(&name) {
                removed.push((name, index, worker.leases().collect()));
            }
        }
        removed
    }

    /// The workers of a pool that take chunks, have a free slot, and have room for `kv_tokens`, with their places.
    pub(super) fn free(
        &self,
        pool: &PoolKey,
        kv_tokens: u64,
    ) -> impl Iterator<Item = (usize, &LiveWorker)> {
        let pool = self.pools.get(pool).into_iter();
        let free = pool.flat_map(move |pool| pool.free.range((kv_tokens, 0)..));
        free.filter_map(|(_, index)| Some((*index, self.at(*index)?)))
    }

    /// All workers of a pool, with their places.
    pub(super) fn members(
        &self,
        pool: &PoolKey,
    ) -> impl Iterator<Item = (usize, &LiveWorker)> + Clone {
        let members = self.pools.get(pool).into_iter();
        let members = members.flat_map(|pool| &pool.members);
        members.filter_map(|index| Some((*index, self.at(*index)?)))
    }

    /// Whether a worker of the pool takes chunks and has a free slot.
    pub(super) fn has_free(&self, pool: &PoolKey) -> bool {
        let workers = self.pools.get(pool);
        workers.is_some_and(|workers| !workers.free.is_empty())
    }

    /// Longest context that a free worker of the pool takes, and most KV tokens for which one has room. The worker
    /// that is kept for a request does not count.
    pub(super) fn free_limits(&self, pool: &PoolKey, kept: Option<usize>) -> (u32, u64) {
        let Some(workers) = self.pools.get(pool) else {
            return (0, 0);
        };
        let is_other = |index: usize| Some(index) != kept;
        let mut contexts = workers.free_contexts.iter().rev();
        let mut rooms = workers.free.iter().rev();
        let context = contexts.find(|(_, index)| is_other(*index));
        let room = rooms.find(|(_, index)| is_other(*index));
        (
            context.map_or(0, |(context, _)| *context),
            room.map_or(0, |(room, _)| *room),
        )
    }

    /// The load of a pool, for the choice of a worker.
    pub(super) fn load(
        &self,
        pool: &PoolKey,
        service_ms: f64,
        last: Option<usize>,
        needs_range: bool,
    ) -> PoolLoad {
        let workers = self.pools.get(pool);
        let range = needs_range.then(|| {
            let running = self.members(pool).map(|(_, worker)| worker.running());
            running.fold((u32::MAX, 0), |(fewest, most), running| {
                (fewest.min(running), most.max(running))
            })
        });
        PoolLoad {
            sessions: 0,
            running: workers.map_or(0, |workers| workers.running),
            slots: workers.map_or(0, |workers| workers.slots),
            running_range: range.unwrap_or((0, 0)),
            service_ms,
            last,
        }
    }

    pub(super) fn headroom(&self, pool: &PoolKey) -> Headroom {
        let workers = self.pools.get(pool);
        workers.map_or(Headroom::default(), |workers| Headroom {
            open_context_max: workers.open_context_max,
            slots: workers.slots,
        })
    }

    /// A number that grows when workers of the pool come, go, or change what they take. 0 without workers.
    pub(super) fn version(&self, pool: &PoolKey) -> u64 {
        self.pools.get(pool).map_or(0, |workers| workers.version)
    }

    /// The report on the EAGLE-3 head of a worker's fallback, if a request of the worker could go on there.
    pub(super) fn fallback(&self, worker: &WorkerId) -> Option<Eagle3Report> {
        let own = &self.get(worker)?.heartbeat;
        let named = own.fallback.as_ref().filter(|name| *name != worker)?;
        let named = self.get(named)?;
        let fallback = &named.heartbeat;
        let same_text = fallback.model == own.model
            && fallback.tokenizer == own.tokenizer
            && fallback.max_context >= own.max_context;
        // A full worker would send the request back here, after a wasted prefill.
        let is_open = !fallback.draining && named.has_slot();
        fallback.eagle3.filter(|_| same_text && is_open)
    }

    /// Why no worker of the pool takes chunks, as one of them says. `None` if one takes them, or none says why.
    pub(super) fn trouble(&self, pool: &PoolKey) -> Option<String> {
        if self.members(pool).any(|(_, worker)| worker.is_open()) {
            return None;
        }
        let mut troubles = self.members(pool).filter_map(|(_, worker)| {
            let trouble = worker.heartbeat.trouble.as_ref()?;
            Some(format!("worker {}: {trouble}", worker.heartbeat.worker))
        });
        troubles.next()
    }

    pub(super) fn serves(&self, pool: &PoolKey) -> bool {
        self.pools.contains_key(pool)
    }

    /// The models that are served now. A draining worker still counts, because its successor will start soon. A model
    /// that left the list during a restart would turn a short wait into a "no such model" error.
    pub(super) fn models(&self) -> Vec<ServedModel> {
        let mut models: BTreeMap<(&str, &str), ServedModel> = BTreeMap::new();
        for worker in self.all() {
            let heartbeat = &worker.heartbeat;
            let served = models
                .entry((&heartbeat.model, &heartbeat.tokenizer))
                .or_insert_with(|| ServedModel {
                    model: heartbeat.model.clone(),
                    tokenizer: heartbeat.tokenizer.clone(),
                    max_context: 0,
                    workers: 0,
                    open: Some(0),
                    trouble: None,
                    compiles_forms: true,
                });
            served.max_context = served.max_context.max(heartbeat.max_context);
            served.workers += 1;
            if worker.is_open() {
                served.open = served.open.map(|open| open + 1);
            } else if served.trouble.is_none() {
                served.trouble.clone_from(&heartbeat.trouble);
            }
            served.compiles_forms &= heartbeat.compiles_forms;
        }
        models.into_values().collect()
    }

    /// The live workers, for operators.
    pub(super) fn reports(&self, now_ms: u64) -> Vec<WorkerReport> {
        let report = |worker: &LiveWorker| {
            let heartbeat = &worker.heartbeat;
            WorkerReport {
                worker: heartbeat.worker.clone(),
                url: heartbeat.url.clone(),
                model: heartbeat.model.clone(),
                running: worker.running(),
                max_running: heartbeat.max_running,
                draining: heartbeat.draining,
                trouble: heartbeat.trouble.clone(),
                suspect: worker.suspect_since_ms.is_some(),
                silent_ms: now_ms.saturating_sub(worker.reported_ms),
                kv: heartbeat.kv.as_ref().map(|kv| KvUse {
                    capacity_tokens: kv.capacity_tokens,
                    running_tokens: kv.running_tokens,
                    kept_tokens: kv.kept_tokens,
                }),
                state: heartbeat.state,
            }
        };
        self.all().map(report).collect()
    }

    pub(super) fn observe(&self, now_ms: u64) -> Vec<WorkerState> {
        let state = |worker: &LiveWorker| WorkerState {
            worker: worker.heartbeat.worker.clone(),
            url: worker.heartbeat.url.clone(),
            model: worker.heartbeat.model.clone(),
            tokenizer: worker.heartbeat.tokenizer.clone(),
            leases: worker.leases.len(),
            foreign: worker.foreign.len(),
            kv_planned_tokens: worker.planned_tokens,
            max_running: worker.heartbeat.max_running,
            draining: worker.heartbeat.draining,
            suspect: worker.suspect_since_ms.is_some(),
            silent_ms: now_ms.saturating_sub(worker.reported_ms),
        };
        self.all().map(state).collect()
    }
}

/// Refuses a heartbeat with values out of range.
fn check(heartbeat: &Heartbeat) -> Result<(), ApiError> {
    let refused = |param, fault| Err(ApiError::invalid(param, format!("heartbeat: {fault}")));
    for (param, text, bytes_max) in [
        ("worker", &heartbeat.worker.0, NAME_BYTES_MAX),
        ("model", &heartbeat.model, NAME_BYTES_MAX),
        ("tokenizer", &heartbeat.tokenizer, NAME_BYTES_MAX),
        ("url", &heartbeat.url, URL_BYTES_MAX),
    ] {
        let bytes = text.len();
        if !(1..=bytes_max).contains(&bytes) {
            let fault = format!("{param} has {bytes} bytes; send 1 to {bytes_max}");
            return refused(param, fault);
        }
    }
    let fallback_bytes = heartbeat.fallback.as_ref().map_or(0, |name| name.0.len());
    if fallback_bytes > NAME_BYTES_MAX {
        let fault = format!("fallback has {fallback_bytes} bytes; send at most {NAME_BYTES_MAX}");
        return refused("fallback", fault);
    }
    let trouble_bytes = heartbeat.trouble.as_ref().map_or(0, String::len);
    if trouble_bytes > TROUBLE_BYTES_MAX {
        let fault = format!("trouble has {trouble_bytes} bytes; send at most {TROUBLE_BYTES_MAX}");
        return refused("trouble", fault);
    }
    let held = heartbeat.kv.as_ref().and_then(|kv| kv.held.as_ref());
    let held = held.map_or(0, Vec::len);
    if held > HELD_MAX {
        let fault = format!("kv.held has {held} prefixes; send at most {HELD_MAX}");
        return refused("kv.held", fault);
    }
    let slots = heartbeat.max_running;
    if !(1..=WORKER_RUNNING_MAX).contains(&slots) {
        let fault = format!("max_running is {slots}; send 1 to {WORKER_RUNNING_MAX}");
        return refused("max_running", fault);
    }
    // A worker may still be ending chunks while their successors start, hence twice the number.
    let (running, running_max) = (heartbeat.running.len(), 2 * WORKER_RUNNING_MAX);
    if running > running_max as usize {
        let fault = format!("{running} running leases; send at most {running_max}");
        return refused("running", fault);
    }
    Ok(())
}

/// A worker in a snapshot.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct WorkerState {
    worker: WorkerId,
    url: String,
    model: String,
    tokenizer: String,
    /// Leases that are held on it.
    pub leases: usize,
    /// Leases that it named and that this scheduler does not hold.
    pub foreign: usize,
    /// KV tokens that are planned for them.
    kv_planned_tokens: u64,
    /// Maximum number of chunks at once.
    max_running: u32,
    /// It takes no new chunks.
    draining: bool,
    /// A chunk failed there, and it has neither reported nor completed a chunk since.
    suspect: bool,
    /// Time since its last heartbeat.
    pub silent_ms: u64,
}
