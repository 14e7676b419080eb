//! What to do when a lease is refused or a chunk fails: a plain policy, without clock or I/O.
//!
//! A scheduler that is away is waited for (`absence.rs`). Before the first token of a request, its word that no worker is there
//! is asked for once more, and failures of workers and engines are tried again as often as `failures_max` says; after it, the
//! client has seen output, so everything that may pass is. Failures are counted in
//! a row: a token in between means that the request gets on. Those that a worker heard of from its engine are among them before
//! the first token.
//!
//! What asks an engine again for a request without a token is a retry, and needs the leave of the budget that all requests share
//! (`retries.rs`). What continues an output is none, and neither is what follows a refusal for which no engine was asked.

use std::time::{Duration, Instant};

use refrain_protocol::error::code;
use refrain_protocol::scheduling::LeaseOutcome;
use refrain_protocol::{ApiError, ErrorKind, WorkerId};

use crate::absence::Absence;

/// Longest pause between two attempts.
const PAUSE_MAX: Duration = Duration::from_secs(2);

/// When a client may try again where clocks differ: another gateway's may be right.
const CLOCK_RETRY_AFTER_MS: u64 = 1_000;

/// Excluded workers remembered.
const EXCLUDED_MAX: usize = 16;

/// The attempts of one choice.
#[derive(Debug)]
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
    transferred: bool,
    /// Times that a worker named another one.
    transfers: u32,
    /// Whether the next chunk is asked for because the last one failed.
    again: bool,
    absence: Absence,
}

/// Times that a request may be sent on, should the worker that was named be full when it comes there.
const TRANSFERS_MAX: u32 = 3;

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

/// What a choice has said when its chunk fails.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Said {
    /// No token.
    Nothing,
    /// Tokens, all of them in earlier chunks.
    Before,
    /// Tokens in this chunk.
    InThisChunk,
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
    pub(crate) fn new(failures_max: u32, backoff: Duration, scheduler_wait: Duration) -> Self {
        Attempts {
            failures: 0,
            failures_max,
            backoff,
            exclude: Vec::new(),
            prefer: None,
            named: false,
            transferred: false,
            transfers: 0,
            again: false,
            absence: Absence::new(scheduler_wait, backoff),
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

    /// Whether the next chunk is asked for because the last one failed.
    pub(crate) fn is_again(&self) -> bool {
        self.again
    }

    /// The worker's engine failed before the request's first token, and the worker asks it once more.
    pub(crate) fn retried(&mut self) {
        self.failures = self.failures.saturating_add(1);
    }

    /// The scheduler said no, or nothing. `has_output`: whether the client may have seen some.
    pub(crate) fn lease_refused(
        &mut self,
        error: ApiError,
        has_output: bool,
        now: Instant,
    ) -> Verdict {
        if Absence::is_told_by(&error) {
            return self.absence.noticed(error, now);
        }
        self.absence.is_over();
        let had_excluded = !self.exclude.is_empty();
        match error.kind {
            ErrorKind::Overloaded if !has_output => Verdict::GiveUp(error),
            ErrorKind::Overloaded => self.again(error, self.failures_max),
            ErrorKind::Unavailable | ErrorKind::Internal => {
                // If only workers that failed are left, they are better than none.
                self.exclude.clear();
                let most = if has_output || had_excluded {
                    self.failures_max
                } else {
                    2
                };
                self.again(error, most)
            }
            ErrorKind::Unauthorized => Verdict::GiveUp(unbelieved(error, "the scheduler")),
            _ => Verdict::GiveUp(error),
        }
    }

    /// A chunk failed. `may_retry` is asked before a retry.
    pub(crate) fn chunk_failed(
        &mut self,
        worker: &WorkerId,
        error: ApiError,
        said: Said,
        may_retry: impl FnOnce() -> bool,
    ) -> (LeaseOutcome, Verdict) {
        if said == Said::InThisChunk {
            self.failures = 0;
        }
        self.prefer = None;
        self.again = true;
        let error = match error.kind {
            ErrorKind::Unauthorized => unbelieved(error, &format!("worker {worker}")),
            _ => error,
        };
        let code = error.code.as_deref();
        let unasked = [
            code::WORKER_FULL,
            code::DRAINING,
            code::ENGINE_BREAKER_OPEN,
            code::OUT_OF_DESCRIPTORS,
            code::CLOCK_SKEW,
        ];
        let is_free = said != Said::Nothing || code.is_some_and(|code| unasked.contains(&code));
        let outcome = match error.kind {
            ErrorKind::InvalidRequest | ErrorKind::TooLarge => {
                return (LeaseOutcome::Done, Verdict::GiveUp(error));
            }
            // Nobody waits for it any more, and nobody is to blame.
            ErrorKind::Timeout if code == Some(code::REQUEST_TIMEOUT) => {
                return (LeaseOutcome::Done, Verdict::GiveUp(error));
            }
            // The client has waited for as long as an engine may take; another may take as long.
            ErrorKind::Timeout
                if code == Some(code::ENGINE_TIMEOUT) && said != Said::InThisChunk =>
            {
                return (LeaseOutcome::WorkerFailed, Verdict::GiveUp(error));
            }
            // A newer attempt of our own: the worker is well.
            ErrorKind::Conflict => LeaseOutcome::Continues,
            ErrorKind::Unavailable if code == Some(code::SERVICE_UNREACHABLE) => {
                self.leave_out(worker);
                LeaseOutcome::WorkerFailed
            }
            // Full or draining: well too, but not for us now. So is one that does not believe what we sign by our clock, since
            // ours may be the one that is off.
            ErrorKind::Overloaded | ErrorKind::Unavailable => {
                self.leave_out(worker);
                LeaseOutcome::Continues
            }
            _ => {
                self.leave_out(worker);
                LeaseOutcome::WorkerFailed
            }
        };
        let verdict = match self.again(error.clone(), self.failures_max) {
            Verdict::Again(_) if !is_free && !may_retry() => Verdict::GiveUp(error),
            verdict => verdict,
        };
        (outcome, verdict)
    }

    /// Whether the worker that is preferred was named by the last one.
    pub(crate) fn prefers_named(&self) -> bool {
        self.named
    }

    /// Whether the request has been handed over: once is enough, as each time costs a prefill.
    pub(crate) fn is_transferred(&self) -> bool {
        self.transferred || self.transfers >= TRANSFERS_MAX
    }

    /// A lease was granted.
    pub(crate) fn leased(&mut self, worker: &WorkerId) {
        self.absence.is_over();
        if std::mem::take(&mut self.named) {
            self.transferred = self.prefer.as_ref() == Some(worker);
        }
    }

    /// A chunk ended and the request goes on.
    pub(crate) fn chunk_ended(&mut self, worker: &WorkerId, next: NextChunk) {
        self.failures = 0;
        self.again = false;
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
                self.transfers += 1;
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

    fn again(&mut self, error: ApiError, most: u32) -> Verdict {
        self.failures = self.failures.saturating_add(1);
        if self.failures >= most {
            return Verdict::GiveUp(error);
        }
        let doubled = self
            .backoff
            .saturating_mul(1 << (self.failures - 1).min(16));
        let hint = Duration::from_millis(error.retry_after_ms.unwrap_or(0));
        Verdict::Again(doubled.max(hint).min(PAUSE_MAX))
    }
}

/// A service does not believe what this gateway signs. That is not the client's fault: it signs nothing.
fn unbelieved(error: ApiError, whose: &str) -> ApiError {
    let detail = format!("{whose}: {}", error.message);
    match error.code.as_deref() {
        Some(code::CLOCK_SKEW | code::NAMESPACE_EXPIRED) => {
            let message = "the clocks of this mesh differ too much; an operator has to set them";
            ApiError::new(ErrorKind::Unavailable, message)
                .with_code(code::CLOCK_SKEW)
                .with_retry_after_ms(CLOCK_RETRY_AFTER_MS)
                .with_detail(detail)
        }
        _ => ApiError::internal(detail),
    }
}

#[cfg(test)]
mod tests;
