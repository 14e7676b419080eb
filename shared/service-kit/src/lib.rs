//! The shell that every service shares: configuration, telemetry, HTTP on both ends, authentication inside the mesh,
//! drain, timers, comparison of clocks, actors, recovery from panics, and the API of Kubernetes. It knows no tokens.
//!
//! A service calls [`config::load`], then [`telemetry::init`], then [`http::serve`], and reaches others with
//! [`http::MeshClient`]. A service that keeps its state in an actor puts the core into [`guard::Guarded`] and the
//! actor on an [`actor_thread::ActorThread`]. Loops for the life of a process are in [`actors`].
//!
//! Read first: `http/server.rs` (the listener), `http/client.rs` (calls between services), `mesh.rs` (who may call
//! whom).

pub mod actor_thread;
pub mod actors;
pub mod backoff;
pub mod build_info;
pub mod causes;
pub mod clock;
pub mod clocks;
pub mod cluster_api;
pub mod config;
pub mod deadline;
pub mod descriptors;
pub mod drain;
pub mod guard;
pub mod http;
pub mod mesh;
pub mod priority;
pub mod random;
mod reload;
pub mod tasks;
pub mod telemetry;
pub mod tls;
pub mod trace;
