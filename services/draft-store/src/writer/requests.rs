//! Requests that change what is stored.

use refrain_protocol::document::DocumentUpdate;
use refrain_protocol::{Namespace, NamespaceId};
use refrain_speculation::Observed;

/// Updates of one caller, for one namespace.
#[derive(Clone, Debug)]
pub(crate) struct Append {
    pub(crate) namespace: NamespaceId,
    pub(crate) names: Namespace,
    pub(crate) updates: Vec<DocumentUpdate>,
    pub(crate) author: UpdateAuthor,
}

/// The author of updates.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum UpdateAuthor {
    /// A worker. It does not know what was erased, so erasures are checked.
    Worker,
    /// An operator, who wants them stored regardless of erasures. With `is_static`, no budget and no age ever evicts
    /// them.
    Operator { is_static: bool },
}

/// Observations of a worker, to be added to the acceptance statistics of a namespace.
#[derive(Clone, Debug)]
pub(crate) struct StatisticsReport {
    pub(crate) namespace: NamespaceId,
    pub(crate) names: Namespace,
    /// Not empty.
    pub(crate) observed: Observed,
}
