//! The events of a request, whose reader drives the work behind them (`driven_work.rs`).
//!
//! If nobody reads for too long, the worker ends the chunk, and [`RequestTime`] ends the request once its time is up.

use std::collections::VecDeque;
use std::future::{Future, poll_fn};
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::{Duration, Instant};

use refrain_accounts::tenants::StreamShape;
use refrain_protocol::ApiError;
use refrain_protocol::openai::{FinishReason, Usage};
use refrain_protocol::scheduling::RequestClass;
use refrain_service_kit::deadline::Deadline;
use refrain_service_kit::http::AccessNote;
use tokio::sync::mpsc;

use crate::relay::choice::ChoiceProgress;
use crate::relay::driven_work::DrivenWork;
use crate::relay::events::{RelayEvent, RequestSummary};
use crate::relay::request_time::{RequestTime, TimeEntry};
use crate::relay::stream_shaper::StreamShaper;

/// The events of one request. Dropping it stops the request.
pub struct RequestEvents {
    work: Arc<DrivenWork>,
    /// Ends the request if nobody drives it.
    _entry: Option<TimeEntry>,
    /// The note for the access log, which gets the tokens or the error.
    note: AccessNote,
    shaped: Option<Box<ShapedEvents>>,
    observers: Vec<Box<dyn EventObserver>>,
}

/// An observer of the events of a request, which sees each before its reader does.
pub trait EventObserver: Send {
    /// Sees an event.
    ///
    /// # Errors
    /// The request must not be answered as if all were well. Its reader gets the error in place of the event.
    fn observe(&mut self, event: &RelayEvent) -> Result<(), ApiError>;
}

/// The events of a request that has a shape.
struct ShapedEvents {
    shaper: StreamShaper,
    /// Those that may be sent.
    ready: VecDeque<RelayEvent>,
    due: Deadline,
    is_over: bool,
}

impl RequestEvents {
    /// Creates the events that `work` sends. It gets at most `events_max` events ahead of their reader.
    pub(crate) fn new<F>(
        events_max: usize,
        work: impl FnOnce(mpsc::Sender<RelayEvent>) -> F,
    ) -> Self
    where
        F: Future<Output = ()> + Send + 'static,
    {
        RequestEvents {
            work: Arc::new(DrivenWork::new(events_max, work)),
            _entry: None,
            note: AccessNote::default(),
            shaped: None,
            observers: Vec::new(),
        }
    }

    /// The events of a request that was aborted before it began: all its choices end without a token.
    pub(crate) fn aborted(choices: u32, prompt_tokens: u64) -> Self {
        RequestEvents::new(1, move |events| async move {
            for index in 0..choices {
                let progress = ChoiceProgress {
                    finish: Some(FinishReason::Abort),
                    ..ChoiceProgress::default()
                };
                // An error means that the reader has left.
                let _ = events.send(RelayEvent::Progress { index, progress }).await;
            }
            let usage = Usage {
                prompt_tokens,
                total_tokens: prompt_tokens,
                ..Usage::default()
            };
            let summary = RequestSummary {
                usage,
                metrics: None,
            };
            let _ = events.send(RelayEvent::Done(Box::new(summary))).await;
        })
    }

    /// Gives the events a shape.
    pub(super) fn shaped(mut self, shape: Option<StreamShape>) -> Self {
        self.shaped = shape.map(|shape| {
            Box::new(ShapedEvents {
                shaper: StreamShaper::new(shape),
                ready: VecDeque::new(),
                due: Deadline::after(Duration::ZERO),
                is_over: false,
            })
        });
        self
    }

    /// Notes the tokens or the error of the request once they are known.
    pub(crate) fn noted(mut self, note: AccessNote) -> Self {
        self.note = note;
        self
    }

    /// Shows each event to observers before its reader gets it.
    pub(crate) fn observed(mut self, observers: Vec<Box<dyn EventObserver>>) -> Self {
        self.observers = observers;
        self
    }

    /// Makes the request end when its time is up, also if nobody polls it.
    pub(super) fn within(
        mut self,
        time: &Arc<RequestTime>,
        class: RequestClass,
        received: Instant,
    ) -> Self {
        self._entry = Some(time.watch(class, received, &self.work));
        self
    }

    /// Waits for the next event; `None` after the last one.
    pub async fn next(&mut self) -> Option<RelayEvent> {
        poll_fn(|context| self.poll_next(context)).await
    }

    /// Polls for the next event; `None` after the last one.
    pub(crate) fn poll_next(&mut self, context: &mut Context<'_>) -> Poll<Option<RelayEvent>> {
        let mut polled = match &mut self.shaped {
            None => self.work.poll_next(context),
            Some(shaped) => shaped.poll_next(&self.work, context),
        };
        if let Poll::Ready(Some(event)) = &mut polled {
            for observer in &mut self.observers {
                if let Err(error) = observer.observe(event) {
                    *event = RelayEvent::Failed(error);
                }
            }
        }
        match &polled {
            Poll::Ready(Some(RelayEvent::Done(summary))) => {
                let usage = summary.usage;
                self.note.note(|facts| {
                    facts.tokens = Some((usage.prompt_tokens, usage.completion_tokens));
                });
            }
            Poll::Ready(Some(RelayEvent::Failed(error))) => self.note.failed(error),
            _ => {}
        }
        polled
    }
}

impl ShapedEvents {
    /// Polls for the next event that has its shape. All output is taken in as it comes, so the worker does not wait.
    fn poll_next(
        &mut self,
        work: &DrivenWork,
        context: &mut Context<'_>,
    ) -> Poll<Option<RelayEvent>> {
        loop {
            while !self.is_over {
                match work.poll_next(context) {
                    Poll::Ready(Some(event)) => self.shaper.push(event, Instant::now()),
                    Poll::Ready(None) => self.is_over = true,
                    Poll::Pending => break,
                }
            }
            if let Some(event) = self.ready.pop_front() {
                return Poll::Ready(Some(event));
            }
            self.ready.extend(self.shaper.release(Instant::now()));
            if !self.ready.is_empty() {
                continue;
            }
            let Some(due) = self.shaper.due() else {
                return match self.is_over {
                    true => Poll::Ready(None),
                    false => Poll::Pending,
                };
            };
            self.due.set(due.into());
            if self.due.poll_due(context).is_pending() {
                return Poll::Pending;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicUsize, Ordering};
    use std::task::Waker;

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
    async fn events_arrive_in_order_whatever_the_limit() {
        for events_max in [1, 2, 7] {
            let mut events = RequestEvents::new(events_max, |events| async move {
                for number in 0..20 {
                    if number % 3 == 0 {
                        tokio::task::yield_now().await;
                    }
                    events.send(failed(number)).await.unwrap();
                }
            });
            for number in 0..20 {
                assert_eq!(detail(events.next().await), number);
            }
            assert!(events.next().await.is_none());
            assert!(events.next().await.is_none());
        }
    }

    #[tokio::test]
    async fn work_that_waits_for_room_is_driven_on() {
        // More events than fit, each sent by a future that is polled only when it is woken.
        let mut events = RequestEvents::new(2, |events| async move {
            let sends = (0..100).map(|number| {
                let events = events.clone();
                async move { events.send(failed(number)).await.map_err(|_| ()) }
            });
            futures_util::future::try_join_all(sends).await.unwrap();
        });
        let mut seen = std::collections::BTreeSet::new();
        while let Some(event) = events.next().await {
            seen.insert(detail(Some(event)));
        }
        assert_eq!(seen.len(), 100);
    }

    #[tokio::test]
    async fn an_event_costs_one_poll_of_the_work() {
        let polls = Arc::new(AtomicUsize::new(0));
        let (give, mut given) = mpsc::channel::<usize>(1);
        let counted = polls.clone();
        let mut events = RequestEvents::new(4, |events| async move {
            let mut work = Box::pin(async move {
                while let Some(number) = given.recv().await {
                    events.send(failed(number)).await.unwrap();
                }
            });
            poll_fn(move |context| {
                counted.fetch_add(1, Ordering::Relaxed);
                work.as_mut().poll(context)
            })
            .await;
        });
        let mut next = poll_once(&mut events);
        assert!(next.is_none(), "there is no event yet");
        for number in 0..10 {
            let before = polls.load(Ordering::Relaxed);
            give.send(number).await.unwrap();
            next = poll_once(&mut events);
            assert_eq!(detail(next), number);
            assert!(poll_once(&mut events).is_none());
            assert!(poll_once(&mut events).is_none());
            assert_eq!(polls.load(Ordering::Relaxed), before + 1);
        }
        drop(give);
        assert!(events.next().await.is_none());
    }

    /// The event of one poll, always by the same task.
    fn poll_once(events: &mut RequestEvents) -> Option<RelayEvent> {
        match events.poll_next(&mut Context::from_waker(Waker::noop())) {
            Poll::Ready(event) => event,
            Poll::Pending => None,
        }
    }

    #[tokio::test]
    async fn dropping_the_events_drops_the_work() {
        let (held, is_held) = tokio::sync::oneshot::channel::<()>();
        let mut events = RequestEvents::new(1, |events| async move {
            let _held = held;
            events.send(failed(1)).await.unwrap();
            std::future::pending::<()>().await;
        });
        assert_eq!(detail(events.next().await), 1);
        drop(events);
        assert!(is_held.await.is_err());
    }
}
