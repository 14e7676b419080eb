//! The mailbox of an actor, which outlives its body, and the order that ends it.

use std::ops::{Deref, DerefMut};

use tokio::sync::{OwnedMutexGuard, mpsc, watch};

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
        std::future::pending::<()>().await;
    }
}

/// The receiving end of a mailbox, as a body has it. Unlike that of a channel it also ends when the actor is asked to
/// stop.
pub struct Inbox<M> {
    pub(super) receiver: OwnedMutexGuard<mpsc::Receiver<M>>,
    pub(super) orders: watch::Receiver<Order>,
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

    /// The next messages, at most `limit`, behind those in `messages`. Returns their number, which is 0 once the
    /// mailbox is closed and empty.
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
}

impl<M> Deref for Inbox<M> {
    type Target = mpsc::Receiver<M>;

    fn deref(&self) -> &mpsc::Receiver<M> {
        &self.receiver
    }
}

impl<M> DerefMut for Inbox<M> {
    fn deref_mut(&mut self) -> &mut mpsc::Receiver<M> {
        &mut self.receiver
    }
}

impl<M> Drop for Inbox<M> {
    /// After a panic the next body gets the mailbox. Otherwise senders should learn that there is none.
    fn drop(&mut self) {
        if std::thread::panicking() {
            return;
        }
        self.receiver.close();
        while self.receiver.try_recv().is_ok() {}
    }
}
