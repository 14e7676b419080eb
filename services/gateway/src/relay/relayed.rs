//! The events of a request, and the work that they come from, in one: who reads drives.
//!
//! A task of its own for the work would be woken for each token, and would wake the reader's in turn. So the reader's own
//! task polls the work, down to the engine's connection where the worker is in this process, and what was said is written to
//! the client before that task sleeps again. While nobody reads, nothing goes on here; a worker ends a chunk whose reader
//! stands still for too long, and [`RequestTime`] the request once its time is up.

use std::future::{Future, poll_fn};
use std::pin::Pin;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::task::{Context, Poll, Wake, Waker};
use std::time::Instant;

use futures_util::task::AtomicWaker;
use refrain_protocol::ApiError;
use tokio::sync::mpsc;

use crate::relay::RelayEvent;
use crate::relay::time::{RequestTime, Watch};

/// What happens to one request. Dropping it stops the request.
pub(crate) struct Relayed {
    driven: Arc<Driven>,
    /// The signal, as the work sees it.
    waker: Waker,
    /// Ends the request if nobody drives it.
    _watch: Option<Watch>,
}

/// What is driven. Its reader has it locked for as long as a poll takes, and nobody else wants it before its time is up.
pub(super) struct Driven {
    state: Mutex<State>,
    signal: Arc<Signal>,
}

struct State {
    /// Until it is done.
    work: Option<Pin<Box<dyn Future<Output = ()> + Send>>>,
    /// What the work has said. Its sender is in there.
    said: mpsc::Receiver<RelayEvent>,
}

/// Tells that the work can go on. A reader is polled for other reasons, too, and right after each event: the work is not.
struct Signal {
    is_set: AtomicBool,
    reader: AtomicWaker,
}

impl Wake for Signal {
    fn wake(self: Arc<Self>) {
        self.wake_by_ref();
    }

    fn wake_by_ref(self: &Arc<Self>) {
        self.is_set.store(true, Ordering::Release);
        self.reader.wake();
    }
}

impl Relayed {
    /// Of work that says what happens, `room` events ahead of its reader at most.
    pub(crate) fn new<F>(room: usize, work: impl FnOnce(mpsc::Sender<RelayEvent>) -> F) -> Self
    where
        F: Future<Output = ()> + Send + 'static,
    {
        let (events, said) = mpsc::channel(room);
        let signal = Arc::new(Signal {
            is_set: AtomicBool::new(true),
            reader: AtomicWaker::new(),
        });
        let state = State {
            work: Some(Box::pin(work(events))),
            said,
        };
        Relayed {
            waker: signal.clone().into(),
            driven: Arc::new(Driven {
                state: Mutex::new(state),
                signal,
            }),
            _watch: None,
        }
    }

    /// Ends by this clock also where nobody polls it.
    pub(super) fn within(mut self, time: &Arc<RequestTime>, received: Instant) -> Self {
        self._watch = Some(time.watch(received, &self.driven));
        self
    }

    /// The next event; `None` after the last one.
    pub(crate) async fn next(&mut self) -> Option<RelayEvent> {
        poll_fn(|context| self.poll_next(context)).await
    }

    /// As [`Relayed::next`].
    pub(crate) fn poll_next(&mut self, context: &mut Context<'_>) -> Poll<Option<RelayEvent>> {
        let Driven { state, signal } = &*self.driven;
        let mut state = state.lock().unwrap_or_else(PoisonError::into_inner);
        // The channel's own waker is not asked for: nobody but the work sends into it.
        if let Ok(event) = state.said.try_recv() {
            return Poll::Ready(Some(event));
        }
        let Some(work) = &mut state.work else {
            return Poll::Ready(None);
        };
        signal.reader.register(context.waker());
        if !signal.is_set.swap(false, Ordering::AcqRel) {
            return Poll::Pending;
        }
        let mut context = Context::from_waker(&self.waker);
        if work.as_mut().poll(&mut context).is_ready() {
            state.work = None;
            return Poll::Ready(state.said.try_recv().ok());
        }
        match state.said.try_recv() {
            Ok(event) => Poll::Ready(Some(event)),
            Err(_) => Poll::Pending,
        }
    }
}

impl Driven {
    /// Ends work that is not done, with all that it holds; its reader finds this error in place of what was not read yet.
    /// `false`: it is being polled at this moment, and so by a reader that it can end by itself for.
    pub(super) fn end_unpolled(&self, error: ApiError) -> bool {
        let Ok(mut state) = self.state.try_lock() else {
            return false;
        };
        let Some(work) = state.work.take() else {
            return true;
        };
        let (last, said) = mpsc::channel(1);
        // There is room for one.
        let _ = last.try_send(RelayEvent::Failed(error));
        state.said = said;
        drop(state);
        drop(work);
        self.signal.reader.wake();
        true
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::AtomicUsize;

    use refrain_protocol::ApiError;

    use super::*;

    fn failed(message: usize) -> RelayEvent {
        RelayEvent::Failed(ApiError::internal(message))
    }

    fn detail(event: Option<RelayEvent>) -> usize {
        match event {
            Some(RelayEvent::Failed(error)) => error.detail.unwrap().parse().unwrap(),
            other => panic!("{other:?}"),
        }
    }

    #[tokio::test]
    async fn all_comes_in_order_however_little_room_there_is() {
        for room in [1, 2, 7] {
            let mut relayed = Relayed::new(room, |events| async move {
                for number in 0..20 {
                    if number % 3 == 0 {
                        tokio::task::yield_now().await;
                    }
                    events.send(failed(number)).await.unwrap();
                }
            });
            for number in 0..20 {
                assert_eq!(detail(relayed.next().await), number);
            }
            assert!(relayed.next().await.is_none());
            assert!(relayed.next().await.is_none());
        }
    }

    #[tokio::test]
    async fn work_that_many_wait_in_is_driven_by_room() {
        // More than fit, each a future of its own that is polled only when it is woken.
        let mut relayed = Relayed::new(2, |events| async move {
            let sends = (0..100).map(|number| {
                let events = events.clone();
                async move { events.send(failed(number)).await.map_err(|_| ()) }
            });
            futures_util::future::try_join_all(sends).await.unwrap();
        });
        let mut seen = std::collections::BTreeSet::new();
        while let Some(event) = relayed.next().await {
            seen.insert(detail(Some(event)));
        }
        assert_eq!(seen.len(), 100);
    }

    #[tokio::test]
    async fn an_event_costs_one_poll_of_the_work() {
        let polls = Arc::new(AtomicUsize::new(0));
        let (ask, mut asked) = mpsc::channel::<usize>(1);
        let counted = polls.clone();
        let mut relayed = Relayed::new(4, |events| async move {
            let mut work = Box::pin(async move {
                while let Some(number) = asked.recv().await {
                    events.send(failed(number)).await.unwrap();
                }
            });
            poll_fn(move |context| {
                counted.fetch_add(1, Ordering::Relaxed);
                work.as_mut().poll(context)
            })
            .await;
        });
        let mut next = poll_once(&mut relayed);
        assert!(next.is_none(), "nothing was asked for");
        for number in 0..10 {
            let before = polls.load(Ordering::Relaxed);
            ask.send(number).await.unwrap();
            next = poll_once(&mut relayed);
            assert_eq!(detail(next), number);
            assert!(poll_once(&mut relayed).is_none());
            assert!(poll_once(&mut relayed).is_none());
            assert_eq!(polls.load(Ordering::Relaxed), before + 1);
        }
        drop(ask);
        assert!(relayed.next().await.is_none());
    }

    /// What one poll by one and the same task brings.
    fn poll_once(relayed: &mut Relayed) -> Option<RelayEvent> {
        match relayed.poll_next(&mut Context::from_waker(Waker::noop())) {
            Poll::Ready(event) => event,
            Poll::Pending => None,
        }
    }

    #[tokio::test]
    async fn dropping_it_drops_the_work() {
        let (held, is_held) = tokio::sync::oneshot::channel::<()>();
        let mut relayed = Relayed::new(1, |events| async move {
            let _held = held;
            events.send(failed(1)).await.unwrap();
            std::future::pending::<()>().await;
        });
        assert_eq!(detail(relayed.next().await), 1);
        drop(relayed);
        assert!(is_held.await.is_err());
    }
}
