//! Forward passes: KV caches, attention over draft trees, and decoder layers.

mod attention;
mod branch;
mod draft_kv;
mod forward;
mod kv_cache;
mod layer_executor;

pub(crate) use branch::{Branch, logit_rows};
pub(crate) use draft_kv::DraftKv;
pub(crate) use forward::{ForwardPass, ModelForward, backend_logits, backend_pass};
pub(crate) use kv_cache::{BLOCK_TOKENS, BlockCount, BlockFloats, CountedBlock, KvCache, KvShape};
pub(crate) use layer_executor::{LayerExecutor, Logits};
