//! The `refrain` binary as a library, so that tests can run whole meshes in one process.
//!
//! [`config`] is the one configuration file, [`roles`] starts and stops what a process is to be, [`mod@bench`]
//! measures a running mesh, [`replay`] tells from recorded calls what drafting would be worth and [`analyze`] for whom, [`store`] is for operators
//! of the draft store.

pub mod analyze;
pub mod bench;
pub mod config;
mod local;
pub mod replay;
pub mod roles;
pub mod store;
