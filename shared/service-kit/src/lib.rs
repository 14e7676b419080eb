//! The shell that every service wears: configuration, telemetry, HTTP on both ends, mesh authentication,
//! drain, deadlines, clocks that are compared, threads for actors and a guard around their cores. It does not know what a token is.
//!
//! Start with [`config::load`], [`telemetry::init`] and [`http::serve`]; services that keep state in an
//! actor put its core into [`guard::Guarded`].

pub mod actor_thread;
pub mod clock;
pub mod clocks;
pub mod config;
pub mod deadline;
pub mod descriptors;
pub mod drain;
pub mod guard;
pub mod http;
pub mod mesh;
pub mod random;
pub mod telemetry;
