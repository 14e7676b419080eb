//! The wire types, identifiers and errors that the services exchange.
//!
//! This crate is plain data with serde. It has no I/O, no clocks and no policy.
//!
//! The way of a request through the types: the gateway asks the scheduler for a lease ([`scheduling`]), sends a chunk
//! to the leased worker ([`chunk`]), and the worker asks its engine for steps ([`engine`]). Trainers order pauses and
//! new weights ([`engine_order`]). Chunks and steps carry their tokens behind their JSON ([`token_body`]). Workers
//! send outputs to the draft store as pieces of documents ([`document`]), and pull the news of namespaces and of
//! groups from it ([`pull`], [`group`]). They load sealed segments from it ([`segment`]), and share acceptance
//! statistics through it ([`acceptance`]).
//! Gateways ask it for the lengths of earlier outputs ([`history`]), and keep their tenants ([`tenants`]) and their
//! usage ([`usage`]) in it. Operators use [`admin`], and replicas of the draft store [`join`]. Clients of the gateway
//! use [`openai`].
//!
//! Read first: [`engine`], then [`chunk`].

pub mod acceptance;
pub mod admin;
pub mod adoption;
pub mod chunk;
pub mod document;
pub mod engine;
pub mod engine_order;
pub mod error;
pub mod forgetting;
pub mod group;
pub mod history;
mod ids;
pub mod join;
pub mod names;
mod namespace;
pub mod openai;
pub mod prefix;
pub mod pull;
pub mod scheduling;
pub mod segment;
pub mod shard;
pub mod tenants;
pub mod token_body;
pub mod usage;

pub use error::{ApiError, ErrorKind};
pub use ids::{DocumentId, EngineSessionId, LeaseId, NamespaceId, RequestId, TenantId, WorkerId};
pub use names::TenantName;
pub use namespace::{Namespace, PARTITION_MARK, SignedNamespace};

/// A token id of the target model's vocabulary.
pub type TokenId = u32;

/// The HTTP header that carries the mesh secret in every call between services.
pub const MESH_SECRET_HEADER: &str = "x-refrain-mesh-secret";
