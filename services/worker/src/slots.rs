//! Which leases run here, and which requests have been taken over: admission before the decode loop.

use std::collections::HashSet;
use std::num::NonZeroUsize;
use std::sync::{Mutex, MutexGuard};
use std::time::Duration;

use lru::LruCache;
use prometheus::IntGauge;
use refrain_protocol::error::code;
use refrain_protocol::{ApiError, ErrorKind, LeaseId, RequestId};
use tokio::sync::Notify;

/// Admission of chunks: at most `running_max` at once, and never an older epoch of a request.
pub(crate) struct Slots {
    state: Mutex<State>,
    running_max: usize,
    running: IntGauge,
    released: Notify,
}

struct State {
    leases: HashSet<LeaseId>,
    epochs: LruCache<RequestId, u64>,
}

/// Requests whose epoch is remembered. An attempt this far behind has long lost its lease.
const EPOCHS_REMEMBERED: NonZeroUsize = NonZeroUsize::new(65_536).unwrap();

impl Slots {
    pub(crate) fn new(running_max: u32, running: IntGauge) -> Self {
        let state = State {
            leases: HashSet::new(),
            epochs: LruCache::new(EPOCHS_REMEMBERED),
        };
        Slots {
            state: Mutex::new(state),
            running_max: running_max as usize,
            running,
            released: Notify::new(),
        }
    }

    /// Takes a slot. Give it back with [`Slots::release`].
    ///
    /// # Errors
    /// `Conflict` for an epoch that is not newer than every one seen of the request, `Overloaded` when all
    /// slots are taken.
    pub(crate) fn take(
        &self,
        lease: LeaseId,
        request: RequestId,
        epoch: u64,
    ) -> Result<(), ApiError> {
        let mut state = self.lock();
        if state
            .epochs
            .peek(&request)
            .is_some_and(|&seen| epoch <= seen)
        {
            return Err(ApiError::new(
                ErrorKind::Conflict,
                "a newer lease of this request was here before",
            )
            .with_code("stale_epoch"));
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
        state.leases.insert(lease);
        self.running.set(state.leases.len() as i64);
        Ok(())
    }

    /// As [`Slots::take`], but waits up to `wait` where all slots are taken: the scheduler grants a slot as
    /// soon as the gateway is done with it, which can be a step before this worker is.
    pub(crate) async fn take_soon(
        &self,
        lease: LeaseId,
        request: RequestId,
        epoch: u64,
        wait: Duration,
    ) -> Result<(), ApiError> {
        let deadline = tokio::time::Instant::now() + wait;
        loop {
            let released = self.released.notified();
            match self.take(lease, request, epoch) {
                Err(error) if error.kind == ErrorKind::Overloaded => {
                    if tokio::time::timeout_at(deadline, released).await.is_err() {
                        return Err(error);
                    }
                }
                outcome => return outcome,
            }
        }
    }

    pub(crate) fn release(&self, lease: LeaseId) {
        let mut state = self.lock();
        state.leases.remove(&lease);
        self.running.set(state.leases.len() as i64);
        self.released.notify_waiters();
    }

    /// The leases that run now.
    pub(crate) fn leases(&self) -> Vec<LeaseId> {
        let mut leases: Vec<LeaseId> = self.lock().leases.iter().copied().collect();
        leases.sort_unstable();
        leases
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state
            .lock()
            .unwrap_or_else(|poisoned| poisoned.into_inner())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn old_epochs_and_full_slots_are_refused() {
        let slots = Slots::new(1, IntGauge::new("running", "running").unwrap());
        slots.take(LeaseId(1), RequestId(1), 5).unwrap();
        let stale = slots.take(LeaseId(2), RequestId(1), 5).unwrap_err();
        assert_eq!(stale.kind, ErrorKind::Conflict);
        let full = slots.take(LeaseId(3), RequestId(2), 1).unwrap_err();
        assert_eq!(full.kind, ErrorKind::Overloaded);
        slots.release(LeaseId(1));
        slots.take(LeaseId(4), RequestId(2), 1).unwrap();
        assert_eq!(slots.leases(), vec![LeaseId(4)]);
    }
}
