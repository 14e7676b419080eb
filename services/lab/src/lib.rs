//! Measurements of drafting, away from the serving path.
//!
//! Read [`replay`] first: it decodes recorded calls on a model of an engine. [`analyze`] says for which workloads and
//! tenants drafting would help, [`mod@bench`] measures a running mesh, and [`simulate`] compares how
//! requests are scheduled. [`paper`] repeats the experiments of papers. [`logs`] reads logs of any tool, and
//! [`json_lines`] files of lines;
//! [`progress`] and [`text_table`] are what commands print.
//!
//! The `refrain` binary calls this crate; no service does.

pub mod analyze;
mod approximate_tokenizer;
pub mod bench;
pub mod json_lines;
pub mod logs;
mod page;
pub mod paper;
pub mod progress;
pub mod replay;
pub mod simulate;
pub mod text_table;
