//! What operators ask of the draft store. Tenants are named plainly here: the mesh's secret is what these
//! calls are believed by.

use serde::{Deserialize, Serialize};

use crate::document::DocumentUpdate;
use crate::{Namespace, NamespaceId};

/// What a compaction gave back.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct CompactReply {
    /// Bytes of the log and of segments before.
    pub before_bytes: u64,
    /// Bytes of what took their place.
    pub after_bytes: u64,
}

/// Which documents are to be erased: those to which all that is given applies. Something must be given, and a
/// session needs its tenant, since sessions are named by clients.
///
/// What drafts were worth is forgotten as well, of every namespace that may be hit and as a whole: those are counts, of which
/// nobody can tell from which session or hour they came. One that names a tenant leaves those of others alone, one that
/// names none takes everybody's. They are learnt again within minutes.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct EraseRequest {
    /// All namespaces of this tenant.
    pub tenant: Option<String>,
    /// Of these, those of this model.
    pub model: Option<String>,
    /// The client's session.
    pub session: Option<String>,
    /// Begun at this time or later, Unix milliseconds by the store's clock.
    pub from_ms: Option<u64>,
    /// Begun before this time.
    pub until_ms: Option<u64>,
    /// Delete every quarantined log and segment as well, also those that hold something unreadable. Without this
    /// they stay, and [`EraseReply::quarantines_kept`] counts them.
    pub quarantines: bool,
}

/// Answered when nothing of it is on disk any more.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct EraseReply {
    /// The instant: what was begun before is gone, what is begun after stays.
    pub erased_at_ms: u64,
    /// Documents that were erased by this call.
    pub documents: u64,
    /// Quarantined logs that were deleted.
    pub quarantines: u64,
    /// Quarantined logs and segments that could not be read as a whole, and may hold some of what was to be erased.
    #[serde(default)]
    pub quarantines_kept: u64,
}

/// What an operator takes responsibility for.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct ConfirmRequest {
    /// The store came up with far fewer documents than it had, and is to serve without them.
    pub loss: bool,
    /// The wall clock is right although it jumped, and documents are to age by it.
    pub clock: bool,
}

/// What was confirmed; `None` where there was nothing to confirm.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct ConfirmReply {
    /// Documents that were missing.
    pub lost_documents: Option<u64>,
    /// Milliseconds that the wall clock was ahead of the store's time.
    pub clock_offset_ms: Option<i64>,
}

/// Documents of one namespace to be stored. Not signed: an operator names it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ImportRequest {
    /// Whose they are.
    pub namespace: Namespace,
    /// As a worker would send them; repeats are harmless.
    pub updates: Vec<DocumentUpdate>,
    /// For good: no budget and no age removes them, only an erasure.
    pub is_static: bool,
}

/// A place in an export: after the document of `namespace` whose last change was `sequence`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct ExportCursor {
    /// Which export, as the store numbers them; 0 begins one.
    pub snapshot: u64,
    /// Namespaces are told in order of their ids.
    pub namespace: NamespaceId,
    /// 0 before the first document.
    pub sequence: u64,
}

/// Asks for the documents of a tenant.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ExportRequest {
    /// Whose.
    pub tenant: String,
    /// Of one model only.
    pub model: Option<String>,
    /// Those after this.
    pub after: ExportCursor,
    /// Most tokens to send (at least one document is sent).
    pub max_tokens: u32,
}

/// One whole document.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ExportedDocument {
    /// Whose it is.
    pub namespace: Namespace,
    /// All of it, in one piece.
    pub update: DocumentUpdate,
}

/// A page of an export: documents as they were when it began, all that were there and nothing newer. Once something of
/// its namespaces is erased, the next page is refused: then the export is to be begun again.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct ExportReply {
    /// In order of their last change, namespace by namespace.
    pub documents: Vec<ExportedDocument>,
    /// Where to go on; `None` at the end.
    pub next: Option<ExportCursor>,
}

/// Something that is stored and cannot be read.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Damage {
    /// The record or document.
    pub what: String,
    /// What is wrong with it.
    pub why: String,
}

/// What was read, and what could not be.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct VerifyReply {
    /// Records whose checksum and content were looked at.
    pub records: u64,
    /// Documents that were read whole.
    pub documents: u64,
    /// Their tokens.
    pub tokens: u64,
    /// Damaged records and documents.
    pub damaged: u64,
    /// Quarantined logs and segments that could not be read as a whole.
    #[serde(default)]
    pub quarantines: u64,
    /// The first of them, at most [`DAMAGE_LISTED_MAX`].
    pub damage: Vec<Damage>,
}

/// Most entries of [`VerifyReply::damage`].
pub const DAMAGE_LISTED_MAX: usize = 1_000;
