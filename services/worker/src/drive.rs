//! Drive mode: while a streaming engine generates, the worker may give up the stream and have a draft verified
//! instead.
//!
//! A streaming engine does not accept drafts, but some calls make it judge one all the same (`engine/verify.rs` has
//! the rules). Such a call costs the stream, some milliseconds, and a new stream afterwards. For each draft,
//! [`policy`] estimates whether a call pays; all its inputs are learnt from what happened in this worker. A chunk
//! takes part through its [`ChunkDrive`]. The streaming driver makes the calls; nothing else knows of this folder.

mod best_call;
mod call;
mod chunk_drive;
mod followed;
mod pace;
mod policy;
#[cfg(test)]
mod tests;

pub(crate) use call::VerifyCall;
pub(crate) use chunk_drive::{ChunkDrive, SharedDrive};
