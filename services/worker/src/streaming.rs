//! The driver for engines that generate by themselves: one task per chunk relays an engine's stream.
//!
//! Read [`StreamContext::run`] first, then `streamed_chunk.rs`. Tokens go to the reader and to the store, as in the
//! decode loop, and nothing is drafted. When a reader leaves, its chunk's task ends, and with it the engine's work.

mod context;
mod engine_health;
mod form_phase;
mod interrupts;
mod open;
mod primer;
mod primer_texts;
mod running_chunks;
mod step_gaps;
mod streamed_chunk;
mod timeout;

use std::sync::Arc;

use refrain_protocol::LeaseId;
use refrain_protocol::chunk::ChunkCut;
use refrain_service_kit::actors::Inbox;
use tokio::sync::{mpsc, oneshot};
use tracing::Instrument;

use self::running_chunks::ChunkHandle;
use self::streamed_chunk::run_chunk;
use crate::chunk::{ActiveChunk, Command, EndOrder};

pub(crate) use self::context::StreamContext;
pub(crate) use self::primer::Primer;

/// The entry of a chunk, which is removed when this is dropped.
struct ChunkEntry {
    context: Arc<StreamContext>,
    lease: LeaseId,
}

impl Drop for ChunkEntry {
    fn drop(&mut self) {
        self.context.chunks.handles().remove(&self.lease);
    }
}

/// Capacity of a chunk's control queue: a cut, an evacuation, a take-over, and a request to give way. Further
/// requests to give way would change nothing, and a further cut waits.
const CONTROL_QUEUE: usize = 4;

impl StreamContext {
    /// The driver: it passes commands on to the tasks of chunks.
    ///
    /// Runs until it receives [`Command::Stop`] or all senders are gone, and the last chunk has ended.
    pub(crate) async fn run(self: Arc<Self>, mut commands: Inbox<Command>) {
        let mut has_senders = true;
        loop {
            tokio::select! {
                command = commands.recv(), if has_senders => match command {
                    Some(Command::Start(chunk)) => self.start(*chunk),
                    Some(Command::Cut(cut, done)) => self.cut(cut, done),
                    Some(Command::EndChunks(order)) => self.end_ordered(&order),
                    Some(Command::Stop) => _ = self.chunks.tasks.close(),
                    None => {
                        has_senders = false;
                        self.chunks.tasks.close();
                    }
                },
                // This needs the end of new chunks first.
                () = self.chunks.tasks.wait() => break,
            }
        }
        let last = std::future::ready(());
        self.shared.serve_cuts(commands, last).await;
    }

    /// Starts the task of a chunk on the runtime of its reader, which calls this: so a token goes from the engine's
    /// connection to the client's on one thread.
    pub(crate) fn start(self: &Arc<Self>, chunk: ActiveChunk) {
        if let Some(primer) = &self.primer {
            primer.note_use(chunk.running.namespace, &chunk.running.request.namespace);
        }
        let key = chunk.key();
        let (control, controls) = mpsc::channel(CONTROL_QUEUE);
        let gate = self.shared.orders.gate();
        self.chunks.begin(ChunkHandle { key, control }, &gate);
        let entry = ChunkEntry {
            context: self.clone(),
            lease: key.lease,
        };
        let span = chunk.span.clone();
        let task = async move {
            // It is large, and would be copied on its way into the task.
            Box::pin(run_chunk(&entry.context, chunk, controls)).await;
            drop(entry);
        };
        let task = self.chunks.tasks.track_future(task.instrument(span));
        tokio::spawn(task);
    }

    /// Ends the chunks that an order is about.
    pub(crate) fn end_ordered(&self, order: &EndOrder) {
        self.chunks.end(order, &self.shared.orders.gate());
    }

    fn cut(&self, cut: ChunkCut, done: oneshot::Sender<()>) {
        let shared = self.shared.clone();
        let end_late = move |ending| shared.end_late(ending);
        self.chunks.cut(cut, done, end_late);
    }
}
