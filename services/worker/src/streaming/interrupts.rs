//! The interrupts that end a chunk from outside: control messages, and the departure of its reader.

use std::pin::Pin;
use std::task::{Context, Poll};

use futures_util::future::poll_fn;
use tokio::sync::mpsc;

use crate::chunk::{ChunkEnding, Events};
use crate::shared::Shared;

/// Kept for as long as the chunk runs: creating its futures anew for each token would cost more than polling them.
pub(super) struct Interrupts {
    controls: mpsc::Receiver<ChunkEnding>,
    reader_left: Pin<Box<dyn Future<Output = ()> + Send>>,
}

impl Interrupts {
    pub(super) fn new(controls: mpsc::Receiver<ChunkEnding>, events: &Events) -> Self {
        let events = events.clone();
        Interrupts {
            controls,
            reader_left: Box::pin(async move { events.closed().await }),
        }
    }

    /// Ready with the first interrupt, which ends the chunk in this way.
    pub(super) fn poll(&mut self, context: &mut Context<'_>) -> Poll<ChunkEnding> {
        match self.controls.poll_recv(context) {
            Poll::Ready(Some(ending)) => Poll::Ready(ending),
            Poll::Ready(None) | Poll::Pending => self
                .reader_left
                .as_mut()
                .poll(context)
                .map(|()| ChunkEnding::ReaderLeft),
        }
    }

    /// The ending by a control message that has arrived already. A chunk whose stream is always ready never waits, so
    /// it would not poll for interrupts.
    pub(super) fn pending_control(&mut self) -> Option<ChunkEnding> {
        self.controls.try_recv().ok()
    }

    /// Waits for an interrupt.
    pub(super) async fn wait(&mut self) -> ChunkEnding {
        poll_fn(|context| self.poll(context)).await
    }

    /// Handles the control messages that arrived while the chunk was ending.
    pub(super) fn close(mut self, shared: &Shared) {
        self.controls.close();
        while let Ok(ending) = self.controls.try_recv() {
            shared.end_late(ending);
        }
    }
}
