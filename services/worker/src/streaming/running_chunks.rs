//! The chunks that run, each in a task.

use std::collections::HashMap;

use parking_lot::{Mutex, MutexGuard};
use refrain_protocol::chunk::ChunkEndReason;
use refrain_protocol::{DocumentId, LeaseId};
use tokio::sync::mpsc;
use tokio_util::task::TaskTracker;

use super::ending::ChunkControl;
use crate::orders::{Fate, Gate};

/// The handle of a chunk's task.
pub(super) struct ChunkHandle {
    pub(super) document: DocumentId,
    pub(super) control: mpsc::Sender<ChunkControl>,
    /// The number of the pause in which its request began; 0: in none.
    pub(super) begun_in: u64,
}

/// The tasks of chunks. They are started by the thread of the reader, so that a request wakes no other thread.
#[derive(Default)]
pub(crate) struct RunningChunks {
    handles: Mutex<HashMap<LeaseId, ChunkHandle>>,
    pub(super) tasks: TaskTracker,
}

impl RunningChunks {
    pub(super) fn handles(&self) -> MutexGuard<'_, HashMap<LeaseId, ChunkHandle>> {
        self.handles.lock()
    }

    /// Ends the chunks that the order of a trainer aborts.
    pub(super) fn abort(&self, gate: &Gate) {
        for chunk in self.handles().values() {
            if gate.fate(chunk.begun_in) == Fate::Aborted {
                let end = ChunkControl::End(ChunkEndReason::Aborted);
                let _ = chunk.control.try_send(end);
            }
        }
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
