//! The draft store: the durable memory of outputs, and the feed by which workers follow it.
//!
//! Workers append pieces of outputs while they decode. Every worker follows the namespaces it serves and builds its
//! index from what the store sends.
//!
//! # What a commit does
//!
//! 1. `handle/calls.rs` checks a call, and `append.rs` beside it sends the updates to the writer's actor.
//! 2. `writer/actor/commit_queue.rs` gathers appends for a few milliseconds.
//! 3. `writer/core.rs` applies them to a `writer/edit.rs`, which changes the catalog and gathers log writes.
//!    `writer/placement.rs` decides where each update belongs in its document.
//! 4. `log/journaled.rs` writes the batch to the journal and waits for `fdatasync`. Then it keeps text in memory, and
//!    small records in sled.
//! 5. The actor answers the callers and wakes the followers. `reading/feed.rs` reads what changed.
//!
//! Later, `background/seal.rs` moves documents that have ended from the log to an immutable segment file.
//! `log/journaled/rewrite.rs` copies what is alive in the log into fresh files when it has outgrown its content.
//!
//! # What a start does
//!
//! 1. `service/server.rs` starts the writer's actor on a thread of its own. `writer/actor.rs` locks the directory.
//! 2. `directory/open.rs` reads the manifest and opens the log that it names. A damaged catalogue is built again
//!    from the journal; a damaged journal moves to quarantine.
//! 3. `segments/discovery.rs` maps and checks the segments that the log names.
//! 4. `catalog/load.rs` reads the catalog back from the log and the segments.
//! 5. `service/server.rs` starts the listener.
//!
//! # What to read first
//!
//! `writer/placement.rs`, then `writer/core.rs`, then `catalog.rs` with `catalog/feed.rs`. `record.rs` and `codec.rs`
//! define every byte of the log, `segments.rs` the sealed documents, `directory.rs` recovery from a damaged disk.
//! Operators have calls of their own (`refrain_rpc::StoreAdmin`), which name tenants in plain text and require the
//! mesh secret. [`ClosedStore`] opens a directory that no process uses.
//!
//! ```no_run
//! # async fn example(mesh: refrain_service_kit::mesh::MeshAuth) -> anyhow::Result<()> {
//! use refrain_rpc::DraftStore as _;
//! let metrics = refrain_service_kit::telemetry::Metrics::new()?;
//! let config = refrain_draft_store::DraftStoreConfig::default();
//! let store = refrain_draft_store::start(config, mesh, &metrics).await?;
//! println!("{:?}", store.handle().stats().await?);
//! store.drain(std::time::Duration::from_secs(5)).await;
//! # Ok(())
//! # }
//! ```
//!
//! # Promises
//!
//! * An answered append survives a crash of the process and a loss of power. One `fdatasync` serves a group of
//!   updates.
//! * Everything erased is gone from every file before the call is answered (`handle/erase.rs`).
//!   `catalog/erasures.rs` keeps it gone while workers go on sending it. An erasure also deletes quarantined logs
//!   that were salvaged in full. Others stay until an operator names them, since they may be the only copy of another
//!   tenant's documents.
//! * An export shows one moment while the store goes on (`catalog/exports.rs`, `reading/export.rs`).
//! * A worker that starts takes over segments as they are and the other documents one by one. It follows the feed
//!   from there (`reading/segments.rs`).
//! * A registered group of samples has a log of its own: the same updates, read by another cursor
//!   (`catalog/groups.rs`). The group ends with its time to live; documents of older weights leave it, and stay in
//!   their namespace.
//! * The lengths of complete outputs are known by the hashes of their prompts (`catalog/history.rs`).
//!
//! # Costs
//!
//! A document takes about 410 bytes of memory, of which about 38 are for the lengths of outputs by prompt. A token
//! takes two to three bytes of records in the log. A freshly written log takes 2.5 to 5 times its records on disk; an
//! empty one takes half a megabyte. The journal grows with every update, by some fourteen bytes per token for outputs
//! that arrive 32 tokens at a time.
//!
//! The log is rewritten when it has grown to twice its fresh size, or when it wastes an eighth of all that the store
//! holds. A rewrite needs the fresh size once more on disk.
//!
//! In a segment a token takes nine bytes, and more than twelve in documents of less than 33 tokens
//! (`segments/file.rs`). That is more than in a fresh log, but the index needs no building. A segment goes with its
//! last document, and is rewritten when a quarter of it is gone.
//!
//! Only one log or segment is written at a time. Under churn the disk therefore holds at most twice the live data at
//! rest, plus one segment or log in the making. A store that is filled faster than it can tidy up refuses appends for
//! a while (`log_bytes_max`).
//!
//! With `[draft_store.feed]` the store is one of several replicas, which a stream of NATS JetStream keeps equal
//! (`replication.rs`, docs/replication.md).

mod background;
mod catalog;
mod clock;
mod codec;
mod config;
mod directory;
mod handle;
mod log;
mod message;
mod metrics;
mod reading;
mod record;
mod replicas;
mod replication;
mod segments;
mod service;
mod shared_store;
#[cfg(test)]
mod tests;
mod writer;

pub use config::{DraftStoreConfig, FeedConfig, StoreTuning, TenantQuota};
pub use directory::lock::is_in_use;
pub use handle::{DraftStoreHandle, StoreState};
pub use replicas::status::FeedState;
pub use service::{ClosedStore, DraftStoreServer, start};
