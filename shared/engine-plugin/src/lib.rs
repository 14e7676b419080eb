//! Drafts inside an engine: the engine reports what its requests emit, and is offered drafts.
//!
//! [`Proposer`] (`proposer.rs`, read it first) is all that an engine sees. Its calls on the engine's step path only
//! compute: they wait for no lock that another thread may hold, do no I/O, and leave long work to others. Two threads
//! do the rest: the background thread (`background.rs`), and the reader of long prompts (`own_index.rs`). Where
//! something goes wrong there, drafts get fewer, and the engine goes on.
//!
//! An engine whose runner drafts on its devices is told instead which texts belong there (`device.rs`), and how long
//! the drafts of a step should be (`lengths.rs`).
//!
//! `request.rs` is one request; `request_state.rs` is the part of it that outlives an interruption. The rules of
//! drafts are in `speculation.rs`.

mod awaited;
mod background;
mod backlog;
mod config;
mod default_namespace;
mod device;
mod lengths;
mod metrics;
mod metrics_server;
mod outbox;
mod own_index;
mod paused;
mod proposer;
mod request;
mod request_state;
mod sources;
mod speculation;
#[cfg(test)]
mod tests;

pub use config::{PluginConfig, PluginMeshConfig};
pub use device::{DeviceCommand, DeviceConfig};
pub use lengths::PaddedPart;
pub use proposer::{Proposer, RequestPlace, RequestStart, RequestStep};
pub use request::DraftChain;
pub use speculation::{EngineRules, SpeculationConfig};
