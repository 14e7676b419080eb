//! The table of live workers, made of nothing but their heartbeats.

use std::collections::{BTreeMap, BTreeSet};

use refrain_protocol::scheduling::{Eagle3Report, Heartbeat, LeaseRequest, ServedModel};
use refrain_protocol::{ApiError, ErrorKind, LeaseId, WorkerId};
use serde::Serialize;

use super::queue::PoolKey;
use crate::config::SchedulerConfig;
use crate::placement::Candidate;

/// Longest name of a worker, a model or a tokenizer.
const NAME_BYTES_MAX: usize = 512;
/// Longest URL of a worker.
const URL_BYTES_MAX: usize = 2_048;

/// One worker.
#[derive(Debug)]
pub(super) struct Worker {
    pub(super) heartbeat: Heartbeat,
    /// The process before this one: its stragglers are refused.
    previous_incarnation: Option<u64>,
    registered_ms: u64,
    heard_ms: u64,
    /// Leases of this table, granted but perhaps not yet named by a heartbeat.
    pub(super) leases: BTreeSet<LeaseId>,
    /// Leases it named that this table does not know: grants of an earlier life of the scheduler, or chunks
    /// it has not let go of. They take slots like any other.
    foreign: BTreeSet<LeaseId>,
    /// When somebody last failed to reach it, if nothing has been heard of it since.
    suspect_since_ms: Option<u64>,
}

impl Worker {
    fn running(&self) -> u32 {
        u32::try_from(self.leases.len() + self.foreign.len()).unwrap_or(u32::MAX)
    }

    fn candidate<'a>(&'a self, worker: &'a WorkerId) -> Candidate<'a> {
        Candidate {
            worker,
            model: &self.heartbeat.model,
            tokenizer: &self.heartbeat.tokenizer,
            max_context: self.heartbeat.max_context,
            running: self.running(),
            max_running: self.heartbeat.max_running,
            draining: self.heartbeat.draining,
            suspect: self.suspect_since_ms.is_some(),
            registered_ms: self.registered_ms,
        }
    }
}

/// What a heartbeat turned out to be.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Beat {
    /// A worker nobody knew.
    Joined,
    /// The same process as before.
    Same,
    /// A new process of a known worker; these leases went down with the old one.
    Restarted(Vec<LeaseId>),
}

/// What of a pool can take a chunk.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Headroom {
    /// Longest context among the workers that take new chunks, full or not; 0 if there is none.
    pub(super) open_context_max: u32,
    /// The same among those with a free slot.
    pub(super) free_context_max: u32,
    /// Slots of all workers that take new chunks.
    pub(super) slots: u64,
}

/// All live workers, by name.
#[derive(Debug, Default)]
pub(super) struct WorkerTable {
    workers: BTreeMap<WorkerId, Worker>,
}

impl WorkerTable {
    pub(super) fn len(&self) -> usize {
        self.workers.len()
    }

    pub(super) fn get_mut(&mut self, worker: &WorkerId) -> Option<&mut Worker> {
        self.workers.get_mut(worker)
    }

    pub(super) fn url(&self, worker: &WorkerId) -> Option<&str> {
        self.workers
            .get(worker)
            .map(|worker| worker.heartbeat.url.as_str())
    }

    /// Takes a heartbeat in, all but its list of leases.
    pub(super) fn beat(
        &mut self,
        heartbeat: &Heartbeat,
        config: &SchedulerConfig,
        now_ms: u64,
    ) -> Result<Beat, ApiError> {
        check(heartbeat, config)?;
        // The list lives on in `leases` and `foreign`.
        let heartbeat = Heartbeat {
            running: Vec::new(),
            ..heartbeat.clone()
        };
        let Some(known) = self.workers.get_mut(&heartbeat.worker) else {
            if self.workers.len() >= config.workers_max {
                return Err(ApiError::new(
                    ErrorKind::Overloaded,
                    format!(
                        "the scheduler knows {} workers, its limit (workers_max); raise it or stop some",
                        self.workers.len()
                    ),
                )
                .with_code("workers_limit")
                .with_retry_after_ms(config.worker_ttl_ms));
            }
            let worker = Worker {
                previous_incarnation: None,
                registered_ms: now_ms,
                heard_ms: now_ms,
                leases: BTreeSet::new(),
                foreign: BTreeSet::new(),
                suspect_since_ms: None,
                heartbeat,
            };
            self.workers.insert(worker.heartbeat.worker.clone(), worker);
            return Ok(Beat::Joined);
        };
        if known.previous_incarnation == Some(heartbeat.incarnation) {
            return Err(ApiError::new(
                ErrorKind::Conflict,
                format!(
                    "a newer process reports as worker {}; stop this one or give it a name of its own",
                    heartbeat.worker
                ),
            )
            .with_code("worker_name_taken"));
        }
        let restarted = known.heartbeat.incarnation != heartbeat.incarnation;
        let mut lost = Vec::new();
        if restarted {
            known.previous_incarnation = Some(known.heartbeat.incarnation);
            known.registered_ms = now_ms;
            known.foreign.clear();
            lost.extend(known.leases.iter().copied());
        }
        known.heard_ms = now_ms;
        known.suspect_since_ms = None;
        known.heartbeat = heartbeat;
        Ok(if restarted {
            Beat::Restarted(lost)
        } else {
            Beat::Same
        })
    }

    /// Replaces what a worker runs beyond the leases of this table.
    pub(super) fn set_foreign(&mut self, worker: &WorkerId, foreign: BTreeSet<LeaseId>) {
        if let Some(worker) = self.workers.get_mut(worker) {
            worker.foreign = foreign;
        }
    }

    /// Strikes an unknown lease off whichever worker named it. `false`: nobody did.
    pub(super) fn end_foreign(&mut self, lease: LeaseId) -> bool {
        self.workers
            .values_mut()
            .any(|worker| worker.foreign.remove(&lease))
    }

    /// Somebody failed to reach it: no new chunks until it reports again, or brings one to its end after this.
    pub(super) fn suspect(&mut self, worker: &WorkerId, now_ms: u64) {
        if let Some(worker) = self.workers.get_mut(worker) {
            worker.suspect_since_ms = Some(now_ms);
        }
    }

    /// It brought a chunk to its end at `ended_ms`. Before it became suspect, or in that very millisecond, that says nothing.
    pub(super) fn trust(&mut self, worker: &WorkerId, ended_ms: u64) {
        if let Some(worker) = self.workers.get_mut(worker)
            && worker
                .suspect_since_ms
                .is_some_and(|since| since < ended_ms)
        {
            worker.suspect_since_ms = None;
        }
    }

    /// When the worker was last heard that has been silent for longest.
    pub(super) fn heard_first_ms(&self) -> Option<u64> {
        self.workers.values().map(|worker| worker.heard_ms).min()
    }

    /// Removes the workers silent for `ttl_ms`, with the leases they took along.
    pub(super) fn remove_silent(
        &mut self,
        now_ms: u64,
        ttl_ms: u64,
    ) -> Vec<(WorkerId, Vec<LeaseId>)> {
        let mut silent = Vec::new();
        self.workers.retain(|name, worker| {
            let live = now_ms < worker.heard_ms.saturating_add(ttl_ms);
            if !live {
                silent.push((name.clone(), worker.leases.iter().copied().collect()));
            }
            live
        });
        silent
    }

    pub(super) fn candidates(&self) -> impl Iterator<Item = Candidate<'_>> {
        self.workers
            .iter()
            .map(|(name, worker)| worker.candidate(name))
    }

    pub(super) fn headroom(&self, pool: &PoolKey) -> Headroom {
        let mut headroom = Headroom::default();
        let in_pool = |candidate: &Candidate<'_>| {
            candidate.model == pool.model
                && candidate.tokenizer == pool.tokenizer
                && !candidate.draining
        };
        for candidate in self.candidates().filter(in_pool) {
            headroom.slots += u64::from(candidate.max_running);
            headroom.open_context_max = headroom.open_context_max.max(candidate.max_context);
            if !candidate.suspect && candidate.running < candidate.max_running {
                headroom.free_context_max = headroom.free_context_max.max(candidate.max_context);
            }
        }
        headroom
    }

    /// How the EAGLE-3 head of a worker's fallback does, if a request of the worker could go on there.
    pub(super) fn fallback(&self, of: &WorkerId) -> Option<Eagle3Report> {
        let own = &self.workers.get(of)?.heartbeat;
        let named = own.fallback.as_ref().filter(|name| *name != of)?;
        let there = self.workers.get(named)?;
        let same_text = there.heartbeat.model == own.model
            && there.heartbeat.tokenizer == own.tokenizer
            && there.heartbeat.max_context >= own.max_context;
        // A full one would send the request back here, after a prefill for nothing.
        let has_room = there.running() < there.heartbeat.max_running;
        let takes = !there.heartbeat.draining && there.suspect_since_ms.is_none() && has_room;
        there.heartbeat.eagle3.filter(|_| same_text && takes)
    }

    /// Whether it would take chunks if it had a slot.
    pub(super) fn is_full(&self, worker: &WorkerId) -> bool {
        self.workers.get(worker).is_some_and(|known| {
            let candidate = known.candidate(worker);
            let is_open = !candidate.draining && !candidate.suspect;
            is_open && candidate.running >= candidate.max_running
        })
    }

    pub(super) fn pool_of(&self, worker: &WorkerId) -> Option<PoolKey> {
        let heartbeat = &self.workers.get(worker)?.heartbeat;
        Some(PoolKey {
            model: heartbeat.model.clone(),
            tokenizer: heartbeat.tokenizer.clone(),
        })
    }

    /// Whether a request of its pool could be placed on it if it had a slot.
    pub(super) fn fits(&self, worker: &WorkerId, request: &LeaseRequest) -> bool {
        self.workers.get(worker).is_some_and(|known| {
            known.heartbeat.max_context > request.context_tokens
                && !request.exclude.contains(worker)
        })
    }

    pub(super) fn serves(&self, pool: &PoolKey) -> bool {
        self.workers.values().any(|worker| {
            worker.heartbeat.model == pool.model && worker.heartbeat.tokenizer == pool.tokenizer
        })
    }

    /// The models served now. A draining worker still counts: its successor is on the way, and a model that
    /// vanished from the list during a restart would turn a wait into a "no such model".
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
                });
            served.max_context = served.max_context.max(heartbeat.max_context);
            served.workers += 1;
        }
        models.into_values().collect()
    }

    pub(super) fn observe(&self, now_ms: u64) -> Vec<WorkerState> {
        let state = |(name, worker): (&WorkerId, &Worker)| WorkerState {
            worker: name.clone(),
            url: worker.heartbeat.url.clone(),
            model: worker.heartbeat.model.clone(),
            tokenizer: worker.heartbeat.tokenizer.clone(),
            leases: worker.leases.len(),
            foreign: worker.foreign.len(),
            max_running: worker.heartbeat.max_running,
            draining: worker.heartbeat.draining,
            suspect: worker.suspect_since_ms.is_some(),
            silent_ms: now_ms.saturating_sub(worker.heard_ms),
        };
        self.workers.iter().map(state).collect()
    }
}

fn check(heartbeat: &Heartbeat, config: &SchedulerConfig) -> Result<(), ApiError> {
    for (param, text, bytes_max) in [
        ("worker", &heartbeat.worker.0, NAME_BYTES_MAX),
        ("model", &heartbeat.model, NAME_BYTES_MAX),
        ("tokenizer", &heartbeat.tokenizer, NAME_BYTES_MAX),
        ("url", &heartbeat.url, URL_BYTES_MAX),
    ] {
        if text.is_empty() || text.len() > bytes_max {
            return Err(ApiError::invalid(
                param,
                format!(
                    "heartbeat: {param} has {} bytes; send 1 to {bytes_max}",
                    text.len()
                ),
            ));
        }
    }
    if let Some(fallback) = &heartbeat.fallback
        && fallback.0.len() > NAME_BYTES_MAX
    {
        return Err(ApiError::invalid(
            "fallback",
            format!(
                "heartbeat: fallback has {} bytes; send at most {NAME_BYTES_MAX}",
                fallback.0.len()
            ),
        ));
    }
    let running_max = config.worker_running_max;
    if heartbeat.max_running == 0 || heartbeat.max_running > running_max {
        return Err(ApiError::invalid(
            "max_running",
            format!(
                "heartbeat: max_running is {}; send 1 to {running_max} (worker_running_max)",
                heartbeat.max_running
            ),
        ));
    }
    // A worker may still be letting go of chunks while their successors start, hence twice.
    if heartbeat.running.len() > 2 * running_max as usize {
        return Err(ApiError::invalid(
            "running",
            format!(
                "heartbeat: {} running leases; at most {}",
                heartbeat.running.len(),
                2 * running_max
            ),
        ));
    }
    Ok(())
}

/// A worker in a snapshot.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct WorkerState {
    /// Who.
    pub worker: WorkerId,
    /// Where.
    pub url: String,
    /// Public model name.
    pub model: String,
    /// Tokenizer identity.
    pub tokenizer: String,
    /// Leases granted on it.
    pub leases: usize,
    /// Leases it named that this scheduler did not grant, or ended a while ago.
    pub foreign: usize,
    /// Chunks it takes at once.
    pub max_running: u32,
    /// Takes no new chunks.
    pub draining: bool,
    /// Somebody failed to reach it, and it has neither reported nor ended a chunk since.
    pub suspect: bool,
    /// Since its last heartbeat.
    pub silent_ms: u64,
}
