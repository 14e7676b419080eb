//! How long a request may take, and the end of those whose clients have stopped reading.
//!
//! A request's own timer ends it, as its reader polls it. A client that keeps its connection and reads no more stops that:
//! once the connection's buffer is full the body of its answer is polled no further, timers and all, and the request's place,
//! lease and stream would be held for as long as the connection lives. So one task looks at all requests now and then, and
//! ends those that are still there some time after they should have ended by themselves. It wakes nobody before.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::time::{Duration, Instant};

use refrain_protocol::{ApiError, ErrorKind};

use crate::relay::relayed::Driven;

/// How often requests are looked at, and how long one whose time is up has to end by itself.
const LOOK_EVERY: Duration = Duration::from_secs(1);

/// A year: no longer time is reckoned with, since an instant has to be able to hold it.
const FOR_EVER: Duration = Duration::from_secs(365 * 24 * 3_600);

/// The time that every request has.
pub(crate) struct RequestTime {
    request_max: Duration,
    watched: Mutex<Watched>,
}

/// Requests by when they are ended, each with a number that no other has.
#[derive(Default)]
struct Watched {
    numbers: u64,
    by_end: BTreeMap<Key, Weak<Driven>>,
    /// The error with which requests end from now on, those that come to be watched included.
    cut: Option<ApiError>,
}

type Key = (Instant, u64);

/// A request's entry; dropping it takes it out.
pub(crate) struct Watch {
    time: Arc<RequestTime>,
    key: Key,
}

impl RequestTime {
    /// So long for each.
    pub(crate) fn new(request_max: Duration) -> Self {
        RequestTime {
            request_max,
            watched: Mutex::default(),
        }
    }

    /// Until a request has taken as long as it may.
    pub(crate) fn left(&self, received: Instant) -> Duration {
        self.request_max.saturating_sub(received.elapsed())
    }

    /// The error that ended a request from here, if one did.
    pub(super) fn ended_by(&self, received: Instant) -> Option<ApiError> {
        let cut = self.watched().cut.clone();
        cut.or_else(|| self.left(received).is_zero().then(|| self.error()))
    }

    /// What a client is told whose request has taken longer.
    pub(crate) fn error(&self) -> ApiError {
        let most = self.request_max.as_secs();
        ApiError::new(
            ErrorKind::Timeout,
            format!("the request took longer than {most} s"),
        )
    }

    /// Sees to it that a request ends though nobody polls it.
    pub(super) fn watch(self: &Arc<Self>, received: Instant, driven: &Arc<Driven>) -> Watch {
        let life = self.request_max.min(FOR_EVER);
        let end = received + life + LOOK_EVERY;
        let mut watched = self.watched();
        watched.numbers += 1;
        let key = (end, watched.numbers);
        watched.by_end.insert(key, Arc::downgrade(driven));
        let cut = watched.cut.clone();
        drop(watched);
        if let Some(error) = cut {
            // Nobody polls it yet.
            driven.end_unpolled(error);
        }
        Watch {
            time: self.clone(),
            key,
        }
    }

    /// Ends all requests with this error, and those that begin from now on. One that is being polled at this moment is not
    /// ended: ask again, until none is left.
    pub(crate) fn cut(&self, error: &ApiError) {
        let all: Vec<_> = {
            let mut watched = self.watched();
            watched.cut = Some(error.clone());
            let all = watched.by_end.iter();
            all.map(|(key, driven)| (*key, driven.clone())).collect()
        };
        self.end(all, error);
    }

    /// Looks after all requests, for as long as it is polled.
    pub(crate) async fn look_after(self: Arc<Self>) {
        loop {
            tokio::time::sleep(LOOK_EVERY).await;
            self.end_overdue(Instant::now());
        }
    }

    /// Ends the requests that should have ended by themselves before `now`.
    fn end_overdue(&self, now: Instant) {
        let overdue: Vec<_> = self
            .watched()
            .by_end
            .range(..=(now, u64::MAX))
            .map(|(key, driven)| (*key, driven.clone()))
            .collect();
        self.end(overdue, &self.error());
    }

    /// Not under the lock: with a request goes all that it holds.
    fn end(&self, requests: Vec<(Key, Weak<Driven>)>, error: &ApiError) {
        for (key, driven) in requests {
            let is_over = driven
                .upgrade()
                .is_none_or(|driven| driven.end_unpolled(error.clone()));
            if is_over {
                self.watched().by_end.remove(&key);
            }
        }
    }

    fn watched(&self) -> MutexGuard<'_, Watched> {
        self.watched.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for Watch {
    fn drop(&mut self) {
        self.time.watched().by_end.remove(&self.key);
    }
}

#[cfg(test)]
mod tests {
    use std::future::pending;
    use std::sync::atomic::{AtomicUsize, Ordering};
    use std::task::{Context, Wake};

    use tokio::sync::oneshot;

    use super::*;
    use crate::relay::{RelayEvent, Relayed};

    const REQUEST_MAX: Duration = Duration::from_secs(3_600);

    fn failed() -> RelayEvent {
        RelayEvent::Failed(ApiError::internal("said"))
    }

    /// A request that says so many things, as far as there is room for two, and then nothing. The receiver fails once its
    /// work has been dropped.
    fn endless(
        time: &Arc<RequestTime>,
        received: Instant,
        events: usize,
    ) -> (Relayed, oneshot::Receiver<()>) {
        let (held, is_held) = oneshot::channel::<()>();
        let relayed = Relayed::new(2, move |said| async move {
            let _held = held;
            for _ in 0..events {
                said.send(failed()).await.unwrap();
            }
            pending::<()>().await;
        });
        (relayed.within(time, received), is_held)
    }

    #[tokio::test]
    async fn what_nobody_polls_ends_when_its_time_is_up_and_not_before() {
        let time = Arc::new(RequestTime::new(REQUEST_MAX));
        let received = Instant::now();
        // One never polled, one that stands with its channel full, and one that came later.
        let (mut unread, mut unread_held) = endless(&time, received, 0);
        let (mut full, mut full_held) = endless(&time, received, 5);
        assert!(full.next().await.is_some());
        let (_later, mut later_held) = endless(&time, received + REQUEST_MAX, 0);
        let end = received + REQUEST_MAX + LOOK_EVERY;
        time.end_overdue(end - Duration::from_nanos(1));
        for held in [&mut unread_held, &mut full_held] {
            assert_eq!(held.try_recv(), Err(oneshot::error::TryRecvError::Empty));
        }
        time.end_overdue(end);
        // Gone without a poll.
        for held in [&mut unread_held, &mut full_held] {
            assert_eq!(held.try_recv(), Err(oneshot::error::TryRecvError::Closed));
        }
        assert_eq!(
            later_held.try_recv(),
            Err(oneshot::error::TryRecvError::Empty)
        );
        assert_eq!(time.watched().by_end.len(), 1);
        // A reader that comes back is told, and nothing follows.
        for relayed in [&mut unread, &mut full] {
            match relayed.next().await {
                Some(RelayEvent::Failed(error)) => assert_eq!(error.kind, ErrorKind::Timeout),
                other => panic!("{other:?}"),
            }
            assert!(relayed.next().await.is_none());
        }
    }

    struct Wakes(AtomicUsize);

    impl Wake for Wakes {
        fn wake(self: Arc<Self>) {
            self.0.fetch_add(1, Ordering::Relaxed);
        }
    }

    #[tokio::test]
    async fn a_reader_is_woken_by_the_end_and_by_no_look_before() {
        let time = Arc::new(RequestTime::new(REQUEST_MAX));
        let received = Instant::now();
        let (mut relayed, _is_held) = endless(&time, received, 0);
        let wakes = Arc::new(Wakes(AtomicUsize::new(0)));
        let waker = wakes.clone().into();
        let mut context = Context::from_waker(&waker);
        assert!(relayed.poll_next(&mut context).is_pending());
        for s in 0..10 {
            time.end_overdue(received + Duration::from_secs(s));
        }
        assert_eq!(wakes.0.load(Ordering::Relaxed), 0);
        time.end_overdue(received + REQUEST_MAX + LOOK_EVERY);
        assert_eq!(wakes.0.load(Ordering::Relaxed), 1);
        assert!(relayed.poll_next(&mut context).is_ready());
    }

    #[tokio::test]
    async fn an_answer_that_was_finished_in_time_is_read_for_as_long_as_it_takes() {
        let time = Arc::new(RequestTime::new(Duration::ZERO));
        let received = Instant::now();
        let mut relayed = Relayed::new(3, |said| async move {
            for _ in 0..3 {
                said.send(failed()).await.unwrap();
            }
        })
        .within(&time, received);
        assert!(relayed.next().await.is_some());
        time.end_overdue(received + LOOK_EVERY);
        for _ in 0..2 {
            match relayed.next().await {
                Some(RelayEvent::Failed(error)) => assert_eq!(error.kind, ErrorKind::Internal),
                other => panic!("{other:?}"),
            }
        }
        assert!(relayed.next().await.is_none());
    }

    #[tokio::test]
    async fn what_is_over_is_not_remembered() {
        let time = Arc::new(RequestTime::new(REQUEST_MAX));
        let (relayed, is_held) = endless(&time, Instant::now(), 0);
        assert_eq!(time.watched().by_end.len(), 1);
        drop(relayed);
        assert!(is_held.await.is_err());
        assert!(time.watched().by_end.is_empty());
        // Nor is one whose time never ends.
        let forever = Arc::new(RequestTime::new(Duration::MAX));
        let (relayed, _is_held) = endless(&forever, Instant::now(), 0);
        assert_eq!(forever.watched().by_end.len(), 1);
        drop(relayed);
        assert!(forever.watched().by_end.is_empty());
    }

    #[tokio::test]
    async fn a_cut_ends_what_runs_and_what_begins_and_its_readers_are_told() {
        let time = Arc::new(RequestTime::new(Duration::MAX));
        let (running, running_held) = endless(&time, Instant::now(), 5);
        let cut = ApiError::new(ErrorKind::Unavailable, "cut").with_code("cut");
        time.cut(&cut);
        let (late, late_held) = endless(&time, Instant::now(), 5);
        for (mut relayed, held) in [(running, running_held), (late, late_held)] {
            assert!(held.await.is_err(), "its work goes on");
            match relayed.next().await {
                Some(RelayEvent::Failed(error)) => assert_eq!(error, cut),
                other => panic!("{other:?}"),
            }
            assert!(relayed.next().await.is_none());
        }
    }
}
