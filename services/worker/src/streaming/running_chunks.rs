//! The chunks that run, each in a task.

use std::collections::HashMap;

use parking_lot::{Mutex, MutexGuard};
use refrain_protocol::LeaseId;
use refrain_protocol::chunk::ChunkCut;
use tokio::sync::mpsc::error::TrySendError;
use tokio::sync::{mpsc, oneshot};
use tokio_util::task::TaskTracker;

use crate::chunk::{ChunkEnding, ChunkKey, EndOrder};
use crate::orders::Gate;

/// The handle of a chunk's task.
pub(super) struct ChunkHandle {
    pub(super) key: ChunkKey,
    /// Takes the endings that come from outside. Each of them ends the chunk.
    pub(super) control: mpsc::Sender<ChunkEnding>,
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

    /// Adds a chunk. An older one of the same request ends.
    pub(super) fn begin(&self, chunk: ChunkHandle, gate: &Gate) {
        let mut handles = self.handles();
        let order = EndOrder::TakeOver(chunk.key.document);
        end_in(&handles, &order, gate);
        handles.insert(chunk.key.lease, chunk);
    }

    /// Ends the chunks that an order is about.
    pub(super) fn end(&self, order: &EndOrder, gate: &Gate) {
        end_in(&self.handles(), order, gate);
    }

    /// Passes a cut on to its chunk, which reports by `done` that it is carried out. One that comes after the end is
    /// for `end_late`.
    ///
    /// Every message ends its chunk. So where the queue is full, the cut waits only until the chunk has ended.
    pub(super) fn cut(
        &self,
        cut: ChunkCut,
        done: oneshot::Sender<()>,
        end_late: impl FnOnce(ChunkEnding) + Send + 'static,
    ) {
        let handles = self.handles();
        let control = handles.get(&cut.lease).map(|chunk| chunk.control.clone());
        drop(handles);
        let ending = ChunkEnding::Cut(cut, done);
        let Some(control) = control else {
            return end_late(ending);
        };
        match control.try_send(ending) {
            Ok(()) => {}
            Err(TrySendError::Closed(unsent)) => end_late(unsent),
            Err(TrySendError::Full(unsent)) => {
                self.tasks.spawn(async move {
                    if let Err(unsent) = control.send(unsent).await {
                        end_late(unsent.0);
                    }
                });
            }
        }
    }
}

fn end_in(handles: &HashMap<LeaseId, ChunkHandle>, order: &EndOrder, gate: &Gate) {
    for chunk in handles
        .values()
        .filter(|chunk| order.ends(&chunk.key, gate))
    {
        // A chunk whose queue is full ends already.
        let _ = chunk.control.try_send(order.ending());
    }
}

#[cfg(test)]
mod tests {
    use refrain_protocol::DocumentId;

    use super::*;

    const LEASE: LeaseId = LeaseId(1);

    /// A chunk whose control queue is full, and the other end of the queue.
    fn crowded() -> (RunningChunks, mpsc::Receiver<ChunkEnding>) {
        let chunks = RunningChunks::default();
        let (control, controls) = mpsc::channel(1);
        let key = ChunkKey {
            lease: LEASE,
            document: DocumentId(1),
            begun_in: 0,
        };
        let gate = Gate::default();
        chunks.begin(ChunkHandle { key, control }, &gate);
        chunks.end(&EndOrder::Evacuate, &gate);
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
        chunks.cut(cut, done, move |ending| {
            if let ChunkEnding::Cut(cut, done) = ending {
                ended.send(cut).unwrap();
                done.send(()).unwrap();
            }
        });
        (is_done, cuts)
    }

    #[tokio::test]
    async fn a_cut_that_finds_the_queue_full_waits_for_room() {
        let (chunks, mut controls) = crowded();
        let (mut is_done, ended) = cut_in(&chunks);
        assert!(is_done.try_recv().is_err() && ended.try_recv().is_err());
        assert!(matches!(controls.recv().await, Some(ChunkEnding::Ended(_))));
        let Some(ChunkEnding::Cut(cut, done)) = controls.recv().await else {
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
