//! HTTP on both ends: the listener every service has, errors in OpenAI's shape, and the client that
//! services call each other with.

mod client;
mod error;
mod server;

pub use client::MeshClient;
pub use error::{HttpError, HttpResult};
pub use server::{Readiness, RequestIdentity, ServeOptions, Server, serve};
