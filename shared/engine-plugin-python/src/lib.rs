//! The native part of the Python package `refrain_client`: drafts inside an engine.
//!
//! `Client` (`client.rs`) wraps the crate `engine-plugin` for Python. During a call, other Python threads run.

mod client;
mod tokens;

use pyo3::prelude::*;

/// Drafts from a mesh's replica, inside an engine.
#[pymodule]
mod _native {
    #[pymodule_export]
    use super::client::{Client, device_words_max};

    #[pymodule_export]
    #[allow(
        non_upper_case_globals,
        reason = "the name that Python packages have for it"
    )]
    const __version__: &str = env!("CARGO_PKG_VERSION");
}
