//! The worker as a service: its handle for callers in this process, its HTTP listener, and its heartbeats.

mod engine_checks;
mod handle;
mod heartbeat;
mod http;
mod keep_alive;
mod late_worker;
mod listener;
mod ordered_drain;
mod trainer_orders;

pub use self::handle::WorkerHandle;
pub(crate) use self::handle::WorkerParts;
pub(crate) use self::heartbeat::Heartbeats;
pub use self::listener::{EngineWait, WorkerListener};
pub(crate) use self::ordered_drain::OrderedDrain;
