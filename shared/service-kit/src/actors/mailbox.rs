//! The mailbox of an actor, which outlives its body, and the order that ends it.

use std::sync::Arc;

use tokio::sync::mpsc::error::TryRecvError;
use tokio::sync::{Mutex, OwnedMutexGuard, mpsc, watch};

/// The owner's wish. Later ones include earlier ones.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Order {
    Run,
    /// The mailbox takes no more messages, and the body ends after the last one.
    Close,
    Abort,
}

/// Waits for an order. An owner who lets his actor go gives none any more.
pub(super) async fn at_least(mut orders: watch::Receiver<Order>, order: Order) {
    if orders.wait_for(|given| *given >= order).await.is_err() {
        std::future::pending().await
    }
}

/// The receiving end of a mailbox while no body has it.
#[derive(Debug)]
pub(super) struct Slot<M> {
    receiver: Arc<Mutex<mpsc::Receiver<M>>>,
    orders: watch::Receiver<Order>,
}

impl<M> Clone for Slot<M> {
    fn clone(&self) -> Self {
        Slot {
            receiver: self.receiver.clone(),
            orders: self.orders.clone(),
        }
    }
}

impl<M> Slot<M> {
    pub(super) fn new(receiver: mpsc::Receiver<M>, orders: watch::Receiver<Order>) -> Self {
        Slot {
            receiver: Arc::new(Mutex::new(receiver)),
            orders,
        }
    }

    /// Lends the mailbox to a body. A body before it has given it back by its end.
    pub(super) async fn open(self) -> Inbox<M> {
        Inbox {
            receiver: self.receiver.lock_owned().await,
            orders: self.orders,
        }
    }
}

/// The receiving end of a mailbox, as a body has it.
pub struct Inbox<M> {
    receiver: OwnedMutexGuard<mpsc::Receiver<M>>,
    orders: watch::Receiver<Order>,
}

impl<M> Inbox<M> {
    /// The next message. `None` once the mailbox is closed and empty.
    pub async fn recv(&mut self) -> Option<M> {
        if !self.receiver.is_closed() {
            tokio::select! {
                biased;
                message = self.receiver.recv() => return message,
                () = at_least(self.orders.clone(), Order::Close) => self.receiver.close(),
            }
        }
        self.receiver.recv().await
    }

    /// The next messages, at most `limit`, behind those in `messages`. Returns their number, which is 0 once the mailbox
    /// is closed and empty.
    pub async fn recv_many(&mut self, messages: &mut Vec<M>, limit: usize) -> usize {
        if !self.receiver.is_closed() {
            tokio::select! {
                biased;
                count = self.receiver.recv_many(messages, limit) => return count,
                () = at_least(self.orders.clone(), Order::Close) => self.receiver.close(),
            }
        }
        self.receiver.recv_many(messages, limit).await
    }

    /// A message that waits already.
    ///
    /// # Errors
    /// There is none.
    pub fn try_recv(&mut self) -> Result<M, TryRecvError> {
        self.receiver.try_recv()
    }

    /// Number of messages that wait.
    pub fn len(&self) -> usize {
        self.receiver.len()
    }

    /// Whether no message waits.
    pub fn is_empty(&self) -> bool {
        self.receiver.is_empty()
    }
}
