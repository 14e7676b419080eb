//! Engines that come and go while the process runs, because they register or because a source names them. Each gets a
//! worker of its own, which appears at the scheduler as any other does.
//!
//! * `adopter`: adopts engines and gives them up; read this first.
//! * `engine_table`: the engines that were adopted.
//! * `allowed_hosts`: which of them may be called.
//! * `discovery`: follows the sources that name engines.
//! * `connection`: the check of an engine, and the connection to it.
//! * `record`: the file that keeps the engines over restarts.
//! * `server`, `http`: the process that adopts engines, and its listener for gateways.

mod adopter;
mod allowed_hosts;
mod connection;
mod discovery;
mod engine_table;
mod http;
mod metrics;
mod record;
mod server;

pub use self::adopter::{Adopter, AdopterDeps};
pub use self::discovery::look_up;
pub use self::server::AdopterServer;
