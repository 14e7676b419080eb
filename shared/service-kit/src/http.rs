//! HTTP on both ends: the listener every service has, errors in OpenAI's shape, and the client that
//! services call each other with.

mod body;
mod client;
mod connections;
mod error;
mod mesh_only;
mod places;
mod server;
#[cfg(test)]
mod tests;

pub use body::RawBody;
pub use client::MeshClient;
pub use error::{HttpError, HttpResult};
pub use mesh_only::{MeshOnly, MeshOnlyService, mesh_only};
pub use places::AddressLimit;
pub use server::{Readiness, RequestIdentity, ServeOptions, Server, serve, serve_public};
