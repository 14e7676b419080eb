//! Groups of samples in the draft store: their registration, and the logs that their workers read.
//!
//! These are the calls of the distributed grouped draft server of the Seer paper: `register_group` and `fetch_cst`.
//! Its `update_cst` is [`append`](crate::document::AppendRequest), whose documents name their group.
//!
//! These types travel in bincode, so no field may be skipped in serialisation.

use serde::{Deserialize, Serialize};

use crate::document::{FeedCursor, FollowReply};
use crate::{DocumentId, SignedNamespace};

/// Registers a group of samples, or renews its registration.
///
/// From then on its log has the documents of the group that are appended to. They are documents of the namespace like
/// all others, and stay when the group ends.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct RegisterGroupRequest {
    /// The namespace, signed by the gateway.
    pub namespace: SignedNamespace,
    /// The name of the group, as in [`DocumentHead::group`](crate::document::DocumentHead::group).
    pub group: String,
    /// Milliseconds after the last registration until the log ends.
    pub ttl_ms: u64,
}

/// A position in the log of a group.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct GroupCursor {
    /// The group.
    pub group: String,
    /// The position.
    pub after: FeedCursor,
    /// Documents that the reader itself writes. The answer leaves them out.
    pub own: Vec<DocumentId>,
}

/// Asks for the changes of some groups.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct FetchGroupsRequest {
    /// The namespace, signed by the gateway.
    pub namespace: SignedNamespace,
    /// The groups, each with a position. Those at the beginning are answered first where not all fit.
    pub groups: Vec<GroupCursor>,
    /// Most tokens of the answer, which has at least one change if there is one.
    pub max_tokens: u32,
}

/// The changes of a group.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct GroupLog {
    /// Whether the group is registered. If not, `log` is empty.
    pub is_registered: bool,
    /// The changes, as in the feed of a namespace.
    pub log: FollowReply,
    /// Milliseconds since the oldest of the newest tokens in `log` was emitted, by the clocks of its writer and of
    /// the store, each of which measured its own part. `None`: there are only older tokens, whose time is not known.
    pub age_ms: Option<u32>,
}

/// The answer to [`FetchGroupsRequest`].
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct FetchGroupsReply {
    /// One entry for each group of the request, in that order.
    pub groups: Vec<GroupLog>,
}
