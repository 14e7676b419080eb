//! What to do when a lease is refused or a chunk fails: a plain policy, without clock or I/O.
//!
//! Before the first token of a request, a scheduler's absence is tried again once, and failures of workers and engines as
//! often as `failures_max` says; after it, the client has seen output, so everything that may pass is. Failures are counted in
//! a row, those that a worker heard of from its engine among them: a token in between means that the request gets on.
//!
//! The first attempt behind a token continues an output and is always made. All others are retries, and need the leave of the
//! budget that all requests share (`retries.rs`).

use std::time::Duration;

use refrain_protocol::scheduling::LeaseOutcome;
use refrain_protocol::{ApiError, ErrorKind, WorkerId};

/// Longest pause between two attempts.
const PAUSE_MAX: Duration = Duration::from_secs(2);

/// Excluded workers remembered.
const EXCLUDED_MAX: usize = 16;

/// The attempts of one choice.
#[derive(Clone, Debug)]
pub(crate) struct Attempts {
    failures: u32,
    failures_max: u32,
    backoff: Duration,
    /// Workers that failed since the last chunk that went well.
    exclude: Vec<WorkerId>,
    /// The worker of the last chunk, if its KV is worth going back to; or the one it was handed over to.
    prefer: Option<WorkerId>,
    /// Whether `prefer` is such a one, and the lease for it is still to come.
    named: bool,
    handed_over: bool,
    /// Times that a worker named another one.
    hand_overs: u32,
}

/// Times that a request may be sent on, should the worker that was named be full when it comes there.
const HAND_OVERS_MAX: u32 = 3;

/// Where a request goes on after a chunk.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum NextChunk {
    /// Where its KV is, if there is room.
    Here,
    /// Not there: the worker takes nothing new.
    Elsewhere,
    /// On this one, which the worker named as better for the request.
    On(WorkerId),
}

/// What to do.
#[derive(Clone, Debug, PartialEq)]
pub(crate) enum Verdict {
    /// Ask for another lease after this pause.
    Again(Duration),
    /// Tell the client.
    GiveUp(ApiError),
}

impl Attempts {
    /// None so far.
    pub(crate) fn new(failures_max: u32, backoff: Duration) -> Self {
        Attempts {
            failures: 0,
            failures_max,
            backoff,
            exclude: Vec::new(),
            prefer: None,
            named: false,
            handed_over: false,
            hand_overs: 0,
        }
    }

    /// For the next lease.
    pub(crate) fn exclude(&self) -> &[WorkerId] {
        &self.exclude
    }

    /// For the next lease.
    pub(crate) fn prefer(&self) -> Option<&WorkerId> {
        self.prefer.as_ref()
    }

    /// Attempts that are left, the next one among them.
    pub(crate) fn left(&self) -> u32 {
        self.failures_max.saturating_sub(self.failures).max(1)
    }

    /// Whether nothing has failed since the request last got on.
    pub(crate) fn is_first(&self) -> bool {
        self.failures == 0
    }

    /// The worker's engine failed, and the worker asks it once more.
    pub(crate) fn retried(&mut self) {
        self.failures += 1;
    }

    /// The scheduler said no. `has_output`: whether the client may have seen some. `may_retry` is asked before a retry.
    pub(crate) fn lease_refused(
        &mut self,
        error: ApiError,
        has_output: bool,
        may_retry: impl FnOnce() -> bool,
    ) -> Verdict {
        let had_excluded = !self.exclude.is_empty();
        let continues = has_output && self.failures == 0;
        let may_retry = || continues || may_retry();
        match error.kind {
            ErrorKind::Overloaded if !has_output => Verdict::GiveUp(error),
            ErrorKind::Overloaded => self.again(error, self.failures_max, may_retry),
            ErrorKind::Unavailable
            | ErrorKind::Upstream
            | ErrorKind::Timeout
            | ErrorKind::Internal => {
                // If only workers that failed are left, they are better than none.
                self.exclude.clear();
                // Once, since a dispatcher that starts anew loses its queue.
                let most = if has_output || had_excluded {
                    self.failures_max
                } else {
                    2
                };
                self.again(error, most, may_retry)
            }
            // Not the client's fault: it signs no namespaces.
            ErrorKind::Unauthorized => Verdict::GiveUp(ApiError::internal(error)),
            _ => Verdict::GiveUp(error),
        }
    }

    /// A chunk failed. `progressed`: whether it brought tokens first. `may_retry` is asked before a retry.
    pub(crate) fn chunk_failed(
        &mut self,
        worker: &WorkerId,
        error: ApiError,
        progressed: bool,
        may_retry: impl FnOnce() -> bool,
    ) -> (LeaseOutcome, Verdict) {
        let may_retry = || progressed || may_retry();
        if progressed {
            self.failures = 0;
        }
        self.prefer = None;
        match error.kind {
            ErrorKind::InvalidRequest | ErrorKind::TooLarge => {
                (LeaseOutcome::Done, Verdict::GiveUp(error))
            }
            // The client has waited for as long as an engine may take; another may take as long.
            ErrorKind::Timeout
                if error.code.as_deref() == Some("engine_timeout") && !progressed =>
            {
                (LeaseOutcome::WorkerFailed, Verdict::GiveUp(error))
            }
            // A newer attempt of our own: the worker is well.
            ErrorKind::Conflict => (
                LeaseOutcome::Continues,
                self.again(error, self.failures_max, may_retry),
            ),
            // Full or draining: well too, but not for us now.
            ErrorKind::Overloaded | ErrorKind::Unavailable => {
                self.leave_out(worker);
                (
                    LeaseOutcome::Continues,
                    self.again(error, self.failures_max, may_retry),
                )
            }
            _ => {
                self.leave_out(worker);
                (
                    LeaseOutcome::WorkerFailed,
                    self.again(error, self.failures_max, may_retry),
                )
            }
        }
    }

    /// Whether the worker that is preferred was named by the last one.
    pub(crate) fn prefers_named(&self) -> bool {
        self.named
    }

    /// Whether the request has been handed over: once is enough, as each time costs a prefill.
    pub(crate) fn is_handed_over(&self) -> bool {
        self.handed_over || self.hand_overs >= HAND_OVERS_MAX
    }

    /// A lease was granted.
    pub(crate) fn leased(&mut self, worker: &WorkerId) {
        if std::mem::take(&mut self.named) {
            self.handed_over = self.prefer.as_ref() == Some(worker);
        }
    }

    /// A chunk ended and the request goes on.
    pub(crate) fn chunk_ended(&mut self, worker: &WorkerId, next: NextChunk) {
        self.failures = 0;
        self.exclude.clear();
        self.named = false;
        match next {
            NextChunk::Here => self.prefer = Some(worker.clone()),
            NextChunk::Elsewhere => {
                self.prefer = None;
                self.leave_out(worker);
            }
            NextChunk::On(next) => {
                self.prefer = Some(next);
                self.named = true;
                self.hand_overs += 1;
            }
        }
    }

    fn leave_out(&mut self, worker: &WorkerId) {
        if !self.exclude.contains(worker) {
            if self.exclude.len() == EXCLUDED_MAX {
                self.exclude.remove(0);
            }
            self.exclude.push(worker.clone());
        }
    }

    fn again(&mut self, error: ApiError, most: u32, may_retry: impl FnOnce() -> bool) -> Verdict {
        self.failures += 1;
        if self.failures >= most || !may_retry() {
            return Verdict::GiveUp(error);
        }
        let doubled = self
            .backoff
            .saturating_mul(1 << (self.failures - 1).min(16));
        let hint = Duration::from_millis(error.retry_after_ms.unwrap_or(0));
        Verdict::Again(doubled.max(hint).min(PAUSE_MAX))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn error(kind: ErrorKind) -> ApiError {
        ApiError::new(kind, "x")
    }

    fn attempts() -> Attempts {
        Attempts::new(4, Duration::from_millis(50))
    }

    fn granted() -> bool {
        true
    }

    fn worker(name: &str) -> WorkerId {
        WorkerId(name.into())
    }

    #[test]
    fn a_full_queue_is_the_clients_to_know_before_its_first_token_only() {
        assert!(matches!(
            attempts().lease_refused(error(ErrorKind::Overloaded), false, granted),
            Verdict::GiveUp(_)
        ));
        assert!(matches!(
            attempts().lease_refused(error(ErrorKind::Overloaded), true, granted),
            Verdict::Again(_)
        ));
    }

    #[test]
    fn an_absent_scheduler_is_asked_once_more() {
        let mut attempts = attempts();
        assert_eq!(
            attempts.lease_refused(error(ErrorKind::Unavailable), false, granted),
            Verdict::Again(Duration::from_millis(50))
        );
        assert!(matches!(
            attempts.lease_refused(error(ErrorKind::Unavailable), false, granted),
            Verdict::GiveUp(_)
        ));
    }

    #[test]
    fn a_slow_engine_is_not_waited_for_again() {
        let slow = || error(ErrorKind::Timeout).with_code("engine_timeout");
        let verdict = |progressed| {
            attempts()
                .chunk_failed(&worker("a"), slow(), progressed, granted)
                .1
        };
        assert!(matches!(verdict(false), Verdict::GiveUp(_)));
        assert!(matches!(verdict(true), Verdict::Again(_)));
    }

    #[test]
    fn failed_workers_are_left_out_until_nobody_else_is_there() {
        let mut attempts = attempts();
        let (outcome, verdict) =
            attempts.chunk_failed(&worker("a"), error(ErrorKind::Upstream), false, granted);
        assert_eq!(
            (outcome, verdict),
            (
                LeaseOutcome::WorkerFailed,
                Verdict::Again(Duration::from_millis(50))
            )
        );
        assert_eq!(attempts.exclude(), [worker("a")]);
        let verdict = attempts.lease_refused(error(ErrorKind::Unavailable), false, granted);
        assert_eq!(verdict, Verdict::Again(Duration::from_millis(100)));
        assert!(attempts.exclude().is_empty());
    }

    #[test]
    fn failures_are_counted_in_a_row() {
        let mut attempts = attempts();
        for _ in 0..20 {
            let (_, verdict) =
                attempts.chunk_failed(&worker("a"), error(ErrorKind::Timeout), true, granted);
            assert!(matches!(verdict, Verdict::Again(_)));
        }
        let mut last = None;
        for _ in 0..3 {
            last = Some(
                attempts
                    .chunk_failed(&worker("b"), error(ErrorKind::Timeout), false, granted)
                    .1,
            );
        }
        assert!(matches!(last, Some(Verdict::GiveUp(_))));
    }

    #[test]
    fn retries_need_leave_and_continuations_do_not() {
        let refused = || false;
        let lost = || error(ErrorKind::Upstream);
        let mut attempts = attempts();
        let verdict = attempts.chunk_failed(&worker("a"), lost(), true, refused).1;
        assert!(matches!(verdict, Verdict::Again(_)));
        let verdict = attempts
            .chunk_failed(&worker("b"), lost(), false, refused)
            .1;
        assert_eq!(verdict, Verdict::GiveUp(lost()));

        let mut attempts = self::attempts();
        attempts.chunk_ended(&worker("a"), NextChunk::Here);
        let full = || error(ErrorKind::Overloaded);
        let verdict = attempts.lease_refused(full(), true, refused);
        assert!(matches!(verdict, Verdict::Again(_)));
        let verdict = attempts.lease_refused(full(), true, refused);
        assert_eq!(verdict, Verdict::GiveUp(full()));
    }

    #[test]
    fn what_a_worker_tried_counts() {
        let mut attempts = attempts();
        assert_eq!(attempts.left(), 4);
        attempts.retried();
        attempts.retried();
        let lost = error(ErrorKind::Upstream);
        let verdict = attempts
            .chunk_failed(&worker("a"), lost.clone(), false, granted)
            .1;
        assert!(matches!(verdict, Verdict::Again(_)));
        assert_eq!(attempts.left(), 1);
        // Nobody is asked for leave for what is not done in any case.
        let unasked = || unreachable!("the last attempt has failed");
        let verdict = attempts
            .chunk_failed(&worker("b"), lost.clone(), false, unasked)
            .1;
        assert_eq!(verdict, Verdict::GiveUp(lost));
    }

    #[test]
    fn what_no_worker_can_do_is_not_tried_elsewhere() {
        let (outcome, verdict) = attempts().chunk_failed(
            &worker("a"),
            error(ErrorKind::InvalidRequest),
            false,
            granted,
        );
        assert_eq!(outcome, LeaseOutcome::Done);
        assert!(
            matches!(verdict, Verdict::GiveUp(error) if error.kind == ErrorKind::InvalidRequest)
        );
    }

    #[test]
    fn the_last_worker_is_preferred_unless_it_drains() {
        let mut attempts = attempts();
        attempts.chunk_ended(&worker("a"), NextChunk::Here);
        assert_eq!(attempts.prefer(), Some(&worker("a")));
        attempts.chunk_ended(&worker("a"), NextChunk::Elsewhere);
        assert_eq!(
            (attempts.prefer(), attempts.exclude()),
            (None, &[worker("a")][..])
        );
    }

    #[test]
    fn a_request_is_handed_over_once_it_is_there_and_not_sent_on_for_ever() {
        let mut attempts = attempts();
        attempts.chunk_ended(&worker("a"), NextChunk::On(worker("b")));
        assert_eq!(attempts.prefer(), Some(&worker("b")));
        assert!(attempts.prefers_named() && !attempts.is_handed_over());
        attempts.leased(&worker("b"));
        assert!(!attempts.prefers_named() && attempts.is_handed_over());

        let mut attempts = self::attempts();
        for sent in 0..HAND_OVERS_MAX {
            assert!(!attempts.is_handed_over(), "sent on {sent} times");
            attempts.chunk_ended(&worker("a"), NextChunk::On(worker("b")));
            // It was full.
            attempts.leased(&worker("a"));
        }
        assert!(attempts.is_handed_over());
    }

    #[test]
    fn pauses_grow_to_a_bound_and_heed_hints() {
        let mut attempts = Attempts::new(100, Duration::from_millis(50));
        let hinted = error(ErrorKind::Overloaded).with_retry_after_ms(700);
        assert_eq!(
            attempts.lease_refused(hinted, true, granted),
            Verdict::Again(Duration::from_millis(700))
        );
        for _ in 0..40 {
            attempts.lease_refused(error(ErrorKind::Overloaded), true, granted);
        }
        assert_eq!(
            attempts.lease_refused(error(ErrorKind::Overloaded), true, granted),
            Verdict::Again(PAUSE_MAX)
        );
    }
}
