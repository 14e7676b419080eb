//! HTTP on both ends: the listener of every service, errors in OpenAI's shape, and the client for calls between
//! services.

mod access;
mod body;
mod client;
mod connection_table;
mod connections;
mod content_encoding;
mod error;
mod heads;
mod listener;
mod mesh_only;
mod pages;
mod server;
mod stream;
#[cfg(test)]
mod tests;

pub use access::{AccessFacts, AccessNote, ErrorNames};
pub use body::RawBody;
pub use client::{MeshClient, failed_call_kind};
pub use connection_table::AddressLimit;
pub use content_encoding::ContentEncoding;
pub use error::{HttpError, HttpResult};
pub use heads::{pass_answer_heads, pass_request_heads};
pub use listener::ListenerConfig;
pub use mesh_only::{RouteRoles, mesh_only};
pub use pages::{PageGuard, is_host_name};
pub use server::{PublicOptions, Readiness, ServeOptions, Server, get, post, serve, serve_public};
