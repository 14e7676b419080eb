//! A chunk in the batch.

use std::time::{Duration, Instant};

use refrain_protocol::{ApiError, ErrorKind};

use crate::chunk::ActiveChunk;
use crate::running::StepRecord;

/// Pause after the engine refused for lack of room without a hint how long.
pub(super) const ENGINE_FULL_PAUSE: Duration = Duration::from_millis(20);
/// Longest pause after such a refusal, whatever the engine suggests.
pub(super) const ENGINE_FULL_PAUSE_MAX: Duration = Duration::from_secs(1);
/// How long the engine may refuse a request for lack of room before the request fails.
const ENGINE_FULL_TIMEOUT: Duration = Duration::from_secs(20);

/// A chunk in the batch.
pub(crate) struct Member {
    pub(super) chunk: ActiveChunk,
    /// The result of the last step, until the decode loop has learnt from it and recorded it.
    pub(super) unsettled: Option<StepRecord>,
    pub(super) room: EngineRoom,
}

impl Member {
    pub(super) fn new(chunk: ActiveChunk) -> Self {
        Member {
            chunk,
            unsettled: None,
            room: EngineRoom::default(),
        }
    }

    /// Handles the engine's error for this request in a step: the request opens a new session, pauses, or fails.
    ///
    /// # Errors
    /// The error is final.
    pub(super) fn postpone(&mut self, error: ApiError, now: Instant) -> Result<(), ApiError> {
        match error.kind {
            ErrorKind::NotFound => self.chunk.running.reopen(),
            ErrorKind::Overloaded => self.room.refused(error, now),
            _ => Err(error),
        }
    }
}

/// The room that the engine has for a request, as far as it was refused for lack of room.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct EngineRoom {
    /// The time of the first refusal in a row.
    refused_since: Option<Instant>,
    /// The time until which the request pauses.
    paused_until: Option<Instant>,
}

impl EngineRoom {
    /// The time until which the request pauses, if it does.
    pub(super) fn paused_until(&self, now: Instant) -> Option<Instant> {
        self.paused_until.filter(|until| *until > now)
    }

    /// Notes a refusal: the request pauses.
    ///
    /// # Errors
    /// The engine refused it for too long.
    fn refused(&mut self, error: ApiError, now: Instant) -> Result<(), ApiError> {
        let refused_for = now - *self.refused_since.get_or_insert(now);
        if refused_for > ENGINE_FULL_TIMEOUT {
            return Err(error);
        }
        let hint = error.retry_after_ms.map(Duration::from_millis);
        // A wait that is long already goes on. To ask again takes the time of both sides as well.
        let pause = hint.unwrap_or(ENGINE_FULL_PAUSE).max(refused_for / 4);
        self.paused_until = Some(now + pause.min(ENGINE_FULL_PAUSE_MAX));
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pauses_grow_with_the_wait_until_the_request_fails() {
        let start = Instant::now();
        let mut room = EngineRoom::default();
        let full = || ApiError::new(ErrorKind::Overloaded, "no room");
        let mut pause = |after_ms, error| {
            let now = start + Duration::from_millis(after_ms);
            room.refused(error, now)
                .map(|()| room.paused_until(now).map(|until| until - now))
        };
        assert_eq!(pause(0, full()), Ok(Some(ENGINE_FULL_PAUSE)));
        let hint = full().with_retry_after_ms(70);
        assert_eq!(pause(20, hint), Ok(Some(Duration::from_millis(70))));
        assert_eq!(pause(400, full()), Ok(Some(Duration::from_millis(100))));
        let hint = full().with_retry_after_ms(60_000);
        assert_eq!(pause(500, hint), Ok(Some(ENGINE_FULL_PAUSE_MAX)));
        assert_eq!(pause(20_000, full()), Ok(Some(ENGINE_FULL_PAUSE_MAX)));
        assert_eq!(pause(20_001, full()), Err(full()));
        assert_eq!(room.paused_until(start + Duration::from_secs(60)), None);
    }
}
