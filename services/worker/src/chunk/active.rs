//! A chunk that is decoded.

use std::collections::VecDeque;
use std::time::{Duration, Instant};

use refrain_protocol::chunk::ChunkEvent;
use refrain_protocol::error::code;
use refrain_protocol::{ApiError, ErrorKind, LeaseId};
use tokio::sync::mpsc;

use super::admission::AdmissionPermit;
use super::held::HeldNotices;
use crate::orders::{Fate, Gate, Ticket};
use crate::running::{ActiveRequest, StepRecord};

/// How long the engine may refuse a request for lack of room before the request fails.
const ENGINE_FULL_TIMEOUT: Duration = Duration::from_secs(20);
/// Longest pause after such a refusal, whatever the engine suggests.
const ENGINE_FULL_PAUSE_MAX: Duration = Duration::from_secs(1);

/// A chunk that is decoded.
pub(crate) struct ActiveChunk {
    pub(crate) running: ActiveRequest,
    /// The result of the last step, until the decode loop has learnt from it and recorded it.
    pub(crate) unsettled: Option<StepRecord>,
    pub(crate) events: mpsc::Sender<Result<ChunkEvent, ApiError>>,
    pub(crate) lease: LeaseId,
    permit: AdmissionPermit,
    pub(crate) span: tracing::Span,
    /// The runtime of the reader. A streamed chunk runs there too, so that a token goes from the engine's connection
    /// to the client's on one thread.
    pub(crate) runtime: tokio::runtime::Handle,
    /// Its place at the gate of a trainer's orders.
    ticket: Ticket,
    /// How long the request may take from its first turn on.
    time_left: Option<Duration>,
    /// The time when the request times out, by the clock that stands still while everything is held. `None` before
    /// its first turn as well.
    deadline: Option<Instant>,
    has_begun: bool,
    held: HeldNotices,
    /// An event that did not fit into the queue when the chunk ended.
    pub(crate) unsent: Option<ChunkEvent>,
    /// The last event, once the chunk has ended.
    last: Option<Result<ChunkEvent, ApiError>>,
    /// The time since when the queue has been full.
    pub(crate) stalled_since: Option<Instant>,
    /// The time until which the request pauses, because the engine had no room for it.
    pub(crate) wait_until: Option<Instant>,
    /// The time of the engine's first refusal in a row.
    pub(crate) waits_since: Option<Instant>,
}

impl ActiveChunk {
    /// A chunk whose reader is on the current runtime.
    pub(crate) fn new(
        running: ActiveRequest,
        events: mpsc::Sender<Result<ChunkEvent, ApiError>>,
        permit: AdmissionPermit,
        span: tracing::Span,
        ticket: Ticket,
        time_left: Option<Duration>,
    ) -> Self {
        ActiveChunk {
            running,
            ticket,
            time_left,
            deadline: None,
            has_begun: false,
            held: HeldNotices::default(),
            unsettled: None,
            events,
            lease: permit.lease(),
            permit,
            span,
            runtime: tokio::runtime::Handle::current(),
            unsent: None,
            last: None,
            stalled_since: None,
            wait_until: None,
            waits_since: None,
        }
    }

    /// The fate of the request at the gate.
    pub(crate) fn fate(&self, gate: &Gate) -> Fate {
        gate.fate(self.ticket.begun_in())
    }

    /// The number of the pause in which the request began; 0: in none.
    pub(crate) fn begun_in(&self) -> u64 {
        self.ticket.begun_in()
    }

    /// Begins the time of the request, on the clock that stands still while everything is held.
    pub(crate) fn begin_time(&mut self, working_time: Instant) {
        if !std::mem::replace(&mut self.has_begun, true) {
            let left = self.time_left;
            self.deadline = left.and_then(|left| working_time.checked_add(left));
        }
    }

    /// Notes whether the request is held, and tells its reader.
    pub(crate) fn note_held(&mut self, is_held: bool, now: Instant) {
        self.held.note(is_held, &self.events, now);
    }

    /// The time when the request times out, by the clock that stands still while everything is held.
    pub(crate) fn deadline(&self) -> Option<Instant> {
        self.deadline
    }

    /// The timeout error of the request, if its time is up by the clock that stands still while everything is held.
    pub(crate) fn overdue(&self, now: Instant) -> Option<ApiError> {
        let is_overdue = self.deadline.is_some_and(|deadline| deadline <= now);
        is_overdue.then(|| {
            let message = "the request timed out";
            ApiError::new(ErrorKind::Timeout, message).with_code(code::REQUEST_TIMEOUT)
        })
    }

    /// Handles the engine's error for this request in a step: the request opens a new session, pauses, or fails.
    ///
    /// # Errors
    /// The error is final.
    pub(crate) fn postpone(
        &mut self,
        error: ApiError,
        default_pause: Duration,
        now: Instant,
    ) -> Result<(), ApiError> {
        match error.kind {
            ErrorKind::NotFound => self.running.reopen(),
            ErrorKind::Overloaded => {
                let since = *self.waits_since.get_or_insert(now);
                if now - since > ENGINE_FULL_TIMEOUT {
                    return Err(error);
                }
                let pause = error
                    .retry_after_ms
                    .map_or(default_pause, Duration::from_millis);
                // A wait that is long already goes on. To ask again takes the time of both sides as well.
                let pause = pause.max((now - since) / 4);
                self.wait_until = Some(now + pause.min(ENGINE_FULL_PAUSE_MAX));
                Ok(())
            }
            _ => Err(error),
        }
    }

    /// Sets the last event, which is sent when the chunk is closed.
    pub(crate) fn set_last(&mut self, event: Result<ChunkEvent, ApiError>) {
        self.last = Some(event);
    }

    /// Separates the request from its reader, who waits for the last event.
    pub(crate) fn into_parts(self) -> (ActiveRequest, LastEvent) {
        let last = LastEvent {
            permit: self.permit,
            ticket: self.ticket,
            events: self.events,
            unsent: self.unsent,
            last: self.last,
        };
        (self.running, last)
    }
}

/// The end of a chunk for its reader. A chunk that ends without an event only frees its slot.
pub(crate) struct LastEvent {
    permit: AdmissionPermit,
    ticket: Ticket,
    events: mpsc::Sender<Result<ChunkEvent, ApiError>>,
    unsent: Option<ChunkEvent>,
    last: Option<Result<ChunkEvent, ApiError>>,
}

impl LastEvent {
    /// Frees the slot and sends the event: a reader that has seen the end may rely on the slot. The event must arrive
    /// even if the reader lags. In that case a task of its own waits for room in the queue.
    pub(crate) fn send(self) {
        let LastEvent {
            permit,
            ticket,
            events,
            unsent,
            last,
        } = self;
        drop((permit, ticket));
        let Some(last) = last else {
            return;
        };
        let mut left: VecDeque<_> = unsent.map(Ok).into_iter().collect();
        left.push_back(last);
        while let Some(event) = left.pop_front() {
            if let Err(mpsc::error::TrySendError::Full(event)) = events.try_send(event) {
                left.push_front(event);
                break;
            }
        }
        if !left.is_empty() {
            tokio::spawn(async move {
                for event in left {
                    // An error means that the reader has left.
                    let _ = events.send(event).await;
                }
            });
        }
    }
}
