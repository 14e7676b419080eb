//! Calls of operators to the draft store. They name tenants in plain text: the mesh secret authorises them.

use serde::{Deserialize, Serialize};

use crate::document::DocumentUpdate;
use crate::{Namespace, NamespaceId};

/// The result of a compaction.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct CompactReply {
    /// Bytes of the log and of segments before.
    pub before_bytes: u64,
    /// Bytes of the log and of segments after.
    pub after_bytes: u64,
}

/// Erases the documents to which all given conditions apply. At least one condition must be given. A session needs
/// its tenant, because clients choose the names of sessions.
///
/// The acceptance statistics of every namespace that may be concerned are erased as well. They are counts, so nobody
/// can tell which session or hour they came from. A request that names a tenant leaves those of other tenants alone,
/// one without a tenant erases all. They are learnt again within minutes.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct EraseRequest {
    /// The tenant.
    pub tenant: Option<String>,
    /// The model.
    pub model: Option<String>,
    /// The client's session.
    pub session: Option<String>,
    /// Start at this time or later, in Unix milliseconds by the store's clock.
    pub from_ms: Option<u64>,
    /// Start before this time.
    pub until_ms: Option<u64>,
    /// Whether to delete all quarantined logs and segments as well, even those that cannot be read. Otherwise these
    /// stay, and [`EraseReply::quarantines_kept`] counts them.
    pub quarantines: bool,
}

impl EraseRequest {
    /// Whether it names a tenant, and all documents of it.
    pub fn is_of_whole_tenant(&self) -> bool {
        let Self {
            tenant,
            model,
            session,
            from_ms,
            until_ms,
            quarantines: _,
        } = self;
        let has_condition = model.is_some() || session.is_some() || from_ms.or(*until_ms).is_some();
        tenant.is_some() && !has_condition
    }
}

/// The answer to [`EraseRequest`]. Nothing of the documents is on disk any more.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct EraseReply {
    /// The time of the erasure. Documents that started before are gone; documents that start later stay.
    pub erased_at_ms: u64,
    /// Documents that this call erased.
    pub documents: u64,
    /// The files of the asked store that had text of removed documents, and were rewritten or deleted: paths in its
    /// `data_dir`, at most [`ERASED_FILES_LISTED_MAX`].
    #[serde(default)]
    pub files: Vec<String>,
    /// Quarantined logs that were deleted.
    pub quarantines: u64,
    /// Quarantined logs and segments that could not be read completely, and may contain documents to be erased.
    #[serde(default)]
    pub quarantines_kept: u64,
    /// The other replicas of the shard: those that the configuration names, and those that this one has heard of
    /// lately. One that has not erased yet does so as soon as the erasure reaches it by the stream. A replica that is
    /// started meanwhile does not serve before that.
    #[serde(default)]
    pub replicas: Vec<ErasedReplica>,
}

/// The state of an erasure on another replica.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct ErasedReplica {
    /// Its URL.
    pub url: String,
    /// Nothing of the documents is on its disk any more.
    pub is_done: bool,
    /// The last message of the stream up to which it has applied everything, and carried out all erasures.
    pub sequence: Option<u64>,
    /// The reason why it is not done.
    pub trouble: Option<String>,
}

/// Confirmations of an operator, without which the store does not serve.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct ConfirmRequest {
    /// The store started with far fewer documents than it had, and should serve without them.
    pub loss: bool,
    /// The system clock is right although it jumped, and documents should age by it.
    pub clock: bool,
}

/// The answer to [`ConfirmRequest`]. A field is `None` if there was nothing to confirm.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct ConfirmReply {
    /// Number of missing documents.
    pub lost_documents: Option<u64>,
    /// Milliseconds by which the system clock was ahead of the store's time.
    pub clock_offset_ms: Option<i64>,
}

/// Stores documents of one namespace, which the operator names without a signature.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ImportRequest {
    /// The namespace.
    pub namespace: Namespace,
    /// The updates, as a worker would send them. Repeats are harmless.
    pub updates: Vec<DocumentUpdate>,
    /// Whether the documents stay for good: only an erasure removes them, no budget and no age.
    pub is_static: bool,
}

/// A position in an export: after the document of `namespace` whose last change was `sequence`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct ExportCursor {
    /// Number of the export, given by the store; 0 begins one.
    pub snapshot: u64,
    /// The namespace. Namespaces come in the order of their ids.
    pub namespace: NamespaceId,
    /// Number of the last change; 0 before the first document.
    pub sequence: u64,
}

/// Asks for the documents of a tenant.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ExportRequest {
    /// The tenant.
    pub tenant: String,
    /// The model; `None`: all models.
    pub model: Option<String>,
    /// The position after which documents are asked for.
    pub after: ExportCursor,
    /// Most tokens of the answer, which has at least one document.
    pub max_tokens: u32,
}

/// A whole document.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ExportedDocument {
    /// Its namespace.
    pub namespace: Namespace,
    /// Its content, in one piece.
    pub update: DocumentUpdate,
}

/// A page of an export: documents in the state in which they were when the export began. If documents of its
/// namespaces are erased meanwhile, the next page is refused, and the export has to begin anew.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct ExportReply {
    /// The documents by namespace, and there by their last change.
    pub documents: Vec<ExportedDocument>,
    /// The position of the next page; `None` at the end.
    pub next: Option<ExportCursor>,
}

/// A record or document that cannot be read.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Damage {
    /// The record or document.
    pub what: String,
    /// Its fault.
    pub why: String,
}

/// The result of a verification.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct VerifyReply {
    /// Records whose checksum and content were checked.
    pub records: u64,
    /// Documents that were read completely.
    pub documents: u64,
    /// Their tokens.
    pub tokens: u64,
    /// Number of damaged records and documents.
    pub damaged: u64,
    /// Quarantined logs and segments that could not be read completely.
    #[serde(default)]
    pub quarantines: u64,
    /// The first damaged records and documents, at most [`DAMAGE_LISTED_MAX`].
    pub damage: Vec<Damage>,
    /// The content of each namespace, in order of the namespaces. Replicas with everything applied have the same.
    #[serde(default)]
    pub namespaces: Vec<NamespaceSum>,
    /// The last message of the feed's stream that was applied when the check began; `None` without a feed.
    #[serde(default)]
    pub feed_sequence: Option<u64>,
}

/// The documents of a namespace in numbers, for comparisons between replicas.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct NamespaceSum {
    /// The namespace.
    pub namespace: NamespaceId,
    /// Number of documents that can be read.
    pub documents: u64,
    /// Their tokens.
    pub tokens: u64,
    /// A checksum of all their texts and properties, in hex digits. It does not depend on any order.
    pub checksum: String,
}

/// Most entries of [`EraseReply::files`].
pub const ERASED_FILES_LISTED_MAX: usize = 1_000;

/// Most entries of [`VerifyReply::damage`].
pub const DAMAGE_LISTED_MAX: usize = 1_000;
