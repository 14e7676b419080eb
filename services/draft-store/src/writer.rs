//! The single writer: it turns appends, removals and the passage of time into durable commits.
//!
//! A commit runs in three layers:
//!
//! 1. `actor.rs` receives calls, gathers appends for one commit, supplies the clock, and reopens the store after
//!    an error or a panic. It also starts the background jobs and installs their results.
//! 2. `core.rs` is the writer without clock, threads or actor. It decides what one commit does: appends, evictions,
//!    expiry, erasures.
//! 3. `edit.rs` is one commit in the making. It changes the catalog and gathers the log writes that make the change
//!    durable.
//!
//! The catalog stays locked until the commit is durable. After an error the catalog and the core are both discarded
//! and read again from disk, so nobody ever sees a change that a crash could undo.
//!
//! Read `core.rs` first, then `placement.rs`, the rule that decides where an update belongs in a document.
//! `replication.rs` is the core of a replica, and `join.rs` its rule for documents of other replicas.
//! `sealer.rs` and `rewriter.rs` decide which background job is next, and `remains.rs` tells whether the log's files
//! may hold what was removed. `requests.rs` and `outcome.rs` are a commit's input and output, and `handle.rs` is how
//! others reach the actor.

pub(crate) mod actor;
pub(crate) mod core;
mod edit;
mod errors;
mod join;
pub(crate) mod outcome;
mod placement;
mod remains;
pub(crate) mod replication;
pub(crate) mod requests;
mod rewriter;
mod sealer;
#[cfg(test)]
mod tests;
mod usage;

pub(crate) use edit::usage::usage_start;
