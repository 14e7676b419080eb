//! What operators ask of the draft store. Tenants are named plainly here: the mesh's secret is what these
//! calls are believed by.

use serde::{Deserialize, Serialize};

/// What a compaction gave back.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct CompactReply {
    /// Bytes of the log before.
    pub before_bytes: u64,
    /// Bytes of the log that took its place.
    pub after_bytes: u64,
}

/// Which documents are to be erased: those to which all that is given applies. Something must be given, and a
/// session needs its tenant, since sessions are named by clients.
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
}
