//! The ways in which a chunk ends, and what each of them means.

use refrain_protocol::chunk::{ChunkCut, ChunkEnd, ChunkEndReason, ChunkEvent};
use refrain_protocol::document::FinishReason;
use refrain_protocol::error::code;
use refrain_protocol::{ApiError, ErrorKind, WorkerId};
use tokio::sync::oneshot;

use crate::running::ChunkTally;

/// The way in which a chunk ends.
#[derive(Debug)]
pub(crate) enum ChunkEnding {
    /// It ends for this reason, which its reader is told.
    Ended(ChunkEndReason),
    /// Its request goes on at this worker, which is the fallback.
    Transferred(WorkerId),
    /// The engine failed. The output so far remains an unfinished document, for the request's next chunk.
    Failed(ApiError),
    /// The time of the request is up.
    Overdue,
    /// The reader has left.
    ReaderLeft,
    /// The reader stalled for too long. Other requests can use the slot. The reader finds its tokens in the queue,
    /// and continues once it has read them.
    ReaderStalled,
    /// The reader needs no more of the output. The sender reports that the output is shortened.
    Cut(ChunkCut, oneshot::Sender<()>),
    /// A newer lease continues the request.
    TakenOver,
}

impl ChunkEnding {
    /// The reason that the reader is told, unless it is told an error or nothing.
    fn reason(&self) -> Option<ChunkEndReason> {
        match self {
            ChunkEnding::Ended(reason) => Some(*reason),
            ChunkEnding::Transferred(_) => Some(ChunkEndReason::Transfer),
            ChunkEnding::ReaderStalled => Some(ChunkEndReason::GaveWay),
            ChunkEnding::Failed(_)
            | ChunkEnding::Overdue
            | ChunkEnding::ReaderLeft
            | ChunkEnding::Cut(..)
            | ChunkEnding::TakenOver => None,
        }
    }

    /// The outcome of the chunk in metrics.
    pub(super) fn outcome(&self) -> &'static str {
        match self {
            ChunkEnding::Ended(reason) => match reason {
                ChunkEndReason::Stop => "stop",
                ChunkEndReason::Length => "length",
                ChunkEndReason::ChunkLimit => "chunk_limit",
                ChunkEndReason::GaveWay => "gave_way",
                ChunkEndReason::Draining => "evacuated",
                ChunkEndReason::Transfer => "transferred",
                ChunkEndReason::Aborted => "aborted",
            },
            ChunkEnding::Transferred(_) => "transferred",
            ChunkEnding::Failed(_) => "failed",
            ChunkEnding::Overdue => "overdue",
            ChunkEnding::ReaderLeft => "cancelled",
            ChunkEnding::ReaderStalled => "gave_way",
            ChunkEnding::Cut(..) => "cut",
            ChunkEnding::TakenOver => "taken_over",
        }
    }

    /// Whether the request goes on under another lease.
    pub(crate) fn goes_on(&self) -> bool {
        match self.reason() {
            Some(ChunkEndReason::Stop | ChunkEndReason::Length | ChunkEndReason::Aborted) => false,
            Some(_) => true,
            None => matches!(self, ChunkEnding::Failed(_)),
        }
    }

    /// Whether the request is likely to go on here, so that it is parked until then.
    pub(crate) fn parks(&self) -> bool {
        let reason = self.reason();
        matches!(
            reason,
            Some(ChunkEndReason::ChunkLimit | ChunkEndReason::GaveWay)
        )
    }

    /// How the output ends as it is, if nothing goes on with it. The end of an output that stops or is full is
    /// recorded with its last tokens.
    pub(super) fn finish(&self) -> Option<FinishReason> {
        match self {
            ChunkEnding::Ended(ChunkEndReason::Aborted)
            | ChunkEnding::Overdue
            | ChunkEnding::ReaderLeft => Some(FinishReason::Cancelled),
            _ => None,
        }
    }

    /// Whether a cut may follow: the chunk ended properly, and its reader has yet to look at the last tokens.
    pub(super) fn may_be_cut(&self) -> bool {
        self.reason().is_some()
    }

    /// The last event for the reader. A reader that has left or needs no more is told nothing.
    pub(crate) fn last_event(&self, tally: &ChunkTally) -> Option<Result<ChunkEvent, ApiError>> {
        if let Some(reason) = self.reason() {
            let next_worker = match self {
                ChunkEnding::Transferred(worker) => Some(worker.clone()),
                _ => None,
            };
            let end = ChunkEnd {
                next_worker,
                ..tally.end(reason)
            };
            return Some(Ok(ChunkEvent::End(end)));
        }
        let error = match self {
            ChunkEnding::Failed(error) => error.clone(),
            ChunkEnding::Overdue => ApiError::new(ErrorKind::Timeout, "the request timed out")
                .with_code(code::REQUEST_TIMEOUT),
            ChunkEnding::TakenOver => {
                let message = "a newer lease has taken this request over";
                ApiError::new(ErrorKind::Conflict, message)
            }
            _ => return None,
        };
        Some(Err(error))
    }
}

#[cfg(test)]
mod tests {
    use std::time::Instant;

    use refrain_protocol::LeaseId;

    use super::*;

    #[test]
    fn each_ending_has_its_outcome_its_last_event_and_its_effect_on_the_output() {
        let tally = ChunkTally::new(Instant::now(), 0);
        let cut = ChunkCut {
            lease: LeaseId(1),
            output_len: 1,
            aborted: false,
        };
        let error = ApiError::new(ErrorKind::Upstream, "the engine failed");
        let cancelled = Some(FinishReason::Cancelled);
        // The ending, whether its request goes on, the end of the output, and the reason or the error for the reader.
        let told = |reason| Some(Ok(reason));
        let fails = |kind| Some(Err(kind));
        for (ending, goes_on, finish, last) in [
            (
                ChunkEnding::Ended(ChunkEndReason::Stop),
                false,
                None,
                told(ChunkEndReason::Stop),
            ),
            (
                ChunkEnding::Ended(ChunkEndReason::Draining),
                true,
                None,
                told(ChunkEndReason::Draining),
            ),
            (
                ChunkEnding::Ended(ChunkEndReason::Aborted),
                false,
                cancelled,
                told(ChunkEndReason::Aborted),
            ),
            (
                ChunkEnding::Transferred(WorkerId("other".into())),
                true,
                None,
                told(ChunkEndReason::Transfer),
            ),
            (
                ChunkEnding::ReaderStalled,
                true,
                None,
                told(ChunkEndReason::GaveWay),
            ),
            (
                ChunkEnding::Failed(error),
                true,
                None,
                fails(ErrorKind::Upstream),
            ),
            (
                ChunkEnding::Overdue,
                false,
                cancelled,
                fails(ErrorKind::Timeout),
            ),
            (
                ChunkEnding::TakenOver,
                false,
                None,
                fails(ErrorKind::Conflict),
            ),
            (ChunkEnding::ReaderLeft, false, cancelled, None),
            (
                ChunkEnding::Cut(cut, oneshot::channel().0),
                false,
                None,
                None,
            ),
        ] {
            assert_eq!(ending.goes_on(), goes_on, "{ending:?}");
            assert_eq!(ending.finish(), finish, "{ending:?}");
            let event = ending.last_event(&tally);
            let received = event.map(|event| match event {
                Ok(ChunkEvent::End(end)) => Ok(end.reason),
                Ok(other) => panic!("{other:?}"),
                Err(error) => Err(error.kind),
            });
            assert_eq!(received, last, "{ending:?}");
        }
    }
}
