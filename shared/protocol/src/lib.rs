//! What the services say to each other: wire types, identifiers and errors.
//!
//! Plain data with serde and nothing else: no I/O, no clocks, no policy. Read [`engine`] for what an
//! engine is asked, [`chunk`] for the unit of decoding, [`scheduling`] for leases, and [`document`] for
//! what the draft store keeps; [`segment`] is how workers take over what it has sealed, [`lookup`] how it drafts for
//! them, [`acceptance`] the statistics that it keeps for them, [`admin`] what operators ask
//! of it.

pub mod acceptance;
pub mod admin;
pub mod chunk;
pub mod document;
pub mod engine;
pub mod error;
mod ids;
pub mod lookup;
mod namespace;
pub mod openai;
pub mod scheduling;
pub mod segment;

pub use error::{ApiError, ErrorKind};
pub use ids::{DocumentId, EngineSessionId, LeaseId, NamespaceId, RequestId, WorkerId};
pub use namespace::{Namespace, SignedNamespace};

/// A token id of the target model's vocabulary.
pub type TokenId = u32;

/// HTTP header that carries the mesh secret on every call between services.
pub const MESH_SECRET_HEADER: &str = "x-refrain-mesh-secret";
