//! How much of the work of a form is done in steps, for which all sessions wait.
//!
//! Whether work is done in a step or beside it changes no output, so it may go by a clock. It is that of the
//! processor time of a thread: on a busy machine, forms are no slower than others.

use std::time::Duration;

use refrain_service_kit::clock::thread_time;

/// Processor time of steps that a session's form may take for each token of its output. Most masks take less.
const TOKEN_TIME: Duration = Duration::from_micros(500);

/// Longest time that is saved up. A form begins with it.
const SAVED_MAX: Duration = Duration::from_millis(4);

/// A form whose tokens took longer when it was compiled begins as a slow one.
const TRIED_TIME_MAX: Duration = Duration::from_millis(2);

/// The time that a form may take in steps. Once it has taken more, its work is done beside the steps until its output
/// has grown by as many tokens as make up for it.
#[derive(Debug)]
pub(super) struct FormPace {
    saved: Duration,
    owed: Duration,
}

impl FormPace {
    /// The pace of a form whose tokens took this time when it was compiled.
    pub(super) fn after_trial(time: Duration) -> Self {
        FormPace {
            saved: SAVED_MAX,
            owed: time.saturating_sub(TRIED_TIME_MAX),
        }
    }

    /// Whether the form has taken more time than it had.
    pub(super) fn is_slow(&self) -> bool {
        !self.owed.is_zero()
    }

    /// Notes that the output has grown.
    pub(super) fn earn(&mut self, tokens: usize) {
        let earned = TOKEN_TIME.saturating_mul(u32::try_from(tokens).unwrap_or(u32::MAX));
        let left = earned.saturating_sub(self.owed);
        self.owed = self.owed.saturating_sub(earned);
        self.saved = (self.saved + left).min(SAVED_MAX);
    }

    /// Notes time that was taken in a step, or that would have been.
    pub(super) fn take(&mut self, taken: Duration) {
        self.owed += taken.saturating_sub(self.saved);
        self.saved = self.saved.saturating_sub(taken);
    }

    /// Whether a draft has taken its part of the saved time, from now on: one of `parts`. The rest of the draft is
    /// cut, which changes no output. So a wide draft does not make its form a slow one, whose steps have no draft.
    pub(super) fn slice(pace: Option<&Self>, parts: u32) -> impl Fn() -> bool + use<> {
        let until = pace.map(|pace| thread_time() + pace.saved / parts);
        move || until.is_some_and(|until| thread_time() >= until)
    }

    /// Does work in a step, at this pace if there is one.
    pub(super) fn spend<T>(pace: &mut Option<FormPace>, work: impl FnOnce() -> T) -> T {
        let Some(pace) = pace else {
            return work();
        };
        let started = thread_time();
        let done = work();
        pace.take(thread_time().saturating_sub(started));
        done
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_form_that_takes_more_time_than_it_has_is_slow_until_it_made_up_for_it() {
        assert!(FormPace::after_trial(TRIED_TIME_MAX * 2).is_slow());
        let mut pace = FormPace::after_trial(TRIED_TIME_MAX);
        pace.take(SAVED_MAX);
        pace.earn(3);
        pace.take(TOKEN_TIME * 3);
        assert!(!pace.is_slow());
        pace.take(TOKEN_TIME * 2);
        assert!(pace.is_slow());
        pace.earn(1);
        assert!(pace.is_slow());
        pace.earn(1);
        assert!(!pace.is_slow());
        pace.earn(1_000_000);
        pace.take(SAVED_MAX);
        assert!(!pace.is_slow());
        pace.take(Duration::from_micros(1));
        assert!(pace.is_slow());
    }
}
