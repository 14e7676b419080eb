//! A value that another thread makes for a request.

use tokio::sync::oneshot::Receiver;
use tokio::sync::oneshot::error::TryRecvError;

/// A value that another thread may still be making. The engine's steps go on without it until it is there.
pub(crate) enum Awaited<T> {
    /// There is none, and there will be none.
    Missing,
    Pending(Receiver<T>),
    Ready(T),
}

impl<T> Awaited<T> {
    /// The value, if it is there by now.
    pub(crate) fn poll(&mut self) -> Option<&mut T> {
        if let Awaited::Pending(pending) = self {
            match pending.try_recv() {
                Ok(value) => *self = Awaited::Ready(value),
                Err(TryRecvError::Closed) => *self = Awaited::Missing,
                Err(TryRecvError::Empty) => {}
            }
        }
        match self {
            Awaited::Ready(value) => Some(value),
            Awaited::Pending(_) | Awaited::Missing => None,
        }
    }
}
