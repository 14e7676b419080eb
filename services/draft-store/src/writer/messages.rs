//! The messages that the writer's actor receives.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use actix::Message;
use refrain_protocol::admin::{ConfirmReply, ConfirmRequest};
use refrain_protocol::{ApiError, NamespaceId};
use tokio::sync::oneshot;

use crate::background::log_rewrite::RewriteReport;
use crate::background::seal::{NewSegment, SealReport};
use crate::log::{LogError, RecordLog};
use crate::record::{DocumentKey, ErasureRecord};
use crate::writer::requests::{Append, KeptStatistics, SavedStatistics, StatisticsUpdate};

/// A message to the writer.
#[derive(Message)]
#[rtype(result = "()")]
pub(crate) enum WriterMessage {
    /// Stores updates, and replies with the lengths once they are durable.
    Append {
        append: Append,
        tokens: PendingTokens,
        reply: oneshot::Sender<Result<Vec<u32>, ApiError>>,
    },
    /// Marks documents as used.
    Touch(Vec<DocumentKey>),
    /// Removes documents whose text is damaged.
    Forget(Vec<DocumentKey>),
    /// Remembers an erasure, and replies once that is durable.
    Mark(
        ErasureRecord,
        oneshot::Sender<Result<ErasureRecord, ApiError>>,
    ),
    /// Removes documents as erased, and replies once that is durable.
    Erase(Vec<DocumentKey>, oneshot::Sender<Result<u64, ApiError>>),
    /// Replies with the acceptance statistics of a namespace.
    ReadStatistics(
        NamespaceId,
        oneshot::Sender<Result<Option<KeptStatistics>, ApiError>>,
    ),
    /// Replaces the acceptance statistics of a namespace, and replies once that is durable.
    SaveStatistics(
        StatisticsUpdate,
        oneshot::Sender<Result<SavedStatistics, ApiError>>,
    ),
    /// Confirms a loss or the wall clock, on behalf of an operator.
    Confirm(
        ConfirmRequest,
        oneshot::Sender<Result<ConfirmReply, ApiError>>,
    ),
    /// A message about rewriting the log.
    Rewrite(RewriteMessage),
    /// A message about segments.
    Seal(SealMessage),
    /// Commits what waits, writes the manifest, and closes the log.
    Close(oneshot::Sender<()>),
}

/// A message about rewriting the log.
pub(crate) enum RewriteMessage {
    /// Rewrite the log. The rewrite begins after this message.
    Rewrite(RewriteWaiter),
    /// Write every commit to this log, too.
    Mirror {
        openings: u64,
        to: Arc<dyn RecordLog>,
        reply: oneshot::Sender<Result<Arc<dyn RecordLog>, LogError>>,
    },
    /// Replace the log with the mirror.
    Swap {
        openings: u64,
        number: u64,
        reply: oneshot::Sender<Result<u64, LogError>>,
    },
    /// The background thread has ended.
    Ended(Result<RewriteReport, LogError>),
}

/// A caller that waits for a rewrite.
pub(crate) type RewriteWaiter = oneshot::Sender<Result<RewriteReport, ApiError>>;

/// A message about segments.
pub(crate) enum SealMessage {
    /// Rewrite all segments with removed documents, and with `seals` seal the documents that have ended. The work
    /// begins after this message.
    Purge { waiter: PurgeWaiter, seals: bool },
    /// Put this segment into use.
    Install {
        openings: u64,
        segment: Box<NewSegment>,
        reply: oneshot::Sender<Result<(), LogError>>,
    },
    /// The background thread has ended.
    Ended(Result<SealReport, LogError>),
}

/// A caller that waits until removed documents are in no segment.
pub(crate) type PurgeWaiter = oneshot::Sender<Result<(), ApiError>>;

/// Tokens that count towards the limit of pending tokens, until this is dropped.
pub(crate) struct PendingTokens {
    count: u64,
    all: Arc<AtomicU64>,
}

impl PendingTokens {
    /// Claims `count` tokens, if at most `max` are pending then.
    pub(crate) fn claim(all: &Arc<AtomicU64>, count: u64, max: u64) -> Option<Self> {
        let mut claimed = PendingTokens {
            count,
            all: all.clone(),
        };
        let before = all.fetch_add(count, Ordering::Relaxed);
        if before + count > max && before > 0 {
            // A single claim is accepted even if it is too large: the limit of the request body bounds it.
            drop(std::mem::replace(
                &mut claimed,
                PendingTokens {
                    count: 0,
                    all: all.clone(),
                },
            ));
            return None;
        }
        Some(claimed)
    }
}

impl Drop for PendingTokens {
    fn drop(&mut self) {
        self.all.fetch_sub(self.count, Ordering::Relaxed);
    }
}
