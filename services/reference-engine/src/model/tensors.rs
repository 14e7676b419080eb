//! Reads tensors from weight files, and checks the type and the shape of each one when it is asked for.

use half::{bf16, f16};
use safetensors::tensor::TensorView;
use safetensors::{Dtype, SafeTensors};

use super::error::ModelError;
use super::files::WeightSource;
use crate::kernels::{Matrix, WeightFormat};

/// The tensors of open weight files.
pub(crate) struct WeightTensors<'a> {
    shards: Vec<SafeTensors<'a>>,
    format: WeightFormat,
}

impl WeightTensors<'_> {
    /// Opens `weights` for the duration of `load`.
    ///
    /// # Errors
    /// Fails if a file is unreadable or damaged, or if `load` fails.
    pub(crate) fn open<T>(
        weights: &WeightSource,
        format: WeightFormat,
        load: impl FnOnce(&WeightTensors<'_>) -> Result<T, ModelError>,
    ) -> Result<T, ModelError> {
        let files = weights.read()?;
        let shards = files
            .iter()
            .map(|(file, bytes)| {
                SafeTensors::deserialize(bytes).map_err(|error| ModelError::Content {
                    file: file.clone(),
                    reason: error.to_string(),
                })
            })
            .collect::<Result<Vec<_>, _>>()?;
        load(&WeightTensors { shards, format })
    }

    /// Whether a file holds a tensor of that name.
    pub(crate) fn has(&self, name: &str) -> bool {
        self.shards.iter().any(|shard| shard.tensor(name).is_ok())
    }

    /// Returns a tensor of the expected shape as f32, in row-major order. Every f16 and bf16 value is exact in f32.
    ///
    /// # Errors
    /// A value is not finite, or a matrix is all zero. No model computes anything with such weights: a training run
    /// that diverged writes the first, and a file that was never filled has the second.
    pub(crate) fn floats(&self, name: &str, shape: &[usize]) -> Result<Vec<f32>, ModelError> {
        let values = self.values(name, shape)?;
        let is_matrix = shape.len() > 1 && !values.is_empty();
        let fault = if let Some(at) = values.iter().position(|value| !value.is_finite()) {
            format!("value {at} is {}", values[at])
        } else if is_matrix && values.iter().all(|value| *value == 0.0) {
            "all its values are zero".to_owned()
        } else {
            return Ok(values);
        };
        Err(ModelError::Tensor(format!(
            "{name} cannot be used: {fault}; these weights were not trained or not saved to their end"
        )))
    }

    /// Returns a tensor as [`WeightTensors::floats`] does, whatever its values are.
    pub(crate) fn values(&self, name: &str, shape: &[usize]) -> Result<Vec<f32>, ModelError> {
        let view = self.view(name, shape)?;
        match view.dtype() {
            Dtype::F32 => Ok(numbers(&view, f32::from_le_bytes)),
            Dtype::F16 => Ok(numbers(&view, |bytes| f16::from_le_bytes(bytes).to_f32())),
            Dtype::BF16 => Ok(numbers(&view, |bytes| bf16::from_le_bytes(bytes).to_f32())),
            other => Err(unreadable(name, other, "f32, f16 and bf16")),
        }
    }

    /// Returns a list of `len` whole numbers.
    pub(crate) fn integers(&self, name: &str, len: usize) -> Result<Vec<i64>, ModelError> {
        let view = self.view(name, &[len])?;
        match view.dtype() {
            Dtype::I64 => Ok(numbers(&view, i64::from_le_bytes)),
            Dtype::I32 => Ok(numbers(&view, |bytes| i32::from_le_bytes(bytes).into())),
            other => Err(unreadable(name, other, "i64 and i32")),
        }
    }

    /// Returns a list of `len` flags, stored as one byte each. Any byte but zero means true.
    pub(crate) fn flags(&self, name: &str, len: usize) -> Result<Vec<bool>, ModelError> {
        let view = self.view(name, &[len])?;
        match view.dtype() {
            Dtype::BOOL | Dtype::U8 => Ok(view.data().iter().map(|byte| *byte != 0).collect()),
            other => Err(unreadable(name, other, "bool and u8")),
        }
    }

    /// Packs the tensors of the given names and row counts into one matrix, stacked vertically, each `depth` wide.
    pub(crate) fn matrix(
        &self,
        parts: &[(String, usize)],
        depth: usize,
    ) -> Result<Matrix, ModelError> {
        let parts = parts
            .iter()
            .map(|(name, rows)| self.floats(name, &[*rows, depth]))
            .collect::<Result<Vec<_>, _>>()?;
        Ok(self.pack(&parts, depth))
    }

    /// Packs `parts` as [`Matrix::pack`] does, in the format of these weights.
    pub(crate) fn pack(&self, parts: &[Vec<f32>], depth: usize) -> Matrix {
        Matrix::pack(parts, depth, self.format)
    }

    fn view(&self, name: &str, shape: &[usize]) -> Result<TensorView<'_>, ModelError> {
        let view = self
            .shards
            .iter()
            .find_map(|shard| shard.tensor(name).ok())
            .ok_or_else(|| {
                ModelError::Tensor(format!("{name} is missing from the model's weights"))
            })?;
        if view.shape() != shape {
            let found = view.shape();
            return Err(ModelError::Tensor(format!(
                "{name} has shape {found:?}; config.json requires {shape:?}"
            )));
        }
        Ok(view)
    }
}

/// Reads a tensor's elements of `N` bytes each. The file does not align them, so they cannot be borrowed as numbers.
fn numbers<const N: usize, T>(view: &TensorView<'_>, read: impl Fn([u8; N]) -> T) -> Vec<T> {
    let (elements, _) = view.data().as_chunks();
    elements.iter().map(|bytes| read(*bytes)).collect()
}

fn unreadable(name: &str, found: Dtype, readable: &str) -> ModelError {
    let found = found.to_string().to_lowercase();
    ModelError::Tensor(format!(
        "{name} has type {found}; this engine reads {readable}"
    ))
}
