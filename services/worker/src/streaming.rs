//! The driver for engines that generate by themselves: one task per chunk relays an engine's stream.
//!
//! Read [`StreamContext::run`] first, then `chunk_task.rs`. Tokens go to the reader and to the store, as in the
//! decode loop. In drive mode they are indexed as well, and a stream is sometimes given up for a verify call;
//! otherwise nothing is drafted. When a reader leaves, its chunk's task ends, and with it the engine's work.

mod chunk_task;
mod context;
mod ending;
mod form_phase;
mod interrupts;
mod open;
mod relay;
mod step_gaps;
mod timeout;
mod verify_calls;

use std::collections::HashMap;
use std::sync::Arc;

use refrain_protocol::chunk::{ChunkCut, ChunkEndReason};
use refrain_protocol::{DocumentId, LeaseId};
use tokio::sync::{mpsc, oneshot};
use tokio::task::{Id, JoinSet};
use tracing::Instrument;

use self::ending::ChunkControl;
use crate::chunk::{ActiveChunk, Command, serve_cuts};

pub(crate) use self::context::StreamContext;

/// The driver's handle of a chunk's task.
struct ChunkHandle {
    lease: LeaseId,
    document: DocumentId,
    control: mpsc::Sender<ChunkControl>,
}

/// Capacity of a chunk's control queue: a cut, an evacuation, a take-over, and a request to give way. Further
/// requests to give way would change nothing.
const CONTROL_QUEUE: usize = 4;

impl StreamContext {
    /// The driver: it starts a task per chunk, and passes commands on to the tasks.
    ///
    /// Runs until it receives [`Command::End`] or all senders are gone, and the last chunk has ended.
    pub(crate) async fn run(self: Arc<Self>, mut commands: mpsc::Receiver<Command>) {
        let mut tasks: JoinSet<()> = JoinSet::new();
        let mut chunks: HashMap<Id, ChunkHandle> = HashMap::new();
        let mut ends = false;
        while !ends || !tasks.is_empty() {
            tokio::select! {
                Some(command) = commands.recv() => match command {
                    Command::Start(chunk) => self.start(*chunk, &mut tasks, &mut chunks),
                    Command::Cut(cut, done) => self.cut(cut, done, &chunks),
                    Command::Evacuate => {
                        for chunk in chunks.values() {
                            let control = ChunkControl::End(ChunkEndReason::Draining);
                            let _ = chunk.control.try_send(control);
                        }
                    }
                    Command::GiveWay(leases) => {
                        for chunk in chunks.values().filter(|chunk| leases.contains(&chunk.lease)) {
                            let control = ChunkControl::End(ChunkEndReason::GaveWay);
                            let _ = chunk.control.try_send(control);
                        }
                    }
                    Command::End => ends = true,
                },
                Some(ended) = tasks.join_next_with_id() => {
                    let id = match ended {
                        Ok((id, ())) => id,
                        Err(error) => error.id(),
                    };
                    chunks.remove(&id);
                }
                else => break,
            }
        }
        serve_cuts(commands, &self.shared.sink, std::future::ready(())).await;
    }

    fn start(
        self: &Arc<Self>,
        chunk: ActiveChunk,
        tasks: &mut JoinSet<()>,
        chunks: &mut HashMap<Id, ChunkHandle>,
    ) {
        let runtime = chunk.runtime.clone();
        let document = chunk.running.document();
        for old in chunks.values().filter(|old| old.document == document) {
            let _ = old.control.try_send(ChunkControl::TakenOver);
        }
        let (control, controls) = mpsc::channel(CONTROL_QUEUE);
        let lease = chunk.lease;
        let span = chunk.span.clone();
        let task = self.clone().run_chunk(chunk, controls);
        let id = tasks.spawn_on(task.instrument(span), &runtime).id();
        let handle = ChunkHandle {
            lease,
            document,
            control,
        };
        chunks.insert(id, handle);
    }

    fn cut(&self, cut: ChunkCut, done: oneshot::Sender<()>, chunks: &HashMap<Id, ChunkHandle>) {
        let running = chunks.values().find(|chunk| chunk.lease == cut.lease);
        let control = ChunkControl::Cut(cut, done);
        let unsent = match running {
            Some(chunk) => match chunk.control.try_send(control) {
                Ok(()) => return,
                Err(error) => error.into_inner(),
            },
            None => control,
        };
        if let ChunkControl::Cut(cut, done) = unsent {
            self.shared.sink.cut_ended(cut);
            let _ = done.send(());
        }
    }
}
