//! How the services call each other: one trait per service, and its HTTP client.
//!
//! A service implements its trait on its own handle. In one process the caller holds that handle; between processes
//! it holds the HTTP client. It cannot tell which. Every HTTP call carries the mesh secret, and every namespace is
//! signed by the gateway (see `refrain_service_kit::mesh`).
//!
//! Read first: `worker.rs` (a stream of events) and `scheduler.rs` (a call that waits).

mod adopter;
mod codec;
mod draft_store;
mod engine_address;
mod engine_forgetting;
mod mesh_admin;
mod record_frames;
mod replica_peer;
mod scheduler;
mod store_admin;
mod store_cluster;
mod tenant_erasure;
#[cfg(any(test, feature = "testing"))]
pub mod testing;
mod usage_report;
mod usage_store;
mod worker;

pub use adopter::{EngineAdopter, HttpEngineAdopter};
pub use codec::{BINCODE_CONTENT_TYPE, decode_bincode, encode_bincode};
pub use draft_store::{DraftStore, HttpDraftStore};
pub use engine_address::EngineAddress;
pub use engine_forgetting::{EngineForgotten, Engines, EnginesForgotten};
pub use mesh_admin::{MeshAdmin, MeshPart, MetricsPages};
pub use record_frames::{append_record, read_records};
pub use replica_peer::{HttpReplicaPeer, ReplicaPeer};
pub use scheduler::{
    HEARTBEAT_RETRY_PAUSE, HEARTBEAT_TIMEOUT, HttpScheduler, LEASE_ALIVE_EVERY, LeaseAnswer,
    Scheduler,
};
pub use store_admin::{HttpStoreAdmin, StoreAdmin};
pub use store_cluster::{StoreCluster, draft_store};
pub use tenant_erasure::{Erasure, OtherPlaces, UsageErased, erase_usage};
pub use usage_report::{UsageGrouping, UsageLine, UsageQuery, UsageReport, read_usage};
pub use usage_store::{HttpUsageStore, UsageReplica, UsageStore};
pub use worker::{ChunkStream, HttpWorker, HttpWorkers, Worker, Workers};
