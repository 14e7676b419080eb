//! A chunk of a request while this worker decodes it, whichever driver does so.
//!
//! A chunk passes [`admission`], travels to its driver as an [`ActiveChunk`] in a [`Command`], and ends through the
//! [`OutputSink`].

mod active;
mod admission;
mod command;
mod held;
mod sink;

pub(crate) use self::active::ActiveChunk;
pub(crate) use self::admission::Admission;
pub(crate) use self::command::{Command, serve_cuts};
pub(crate) use self::held::HeldNotices;
pub(crate) use self::sink::OutputSink;
