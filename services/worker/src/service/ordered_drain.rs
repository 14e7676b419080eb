//! The drain that an operator orders, and may take back: the process goes on, and so do its heartbeats.

use std::time::Duration;

use refrain_protocol::scheduling::WorkerDrain;
use tokio::sync::{mpsc, watch};

use crate::chunk::{Command, EndOrder};

/// Whether an operator has ordered a drain.
pub(crate) struct OrderedDrain(watch::Sender<bool>);

impl OrderedDrain {
    pub(crate) fn new() -> Self {
        OrderedDrain(watch::Sender::new(false))
    }

    /// Whether the order stands.
    pub(crate) fn is_ordered(&self) -> bool {
        *self.0.borrow()
    }

    /// Tells of each order, and of its end.
    pub(crate) fn orders(&self) -> watch::Receiver<bool> {
        self.0.subscribe()
    }

    /// Takes an order. Running chunks have the same grace as when the process stops. Then they end by `commands`, and
    /// their requests go on at other workers.
    pub(super) fn take(
        &self,
        order: WorkerDrain,
        grace: Duration,
        commands: &mpsc::Sender<Command>,
    ) {
        let is_new = self
            .0
            .send_if_modified(|ordered| std::mem::replace(ordered, order.drains) != order.drains);
        if !is_new {
            return;
        }
        tracing::info!(
            drains = order.drains,
            "an operator ordered a drain, or its end"
        );
        if order.drains {
            tokio::spawn(evacuate(self.orders(), grace, commands.clone()));
        }
    }
}

/// Ends all chunks after the grace, unless the order is taken back before.
async fn evacuate(
    mut orders: watch::Receiver<bool>,
    grace: Duration,
    commands: mpsc::Sender<Command>,
) {
    let taken_back = orders.wait_for(|ordered| !ordered);
    if tokio::time::timeout(grace, taken_back).await.is_err() {
        // A driver that has stopped has no chunks.
        let evacuate = Command::EndChunks(EndOrder::Evacuate);
        let _ = commands.send(evacuate).await;
    }
}
