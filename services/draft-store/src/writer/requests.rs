//! Requests that change what is stored.

use refrain_protocol::document::DocumentUpdate;
use refrain_protocol::{Namespace, NamespaceId};
use refrain_speculation::Observed;

use crate::catalog::GroupKey;

/// Updates of one caller.
#[derive(Clone, Debug)]
pub(crate) struct Append {
    pub(crate) namespace: NamespaceId,
    pub(crate) names: Namespace,
    pub(crate) updates: Vec<DocumentUpdate>,
    pub(crate) author: UpdateAuthor,
}

/// Who stores updates.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum UpdateAuthor {
    /// A worker, which does not know what was erased.
    Worker,
    /// An operator, who wants them stored whatever was erased before; with `is_static`, for good: no budget and no age
    /// removes them.
    Operator { is_static: bool },
}

/// A group as it is registered.
#[derive(Clone, Debug)]
pub(crate) struct GroupRegistration {
    pub(crate) group: GroupKey,
    pub(crate) ttl_ms: u64,
    pub(crate) weight_version: u64,
}

/// What a worker tells.
#[derive(Clone, Debug)]
pub(crate) struct StatisticsReport {
    pub(crate) namespace: NamespaceId,
    pub(crate) names: Namespace,
    /// Not empty.
    pub(crate) observed: Observed,
}
