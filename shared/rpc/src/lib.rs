//! How the services reach each other: one trait per service, and its HTTP form.
//!
//! A service implements its trait on its own handle, so that in one process the caller holds the handle
//! itself and between processes the HTTP client; callers cannot tell which. Every call carries the mesh
//! secret; every namespace is signed by the gateway (see `refrain_service_kit::mesh`).

mod codec;
mod draft_store;
mod scheduler;
mod store_admin;
mod worker;

pub use codec::{BINCODE_CONTENT_TYPE, decode_bincode, encode_bincode};
pub use draft_store::{DraftStore, HttpDraftStore};
pub use scheduler::{HttpScheduler, LEASE_ALIVE_EVERY, LeaseAnswer, Scheduler};
pub use store_admin::{HttpStoreAdmin, StoreAdmin};
pub use worker::{ChunkStream, HttpWorker, HttpWorkers, Worker, Workers};
