//! The interface of all writers of answers, whatever their API.

use async_trait::async_trait;
use refrain_protocol::ApiError;
use refrain_protocol::openai::ErrorBody;
use serde::Serialize;

use crate::relay::{ChoiceProgress, RelayEvent, RequestEvents, RequestSummary};

/// A comment that keeps proxies from closing an idle stream. Clients skip comments.
const KEEP_ALIVE: &[u8] = b": keep-alive\n\n";

/// Writes the answer to one request, either whole or as the frames of a stream.
///
/// Errors mean that a value cannot be written as JSON, which would be a fault of this service, unless a method says
/// otherwise.
#[async_trait]
pub trait SurfaceWriter: Send {
    /// Writes the frames before all others.
    fn begin(&mut self) -> Result<Vec<u8>, ApiError> {
        Ok(Vec::new())
    }

    /// Writes the frames for the new output of a choice.
    fn progress(&mut self, index: u32, progress: ChoiceProgress) -> Result<Vec<u8>, ApiError>;

    /// Writes the frames at the end.
    fn done(&mut self, summary: &RequestSummary) -> Result<Vec<u8>, ApiError>;

    /// Writes the last frames of a stream that fails: an event with a top-level `error`, as OpenAI's APIs have it. No
    /// `[DONE]` follows.
    fn failed(&mut self, error: &ApiError) -> Result<Vec<u8>, ApiError> {
        let mut frames = Vec::new();
        write_frame(&mut frames, &ErrorBody::from(error))?;
        Ok(frames)
    }

    /// A frame that keeps an idle stream open.
    fn keep_alive(&self) -> &'static [u8] {
        KEEP_ALIVE
    }

    /// Collects all events and writes the whole answer as JSON. It fails as the request does.
    async fn collect(self: Box<Self>, events: &mut RequestEvents) -> Result<Vec<u8>, ApiError>;
}

/// Reads the events of a request to its end, and passes on the progress of its choices. Returns its summary.
///
/// # Errors
/// The error of the request.
pub async fn read_to_end(
    events: &mut RequestEvents,
    mut take: impl FnMut(u32, ChoiceProgress) + Send,
) -> Result<Box<RequestSummary>, ApiError> {
    loop {
        match events.next().await {
            None => return Err(ApiError::internal("a request ended without a last event")),
            Some(RelayEvent::Failed(error)) => return Err(error),
            Some(RelayEvent::Done(summary)) => return Ok(summary),
            Some(RelayEvent::Progress { index, progress }) => take(index, progress),
        }
    }
}

/// Writes one event of a stream.
///
/// # Errors
/// The value cannot be written as JSON.
pub fn write_frame<T: Serialize>(frames: &mut Vec<u8>, value: &T) -> Result<(), ApiError> {
    frames.extend_from_slice(b"data: ");
    serde_json::to_writer(&mut *frames, value).map_err(ApiError::internal)?;
    frames.extend_from_slice(b"\n\n");
    Ok(())
}

/// Writes an event of a stream with its name.
pub(crate) fn write_named_frame<T: Serialize>(
    frames: &mut Vec<u8>,
    name: &str,
    value: &T,
) -> Result<(), ApiError> {
    frames.extend_from_slice(b"event: ");
    frames.extend_from_slice(name.as_bytes());
    frames.extend_from_slice(b"\ndata: ");
    serde_json::to_writer(&mut *frames, value).map_err(ApiError::internal)?;
    frames.extend_from_slice(b"\n\n");
    Ok(())
}
