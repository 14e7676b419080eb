//! A small engine on the CPU: Llama and Qwen networks with verification of draft trees, continuous batching and
//! prefix reuse.
//! It is the mesh's embedded default, and the engine that the mesh's tests run against.
//!
//! [`EngineHandle`] is the engine. A call of `step` runs one batch, in which each session brings new tokens and a
//! draft tree, and gets back the target's own tokens. [`start`] adds the HTTP listener.
//!
//! The folders, from the bottom up:
//!
//! * `kernels`: matrix products and row arithmetic, for several instruction sets. All unsafe code is here.
//! * `model`: a model's files, and its weights in memory.
//! * `network`: KV caches, attention over draft trees, decoder layers, forward passes.
//! * `sampler`: from logits to a token.
//! * `drafter`: the engine's own drafts, of an EAGLE-3 head or a draft model.
//! * `backend`: what a model must offer that other code computes, and `llama`: llama.cpp, which offers it.
//! * `pool`: blocks of KV that outlive their sessions, in memory and in a file.
//! * `engine`: one step over a batch of sessions. Read it first.
//! * `service`: the thread that owns the model, its queue, metrics and HTTP.
//!
//! # Equal bits
//! **A token's logits have the same bits** in a prompt, in plain decoding, in a batch with other sessions and in a
//! draft tree. Three things ensure it. One product kernel serves every number of columns and sums in one order.
//! Attention reads a row's ancestors in order of position, wherever they are stored. Everything else works on one row
//! at a time. Noise is keyed by position, so the output is the same, token for token, with any draft and without.
//! A backend sums in its own order, so for its models this holds but for near ties of logits.
//!
//! The matrix products are this crate's own. Those of candle take 2.6 to 5 times as long for eight columns as for
//! one, and they sum in an order that depends on the number of columns.
//!
//! # Data beside the code
//! The folder `model/` of this crate holds the compiled-in model and its EAGLE-3 head, in Hugging Face's layout, and
//! the reference outputs (`golden.json`) that the tests compare with. `training/` holds the Python programs that made
//! them. Neither is built.
//!
//! This crate knows nothing of the mesh and of tenants. A namespace is only a number here, and it does not matter
//! where drafts come from.

mod backend;
mod config;
mod drafter;
mod engine;
mod kernels;
mod llama;
mod model;
mod network;
mod pool;
mod sampler;
mod service;

#[cfg(test)]
mod tests;

pub use config::{EngineConfig, KvPoolConfig};
pub use kernels::WeightFormat;
pub use llama::{CPU, check_llama, is_gguf, llama_devices};
pub use model::{ModelError, ModelFiles, ModelMemory, SHIPPED_MODEL};
pub use service::{EngineHandle, EngineServer, start};
