//! The longest time of a request, and the end of requests whose clients have stopped reading.
//!
//! A request has a timer of its own, which works as long as its reader polls it. A client may keep its connection
//! open and stop reading. Once the buffer of the connection is full, nobody polls the body of the answer, and the
//! timer with it. The request would then hold its ticket, lease and stream for as long as the connection lives. So
//! one task looks at all requests every second and ends those that should have ended by themselves. It wakes nobody
//! before.
//!
//! While a trainer pauses the workers, no request can go on, so none of these times passes.

use std::collections::BTreeMap;
use std::pin::pin;
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

use parking_lot::Mutex;
use refrain_protocol::scheduling::RequestClass;
use refrain_protocol::{ApiError, ErrorKind};

use crate::relay::driven_work::DrivenWork;
use crate::relay::paused_time::PausedTime;

/// How often requests are checked, and how long a request whose time is up has to end by itself.
const CHECK_EVERY: Duration = Duration::from_secs(1);

/// The longest time that is computed with, since the end has to fit an instant: a year.
const TIME_MAX: Duration = Duration::from_secs(365 * 24 * 3_600);

/// How often a request looks at the clock during a pause.
const PAUSE_CHECK: Duration = Duration::from_millis(100);

/// The time limits of requests, and the requests in flight.
pub(crate) struct RequestTime {
    interactive_max: Duration,
    rollout_max: Duration,
    paused: Mutex<PausedTime>,
    watched: Mutex<WatchedRequests>,
}

/// The requests in flight by the time at which they are ended, each with a unique number.
#[derive(Default)]
struct WatchedRequests {
    numbers: u64,
    by_end: BTreeMap<EntryKey, WatchedRequest>,
    /// Once all requests are cut off: the error that they end with, those that begin later included.
    cut: Option<ApiError>,
}

type EntryKey = (Instant, u64);

#[derive(Clone)]
struct WatchedRequest {
    work: Weak<DrivenWork>,
    class: RequestClass,
    received: Instant,
}

/// The entry of a request, which is removed when this is dropped.
pub(super) struct TimeEntry {
    time: Arc<RequestTime>,
    key: EntryKey,
}

impl RequestTime {
    /// Creates the limits of each interactive request and each rollout.
    pub(crate) fn new(interactive_max: Duration, rollout_max: Duration) -> Self {
        RequestTime {
            interactive_max: interactive_max.min(TIME_MAX),
            rollout_max: rollout_max.min(TIME_MAX),
            paused: Mutex::default(),
            watched: Mutex::default(),
        }
    }

    fn most(&self, class: RequestClass) -> Duration {
        match class {
            RequestClass::Interactive => self.interactive_max,
            RequestClass::Rollout => self.rollout_max,
        }
    }

    /// The time that is left of a request.
    pub(crate) fn left(&self, class: RequestClass, received: Instant) -> Duration {
        self.left_at(class, received, Instant::now())
    }

    fn left_at(&self, class: RequestClass, received: Instant, now: Instant) -> Duration {
        let paused = self.paused.lock().within(received, now);
        let passed = now.saturating_duration_since(received);
        (self.most(class) + paused).saturating_sub(passed)
    }

    /// Begins a pause of the workers, unless there is one.
    pub(crate) fn begin_pause(&self) {
        self.paused.lock().begin(Instant::now());
    }

    /// Ends the pause of the workers, if there is one.
    pub(crate) fn end_pause(&self) {
        self.paused.lock().end(Instant::now());
    }

    /// The time since `from` in which the workers were not paused.
    pub(super) fn active_since(&self, from: Instant) -> Duration {
        let now = Instant::now();
        let paused = self.paused.lock().within(from, now);
        now.saturating_duration_since(from).saturating_sub(paused)
    }

    /// Waits for the work of a request until its time is up.
    ///
    /// # Errors
    /// The error of a request that took too long.
    pub(super) async fn bound<T>(
        &self,
        class: RequestClass,
        received: Instant,
        work: impl Future<Output = T>,
    ) -> Result<T, ApiError> {
        let done = self.within(|| self.left(class, received), work).await;
        done.ok_or_else(|| self.error(class))
    }

    /// Waits for work, at most for this time without pauses. `None`: it took longer.
    pub(super) async fn within_active<T>(
        &self,
        most: Duration,
        work: impl Future<Output = T>,
    ) -> Option<T> {
        let began = Instant::now();
        let left = || most.saturating_sub(self.active_since(began));
        self.within(left, work).await
    }

    async fn within<T>(
        &self,
        left: impl Fn() -> Duration,
        work: impl Future<Output = T>,
    ) -> Option<T> {
        let mut work = pin!(work);
        loop {
            let is_paused = self.paused.lock().is_paused();
            let wait = match is_paused {
                true => left().max(PAUSE_CHECK),
                false => left(),
            };
            match tokio::time::timeout(wait, &mut work).await {
                Ok(done) => return Some(done),
                Err(_) if left().is_zero() => return None,
                Err(_) => {}
            }
        }
    }

    /// The error by which this limit, or a cut, ended a request; `None` if neither did.
    pub(super) fn ended_by(&self, class: RequestClass, received: Instant) -> Option<ApiError> {
        let cut = self.watched.lock().cut.clone();
        let is_over = self.left(class, received).is_zero();
        cut.or_else(|| is_over.then(|| self.error(class)))
    }

    /// The error of a request that took too long.
    pub(crate) fn error(&self, class: RequestClass) -> ApiError {
        let most = self.most(class).as_secs();
        ApiError::new(
            ErrorKind::Timeout,
            format!("the request took longer than {most} s"),
        )
    }

    /// Makes sure that a request ends although nobody polls it.
    pub(super) fn watch(
        self: &Arc<Self>,
        class: RequestClass,
        received: Instant,
        driven: &Arc<DrivenWork>,
    ) -> TimeEntry {
        let end = received + self.most(class) + CHECK_EVERY;
        let mut watched = self.watched.lock();
        watched.numbers += 1;
        let key = (end, watched.numbers);
        let work = Arc::downgrade(driven);
        let request = WatchedRequest {
            work,
            class,
            received,
        };
        watched.by_end.insert(key, request);
        let cut = watched.cut.clone();
        drop(watched);
        if let Some(error) = cut {
            // It cannot be in the middle of a poll, because it has no reader yet.
            driven.end_unpolled(error);
        }
        TimeEntry {
            time: self.clone(),
            key,
        }
    }

    /// Ends all requests with this error, also those that begin later. A request that is being polled at this moment
    /// is not ended, so call this again until none is left.
    pub(crate) fn cut_all(&self, error: &ApiError) {
        let all: Vec<_> = {
            let mut watched = self.watched.lock();
            watched.cut = Some(error.clone());
            let all = watched.by_end.iter();
            all.map(|(key, request)| (*key, request.clone())).collect()
        };
        self.end(all, |_| error.clone());
    }

    /// Ends overdue requests for as long as it is polled.
    pub(crate) async fn end_overdue_requests(self: Arc<Self>) {
        loop {
            tokio::time::sleep(CHECK_EVERY).await;
            self.end_overdue(Instant::now());
        }
    }

    /// Ends the requests that should have ended by themselves before `now`.
    fn end_overdue(&self, now: Instant) {
        let overdue: Vec<_> = self
            .watched
            .lock()
            .by_end
            .range(..=(now, u64::MAX))
            .filter(
                |(
                    _,
                    WatchedRequest {
                        class, received, ..
                    },
                )| {
                    // A pause puts the end off.
                    let checked = now.checked_sub(CHECK_EVERY).unwrap_or(now);
                    self.left_at(*class, *received, checked).is_zero()
                },
            )
            .map(|(key, request)| (*key, request.clone()))
            .collect();
        self.end(overdue, |class| self.error(class));
    }

    /// Ends requests. The lock is not held meanwhile, because a request drops all that it holds.
    fn end(
        &self,
        requests: Vec<(EntryKey, WatchedRequest)>,
        error: impl Fn(RequestClass) -> ApiError,
    ) {
        for (key, WatchedRequest { work, class, .. }) in requests {
            let is_over = work
                .upgrade()
                .is_none_or(|work| work.end_unpolled(error(class)));
            if is_over {
                self.watched.lock().by_end.remove(&key);
            }
        }
    }
}

impl Drop for TimeEntry {
    fn drop(&mut self) {
        self.time.watched.lock().by_end.remove(&self.key);
    }
}

#[cfg(test)]
mod tests {
    use std::future::pending;
    use std::sync::atomic::{AtomicUsize, Ordering};
    use std::task::{Context, Wake};

    use tokio::sync::oneshot;

    use super::*;
    use crate::relay::events::RelayEvent;
    use crate::relay::request_events::RequestEvents;

    const REQUEST_MAX: Duration = Duration::from_secs(3_600);
    const INTERACTIVE: RequestClass = RequestClass::Interactive;

    fn limited(request_max: Duration) -> Arc<RequestTime> {
        Arc::new(RequestTime::new(request_max, request_max))
    }

    fn failed() -> RelayEvent {
        RelayEvent::Failed(ApiError::internal("planned"))
    }

    /// A request that sends a number of events, with room for two, and then waits for ever. The receiver fails once
    /// its work has been dropped.
    fn endless(
        time: &Arc<RequestTime>,
        received: Instant,
        events: usize,
    ) -> (RequestEvents, oneshot::Receiver<()>) {
        let (held, is_held) = oneshot::channel::<()>();
        let request = RequestEvents::new(2, move |sender| async move {
            let _held = held;
            for _ in 0..events {
                sender.send(failed()).await.unwrap();
            }
            pending::<()>().await;
        });
        (request.within(time, INTERACTIVE, received), is_held)
    }

    #[tokio::test]
    async fn a_request_that_nobody_polls_ends_when_its_time_is_up_and_not_before() {
        let time = limited(REQUEST_MAX);
        let received = Instant::now();
        // One request is never polled, one has a full channel, and one began later.
        let (mut unread, mut unread_held) = endless(&time, received, 0);
        let (mut full, mut full_held) = endless(&time, received, 5);
        assert!(full.next().await.is_some());
        let (_later, mut later_held) = endless(&time, received + REQUEST_MAX, 0);
        let end = received + REQUEST_MAX + CHECK_EVERY;
        time.end_overdue(end - Duration::from_nanos(1));
        for held in [&mut unread_held, &mut full_held] {
            assert_eq!(held.try_recv(), Err(oneshot::error::TryRecvError::Empty));
        }
        time.end_overdue(end);
        // Both ended without a poll.
        for held in [&mut unread_held, &mut full_held] {
            assert_eq!(held.try_recv(), Err(oneshot::error::TryRecvError::Closed));
        }
        assert_eq!(
            later_held.try_recv(),
            Err(oneshot::error::TryRecvError::Empty)
        );
        assert_eq!(time.watched.lock().by_end.len(), 1);
        // A reader that comes back finds the error, and nothing after it.
        for events in [&mut unread, &mut full] {
            match events.next().await {
                Some(RelayEvent::Failed(error)) => assert_eq!(error.kind, ErrorKind::Timeout),
                other => panic!("{other:?}"),
            }
            assert!(events.next().await.is_none());
        }
    }

    struct Wakes(AtomicUsize);

    impl Wake for Wakes {
        fn wake(self: Arc<Self>) {
            self.0.fetch_add(1, Ordering::Relaxed);
        }
    }

    #[tokio::test]
    async fn a_reader_is_woken_by_the_end_and_by_no_check_before() {
        let time = limited(REQUEST_MAX);
        let received = Instant::now();
        let (mut events, _is_held) = endless(&time, received, 0);
        let wakes = Arc::new(Wakes(AtomicUsize::new(0)));
        let waker = wakes.clone().into();
        let mut context = Context::from_waker(&waker);
        assert!(events.poll_next(&mut context).is_pending());
        for s in 0..10 {
            time.end_overdue(received + Duration::from_secs(s));
        }
        assert_eq!(wakes.0.load(Ordering::Relaxed), 0);
        time.end_overdue(received + REQUEST_MAX + CHECK_EVERY);
        assert_eq!(wakes.0.load(Ordering::Relaxed), 1);
        assert!(events.poll_next(&mut context).is_ready());
    }

    #[tokio::test]
    async fn an_answer_that_was_finished_in_time_may_be_read_later() {
        let time = limited(Duration::ZERO);
        let received = Instant::now();
        let mut events = RequestEvents::new(3, |sender| async move {
            for _ in 0..3 {
                sender.send(failed()).await.unwrap();
            }
        })
        .within(&time, INTERACTIVE, received);
        assert!(events.next().await.is_some());
        time.end_overdue(received + CHECK_EVERY);
        for _ in 0..2 {
            match events.next().await {
                Some(RelayEvent::Failed(error)) => assert_eq!(error.kind, ErrorKind::Internal),
                other => panic!("{other:?}"),
            }
        }
        assert!(events.next().await.is_none());
    }

    #[tokio::test]
    async fn a_request_that_is_over_is_forgotten() {
        let time = limited(REQUEST_MAX);
        let (events, is_held) = endless(&time, Instant::now(), 0);
        assert_eq!(time.watched.lock().by_end.len(), 1);
        drop(events);
        assert!(is_held.await.is_err());
        assert!(time.watched.lock().by_end.is_empty());
        // So is one without a time limit.
        let forever = limited(Duration::MAX);
        let (events, _is_held) = endless(&forever, Instant::now(), 0);
        assert_eq!(forever.watched.lock().by_end.len(), 1);
        drop(events);
        assert!(forever.watched.lock().by_end.is_empty());
    }

    #[tokio::test]
    async fn a_rollout_has_a_limit_of_its_own() {
        let time = Arc::new(RequestTime::new(REQUEST_MAX, 2 * REQUEST_MAX));
        let received = Instant::now();
        let (_interactive, mut interactive_held) = endless(&time, received, 0);
        let (held, mut rollout_held) = oneshot::channel::<()>();
        let rollout = RequestEvents::new(2, move |_| async move {
            let _held = held;
            pending::<()>().await;
        });
        let mut rollout = rollout.within(&time, RequestClass::Rollout, received);
        let is_held = |held: &mut oneshot::Receiver<()>| {
            held.try_recv() == Err(oneshot::error::TryRecvError::Empty)
        };
        time.end_overdue(received + REQUEST_MAX + CHECK_EVERY);
        assert!(!is_held(&mut interactive_held) && is_held(&mut rollout_held));
        time.end_overdue(received + 2 * REQUEST_MAX + CHECK_EVERY);
        assert!(!is_held(&mut rollout_held));
        match rollout.next().await {
            Some(RelayEvent::Failed(error)) => assert!(error.message.contains("7200 s")),
            other => panic!("{other:?}"),
        }
        // Without a limit it has a year.
        let forever = RequestTime::new(REQUEST_MAX, Duration::MAX);
        assert!(forever.left(RequestClass::Rollout, received) > 300 * 24 * REQUEST_MAX);
    }

    #[tokio::test]
    async fn a_cut_ends_requests_that_run_and_requests_that_begin_later() {
        let time = limited(Duration::MAX);
        let (running, running_held) = endless(&time, Instant::now(), 5);
        let cut = ApiError::new(ErrorKind::Unavailable, "cut");
        time.cut_all(&cut);
        let (late, late_held) = endless(&time, Instant::now(), 5);
        for (mut events, held) in [(running, running_held), (late, late_held)] {
            assert!(held.await.is_err(), "its work still runs");
            match events.next().await {
                Some(RelayEvent::Failed(error)) => assert_eq!(error, cut),
                other => panic!("{other:?}"),
            }
            assert!(events.next().await.is_none());
        }
    }
}
