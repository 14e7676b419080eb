//! The table of live workers, built from their heartbeats alone.

use std::collections::{BTreeMap, BTreeSet};

use refrain_protocol::scheduling::{Eagle3Report, Heartbeat, LeaseRequest, ServedModel};
use refrain_protocol::{ApiError, ErrorKind, LeaseId, WorkerId};
use serde::Serialize;

use super::pool_key::PoolKey;
use crate::config::SchedulerConfig;
use crate::placement::Candidate;

/// Longest name of a worker, a model or a tokenizer, bytes.
const NAME_BYTES_MAX: usize = 512;
/// Longest URL of a worker, bytes.
const URL_BYTES_MAX: usize = 2_048;
/// Most chunks that a worker may run at once. It bounds the leases of one heartbeat; engines run far fewer.
const WORKER_RUNNING_MAX: u32 = 4_096;

/// A live worker.
#[derive(Debug)]
pub(super) struct LiveWorker {
    pub(super) heartbeat: Heartbeat,
    /// The incarnation of the process before this one. Its late heartbeats are refused.
    previous_incarnation: Option<u64>,
    registered_ms: u64,
    /// Time of the last heartbeat.
    reported_ms: u64,
    /// Leases that were granted on it. A heartbeat may not have named them yet.
    pub(super) leases: BTreeSet<LeaseId>,
    /// Leases that it named and that the lease table does not hold: grants of an earlier process of the scheduler, or
    /// chunks that it has not ended yet. They take slots like all others.
    pub(super) foreign: BTreeSet<LeaseId>,
    /// When a chunk last failed there, if the worker has neither reported nor completed a chunk since.
    suspect_since_ms: Option<u64>,
}

impl LiveWorker {
    /// Marks a worker on which a chunk failed. It gets no new chunks until it reports again or completes a chunk.
    pub(super) fn suspect(&mut self, now_ms: u64) {
        self.suspect_since_ms = Some(now_ms);
    }

    /// Clears the mark of a worker that completed a chunk at `ended_ms`. A chunk that ended before the failure, or in
    /// the same millisecond, proves nothing.
    pub(super) fn trust(&mut self, ended_ms: u64) {
        self.suspect_since_ms = self.suspect_since_ms.filter(|since| *since >= ended_ms);
    }

    /// Whether it would take chunks but has no free slot.
    pub(super) fn is_full(&self) -> bool {
        let candidate = self.candidate();
        !self.heartbeat.draining && !candidate.suspect && !candidate.has_slot()
    }

    /// Whether a request of its pool could be placed on it if it had a free slot.
    pub(super) fn fits(&self, request: &LeaseRequest) -> bool {
        let own = &self.heartbeat;
        own.max_context > request.context_tokens && !request.exclude.contains(&own.worker)
    }

    fn candidate(&self) -> Candidate<'_> {
        Candidate {
            heartbeat: &self.heartbeat,
            running: u32::try_from(self.leases.len() + self.foreign.len()).unwrap_or(u32::MAX),
            suspect: self.suspect_since_ms.is_some(),
            registered_ms: self.registered_ms,
        }
    }
}

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
    /// Longest context among those of them that have a free slot. 0 if there is no such worker.
    pub(super) free_context_max: u32,
    /// Slots of all workers that take new chunks.
    pub(super) slots: u64,
}

/// All live workers, by name.
#[derive(Debug, Default)]
pub(super) struct WorkerTable {
    workers: BTreeMap<WorkerId, LiveWorker>,
}

impl WorkerTable {
    pub(super) fn len(&self) -> usize {
        self.workers.len()
    }

    pub(super) fn get(&self, worker: &WorkerId) -> Option<&LiveWorker> {
        self.workers.get(worker)
    }

    pub(super) fn get_mut(&mut self, worker: &WorkerId) -> Option<&mut LiveWorker> {
        self.workers.get_mut(worker)
    }

    /// Stores a heartbeat, except for its list of leases.
    pub(super) fn register(
        &mut self,
        heartbeat: &Heartbeat,
        config: &SchedulerConfig,
        now_ms: u64,
    ) -> Result<Registration, ApiError> {
        check(heartbeat)?;
        // `leases` and `foreign` hold the list.
        let heartbeat = Heartbeat {
            running: Vec::new(),
            ..heartbeat.clone()
        };
        let Some(known) = self.workers.get_mut(&heartbeat.worker) else {
            if self.workers.len() >= config.workers_max {
                let message = format!(
                    "the scheduler has {} workers, its limit; raise scheduler.workers_max or stop some workers",
                    self.workers.len()
                );
                return Err(ApiError::new(ErrorKind::Overloaded, message)
                    .with_code("workers_limit")
                    .with_retry_after_ms(config.worker_ttl_ms));
            }
            let worker = LiveWorker {
                previous_incarnation: None,
                registered_ms: now_ms,
                reported_ms: now_ms,
                leases: BTreeSet::new(),
                foreign: BTreeSet::new(),
                suspect_since_ms: None,
                heartbeat,
            };
            self.workers.insert(worker.heartbeat.worker.clone(), worker);
            return Ok(Registration::Joined);
        };
        if known.previous_incarnation == Some(heartbeat.incarnation) {
            let message = format!(
                "a newer process reports as worker {}; stop this process or give it another id",
                heartbeat.worker
            );
            return Err(ApiError::new(ErrorKind::Conflict, message).with_code("worker_name_taken"));
        }
        known.reported_ms = now_ms;
        known.suspect_since_ms = None;
        let before = std::mem::replace(&mut known.heartbeat, heartbeat);
        if before.incarnation == known.heartbeat.incarnation {
            return Ok(Registration::Renewed);
        }
        known.previous_incarnation = Some(before.incarnation);
        known.registered_ms = now_ms;
        known.foreign.clear();
        Ok(Registration::Restarted(
            known.leases.iter().copied().collect(),
        ))
    }

    /// Removes a foreign lease from the worker that named it. Returns `false` if no worker did.
    pub(super) fn end_foreign(&mut self, lease: LeaseId) -> bool {
        self.workers
            .values_mut()
            .any(|worker| worker.foreign.remove(&lease))
    }

    /// The oldest of all workers' last heartbeats.
    pub(super) fn oldest_heartbeat_ms(&self) -> Option<u64> {
        self.workers.values().map(|worker| worker.reported_ms).min()
    }

    /// Removes the workers that have been silent for `ttl_ms`. Returns them with the leases that are lost.
    pub(super) fn remove_silent(
        &mut self,
        now_ms: u64,
        ttl_ms: u64,
    ) -> Vec<(WorkerId, Vec<LeaseId>)> {
        let mut silent = Vec::new();
        self.workers.retain(|name, worker| {
            let live = now_ms < worker.reported_ms.saturating_add(ttl_ms);
            if !live {
                silent.push((name.clone(), worker.leases.iter().copied().collect()));
            }
            live
        });
        silent
    }

    pub(super) fn candidates(&self) -> impl Iterator<Item = Candidate<'_>> {
        self.workers.values().map(LiveWorker::candidate)
    }

    pub(super) fn headroom(&self, pool: &PoolKey) -> Headroom {
        let mut headroom = Headroom::default();
        for candidate in self.candidates() {
            let worker = candidate.heartbeat;
            if worker.draining || !pool.has_worker(worker) {
                continue;
            }
            headroom.slots += u64::from(worker.max_running);
            headroom.open_context_max = headroom.open_context_max.max(worker.max_context);
            if candidate.has_slot() {
                headroom.free_context_max = headroom.free_context_max.max(worker.max_context);
            }
        }
        headroom
    }

    /// The report on the EAGLE-3 head of a worker's fallback, if a request of the worker could go on there.
    pub(super) fn fallback(&self, worker: &WorkerId) -> Option<Eagle3Report> {
        let own = &self.workers.get(worker)?.heartbeat;
        let named = own.fallback.as_ref().filter(|name| *name != worker)?;
        let candidate = self.workers.get(named)?.candidate();
        let fallback = candidate.heartbeat;
        let same_text = fallback.model == own.model
            && fallback.tokenizer == own.tokenizer
            && fallback.max_context >= own.max_context;
        // A full worker would send the request back here, after a wasted prefill.
        let is_open = !fallback.draining && candidate.has_slot();
        fallback.eagle3.filter(|_| same_text && is_open)
    }

    pub(super) fn serves(&self, pool: &PoolKey) -> bool {
        let mut workers = self.workers.values();
        workers.any(|worker| pool.has_worker(&worker.heartbeat))
    }

    /// The models that are served now. A draining worker still counts, because its successor will start soon. A model
    /// that left the list during a restart would turn a short wait into a "no such model" error.
    pub(super) fn models(&self) -> Vec<ServedModel> {
        let mut models: BTreeMap<(&str, &str), ServedModel> = BTreeMap::new();
        for worker in self.workers.values() {
            let heartbeat = &worker.heartbeat;
            let served = models
                .entry((&heartbeat.model, &heartbeat.tokenizer))
                .or_insert_with(|| ServedModel {
                    model: heartbeat.model.clone(),
                    tokenizer: heartbeat.tokenizer.clone(),
                    max_context: 0,
                    workers: 0,
                    compiles_forms: true,
                });
            served.max_context = served.max_context.max(heartbeat.max_context);
            served.workers += 1;
            served.compiles_forms &= heartbeat.compiles_forms;
        }
        models.into_values().collect()
    }

    pub(super) fn observe(&self, now_ms: u64) -> Vec<WorkerState> {
        let state = |(name, worker): (&WorkerId, &LiveWorker)| WorkerState {
            worker: name.clone(),
            url: worker.heartbeat.url.clone(),
            model: worker.heartbeat.model.clone(),
            tokenizer: worker.heartbeat.tokenizer.clone(),
            leases: worker.leases.len(),
            foreign: worker.foreign.len(),
            max_running: worker.heartbeat.max_running,
            draining: worker.heartbeat.draining,
            suspect: worker.suspect_since_ms.is_some(),
            silent_ms: now_ms.saturating_sub(worker.reported_ms),
        };
        self.workers.iter().map(state).collect()
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
    /// Most chunks at once.
    max_running: u32,
    /// It takes no new chunks.
    draining: bool,
    /// A chunk failed there, and it has neither reported nor completed a chunk since.
    suspect: bool,
    /// Time since its last heartbeat.
    pub silent_ms: u64,
}
