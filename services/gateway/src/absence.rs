//! A scheduler that is away: how long a request waits for it, and when it asks again. Without clock or I/O.
//!
//! A restart takes seconds, in which nothing is wrong with any request: the place in the queue is lost, and asking again gets
//! another one. All requests find out at the same moment, so their pauses are drawn at random.

use std::time::{Duration, Instant};

use backon::{BackoffBuilder, ExponentialBackoff, ExponentialBuilder};
use refrain_protocol::error::code;
use refrain_protocol::{ApiError, ErrorKind};

use crate::attempts::Verdict;

/// Longest pause between two calls, about; a random share of it comes on top.
const PAUSE_MAX: Duration = Duration::from_millis(500);

/// When a client may try again whose request has waited in vain.
const RETRY_AFTER_MS: u64 = 5_000;

/// The scheduler's absence, as one choice knows it.
#[derive(Debug)]
pub(crate) struct Absence {
    /// How long it is waited for.
    wait: Duration,
    pauses: ExponentialBuilder,
    /// Since when it is away, and the pauses to come.
    away: Option<(Instant, ExponentialBackoff)>,
}

impl Absence {
    /// It is there. The first pause is `pause`, about.
    pub(crate) fn new(wait: Duration, pause: Duration) -> Self {
        Absence {
            wait,
            pauses: ExponentialBuilder::new()
                .with_min_delay(pause.min(PAUSE_MAX))
                .with_max_delay(PAUSE_MAX)
                .with_jitter()
                .without_max_times(),
            away: None,
        }
    }

    /// Whether an error says that the scheduler is away, and not what it thinks of the request.
    pub(crate) fn is_told_by(error: &ApiError) -> bool {
        matches!(error.kind, ErrorKind::Upstream | ErrorKind::Timeout)
            || error.has_code(code::SCHEDULER_UNAVAILABLE)
            || error.has_code(code::SERVICE_UNREACHABLE)
    }

    /// A call failed by such an error.
    pub(crate) fn noticed(&mut self, error: ApiError, now: Instant) -> Verdict {
        let pauses = &self.pauses;
        let (since, pauses) = self.away.get_or_insert_with(|| (now, pauses.build()));
        let left = self
            .wait
            .saturating_sub(now.saturating_duration_since(*since));
        if left.is_zero() {
            return Verdict::GiveUp(gone(error));
        }
        let pause = pauses.next().unwrap_or(PAUSE_MAX);
        let hint = Duration::from_millis(error.retry_after_ms.unwrap_or(0));
        // The last call comes as the wait ends.
        Verdict::Again(pause.max(hint).min(left))
    }

    /// It answered.
    pub(crate) fn is_over(&mut self) {
        self.away = None;
    }
}

fn gone(error: ApiError) -> ApiError {
    let message = "the scheduler of this mesh cannot be reached; try again later";
    ApiError::new(ErrorKind::Unavailable, message)
        .with_code(code::SCHEDULER_UNAVAILABLE)
        .with_retry_after_ms(RETRY_AFTER_MS)
        .with_detail(error)
}

#[cfg(test)]
mod tests {
    use super::*;

    const WAIT: Duration = Duration::from_secs(10);
    const PAUSE: Duration = Duration::from_millis(50);

    fn away() -> ApiError {
        ApiError::new(
            ErrorKind::Upstream,
            "a service of the mesh cannot be reached",
        )
    }

    /// Asks until it is given up: how long that took, and how often it was asked.
    fn in_vain(absence: &mut Absence, start: Instant) -> (Duration, usize) {
        let mut now = start;
        for asked in 1..10_000 {
            match absence.noticed(away(), now) {
                Verdict::Again(pause) => now += pause,
                Verdict::GiveUp(error) => {
                    assert_eq!(error.kind, ErrorKind::Unavailable);
                    assert_eq!(error.code.as_deref(), Some(code::SCHEDULER_UNAVAILABLE));
                    assert!(error.retry_after_ms.is_some());
                    return (now - start, asked);
                }
            }
        }
        panic!("it is never given up");
    }

    #[test]
    fn it_is_waited_for_as_long_as_is_said_and_asked_seldom() {
        let mut absence = Absence::new(WAIT, PAUSE);
        let start = Instant::now();
        let (waited, asked) = in_vain(&mut absence, start);
        assert_eq!(waited, WAIT);
        // A pause is between PAUSE_MAX and twice that by the end.
        assert!((10..40).contains(&asked), "asked {asked} times");
        // A sign of life in between starts all anew.
        absence.is_over();
        assert_eq!(in_vain(&mut absence, start).0, WAIT);
        let mut unwaited = Absence::new(Duration::ZERO, PAUSE);
        assert_eq!(in_vain(&mut unwaited, start), (Duration::ZERO, 1));
    }

    #[test]
    fn requests_that_notice_it_together_do_not_ask_together() {
        let now = Instant::now();
        let pauses: std::collections::HashSet<Duration> = (0..100)
            .map(|_| match Absence::new(WAIT, PAUSE).noticed(away(), now) {
                Verdict::Again(pause) => pause,
                Verdict::GiveUp(error) => panic!("{error}"),
            })
            .collect();
        assert!(pauses.len() > 50, "{} different pauses", pauses.len());
        assert!(
            pauses
                .iter()
                .all(|pause| (PAUSE..=2 * PAUSE).contains(pause))
        );
    }

    #[test]
    fn hints_are_heeded() {
        let mut absence = Absence::new(WAIT, PAUSE);
        let hinted = away().with_retry_after_ms(1_500);
        let verdict = absence.noticed(hinted, Instant::now());
        assert_eq!(verdict, Verdict::Again(Duration::from_millis(1_500)));
    }
}
