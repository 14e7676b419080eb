//! The leases that are held, and those that ended a moment ago.

use std::collections::{HashMap, VecDeque};

use refrain_protocol::scheduling::{LeaseOutcome, RequestClass};
use refrain_protocol::{LeaseId, RequestId, WorkerId};

use super::fair_queue::{Arrival, Charge};
use super::group_key::GroupKey;
use super::pool_key::PoolKey;

/// The id of a lease. It is unique because epochs are. Its low half tells a reader of logs which request it belongs
/// to.
pub(super) fn lease_id(epoch: u64, request: RequestId) -> LeaseId {
    LeaseId((u128::from(epoch) << 64) | (request.0 & u128::from(u64::MAX)))
}

/// The epoch of a lease.
pub(super) fn epoch_of(lease: LeaseId) -> u64 {
    (lease.0 >> 64) as u64
}

/// The reason why a lease ended: the `outcome` label of `refrain_scheduler_leases_total`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LeaseEnd {
    /// Its holder gave it back.
    Finished(LeaseOutcome),
    /// No heartbeat named it for `lease_ttl_ms`.
    Expired,
    /// The worker no longer runs it, and its `finish` did not arrive.
    Healed,
    /// The worker fell silent or came back as another process.
    WorkerLost,
    /// The request asked again, so nobody holds this lease any more.
    Superseded,
    /// The caller was gone when the grant arrived.
    Undelivered,
}

impl LeaseEnd {
    /// Whether the request may ask for another chunk.
    pub(super) fn may_go_on(self) -> bool {
        use LeaseOutcome::{Aborted, Finished, GivenUp};
        !matches!(self, LeaseEnd::Finished(Finished | GivenUp | Aborted))
    }

    /// The value of the label.
    pub fn as_str(self) -> &'static str {
        match self {
            LeaseEnd::Finished(LeaseOutcome::Finished) => "finished",
            LeaseEnd::Finished(LeaseOutcome::GivenUp) => "given_up",
            LeaseEnd::Finished(LeaseOutcome::Aborted) => "aborted",
            LeaseEnd::Finished(LeaseOutcome::Continues) => "continues",
            LeaseEnd::Finished(LeaseOutcome::WorkerFailed) => "worker_failed",
            LeaseEnd::Expired => "expired",
            LeaseEnd::Healed => "healed",
            LeaseEnd::WorkerLost => "worker_lost",
            LeaseEnd::Superseded => "superseded",
            LeaseEnd::Undelivered => "undelivered",
        }
    }
}

/// A lease that is held.
#[derive(Clone, Debug)]
pub(super) struct RunningLease {
    pub(super) request: RequestId,
    pub(super) worker: WorkerId,
    pub(super) pool: PoolKey,
    pub(super) tenant: String,
    pub(super) class: RequestClass,
    /// The group of a rollout.
    pub(super) group: Option<GroupKey>,
    /// Whether a member of the group had finished when it was granted.
    pub(super) had_reference: bool,
    pub(super) charge: Charge,
    /// When the request first asked.
    pub(super) arrival: Arrival,
    /// Time from then until the call that got it.
    pub(super) age_ms: u64,
    /// Tokens of prompt and output when it was granted.
    pub(super) context_tokens: u32,
    /// Output tokens when it was granted.
    pub(super) generated_tokens: u32,
    /// The length that earlier outputs to the prompt had.
    pub(super) expected_tokens: Option<u32>,
    /// KV tokens that are planned for it.
    pub(super) kv_tokens: u64,
    /// Its chunk has a limit.
    pub(super) bounded: bool,
    pub(super) granted_ms: u64,
    /// When it was granted, or last named by a heartbeat.
    pub(super) last_seen_ms: u64,
    /// Its worker has been asked to end it, because another tenant waits for the slot.
    pub(super) preempted: bool,
}

/// The facts about an ended lease that a late `finish` or heartbeat needs.
#[derive(Debug)]
struct EndedLease {
    ended_ms: u64,
    /// The lease, for a late `finish` to correct its charge and to tell its length. `None` if that is done, or if
    /// this table did not grant the lease.
    unsettled: Option<Box<RunningLease>>,
}

/// Running leases by id and by request, and a bounded number of ended ones.
#[derive(Debug)]
pub(super) struct LeaseTable {
    running: HashMap<LeaseId, RunningLease>,
    by_request: HashMap<RequestId, LeaseId>,
    ended: HashMap<LeaseId, EndedLease>,
    /// The ended leases, oldest first.
    ended_order: VecDeque<LeaseId>,
    ended_max: usize,
}

impl LeaseTable {
    pub(super) fn new(ended_max: usize) -> Self {
        LeaseTable {
            running: HashMap::new(),
            by_request: HashMap::new(),
            ended: HashMap::new(),
            ended_order: VecDeque::new(),
            ended_max,
        }
    }

    pub(super) fn len(&self) -> usize {
        self.running.len()
    }

    pub(super) fn ended_len(&self) -> usize {
        self.ended.len()
    }

    pub(super) fn get(&self, lease: LeaseId) -> Option<&RunningLease> {
        self.running.get(&lease)
    }

    pub(super) fn get_mut(&mut self, lease: LeaseId) -> Option<&mut RunningLease> {
        self.running.get_mut(&lease)
    }

    pub(super) fn of_request(&self, request: RequestId) -> Option<LeaseId> {
        self.by_request.get(&request).copied()
    }

    pub(super) fn insert(&mut self, lease: LeaseId, running: RunningLease) {
        self.by_request.insert(running.request, lease);
        self.running.insert(lease, running);
    }

    /// Ends a running lease and remembers it as ended.
    pub(super) fn end(
        &mut self,
        lease: LeaseId,
        now_ms: u64,
        settled: bool,
    ) -> Option<RunningLease> {
        let running = self.running.remove(&lease)?;
        if self.by_request.get(&running.request) == Some(&lease) {
            self.by_request.remove(&running.request);
        }
        let unsettled = (!settled).then(|| Box::new(running.clone()));
        self.remember_ended(lease, now_ms, unsettled);
        Some(running)
    }

    /// Remembers a lease as ended, also one that this table did not grant. A late `finish` settles `unsettled`.
    pub(super) fn remember_ended(
        &mut self,
        lease: LeaseId,
        ended_ms: u64,
        unsettled: Option<Box<RunningLease>>,
    ) {
        let ended = EndedLease {
            ended_ms,
            unsettled,
        };
        if self.ended.insert(lease, ended).is_none() {
            self.ended_order.push_back(lease);
        }
        while self.ended_order.len() > self.ended_max {
            if let Some(oldest) = self.ended_order.pop_front() {
                self.ended.remove(&oldest);
            }
        }
    }

    /// The lease that a late `finish` settles. Only the first call returns it.
    pub(super) fn settle_ended(&mut self, lease: LeaseId) -> Option<Box<RunningLease>> {
        self.ended.get_mut(&lease)?.unsettled.take()
    }

    /// Whether a lease ended less than `grace_ms` ago, so that a heartbeat may still name it.
    pub(super) fn ended_within(&self, lease: LeaseId, now_ms: u64, grace_ms: u64) -> bool {
        self.ended
            .get(&lease)
            .is_some_and(|ended| now_ms < ended.ended_ms.saturating_add(grace_ms))
    }

    /// Renews a lease that a heartbeat of its worker named. Returns `false` if that worker has no such running lease.
    pub(super) fn renew(&mut self, lease: LeaseId, worker: &WorkerId, now_ms: u64) -> bool {
        match self.running.get_mut(&lease) {
            Some(running) if running.worker == *worker => {
                running.last_seen_ms = now_ms;
                true
            }
            _ => false,
        }
    }

    /// The oldest `last_seen_ms` of all running leases.
    pub(super) fn oldest_seen_ms(&self) -> Option<u64> {
        self.running
            .values()
            .map(|running| running.last_seen_ms)
            .min()
    }

    /// Running leases that no heartbeat has named for `ttl_ms`, in order of their ids.
    pub(super) fn silent_for(&self, now_ms: u64, ttl_ms: u64) -> Vec<LeaseId> {
        let silent = |running: &RunningLease| now_ms >= running.last_seen_ms.saturating_add(ttl_ms);
        let mut leases: Vec<LeaseId> = self
            .running
            .iter()
            .filter(|(_, running)| silent(running))
            .map(|(lease, _)| *lease)
            .collect();
        leases.sort_unstable();
        leases
    }
}
