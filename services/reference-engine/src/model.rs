//! A model's files, and its weights in memory.

mod architecture;
mod error;
mod files;
mod fingerprint;
mod memory;
mod tensors;
mod weights;

pub(crate) use architecture::Architecture;
#[cfg(feature = "llama")]
pub(crate) use architecture::end_tokens;
pub use error::ModelError;
pub(crate) use files::{HEAD_AUTO, HEAD_OFF, HeadFiles};
pub use files::{ModelFiles, SHIPPED_MODEL};
#[cfg(test)]
pub(crate) use files::{WeightSource, shipped_head, shipped_model};
pub use memory::ModelMemory;
pub(crate) use tensors::WeightTensors;
pub(crate) use weights::{BlockWeights, Model};
