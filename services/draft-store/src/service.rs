//! The running service: its server, its HTTP routes, and the read-only access for tools.
//!
//! `server.rs` starts and stops the service, `routes.rs` offers the handle ([`crate::DraftStoreHandle`]) over HTTP,
//! and `closed_store.rs` opens a directory that no process uses.

mod closed_store;
mod routes;
mod server;

pub use closed_store::ClosedStore;
pub use server::{DraftStoreServer, start};
