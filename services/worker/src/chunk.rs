//! A chunk of a request while this worker decodes it, and the contract of both drivers.
//!
//! A chunk passes [`admission`] and reaches its driver as an [`ActiveChunk`]. The drivers differ in how they get
//! tokens from an engine. The rest is the same for both, and it is here:
//!
//! * `watch` tells at any moment whether a chunk goes on, is held, or has to end: by the orders of a trainer, by the
//!   time of its request, and by its `reader`.
//! * `command` has the commands to a driver, with the rule which chunks an order ends.
//! * `ending` has all ways in which a chunk ends, and what each of them means for the reader and for the metrics.
//! * `sink` is where its output goes. `shared.rs` ends a chunk there.

mod active;
mod admission;
mod command;
mod ending;
mod reader;
mod sink;
mod watch;

pub(crate) use self::active::{ActiveChunk, ChunkKey};
pub(crate) use self::admission::Admission;
pub(crate) use self::command::{Command, EndOrder};
pub(crate) use self::ending::ChunkEnding;
pub(crate) use self::reader::{Events, Reader, reserve};
pub(crate) use self::sink::OutputSink;
pub(crate) use self::watch::Watch;
