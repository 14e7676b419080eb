//! What may end a chunk from outside: what it is told, and its reader's departure.

use std::pin::Pin;
use std::task::{Context, Poll};

use futures_util::future::poll_fn;
use refrain_protocol::chunk::ChunkEndReason;
use tokio::sync::mpsc;

use super::listen::{Events, Outcome};
use super::{Chunks, Control};
use crate::running::Running;

/// Kept for as long as the chunk runs: making its parts anew for each token would cost more than asking them does.
pub(super) struct Outside {
    told: mpsc::Receiver<Control>,
    left: Pin<Box<dyn Future<Output = ()> + Send>>,
}

/// What has come from outside.
pub(super) enum Interruption {
    Told(Control),
    /// Nobody reads on.
    Left,
}

impl Interruption {
    pub(super) fn outcome(self, running: &Running) -> Outcome {
        match self {
            Interruption::Told(Control::Cut(cut, done)) => Outcome::Cut(cut, done),
            Interruption::Told(Control::HandOver) => {
                Outcome::Ended(running.end(ChunkEndReason::Draining))
            }
            Interruption::Told(Control::GiveWay) => {
                Outcome::Ended(running.end(ChunkEndReason::GaveWay))
            }
            Interruption::Told(Control::TakenOver) => Outcome::TakenOver,
            Interruption::Left => Outcome::Left,
        }
    }
}

impl Outside {
    pub(super) fn new(told: mpsc::Receiver<Control>, events: &Events) -> Self {
        let events = events.clone();
        Outside {
            told,
            left: Box::pin(async move { events.closed().await }),
        }
    }

    /// Ready once; the chunk ends with it.
    pub(super) fn poll(&mut self, context: &mut Context<'_>) -> Poll<Interruption> {
        match self.told.poll_recv(context) {
            Poll::Ready(Some(control)) => Poll::Ready(Interruption::Told(control)),
            Poll::Ready(None) | Poll::Pending => self
                .left
                .as_mut()
                .poll(context)
                .map(|()| Interruption::Left),
        }
    }

    /// What was told already, without waiting: who always has something to do would not come to poll for it.
    pub(super) fn told(&mut self) -> Option<Interruption> {
        self.told.try_recv().ok().map(Interruption::Told)
    }

    /// Waits for what ends the chunk from outside.
    pub(super) async fn interrupts(&mut self, running: &Running) -> Outcome {
        let interruption = poll_fn(|context| self.poll(context)).await;
        interruption.outcome(running)
    }

    /// What was told while the chunk was ending: a cut comes after the end.
    pub(super) fn close(mut self, chunks: &Chunks) {
        self.told.close();
        while let Ok(control) = self.told.try_recv() {
            if let Control::Cut(cut, done) = control {
                chunks.outlet.cut_ended(cut);
                let _ = done.send(());
            }
        }
    }
}
