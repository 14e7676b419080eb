//! Admission of chunks: the limit on running chunks, and the fencing of requests by epoch.

use std::collections::HashSet;
use std::num::NonZeroUsize;
use std::sync::Arc;
use std::time::Duration;

use lru::LruCache;
use parking_lot::Mutex;
use prometheus::IntGauge;
use refrain_protocol::error::code;
use refrain_protocol::{ApiError, ErrorKind, LeaseId, RequestId};
use refrain_service_kit::drain::InFlight as DrainToken;
use tokio::sync::Notify;

/// Admits at most `running_max` chunks at once, and never an old epoch of a request.
pub(crate) struct Admission {
    state: Mutex<AdmittedChunks>,
    running_max: usize,
    running: IntGauge,
    released: Notify,
}

struct AdmittedChunks {
    leases: HashSet<LeaseId>,
    /// The newest epoch of each request.
    epochs: LruCache<RequestId, u64>,
    /// The highest of all epochs so far.
    epoch_seen: u64,
}

/// Number of requests whose epoch is remembered. An attempt that is further behind has long lost its lease.
const EPOCHS_REMEMBERED: NonZeroUsize = NonZeroUsize::new(65_536).unwrap();

/// The admission of a chunk. Dropping it frees the slot.
pub(crate) struct AdmissionPermit {
    lease: LeaseId,
    admission: Arc<Admission>,
    _drain: DrainToken,
}

impl AdmissionPermit {
    /// The lease of the chunk.
    pub(crate) fn lease(&self) -> LeaseId {
        self.lease
    }
}

impl Drop for AdmissionPermit {
    fn drop(&mut self) {
        self.admission.release(self.lease);
    }
}

impl Admission {
    pub(crate) fn new(running_max: u32, running: IntGauge) -> Self {
        let state = AdmittedChunks {
            leases: HashSet::new(),
            epochs: LruCache::new(EPOCHS_REMEMBERED),
            epoch_seen: 0,
        };
        Admission {
            state: Mutex::new(state),
            running_max: running_max as usize,
            running,
            released: Notify::new(),
        }
    }

    /// Takes a slot, to be freed with [`Admission::release`].
    ///
    /// # Errors
    /// `Conflict` for an epoch that is not newer than every known epoch of the request; `Overloaded` if all slots are
    /// taken.
    fn take(&self, lease: LeaseId, request: RequestId, epoch: u64) -> Result<(), ApiError> {
        let mut state = self.state.lock();
        if state
            .epochs
            .peek(&request)
            .is_some_and(|&seen| epoch <= seen)
        {
            return Err(ApiError::new(
                ErrorKind::Conflict,
                "this worker has seen a newer lease of this request",
            )
            .with_code(code::STALE_EPOCH));
        }
        if state.leases.len() >= self.running_max {
            return Err(ApiError::new(
                ErrorKind::Overloaded,
                format!("all {} slots of this worker are taken", self.running_max),
            )
            .with_code(code::WORKER_FULL)
            .with_retry_after_ms(200));
        }
        state.epochs.put(request, epoch);
        state.epoch_seen = state.epoch_seen.max(epoch);
        state.leases.insert(lease);
        self.running.set(state.leases.len() as i64);
        Ok(())
    }

    /// Admits a chunk, and waits up to `wait` while all slots are taken. The scheduler grants a slot as soon as the
    /// gateway has finished with it, which may be a step earlier than this worker.
    ///
    /// # Errors
    /// `Conflict` for an epoch that is not newer than every known epoch of the request; `Overloaded` if no slot
    /// became free.
    pub(crate) async fn admit(
        self: &Arc<Self>,
        lease: LeaseId,
        request: RequestId,
        epoch: u64,
        wait: Duration,
        drain: DrainToken,
    ) -> Result<AdmissionPermit, ApiError> {
        let deadline = tokio::time::Instant::now() + wait;
        loop {
            let released = self.released.notified();
            match self.take(lease, request, epoch) {
                Err(error) if error.kind == ErrorKind::Overloaded => {
                    if tokio::time::timeout_at(deadline, released).await.is_err() {
                        return Err(error);
                    }
                }
                Err(error) => return Err(error),
                Ok(()) => {
                    return Ok(AdmissionPermit {
                        lease,
                        admission: self.clone(),
                        _drain: drain,
                    });
                }
            }
        }
    }

    fn release(&self, lease: LeaseId) {
        let mut state = self.state.lock();
        state.leases.remove(&lease);
        self.running.set(state.leases.len() as i64);
        self.released.notify_waiters();
    }

    /// The highest epoch of all chunks so far.
    pub(crate) fn epoch_seen(&self) -> u64 {
        self.state.lock().epoch_seen
    }

    /// The leases of the running chunks.
    pub(crate) fn leases(&self) -> Vec<LeaseId> {
        let mut leases: Vec<LeaseId> = self.state.lock().leases.iter().copied().collect();
        leases.sort_unstable();
        leases
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn old_epochs_and_full_slots_are_refused() {
        let admission = Admission::new(1, IntGauge::new("running", "running").unwrap());
        admission.take(LeaseId(1), RequestId(1), 5).unwrap();
        let stale = admission.take(LeaseId(2), RequestId(1), 5).unwrap_err();
        assert_eq!(stale.kind, ErrorKind::Conflict);
        let full = admission.take(LeaseId(3), RequestId(2), 1).unwrap_err();
        assert_eq!(full.kind, ErrorKind::Overloaded);
        admission.release(LeaseId(1));
        admission.take(LeaseId(4), RequestId(2), 1).unwrap();
        assert_eq!(admission.leases(), vec![LeaseId(4)]);
        assert_eq!(admission.epoch_seen(), 5);
    }
}
