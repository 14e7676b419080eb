//! Requests that change what is stored.

use refrain_protocol::document::DocumentUpdate;
use refrain_protocol::{Namespace, NamespaceId};

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

/// New acceptance statistics of a namespace.
#[derive(Clone, Debug)]
pub(crate) struct StatisticsUpdate {
    pub(crate) namespace: NamespaceId,
    pub(crate) names: Namespace,
    /// The table that they continue; 0 for none.
    pub(crate) continues: u64,
    /// The number of the table, if there is none yet.
    pub(crate) new_table: u64,
    /// Not empty.
    pub(crate) statistics: Vec<u8>,
}

/// The outcome of a [`StatisticsUpdate`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum SavedStatistics {
    /// They were saved as this table.
    Table(u64),
    /// The table that they continue was erased.
    Erased,
}

/// The statistics that are kept for a namespace.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct KeptStatistics {
    pub(crate) table: u64,
    pub(crate) statistics: Vec<u8>,
}
