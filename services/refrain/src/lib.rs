//! The `refrain` binary as a library, so that tests can run whole meshes in one process.
//!
//! [`config`] is the one configuration file, [`roles`] starts and stops the services of a process, and [`store`] is for
//! operators of the draft store.

pub mod config;
mod local;
pub mod roles;
pub mod store;
