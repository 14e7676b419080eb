//! The `refrain` binary as a library, so that tests can run whole meshes in one process.
//!
//! Read [`roles`] first: it starts and stops the services of a process. [`config`] is the configuration file of all
//! roles, [`gateway`] puts a gateway together, and [`serve`] has the commands that start services. [`store`],
//! [`usage`], [`tenants`] and [`mesh_roles`] have the operator's commands. [`check`] judges a configuration, and
//! [`chat`] talks with a gateway. `cluster` runs several processes on one machine, for trying out. [`manual`] has
//! files that packages ship beside the program.

pub mod chat;
pub mod check;
mod cluster;
mod command;
pub mod config;
pub mod gateway;
pub mod health;
mod late_worker;
mod local;
mod local_operator;
pub mod manual;
mod mesh_admin;
pub mod mesh_roles;
mod model_files;
mod own_model;
pub mod record;
pub mod role;
pub mod roles;
pub mod serve;
mod signals;
pub mod store;
pub mod tenants;
mod up_engines;
pub mod usage;
mod welcome;
