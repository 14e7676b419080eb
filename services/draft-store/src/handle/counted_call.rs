//! Calls of a kind of which only some run or wait at once.

use std::sync::Arc;

use prometheus::IntGauge;
use tokio::sync::{OwnedSemaphorePermit, Semaphore};

/// A call that is counted by a gauge until this is dropped, also if the call panics or its caller is gone.
pub(super) struct CountedCall {
    gauge: IntGauge,
    _permit: OwnedSemaphorePermit,
}

impl CountedCall {
    /// Begins a call if there is a permit for it.
    pub(super) fn begin(permits: &Arc<Semaphore>, gauge: &IntGauge) -> Option<Self> {
        let permit = permits.clone().try_acquire_owned().ok()?;
        gauge.inc();
        Some(CountedCall {
            gauge: gauge.clone(),
            _permit: permit,
        })
    }
}

impl Drop for CountedCall {
    fn drop(&mut self) {
        self.gauge.dec();
    }
}
