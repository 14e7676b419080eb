//! Drafts inside an engine, whatever language that is in: what it says of its requests, and what it is offered.
//!
//! [`Proposer`] is all that an engine sees. Its calls on the engine's step path do arithmetic and nothing else: they wait for
//! no lock that somebody else may hold, do no I/O, and what takes long for a long prompt is not done in them. Everything else
//! is two threads': the background's (`background.rs`), and the reader's of long prompts (`own.rs`). Where something goes
//! wrong there, drafts get fewer, and the engine goes on.

mod background;
mod config;
mod listen;
mod metrics;
mod outbox;
mod own;
mod paused;
mod place;
mod proposer;
mod request;
mod standing;
#[cfg(test)]
mod tests;

pub use config::InEngineConfig;
pub use proposer::{Begin, Draft, Proposer, Step};
