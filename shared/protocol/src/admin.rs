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
