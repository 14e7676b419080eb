//! The Python package's native part: drafts inside an engine, as Python calls them.
//!
//! `Client` is what Python sees of the crate `engine-plugin`. While a call is in there, other Python threads run.

mod client;
mod tokens;

use pyo3::prelude::*;

/// Drafts from a mesh's memory, inside an engine.
#[pymodule]
mod _native {
    #[pymodule_export]
    use super::client::Client;
}
