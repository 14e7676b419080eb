//! What the writer is asked.

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
use crate::writer::requests::{Append, GroupRegistration, StatisticsReport};

/// What is asked of the writer.
#[derive(Message)]
#[rtype(result = "()")]
pub(crate) enum WriterMessage {
    /// Store updates, and answer with the lengths once they are durable.
    Append {
        append: Append,
        tokens: PendingTokens,
        reply: oneshot::Sender<Result<Vec<u32>, ApiError>>,
    },
    /// Mark documents as used.
    Touch(Vec<DocumentKey>),
    /// Remove documents whose text is damaged.
    Forget(Vec<DocumentKey>),
    /// Register a group.
    Register(GroupRegistration, oneshot::Sender<Result<(), ApiError>>),
    /// Remember an erasure, and answer when that is durable.
    Mark(
        ErasureRecord,
        oneshot::Sender<Result<ErasureRecord, ApiError>>,
    ),
    /// Remove documents as erased, and answer when that is durable.
    Erase(Vec<DocumentKey>, oneshot::Sender<Result<u64, ApiError>>),
    /// Say what drafts are worth in a namespace.
    Ask(NamespaceId, oneshot::Sender<Result<Vec<u8>, ApiError>>),
    /// Add to it, and answer with all of it once that is durable.
    Tell(StatisticsReport, oneshot::Sender<Result<Vec<u8>, ApiError>>),
    /// Take an operator's word for something.
    Confirm(
        ConfirmRequest,
        oneshot::Sender<Result<ConfirmReply, ApiError>>,
    ),
    /// About rewriting the log.
    Rewrite(RewriteMessage),
    /// About segments.
    Seal(SealMessage),
    /// Commit what waits, write the manifest, close the log.
    Close(oneshot::Sender<()>),
}

/// What is asked of the writer about rewrites.
pub(crate) enum RewriteMessage {
    /// Rewrite the log, whatever it holds; begin after this call.
    Rewrite(RewriteWaiter),
    /// Write every commit to this log, too.
    Mirror {
        opened: u64,
        to: Arc<dyn RecordLog>,
        reply: oneshot::Sender<Result<Arc<dyn RecordLog>, LogError>>,
    },
    /// Put the mirror in the place of the log.
    Swap {
        opened: u64,
        number: u64,
        reply: oneshot::Sender<Result<u64, LogError>>,
    },
    /// The thread is through.
    Ended(Result<RewriteReport, LogError>),
}

/// Who waits for a rewrite.
pub(crate) type RewriteWaiter = oneshot::Sender<Result<RewriteReport, ApiError>>;

/// What is asked of the writer about segments.
pub(crate) enum SealMessage {
    /// Rewrite all segments with documents that are gone, and with `seals` seal what is at rest; begin after this
    /// call.
    Purge { waiter: PurgeWaiter, seals: bool },
    /// Name this one.
    Install {
        opened: u64,
        product: Box<NewSegment>,
        reply: oneshot::Sender<Result<(), LogError>>,
    },
    /// The thread is through.
    Ended(Result<SealReport, LogError>),
}

/// Who waits until what was removed is in no segment.
pub(crate) type PurgeWaiter = oneshot::Sender<Result<(), ApiError>>;

/// Tokens that count against the limit of waiting ones until this is dropped.
pub(crate) struct PendingTokens {
    count: u64,
    all: Arc<AtomicU64>,
}

impl PendingTokens {
    /// Claims room for `count` tokens among at most `max`.
    pub(crate) fn claim(all: &Arc<AtomicU64>, count: u64, max: u64) -> Option<Self> {
        let mut claimed = PendingTokens {
            count,
            all: all.clone(),
        };
        let before = all.fetch_add(count, Ordering::Relaxed);
        if before + count > max && before > 0 {
            // Alone, even an oversized claim is let through: the body limit bounds it.
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
