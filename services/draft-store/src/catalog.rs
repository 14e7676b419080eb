//! The catalog: everything the store knows about its documents in memory, apart from their text.
//!
//! It holds the state of each document, the change feed of each namespace, the order of use, the sums that budgets
//! are compared with, groups, erasures, exports and the list of segments. The text stays on disk, in the log or in
//! memory-mapped segments.
//!
//! Read `state.rs` first: [`Catalog`] and the changes a commit makes to it. `feed.rs` explains how followers see
//! changes without a log of changes. The other files:
//!
//! * `document.rs`: one document, and the feed entries that describe it
//! * `follow.rs`: reads changes in order for followers of a namespace or a group
//! * `recency.rs`: least recently used order and usage per tenant, for eviction
//! * `sealing.rs`: which documents are in a segment, and which could be sealed
//! * `history.rs`: lengths of outputs by prompt
//! * `groups.rs`, `erasures.rs`, `exports.rs` with `export_list.rs`, `acceptance_statistics.rs`: one concern each
//! * `replication.rs` with `outbox.rs`: what a replica has applied of the stream, and what others do not have yet
//! * `tenants.rs`: the tenants that gateways keep here
//! * `load.rs`: reads the catalog back from the log at start
//!
//! A document takes about 410 bytes here, sealed or not. Ten million documents of 500 tokens take 4.1 GB, which is
//! more than one process of this design should hold.

mod acceptance_statistics;
mod document;
mod erasures;
mod export_list;
mod exports;
mod feed;
mod follow;
mod groups;
mod history;
mod load;
mod moves;
mod outbox;
mod recency;
mod replication;
mod sealing;
mod state;
mod tenants;
#[cfg(test)]
mod tests;
mod usage;

pub(crate) use exports::{ExportEnd, ExportLimits, ExportSnapshot, ExportSource, Exports, as_of};
pub(crate) use feed::FeedChange;
pub(crate) use groups::{GroupKey, GroupReader, GroupUpdate};
pub(crate) use load::{LoadedCatalog, load};
pub(crate) use outbox::{EntryVersion, SentText};
pub(crate) use replication::Replication;
pub(crate) use state::Catalog;
pub(crate) use tenants::{TENANT_BYTES_MAX, TenantRefusal, TenantTable};
pub(crate) use usage::UsageState;
