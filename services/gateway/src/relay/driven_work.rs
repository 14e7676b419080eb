//! The work of one request, which the reader of its events drives by polling.
//!
//! A separate task would be woken for each token, and would wake the reader's task in turn. Instead the reader's task
//! polls the work, down to the engine's connection if the worker is in this process. So the output is written to the
//! client before that task sleeps again. While nobody reads, no work is done here.

use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::task::{Context, Poll, Wake, Waker};

use futures_util::task::AtomicWaker;
use parking_lot::Mutex;
use refrain_protocol::ApiError;
use tokio::sync::mpsc;

use crate::relay::events::RelayEvent;

/// The work of a request and the events that it has sent. Its reader holds the lock during a poll, and nobody else
/// takes it before the time of the request is up.
pub(super) struct DrivenWork {
    state: Mutex<WorkState>,
    signal: Arc<WorkSignal>,
    /// The signal as a waker, for the work.
    waker: Waker,
}

struct WorkState {
    /// The work, until it is done.
    work: Option<Pin<Box<dyn Future<Output = ()> + Send>>>,
    /// Events that the work has sent. It holds the sender.
    events: mpsc::Receiver<RelayEvent>,
}

/// Tells that the work can make progress. A reader is polled for other reasons as well, and once more after each
/// event. The work is not.
struct WorkSignal {
    is_set: AtomicBool,
    reader: AtomicWaker,
}

impl Wake for WorkSignal {
    fn wake(self: Arc<Self>) {
        self.wake_by_ref();
    }

    fn wake_by_ref(self: &Arc<Self>) {
        self.is_set.store(true, Ordering::Release);
        self.reader.wake();
    }
}

impl DrivenWork {
    /// Creates the work by `work`, which sends events. It gets at most `events_max` events ahead of its reader.
    pub(super) fn new<F>(
        events_max: usize,
        work: impl FnOnce(mpsc::Sender<RelayEvent>) -> F,
    ) -> Self
    where
        F: Future<Output = ()> + Send + 'static,
    {
        let (sender, events) = mpsc::channel(events_max);
        let signal = Arc::new(WorkSignal {
            is_set: AtomicBool::new(true),
            reader: AtomicWaker::new(),
        });
        DrivenWork {
            state: Mutex::new(WorkState {
                work: Some(Box::pin(work(sender))),
                events,
            }),
            waker: signal.clone().into(),
            signal,
        }
    }

    /// Polls for the next event, and for that the work; `None` after the last event.
    pub(super) fn poll_next(&self, context: &mut Context<'_>) -> Poll<Option<RelayEvent>> {
        let mut state = self.state.lock();
        // The channel needs no waker, because only the work sends into it.
        if let Ok(event) = state.events.try_recv() {
            return Poll::Ready(Some(event));
        }
        let Some(work) = &mut state.work else {
            return Poll::Ready(None);
        };
        self.signal.reader.register(context.waker());
        if !self.signal.is_set.swap(false, Ordering::AcqRel) {
            return Poll::Pending;
        }
        let mut context = Context::from_waker(&self.waker);
        if work.as_mut().poll(&mut context).is_ready() {
            state.work = None;
            return Poll::Ready(state.events.try_recv().ok());
        }
        match state.events.try_recv() {
            Ok(event) => Poll::Ready(Some(event)),
            Err(_) => Poll::Pending,
        }
    }

    /// Ends work that is not done, with all that it holds. Its reader finds this error in place of events that it has
    /// not read. Returns `false` if the work is being polled at this moment: then its reader can end it.
    pub(super) fn end_unpolled(&self, error: ApiError) -> bool {
        let Some(mut state) = self.state.try_lock() else {
            return false;
        };
        let Some(work) = state.work.take() else {
            return true;
        };
        let (last, events) = mpsc::channel(1);
        // There is room for one event.
        let _ = last.try_send(RelayEvent::Failed(error));
        state.events = events;
        drop(state);
        drop(work);
        self.signal.reader.wake();
        true
    }
}
