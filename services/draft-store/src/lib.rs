//! The draft store: the durable memory of outputs, and the feed by which workers follow it.
//!
//! Workers append pieces of outputs while they decode; every worker follows the namespaces it serves and
//! builds its index from what it hears. The store itself drafts only for a worker that has no room for a namespace
//! (`lookup.rs`).
//!
//! Start reading at `placement.rs`, where a piece belongs in a document, then `writer.rs`, the core
//! that turns calls into commits, and `catalog.rs` with `catalog/feed.rs`, what is known in memory and in
//! which order it is told. `directory.rs` is how a damaged disk is survived, `directory/rewrite.rs` how disk
//! space comes back while the store serves, `codec.rs` every byte of the log, `segments.rs` where documents go
//! that are at their end. Around them: an actor with a thread of its own (`writer/actor.rs`), the handle for callers in
//! this process ([`DraftStoreHandle`]), and HTTP routes for all others. Operators have calls of their own
//! (`admin.rs`, `refrain_rpc::StoreAdmin`), which name tenants plainly and stand behind the mesh's secret;
//! [`ClosedStore`] is a directory that they look at while nobody runs it.
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
//! What it promises: an answered append survives a crash of the process and a loss of power (one fsync per
//! group of updates). What it costs: some 370 bytes of memory per document, two to three bytes of storage
//! per token. On disk a log takes 2.5 to 5 times what is in it when freshly written, and is written afresh
//! when it has grown to twice that (`rewrite_factor`), or when what it wastes is an eighth of all that the store holds;
//! for a while that needs the room once more; an empty one takes half a megabyte. The journal grows with every update until
//! then: some fourteen bytes per token for outputs that arrive 32 tokens at a time. In segments a token takes nine bytes (of
//! documents of less than thirty tokens more than twelve: `segments/file.rs`): more than in a log freshly written, for an
//! index that needs no building. A segment goes with its last document, and is written afresh when a quarter
//! of it is gone. Only one log or segment is written at a time, so under churn the disk holds at most twice what is alive,
//! at rest, and one segment or log that is being made; a store that is filled faster than it can tidy up refuses for a
//! while (`log_bytes_max`).
//!
//! A group of samples has a log of its own once it is registered: the same updates, read by another cursor
//! (`catalog/groups.rs`). It ends with its time or with newer weights; the documents stay.
//!
//! What is erased is gone from every file before the call is answered: `handle/erase.rs`, and
//! `catalog/erasures.rs` for how it stays gone while workers go on sending it. Logs in quarantine of which
//! everything was salvaged go with any erasure. Those that hold something unreadable stay until they are named,
//! since they may be the only copy of another tenant's documents.
//!
//! An export tells one moment while the store goes on (`catalog/exports.rs`, `export.rs`).
//!
//! A worker that starts takes over segments as they lie, what is in none as documents, and follows the feed from
//! there (`handle/segments.rs`).
//!
//! Not here: replication.

mod background;
mod catalog;
mod clock;
mod codec;
mod config;
mod directory;
mod log;
mod metrics;
mod reading;
mod record;
mod segments;
mod service;
mod shared_store;
#[cfg(test)]
mod test_store;
mod writer;

pub use config::{DraftStoreConfig, StoreTuning, TenantQuota};
pub use service::{ClosedStore, DraftStoreHandle, DraftStoreServer, StoreState, start};
