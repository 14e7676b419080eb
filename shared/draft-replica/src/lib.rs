//! The replica of a mesh's drafts beside an engine, and the upload of that engine's outputs to the draft store.
//!
//! The crate has three concepts, each with a module that its type is the door to:
//!
//! * [`DraftReplica`] (`replica.rs`, read it first) holds what requests draft from: one index per namespace and one
//!   per group of samples. Requests that run here write to it, and so does the store's feed.
//! * [`RemoteLookup`] (`remote_lookup.rs`) asks the store's own index for drafts where a namespace is not all here.
//! * [`Uploader`] (`uploader.rs`) sends outputs to the store until the store has acknowledged them.
//!
//! The worker's decode loop holds these three; the plugin inside an engine makes no look-ups. No step of an engine
//! waits for the store, except for a look-up, and for that at most as long as the configuration allows.

mod config;
mod metrics;
mod remote_lookup;
mod replica;
mod update;
mod uploader;

pub use config::{RemoteLookupConfig, ReplicaConfig, UploaderConfig};
pub use metrics::{ReplicaMetrics, UploaderMetrics};
pub use remote_lookup::{DraftQuery, RemoteDrafts, RemoteLookup};
pub use replica::{DraftIndex, DraftReplica, GroupMembership, GroupReplica, NamespaceReplica};
pub use update::DocumentUpdateRef;
pub use uploader::Uploader;
