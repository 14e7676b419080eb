//! A live worker: what it reported, what runs there, and what it could take.

use std::collections::BTreeSet;

use refrain_protocol::LeaseId;
use refrain_protocol::scheduling::{Heartbeat, LeaseRequest};

use super::pool_key::PoolKey;
use crate::placement::Candidate;

/// A live worker.
#[derive(Debug)]
pub(super) struct LiveWorker {
    pub(super) heartbeat: Heartbeat,
    pub(super) pool: PoolKey,
    /// The incarnation of the process before this one. Its late heartbeats are refused.
    pub(super) previous_incarnation: Option<u64>,
    pub(super) registered_ms: u64,
    /// Time of the last heartbeat.
    pub(super) reported_ms: u64,
    /// Leases that were granted on it. A heartbeat may not have named them yet.
    pub(super) leases: BTreeSet<LeaseId>,
    /// Leases that it named and that the lease table does not hold: grants of an earlier process of the scheduler, or
    /// chunks that it has not ended yet. They take slots like all others.
    pub(super) foreign: BTreeSet<LeaseId>,
    /// KV tokens that are planned for `leases`.
    pub(super) planned_tokens: u64,
    /// KV tokens that run there beyond the plan, by the last heartbeat: those of foreign leases, and of outputs that
    /// are longer than expected.
    pub(super) unplanned_tokens: u64,
    /// When a chunk last failed there, if the worker has neither reported nor completed a chunk since.
    pub(super) suspect_since_ms: Option<u64>,
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

    /// Chunks that it runs or is about to run.
    pub(super) fn running(&self) -> u32 {
        u32::try_from(self.leases.len() + self.foreign.len()).unwrap_or(u32::MAX)
    }

    /// Leases that it has, with or without a report.
    pub(super) fn leases(&self) -> impl Iterator<Item = LeaseId> {
        self.leases.iter().copied()
    }

    pub(super) fn has_slot(&self) -> bool {
        self.suspect_since_ms.is_none() && self.running() < self.heartbeat.max_running
    }

    /// Whether it would take chunks but has no free slot.
    pub(super) fn is_full(&self) -> bool {
        !self.heartbeat.draining && self.suspect_since_ms.is_none() && !self.has_slot()
    }

    /// Whether it takes chunks, at once or when a slot is free.
    pub(super) fn is_open(&self) -> bool {
        !self.heartbeat.draining
    }

    /// Maximum number of tokens of its KV cache, if it says.
    pub(super) fn capacity_tokens(&self) -> Option<u64> {
        let capacity = self.heartbeat.kv.as_ref().map(|kv| kv.capacity_tokens);
        capacity.filter(|capacity| *capacity > 0)
    }

    /// Whether the KV cache has room for `kv_tokens`.
    pub(super) fn has_room(&self, kv_tokens: u64) -> bool {
        kv_tokens <= self.room_tokens()
    }

    /// Maximum number of KV tokens for which there is room. A request that needs more than all of the KV cache gets
    /// it alone, so an empty one has room for anything.
    pub(super) fn room_tokens(&self) -> u64 {
        match self.capacity_tokens() {
            None => u64::MAX,
            Some(_) if self.planned_tokens + self.unplanned_tokens == 0 => u64::MAX,
            Some(capacity) => {
                capacity.saturating_sub(self.planned_tokens.saturating_add(self.unplanned_tokens))
            }
        }
    }

    /// The part of the KV cache that is planned.
    fn kv_load(&self) -> f64 {
        let used = self.planned_tokens.saturating_add(self.unplanned_tokens);
        let capacity = self.capacity_tokens();
        capacity.map_or(0.0, |capacity| used as f64 / capacity as f64)
    }

    /// Whether a request of its pool could be placed on it if it had a free slot.
    pub(super) fn fits(&self, request: &LeaseRequest) -> bool {
        let own = &self.heartbeat;
        own.max_context > request.context_tokens && !request.exclude.contains(&own.worker)
    }

    /// Whether it could serve a request of its pool that was submitted at `submitted_ms`, now or when a slot is free.
    /// A worker that started after that is not the process on which the request failed.
    pub(super) fn suits(&self, request: &LeaseRequest, submitted_ms: u64) -> bool {
        self.is_open()
            && self.heartbeat.max_context > request.context_tokens
            && (self.registered_ms > submitted_ms
                || !request.exclude.contains(&self.heartbeat.worker))
    }

    pub(super) fn candidate(
        &self,
        index: usize,
        held_tokens: u32,
        prefill_ms_per_1k: f32,
    ) -> Candidate<'_> {
        let measured = self
            .heartbeat
            .kv
            .as_ref()
            .and_then(|kv| kv.prefill_ms_per_1k);
        let measured = measured.filter(|ms| ms.is_finite() && *ms > 0.0);
        Candidate {
            sessions: 0,
            index,
            worker: &self.heartbeat.worker,
            running: self.running(),
            slots: self.heartbeat.max_running,
            kv_load: self.kv_load(),
            held_tokens,
            prefill_ms_per_1k: measured.unwrap_or(prefill_ms_per_1k),
        }
    }
}
