//! The drain that an operator orders, and may take back: the process goes on, and so do its heartbeats.

use std::sync::Arc;
use std::time::Duration;

use refrain_protocol::ApiError;
use refrain_protocol::scheduling::WorkerDrain;
use tokio::sync::watch;

use super::handle::WorkerParts;
use crate::chunk::Command;

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

    /// Notes an order. Returns whether it changes anything.
    fn set(&self, drains: bool) -> bool {
        self.0
            .send_if_modified(|ordered| std::mem::replace(ordered, drains) != drains)
    }
}

impl WorkerParts {
    /// Takes the order of an operator. Running chunks have the same grace as when the process stops. Then they end,
    /// and their requests go on at other workers.
    pub(super) fn order_drain(self: &Arc<Self>, order: WorkerDrain) -> Result<(), ApiError> {
        if !self.ordered_drain.set(order.drains) {
            return Ok(());
        }
        tracing::info!(
            drains = order.drains,
            "an operator ordered a drain, or its end"
        );
        if order.drains {
            tokio::spawn(evacuate(self.clone()));
        }
        Ok(())
    }
}

/// Ends all chunks after the grace, unless the order is taken back before.
async fn evacuate(parts: Arc<WorkerParts>) {
    let mut orders = parts.ordered_drain.orders();
    let grace = Duration::from_millis(parts.shared.config.evacuate_after_ms);
    let taken_back = orders.wait_for(|ordered| !ordered);
    if tokio::time::timeout(grace, taken_back).await.is_err() {
        // A driver that has stopped has no chunks.
        let _ = parts.commands.send(Command::Evacuate).await;
    }
}
