//! The chunks that run, each in a task.

use std::collections::HashMap;
use std::sync::{Mutex, MutexGuard, PoisonError};

use refrain_protocol::chunk::ChunkEndReason;
use refrain_protocol::{DocumentId, LeaseId};
use tokio::sync::mpsc;
use tokio_util::task::TaskTracker;

use super::ending::ChunkControl;

/// The handle of a chunk's task.
pub(super) struct ChunkHandle {
    pub(super) document: DocumentId,
    pub(super) control: mpsc::Sender<ChunkControl>,
}

/// The tasks of chunks. They are started by the thread of the reader, so that a request wakes no other thread.
#[derive(Default)]
pub(crate) struct RunningChunks {
    handles: Mutex<HashMap<LeaseId, ChunkHandle>>,
    pub(super) tasks: TaskTracker,
}

impl RunningChunks {
    pub(super) fn handles(&self) -> MutexGuard<'_, HashMap<LeaseId, ChunkHandle>> {
        self.handles.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Ends the chunks with these leases; `None`: all of them.
    pub(super) fn end(&self, leases: Option<&[LeaseId]>, reason: ChunkEndReason) {
        for (lease, chunk) in self.handles().iter() {
            if leases.is_none_or(|leases| leases.contains(lease)) {
                let _ = chunk.control.try_send(ChunkControl::End(reason));
            }
        }
    }
}
