//! The Python package's native part: a copy of the drafts inside an engine.
//!
//! `Client` is what Python sees. Its calls on the engine's step path do arithmetic and nothing else: they take no lock
//! that somebody may hold for long, do no I/O, and let other Python threads run. Everything else is the background
//! thread's (`background.rs`). Where something goes wrong there, drafts get fewer, and the engine goes on.

mod background;
mod client;
mod config;
mod metrics;
mod paused;
mod request;
mod tokens;

use pyo3::prelude::*;

/// Drafts from a mesh's memory, inside an engine.
#[pymodule]
mod _native {
    #[pymodule_export]
    use super::client::Client;
}
