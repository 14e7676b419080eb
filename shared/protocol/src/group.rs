//! Groups of samples in the draft store: their registration.
//!
//! This is `register_group` of the distributed grouped draft server of the Seer paper. Its `update_cst` is
//! [`append`](crate::document::AppendRequest), whose documents name their group, and its `fetch_cst` is the
//! [pull](crate::pull::PullRequest) of the group.
//!
//! These types travel in bincode, so no field may be skipped in serialisation.

use serde::{Deserialize, Serialize};

use crate::SignedNamespace;

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
