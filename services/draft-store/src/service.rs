//! The running service: its server, its handle for callers, its HTTP routes, and the read-only access for tools.
//!
//! Read `handle.rs` first: [`DraftStoreHandle`] implements `refrain_rpc::DraftStore` and `refrain_rpc::StoreAdmin`,
//! one file per group of calls. `server.rs` starts and stops the service, `routes.rs` offers the handle over HTTP,
//! and `closed_store.rs` opens a directory that no process uses.

mod closed_store;
mod handle;
mod routes;
mod server;
mod usage_gateways;

pub use closed_store::ClosedStore;
pub use handle::{DraftStoreHandle, StoreState};
pub use server::{DraftStoreServer, start};
