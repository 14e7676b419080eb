//! The chunks that run, each in a task.

use std::collections::HashMap;

use parking_lot::{Mutex, MutexGuard};
use refrain_protocol::chunk::{ChunkCut, ChunkEndReason};
use refrain_protocol::{DocumentId, LeaseId};
use tokio::sync::mpsc::error::TrySendError;
use tokio::sync::{mpsc, oneshot};
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

    /// Passes a cut on to its chunk, which reports by `done` that it is carried out. The output of a chunk that has
    /// ended is shortened by `cut_ended`.
    ///
    /// Every message ends its chunk. So where the queue is full, the cut waits only until the chunk has ended.
    pub(super) fn cut(
        &self,
        cut: ChunkCut,
        done: oneshot::Sender<()>,
        cut_ended: impl FnOnce(ChunkCut) + Send + 'static,
    ) {
        let ended = move |unsent| {
            if let ChunkControl::Cut(cut, done) = unsent {
                cut_ended(cut);
                let _ = done.send(());
            }
        };
        let handles = self.handles();
        let control = handles.get(&cut.lease).map(|chunk| chunk.control.clone());
        drop(handles);
        let command = ChunkControl::Cut(cut, done);
        let Some(control) = control else {
            return ended(command);
        };
        match control.try_send(command) {
            Ok(()) => {}
            Err(TrySendError::Closed(unsent)) => ended(unsent),
            Err(TrySendError::Full(unsent)) => {
                self.tasks.spawn(async move {
                    if let Err(unsent) = control.send(unsent).await {
                        ended(unsent.0);
                    }
                });
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const LEASE: LeaseId = LeaseId(1);

    /// A chunk whose control queue is full, and the other end of the queue.
    fn crowded() -> (RunningChunks, mpsc::Receiver<ChunkControl>) {
        let chunks = RunningChunks::default();
        let (control, controls) = mpsc::channel(1);
        let handle = ChunkHandle {
            document: DocumentId(1),
            control,
            begun_in: 0,
        };
        chunks.handles().insert(LEASE, handle);
        chunks.end(None, ChunkEndReason::GaveWay);
        (chunks, controls)
    }

    fn cut_in(
        chunks: &RunningChunks,
    ) -> (oneshot::Receiver<()>, std::sync::mpsc::Receiver<ChunkCut>) {
        let cut = ChunkCut {
            lease: LEASE,
            output_len: 3,
            aborted: false,
        };
        let (done, is_done) = oneshot::channel();
        let (ended, cuts) = std::sync::mpsc::channel();
        chunks.cut(cut, done, move |cut| ended.send(cut).unwrap());
        (is_done, cuts)
    }

    #[tokio::test]
    async fn a_cut_that_finds_the_queue_full_waits_for_room() {
        let (chunks, mut controls) = crowded();
        let (mut is_done, ended) = cut_in(&chunks);
        assert!(is_done.try_recv().is_err() && ended.try_recv().is_err());
        assert!(matches!(controls.recv().await, Some(ChunkControl::End(_))));
        let Some(ChunkControl::Cut(cut, done)) = controls.recv().await else {
            panic!("the cut is lost");
        };
        assert_eq!(cut.output_len, 3);
        done.send(()).unwrap();
        is_done.await.unwrap();
        assert!(ended.try_recv().is_err());
    }

    #[tokio::test]
    async fn a_cut_that_waits_is_carried_out_once_its_chunk_has_ended() {
        let (chunks, controls) = crowded();
        let (is_done, ended) = cut_in(&chunks);
        drop(controls);
        is_done.await.unwrap();
        assert_eq!(ended.try_recv().unwrap().output_len, 3);
    }
}
