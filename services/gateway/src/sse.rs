//! A request's events as server-sent events.

use std::time::Duration;

use bytes::Bytes;
use futures_util::stream::{Stream, unfold};
use refrain_protocol::ApiError;
use refrain_protocol::openai::ErrorBody;
use tokio::sync::mpsc;

use crate::answer::{AnswerWriter, write_frame};
use crate::relay::RelayEvent;

/// Keeps proxies from closing an idle stream; clients skip comments.
const KEEP_ALIVE: &[u8] = b": keep-alive\n\n";

struct State {
    /// Already received: the first event, which decided that there is a stream.
    first: Option<RelayEvent>,
    events: mpsc::Receiver<RelayEvent>,
    writer: AnswerWriter,
    keep_alive: Duration,
    ended: bool,
}

/// The body of a streaming answer. Nothing is buffered: what is ready is sent. Dropping it stops the
/// request.
///
/// An error in mid-stream is an event with a top-level `error`, and then the stream ends without `[DONE]`.
pub(crate) fn body(
    first: Option<RelayEvent>,
    events: mpsc::Receiver<RelayEvent>,
    writer: AnswerWriter,
    keep_alive: Duration,
) -> impl Stream<Item = Result<Bytes, std::io::Error>> + 'static {
    let state = State {
        first,
        events,
        writer,
        keep_alive,
        ended: false,
    };
    unfold(state, |mut state| async move {
        if state.ended {
            return None;
        }
        loop {
            let event = match state.first.take() {
                Some(first) => Some(first),
                None => match tokio::time::timeout(state.keep_alive, state.events.recv()).await {
                    Ok(event) => event,
                    Err(_) => return Some((Ok(Bytes::from_static(KEEP_ALIVE)), state)),
                },
            };
            let frames = state.frames(event).unwrap_or_else(|error| {
                state.ended = true;
                error_frame(&error)
            });
            if !frames.is_empty() {
                return Some((Ok(Bytes::from(frames)), state));
            }
        }
    })
}

impl State {
    fn frames(&mut self, event: Option<RelayEvent>) -> Result<Vec<u8>, ApiError> {
        match event {
            Some(RelayEvent::Progress { index, progress }) => {
                self.writer.progress(index, &progress)
            }
            Some(RelayEvent::Done(summary)) => {
                self.ended = true;
                self.writer.done(&summary)
            }
            Some(RelayEvent::Failed(error)) => Err(error),
            None => Err(ApiError::internal("the request's task died")),
        }
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
