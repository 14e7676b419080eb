//! A worker that may not have started yet, as its listener sees it.

use std::sync::{Arc, OnceLock};

use parking_lot::Mutex;
use refrain_protocol::{ApiError, ErrorKind};

use super::handle::WorkerHandle;

/// The reason of a worker that has its engine, and takes no calls yet.
pub(super) const STARTING: &str = "starting";

/// A worker that may not have started yet.
#[derive(Clone)]
pub(super) struct LateWorker(Arc<LateState>);

struct LateState {
    worker: OnceLock<WorkerHandle>,
    /// The reason why it has not started.
    trouble: Mutex<String>,
}

impl LateWorker {
    pub(super) fn new() -> Self {
        LateWorker(Arc::new(LateState {
            worker: OnceLock::new(),
            trouble: Mutex::new(STARTING.to_owned()),
        }))
    }

    /// The worker.
    ///
    /// # Errors
    /// `Unavailable`: it has not started yet.
    pub(super) fn get(&self) -> Result<&WorkerHandle, ApiError> {
        let trouble = || ApiError::new(ErrorKind::Unavailable, self.0.trouble.lock().clone());
        self.0.worker.get().ok_or_else(trouble)
    }

    /// Whether it takes calls.
    pub(super) fn readiness(&self) -> Result<(), String> {
        match self.0.worker.get() {
            Some(worker) => worker.readiness(),
            None => Err(self.0.trouble.lock().clone()),
        }
    }

    /// Takes calls by a worker that has started.
    pub(super) fn set(&self, worker: WorkerHandle) {
        // It starts once.
        let _ = self.0.worker.set(worker);
    }

    /// Changes the reason why it has not started.
    pub(super) fn say(&self, trouble: &str) {
        trouble.clone_into(&mut self.0.trouble.lock());
    }
}
