//! Documents, the outputs that the draft store keeps, and the feed of their changes.
//!
//! These types travel in bincode, so no field may be skipped in serialisation.

use serde::{Deserialize, Serialize};

use crate::history::PromptHash;
use crate::{DocumentId, SignedNamespace, TokenId};

/// Most prompt tokens that are kept before an output. They are matched, but never drafted.
pub const LEFT_CONTEXT_TOKENS: usize = 16;

/// The properties of a document that are known when it starts.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct DocumentHead {
    /// The client's session.
    pub session: Option<String>,
    /// The group of samples that it belongs to.
    pub group: Option<String>,
    /// Index of the choice in its client request.
    pub choice: u32,
    /// Version of the weights that sampled it.
    pub weight_version: u64,
    /// Time of its start in Unix milliseconds.
    pub created_ms: u64,
    /// The last prompt tokens, at most [`LEFT_CONTEXT_TOKENS`].
    pub left_context: Vec<TokenId>,
    /// The hash of the whole prompt; `None` where the writer did not know it.
    pub prompt_hash: Option<PromptHash>,
}

/// The reason why a document ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum FinishReason {
    /// It ended by a stop id or a stop string. A stop id is kept as the last token.
    Stop,
    /// It reached a length limit.
    Length,
    /// The client went away or aborted the request, so the document is partial.
    Cancelled,
    /// The engine or the worker failed, so the document is partial.
    Failed,
}

/// A piece of a document. Repeats and overlaps are harmless: the store takes only new tokens.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct DocumentUpdate {
    /// The document.
    pub document: DocumentId,
    /// Epoch of the writer, which starts at the fencing epoch of the request. A higher epoch than the last one cuts
    /// the text to `prev_len` before `tokens` are added. A piece of a lower epoch is dropped; see [`FENCED_LEN`].
    pub epoch: u64,
    /// Number of output tokens before this piece.
    pub prev_len: u32,
    /// The output tokens of this piece.
    pub tokens: Vec<TokenId>,
    /// The properties of the document. Every update has them, so that a store which lost the beginning can place the
    /// rest.
    pub head: DocumentHead,
    /// The reason of the end, in the last update.
    pub finish: Option<FinishReason>,
}

/// When an append is answered.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Acknowledgement {
    /// When the updates are on the disk of the store that was called.
    #[default]
    Local,
    /// When the brokers of the feed have them as well, so that other replicas get them even if that store is lost.
    Replicated,
}

/// Stores updates of one namespace.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct AppendRequest {
    /// The namespace, signed by the gateway.
    pub namespace: SignedNamespace,
    /// The updates, in order.
    pub updates: Vec<DocumentUpdate>,
    /// Milliseconds since the oldest token of a group's document in it was emitted; 0 without such tokens. From it
    /// readers of groups know how far they are behind.
    pub waited_ms: u32,
    /// When to answer; `None`: as the store is configured.
    pub acknowledgement: Option<Acknowledgement>,
}

/// The answer to [`AppendRequest`]. The updates are durable now.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct AppendReply {
    /// For each update, the output length that the store has now. If it is less than `prev_len + tokens.len()`, an
    /// earlier piece is missing: send again from there. If it is more, the store has later pieces already.
    /// [`ERASED_LEN`] if the document was erased, and [`FENCED_LEN`] if a newer attempt has written it.
    pub lengths: Vec<u32>,
}

/// The length in an [`AppendReply`] of a document that was erased, or began before its tenant or session was. The
/// store keeps nothing of it, and whoever drafts from it has to forget it. No output is as long, so a sender that
/// does not know this value takes its update as stored, and does not send it again.
pub const ERASED_LEN: u32 = u32::MAX;

/// The length in an [`AppendReply`] of a document that has been written under a higher epoch than the update's, so
/// that tokens of the update were dropped. As with [`ERASED_LEN`], a sender that does not know this value does not
/// send the update again.
pub const FENCED_LEN: u32 = u32::MAX - 1;

/// A position in the stream that the replicas of a shard share.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub struct StreamPosition {
    /// The stream: when it was created, in Unix nanoseconds. 0: none.
    pub stream: u64,
    /// Sequence of a message.
    pub sequence: u64,
}

/// A position in the feed of changes of a namespace.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub struct FeedCursor {
    /// Generation of the feed. It changes when the store is rebuilt, which makes old positions meaningless.
    pub generation: u64,
    /// Number of the last change that was read; 0 before the first.
    pub sequence: u64,
    /// The message of the stream up to which the reader has everything of the namespace. With it another replica
    /// knows where the reader goes on.
    pub seen: StreamPosition,
}

/// A change in a namespace.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum FeedEvent {
    /// A document grew, or a higher epoch shortened it.
    Update(DocumentUpdate),
    /// A document was evicted or erased, so no draft may come from it any more.
    Remove(DocumentId),
}

/// The changes of a namespace or a group after a position.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct FeedDelta {
    /// Whether the generation of the cursor is outdated. If so, drop all data of the scope first.
    pub reset: bool,
    /// The changes, in order.
    pub events: Vec<FeedEvent>,
    /// The position after these changes.
    pub cursor: FeedCursor,
    /// Whether this is the end of the feed for now.
    pub caught_up: bool,
}

impl FeedDelta {
    /// Number of tokens in it.
    pub fn tokens(&self) -> u32 {
        let tokens: usize = self
            .events
            .iter()
            .map(|event| match event {
                FeedEvent::Update(update) => update.tokens.len(),
                FeedEvent::Remove(_) => 0,
            })
            .sum();
        u32::try_from(tokens).unwrap_or(u32::MAX)
    }
}

/// Asks which documents the store does not have.
///
/// A reader that goes on at another replica may have documents of a store that was lost before it could send them. It
/// drops those, since an erasure would not reach it.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct UnknownDocumentsRequest {
    /// The namespace, signed by the gateway.
    pub namespace: SignedNamespace,
    /// The documents.
    pub documents: Vec<DocumentId>,
}

/// The answer to [`UnknownDocumentsRequest`].
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct UnknownDocumentsReply {
    /// The documents that the store does not have.
    pub documents: Vec<DocumentId>,
}

/// Marks documents as used now, because drafts from them were accepted.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct TouchRequest {
    /// The namespace, signed by the gateway.
    pub namespace: SignedNamespace,
    /// The documents. Unknown ones are ignored.
    pub documents: Vec<DocumentId>,
}

/// The size of the store.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct StoreStats {
    /// Number of documents.
    pub documents: u64,
    /// Their output tokens.
    pub tokens: u64,
    /// Their size in bytes, without the overhead of the database.
    pub logical_bytes: u64,
    /// Bytes of the log of unsealed documents on disk.
    pub log_bytes: u64,
    /// Bytes of sealed segments on disk.
    pub segment_bytes: u64,
    /// Bytes of the whole data directory on disk.
    pub disk_bytes: u64,
    /// Number of namespaces with documents.
    pub namespaces: u64,
    /// Documents that were evicted since the start.
    pub evicted_documents: u64,
}

impl std::ops::Add for StoreStats {
    type Output = StoreStats;

    fn add(self, other: StoreStats) -> StoreStats {
        StoreStats {
            documents: self.documents + other.documents,
            tokens: self.tokens + other.tokens,
            logical_bytes: self.logical_bytes + other.logical_bytes,
            log_bytes: self.log_bytes + other.log_bytes,
            segment_bytes: self.segment_bytes + other.segment_bytes,
            disk_bytes: self.disk_bytes + other.disk_bytes,
            namespaces: self.namespaces + other.namespaces,
            evicted_documents: self.evicted_documents + other.evicted_documents,
        }
    }
}
