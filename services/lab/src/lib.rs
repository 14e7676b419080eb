//! Measurements of drafting, away from the serving path: [`replay`] decodes recorded calls against a model of an engine,
//! [`analyze`] says for which workloads and tenants drafting would help, and [`mod@bench`] measures a running mesh.
//!
//! The `refrain` binary calls this crate; no service does.

pub mod analyze;
pub mod bench;
pub mod json_lines;
pub mod replay;
