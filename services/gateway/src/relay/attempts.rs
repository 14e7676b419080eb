//! The decision after a lease was refused or a chunk failed: a plain policy, without clock or I/O. It is the pause
//! before the next attempt, or the error that ends the request.
//!
//! A scheduler that cannot be reached is waited for (`scheduler_absence.rs`). A rollout waits for a worker as well.
//! Before the first token of another request, the answer that no worker is there is asked for once more. Failures of
//! workers and engines are retried up to `failures_max` times. After the first token the client has seen output, so
//! all failures that may pass are retried.
//!
//! Failures are counted in a row: a token in between shows that the request makes progress. Before the first token,
//! the failures that a worker saw of its engine count as well.
//!
//! Asking an engine again for a request without a token is a retry, which needs the consent of the budget that all
//! requests share (`retry_budget.rs`). To continue an output is not a retry, and neither is a request after a refusal
//! for which no engine was asked.

use std::time::{Duration, Instant};

use refrain_protocol::error::code;
use refrain_protocol::scheduling::LeaseOutcome;
use refrain_protocol::{ApiError, ErrorKind, WorkerId};
use refrain_service_kit::backoff::Backoff;

use crate::relay::scheduler_absence::SchedulerAbsence;

/// Longest nominal pause between two attempts. Pauses are at most twice that.
const PAUSE_MAX: Duration = Duration::from_secs(1);

/// Longest pause that a service may ask for.
const HINTED_PAUSE_MAX: Duration = Duration::from_secs(2);

/// Time after which a client may try again whose request was superseded again and again.
const SUPERSEDED_RETRY_AFTER_MS: u64 = 1_000;

/// Time after which a client may try again if clocks differ, since the clock of another gateway may be right.
const CLOCK_RETRY_AFTER_MS: u64 = 1_000;

/// Most excluded workers that are remembered.
const EXCLUDED_MAX: usize = 16;

/// Most transfers of a request, in case the fallback worker is full each time when the request gets there.
const TRANSFERS_MAX: u32 = 3;

/// Codes of refusals for which no engine was asked.
const NO_ENGINE_ASKED: [&str; 6] = [
    code::STALE_EPOCH,
    code::WORKER_FULL,
    code::DRAINING,
    code::ENGINE_BREAKER_OPEN,
    code::OUT_OF_DESCRIPTORS,
    code::CLOCK_SKEW,
];

/// The attempts of one choice.
#[derive(Debug)]
pub(crate) struct Attempts {
    /// Failures in a row.
    failures: u32,
    failures_max: u32,
    backoff: Backoff,
    /// Workers that failed since the last chunk that succeeded.
    exclude: Vec<WorkerId>,
    /// The worker of the last chunk if its KV cache is worth returning to, or the target of a transfer.
    prefer: Option<WorkerId>,
    /// Whether `prefer` is the target of a transfer whose lease is still to come.
    transfer_pending: bool,
    /// Whether the request runs on the worker that it was transferred to.
    transferred: bool,
    /// Number of transfers that were asked for.
    transfers: u32,
    /// Whether the last chunk failed.
    after_failure: bool,
    /// The highest epoch of the choice's leases.
    epoch_seen: u64,
    absence: SchedulerAbsence,
    /// Whether a worker, and room for an output that has begun, are waited for as the scheduler is.
    is_patient: bool,
    /// Whether room in the scheduler's queue is waited for without an end.
    holds: bool,
}

/// The worker for the next chunk.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum NextChunk {
    /// The same worker, which has the KV cache, if it has a slot.
    SameWorker,
    /// Any other worker, since this one takes nothing new.
    OtherWorker,
    /// The fallback worker that the last one named as better for the request.
    Transfer(WorkerId),
}

/// The output of a choice when its chunk fails.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum OutputSoFar {
    /// No token.
    Nothing,
    /// Tokens, all of them from earlier chunks.
    EarlierChunks,
    /// Tokens from this chunk.
    ThisChunk,
}

impl Attempts {
    /// Creates the state of a choice without failures. `first_pause` is about the pause after the first one.
    pub(crate) fn new(failures_max: u32, first_pause: Duration, scheduler_wait: Duration) -> Self {
        Attempts {
            failures: 0,
            failures_max,
            backoff: Backoff::new(first_pause, PAUSE_MAX),
            exclude: Vec::new(),
            prefer: None,
            transfer_pending: false,
            transferred: false,
            transfers: 0,
            after_failure: false,
            epoch_seen: 0,
            absence: SchedulerAbsence::new(scheduler_wait, first_pause),
            is_patient: false,
            holds: false,
        }
    }

    /// Makes a request of a trainer wait for room in the scheduler's queue, for as long as the request may take.
    pub(crate) fn holding(mut self, holds: bool) -> Self {
        self.holds = holds;
        self
    }

    /// Whether the request waits after this refusal until there is room.
    pub(crate) fn is_held_by(&self, error: &ApiError) -> bool {
        self.holds && error.kind == ErrorKind::Overloaded
    }

    /// Makes a rollout wait for a worker for as long as for a scheduler, and for room once it has output.
    pub(crate) fn patient(mut self, is_patient: bool) -> Self {
        self.is_patient = is_patient;
        self
    }

    /// The highest epoch of the leases so far; 0 before the first.
    pub(crate) fn epoch_seen(&self) -> u64 {
        self.epoch_seen
    }

    /// Workers that the next lease should not name.
    pub(crate) fn exclude(&self) -> &[WorkerId] {
        &self.exclude
    }

    /// The worker that the next lease should name.
    pub(crate) fn prefer(&self) -> Option<&WorkerId> {
        self.prefer.as_ref()
    }

    /// Number of attempts that are left, the next one included.
    pub(crate) fn left(&self) -> u32 {
        self.failures_max.saturating_sub(self.failures).max(1)
    }

    /// Whether the next chunk follows a failed one.
    pub(crate) fn is_after_failure(&self) -> bool {
        self.after_failure
    }

    /// Notes that the engine failed before the request's first token, and that the worker asks it once more.
    pub(crate) fn engine_retried(&mut self) {
        self.failures = self.failures.saturating_add(1);
    }

    /// Decides after a call for a lease that failed. `has_output` tells whether the client may have seen output.
    pub(crate) fn lease_refused(
        &mut self,
        error: ApiError,
        has_output: bool,
        now: Instant,
    ) -> Result<Duration, ApiError> {
        if self.is_held_by(&error) {
            // Nothing has failed, and the pauses grow until there is room.
            self.absence.call_answered();
            let hint = Duration::from_millis(error.retry_after_ms.unwrap_or(0));
            return Ok(self.backoff.pause().max(hint.min(HINTED_PAUSE_MAX)));
        }
        let is_waited_for = match error.kind {
            ErrorKind::Unavailable => true,
            ErrorKind::Overloaded => has_output,
            _ => false,
        };
        if self.is_patient && is_waited_for {
            // A worker that failed is better than none.
            self.exclude.clear();
            return self.absence.call_failed(error, now);
        }
        if SchedulerAbsence::is_shown_by(&error) {
            return self.absence.call_failed(error, now);
        }
        self.absence.call_answered();
        let had_excluded = !self.exclude.is_empty();
        match error.kind {
            ErrorKind::Overloaded if !has_output => Err(error),
            ErrorKind::Overloaded => self.failed(error, self.failures_max),
            ErrorKind::Unavailable | ErrorKind::Internal => {
                // A worker that failed is better than none.
                self.exclude.clear();
                let failures_max = if has_output || had_excluded {
                    self.failures_max
                } else {
                    2
                };
                self.failed(error, failures_max)
            }
            ErrorKind::Unauthorized | ErrorKind::Forbidden => {
                Err(gateway_refused(error, "the scheduler"))
            }
            _ => Err(error),
        }
    }

    /// Decides after a chunk that failed, and tells how its lease ended. `may_retry` is asked before a retry.
    pub(crate) fn chunk_failed(
        &mut self,
        worker: &WorkerId,
        error: ApiError,
        output: OutputSoFar,
        may_retry: impl FnOnce() -> bool,
    ) -> (LeaseOutcome, Result<Duration, ApiError>) {
        if output == OutputSoFar::ThisChunk {
            self.made_progress();
        }
        self.prefer = None;
        self.after_failure = true;
        let error = match error.kind {
            ErrorKind::Unauthorized | ErrorKind::Forbidden => {
                gateway_refused(error, &format!("worker {worker}"))
            }
            _ => error,
        };
        let code = error.code.as_deref();
        let is_free = output != OutputSoFar::Nothing
            || code.is_some_and(|code| NO_ENGINE_ASKED.contains(&code));
        let outcome = match error.kind {
            ErrorKind::InvalidRequest | ErrorKind::TooLarge => {
                return (LeaseOutcome::GivenUp, Err(error));
            }
            // Nobody waits for the output any more, and no worker is to blame.
            ErrorKind::Timeout if code == Some(code::REQUEST_TIMEOUT) => {
                return (LeaseOutcome::GivenUp, Err(error));
            }
            // The client has waited for as long as an engine may take, and another engine may take as long.
            ErrorKind::Timeout
                if code == Some(code::ENGINE_TIMEOUT) && output != OutputSoFar::ThisChunk =>
            {
                return (LeaseOutcome::WorkerFailed, Err(error));
            }
            // A newer attempt of this request has taken over, so the worker is well.
            ErrorKind::Conflict => LeaseOutcome::Continues,
            // A full or draining worker is well, but takes nothing now. So is one that refuses this gateway's
            // signature, since the clock of the gateway may be off.
            ErrorKind::Overloaded | ErrorKind::Unavailable
                if code != Some(code::SERVICE_UNREACHABLE) =>
            {
                self.exclude_worker(worker);
                LeaseOutcome::Continues
            }
            _ => {
                self.exclude_worker(worker);
                LeaseOutcome::WorkerFailed
            }
        };
        let decision = match self.failed(error.clone(), self.failures_max) {
            Ok(_) if !is_free && !may_retry() => Err(error),
            decision => decision,
        };
        let decision = decision.map_err(|error| match error.kind {
            ErrorKind::Conflict => superseded(error),
            _ => error,
        });
        match (outcome, &decision) {
            (LeaseOutcome::Continues, Err(_)) => (LeaseOutcome::GivenUp, decision),
            _ => (outcome, decision),
        }
    }

    /// Whether the preferred worker is the target of a transfer.
    pub(crate) fn transfers_to_preferred(&self) -> bool {
        self.transfer_pending
    }

    /// Whether the request may not be transferred again, because it has been, or because its target was full too
    /// often. Each transfer costs a prefill, so one is enough.
    pub(crate) fn is_transferred(&self) -> bool {
        self.transferred || self.transfers >= TRANSFERS_MAX
    }

    /// Notes that a lease of `worker` was granted.
    pub(crate) fn leased(&mut self, worker: &WorkerId, epoch: u64) {
        self.absence.call_answered();
        self.epoch_seen = self.epoch_seen.max(epoch);
        if std::mem::take(&mut self.transfer_pending) {
            self.transferred = self.prefer.as_ref() == Some(worker);
        }
    }

    /// Notes that a chunk ended and the request continues.
    pub(crate) fn chunk_ended(&mut self, worker: &WorkerId, next: NextChunk) {
        self.made_progress();
        self.after_failure = false;
        self.exclude.clear();
        self.transfer_pending = false;
        match next {
            NextChunk::SameWorker => self.prefer = Some(worker.clone()),
            NextChunk::OtherWorker => {
                self.prefer = None;
                self.exclude_worker(worker);
            }
            NextChunk::Transfer(next) => {
                self.prefer = Some(next);
                self.transfer_pending = true;
                self.transfers += 1;
            }
        }
    }

    fn exclude_worker(&mut self, worker: &WorkerId) {
        if !self.exclude.contains(worker) {
            if self.exclude.len() == EXCLUDED_MAX {
                self.exclude.remove(0);
            }
            self.exclude.push(worker.clone());
        }
    }

    fn made_progress(&mut self) {
        self.failures = 0;
        self.backoff.reset();
    }

    /// Counts a failure. Gives up at the last one of `failures_max`.
    fn failed(&mut self, error: ApiError, failures_max: u32) -> Result<Duration, ApiError> {
        self.failures = self.failures.saturating_add(1);
        if self.failures >= failures_max {
            return Err(error);
        }
        let hint = Duration::from_millis(error.retry_after_ms.unwrap_or(0));
        Ok(self.backoff.pause().max(hint.min(HINTED_PAUSE_MAX)))
    }
}

/// A worker goes by another lease of the request. That is not the fault of the client, which has none.
fn superseded(error: ApiError) -> ApiError {
    let message = "the mesh disagrees on who carries this request out; try again";
    ApiError::new(ErrorKind::Unavailable, message)
        .with_code(code::STALE_EPOCH)
        .with_retry_after_ms(SUPERSEDED_RETRY_AFTER_MS)
        .with_detail(error)
}

/// A service refuses a signature or the credential of this gateway. That is not the fault of the client, which has
/// neither.
fn gateway_refused(error: ApiError, service: &str) -> ApiError {
    let detail = format!("{service}: {}", error.message);
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
