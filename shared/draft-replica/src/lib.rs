//! The replica of a mesh's drafts beside an engine, and the upload of that engine's outputs to the draft store.
//!
//! The crate has two concepts, each with a module that its type is the door to:
//!
//! * [`DraftReplica`] (`replica.rs`, read it first) holds what requests draft from: one index per namespace and one
//!   per group of samples. Requests that run here write to it, and so does the store's feed.
//! * [`Uploader`] (`uploader.rs`) sends outputs to the store until the store has acknowledged them.
//!
//! The worker holds both, and so does the plugin inside an engine. No step of an engine waits for the store.

mod config;
mod metrics;
mod replica;
mod update;
mod uploader;

pub use config::{ReplicaConfig, UploaderConfig};
pub use metrics::{ReplicaMetrics, UploaderMetrics};
pub use replica::{DraftIndex, DraftReplica, GroupMembership, GroupReplica, NamespaceReplica};
pub use update::DocumentUpdateRef;
pub use uploader::Uploader;
