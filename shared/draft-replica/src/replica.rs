//! The replica of a mesh's drafts: an index per namespace and per group of samples, kept up to date from two sides.
//!
//! Requests that run here write their outputs to it as they grow. Everything else comes from the draft store:
//! segments are taken over as they lie (`take_over.rs`), and all news come by one pull (`follower.rs`,
//! `schedule.rs`): those of namespaces (`namespace_feed.rs`), and those of the groups that run here (`group_log.rs`).
//! Another replica of the store may take its place (`moved.rs`).
//!
//! The decode loop reads and appends under a lock that is held for microseconds, by any number of readers at once
//! (`locked_index.rs`). Writers keep to that: updates of the feed are applied in small parts (`ingest.rs`), and
//! indexes are sealed, merged and rebuilt beside the lock (`maintenance.rs`). Only the two ends of such a job, which
//! copy texts and compare them, hold it for milliseconds.
//!
//! Read `draft_replica.rs` first, then `namespace.rs` and `draft_index.rs`.

mod capacity;
mod draft_index;
mod draft_replica;
mod follower;
mod group_log;
mod groups;
mod ingest;
mod locked_index;
mod maintenance;
mod moved;
mod namespace;
mod namespace_feed;
mod registry;
mod schedule;
mod take_over;

pub use draft_index::DraftIndex;
pub use draft_replica::DraftReplica;
pub use groups::{GroupMembership, GroupReplica};
pub use namespace::NamespaceReplica;
