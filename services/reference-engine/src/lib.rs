//! A small engine on the CPU: Llama networks with draft-tree verification, continuous batching and prefix
//! reuse. It is the mesh's embedded default, and the engine that its tests run against.
//!
//! [`EngineHandle`] is the engine: `step` runs one batch, in which each session brings new tokens and a draft
//! tree, and gets back the target's own tokens. [`start`] adds the HTTP listener. [`shipped_model`] is
//! compiled in.
//!
//! The promise everything here is built around: **a token's logits have the same bits** whether it was part
//! of a prompt, decoded alone, batched with others, or guessed in a tree. Three things keep it. One product
//! kernel serves every number of columns and adds up in one order; attention reads a row's ancestors in
//! order of position, wherever they are stored; and everything else works on one row at a time. With noise
//! keyed by position, output is then the same token for token with any draft and with none.
//!
//! A model may come with an EAGLE-3 head, a one-layer network that reads the target's hidden states, or with a draft model,
//! a smaller one of the same vocabulary: sessions that are opened for it can have the engine draft by itself, in the step
//! that verifies the draft.
//!
//! The matrix products are this crate's own. Those of candle take 2.6 to 5 times as long for eight columns as for one,
//! and they sum in an order that depends on the number of columns.
//!
//! What this crate does not know: the mesh, tenants (a namespace is a number here), where drafts come from.

mod architecture;
mod attention;
mod batcher;
mod blocks;
mod config;
mod draft_model;
mod drafter;
mod eagle3;
mod engine;
mod error;
mod files;
mod forward;
mod handle;
mod kv;
mod limits;
mod math;
mod matrix;
mod metrics;
mod sampler;
mod service;
mod sessions;
mod simd;
mod tensors;
mod weights;

#[cfg(test)]
mod tests;

pub use architecture::Architecture;

pub use config::{EngineConfig, WeightFormat};
pub use error::ModelError;
pub use files::{ModelFiles, SHIPPED_MODEL, shipped_model};
pub use handle::EngineHandle;
pub use sampler::TOP_LOGPROBS_MAX;
pub use service::{Running, start};
pub use weights::Model;
