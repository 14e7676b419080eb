//! The events of a request as server-sent events.

use std::pin::Pin;
use std::task::{Context, Poll};
use std::time::Duration;

use bytes::Bytes;
use futures_util::stream::Stream;
use refrain_protocol::ApiError;
use refrain_service_kit::deadline::Deadline;
use refrain_tokenization::STAGE;
use tokio::time::Instant;

use crate::relay::{RelayEvent, RequestEvents};
use crate::response::surface_writer::SurfaceWriter;

/// The body of a streaming answer. It sends events as soon as they are ready. Dropping it stops the request.
///
/// An error during the stream is an event, after which the stream ends.
pub(crate) struct EventStreamBody {
    /// The first event, which was received before the head of the response was sent.
    first: Option<RelayEvent>,
    events: RequestEvents,
    writer: Box<dyn SurfaceWriter>,
    keep_alive: Duration,
    has_begun: bool,
    /// Passes when the stream has been idle for that long.
    idle: Deadline,
    ended: bool,
}

impl EventStreamBody {
    pub(crate) fn new(
        first: Option<RelayEvent>,
        events: RequestEvents,
        writer: Box<dyn SurfaceWriter>,
        keep_alive: Duration,
    ) -> Self {
        EventStreamBody {
            first,
            events,
            writer,
            keep_alive,
            has_begun: false,
            idle: Deadline::after(keep_alive),
            ended: false,
        }
    }

    /// The frames before all others, once.
    fn begin(&mut self) -> Option<Result<Vec<u8>, ApiError>> {
        let begins = !std::mem::replace(&mut self.has_begun, true);
        begins.then(|| self.writer.begin())
    }

    fn frames(&mut self, event: Option<RelayEvent>) -> Result<Vec<u8>, ApiError> {
        let _stage = tracing::trace_span!(target: STAGE, "write").entered();
        match event {
            Some(RelayEvent::Progress { index, progress }) => self.writer.progress(index, progress),
            Some(RelayEvent::Done(summary)) => {
                self.ended = true;
                self.writer.done(&summary)
            }
            Some(RelayEvent::Failed(error)) => Err(error),
            None => Err(ApiError::internal("a request ended without a last event")),
        }
    }

    fn poll_event(&mut self, context: &mut Context<'_>) -> Poll<Option<RelayEvent>> {
        match self.first.take() {
            Some(first) => Poll::Ready(Some(first)),
            None => self.events.poll_next(context),
        }
    }
}

impl Stream for EventStreamBody {
    type Item = Result<Bytes, std::io::Error>;

    fn poll_next(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        let this = self.get_mut();
        while !this.ended {
            let frames = match this.begin() {
                Some(frames) => frames,
                None => match this.poll_event(context) {
                    Poll::Ready(event) => this.frames(event),
                    Poll::Pending if this.idle.poll_due(context).is_ready() => {
                        Ok(this.writer.keep_alive().to_vec())
                    }
                    Poll::Pending => return Poll::Pending,
                },
            };
            let frames = frames.unwrap_or_else(|error| {
                this.ended = true;
                this.writer.failed(&error).unwrap_or_default()
            });
            if !frames.is_empty() {
                this.idle.set(Instant::now() + this.keep_alive);
                return Poll::Ready(Some(Ok(Bytes::from(frames))));
            }
        }
        Poll::Ready(None)
    }
}
