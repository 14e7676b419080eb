//! The events of a request as server-sent events.

use std::pin::Pin;
use std::task::{Context, Poll};
use std::time::Duration;

use bytes::Bytes;
use futures_util::stream::Stream;
use refrain_protocol::ApiError;
use refrain_protocol::openai::ErrorBody;
use refrain_service_kit::deadline::Deadline;
use tokio::time::Instant;

use crate::relay::{RelayEvent, RequestEvents};
use crate::response::writer::{AnswerWriter, write_frame};

/// A comment that keeps proxies from closing an idle stream. Clients skip comments.
const KEEP_ALIVE: &[u8] = b": keep-alive\n\n";

/// The body of a streaming answer. It sends events as soon as they are ready. Dropping it stops the request.
///
/// An error during the stream is an event with a top-level `error`, after which the stream ends without `[DONE]`.
pub(crate) struct EventStreamBody {
    /// The first event, which was received before the head of the response was sent.
    first: Option<RelayEvent>,
    events: RequestEvents,
    writer: AnswerWriter,
    keep_alive: Duration,
    /// Passes when the stream has been idle for that long.
    idle: Deadline,
    ended: bool,
}

impl EventStreamBody {
    pub(crate) fn new(
        first: Option<RelayEvent>,
        events: RequestEvents,
        writer: AnswerWriter,
        keep_alive: Duration,
    ) -> Self {
        EventStreamBody {
            first,
            events,
            writer,
            keep_alive,
            idle: Deadline::after(keep_alive),
            ended: false,
        }
    }

    fn frames(&mut self, event: Option<RelayEvent>) -> Result<Vec<u8>, ApiError> {
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
            let frames = match this.poll_event(context) {
                Poll::Ready(event) => this.frames(event).unwrap_or_else(|error| {
                    this.ended = true;
                    error_frame(&error)
                }),
                Poll::Pending if this.idle.poll_due(context).is_ready() => KEEP_ALIVE.to_vec(),
                Poll::Pending => return Poll::Pending,
            };
            if !frames.is_empty() {
                this.idle.set(Instant::now() + this.keep_alive);
                return Poll::Ready(Some(Ok(Bytes::from(frames))));
            }
        }
        Poll::Ready(None)
    }
}

fn error_frame(error: &ApiError) -> Vec<u8> {
    let mut frames = Vec::new();
    if write_frame(&mut frames, &ErrorBody::from(error)).is_err() {
        frames.clear();
        frames.extend_from_slice(
            b"data: {\"error\":{\"message\":\"internal error\",\"type\":\"server_error\",\"param\":null,\"code\":null}}\n\n",
        );
    }
    frames
}
