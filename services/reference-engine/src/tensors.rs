//! The tensors of weight files: read through candle, each checked when it is asked for.

use candle_core::safetensors::SliceSafetensors;
use candle_core::{DType, Device, Tensor};

use crate::ModelError;
use crate::config::WeightFormat;
use crate::files::{Weights, read};
use crate::matrix::Matrix;

/// Open weight files.
pub(crate) struct Tensors<'a> {
    shards: Vec<(&'a str, SliceSafetensors<'a>)>,
    format: WeightFormat,
}

impl Tensors<'_> {
    /// Opens `weights` for as long as `take` takes what it needs of them.
    ///
    /// # Errors
    /// A file that is unreadable or damaged, and what `take` says.
    pub(crate) fn open<T>(
        weights: &Weights,
        format: WeightFormat,
        take: impl FnOnce(&Tensors<'_>) -> Result<T, ModelError>,
    ) -> Result<T, ModelError> {
        let files = match weights {
            Weights::Embedded(bytes) => vec![(
                "the model that is compiled in".to_owned(),
                std::borrow::Cow::Borrowed(*bytes),
            )],
            Weights::Files(paths) => paths
                .iter()
                .map(|path| Ok((path.display().to_string(), read(path)?.into())))
                .collect::<Result<_, ModelError>>()?,
        };
        let shards = files
            .iter()
            .map(|(file, bytes)| {
                SliceSafetensors::new(bytes)
                    .map(|tensors| (file.as_str(), tensors))
                    .map_err(|error| fault(file, error.to_string()))
            })
            .collect::<Result<Vec<_>, _>>()?;
        take(&Tensors { shards, format })
    }

    /// Whether there is a tensor of that name.
    pub(crate) fn has(&self, name: &str) -> bool {
        self.shards.iter().any(|(_, shard)| shard.get(name).is_ok())
    }

    /// A tensor of a known shape, as f32 in row-major order.
    pub(crate) fn floats(&self, name: &str, shape: &[usize]) -> Result<Vec<f32>, ModelError> {
        let (file, tensor) = self.load(name, shape)?;
        if !matches!(tensor.dtype(), DType::F32 | DType::F16 | DType::BF16) {
            return Err(ModelError::Type {
                name: name.to_owned(),
                found: tensor.dtype().as_str().to_owned(),
                readable: "f32, f16 and bf16",
            });
        }
        tensor
            .to_dtype(DType::F32)
            .and_then(|tensor| tensor.flatten_all())
            .and_then(|tensor| tensor.to_vec1())
            .map_err(|error| fault(file, error.to_string()))
    }

    /// A list of whole numbers.
    pub(crate) fn integers(&self, name: &str, len: usize) -> Result<Vec<i64>, ModelError> {
        let (file, tensor) = self.load(name, &[len])?;
        if !matches!(tensor.dtype(), DType::I64 | DType::I32) {
            return Err(ModelError::Type {
                name: name.to_owned(),
                found: tensor.dtype().as_str().to_owned(),
                readable: "i64 and i32",
            });
        }
        tensor
            .to_dtype(DType::I64)
            .and_then(|tensor| tensor.to_vec1())
            .map_err(|error| fault(file, error.to_string()))
    }

    /// A list of yes and no, a byte each. candle has no such type, so the bytes are read as they are.
    pub(crate) fn flags(&self, name: &str, len: usize) -> Result<Vec<bool>, ModelError> {
        let (file, shard) = self.shard(name)?;
        let view = shard
            .get(name)
            .map_err(|error| fault(file, error.to_string()))?;
        check_shape(name, view.shape(), &[len])?;
        if view.data().len() != len {
            return Err(ModelError::Type {
                name: name.to_owned(),
                found: format!("{:?}", view.dtype()).to_lowercase(),
                readable: "bool and u8",
            });
        }
        Ok(view.data().iter().map(|byte| *byte != 0).collect())
    }

    /// Tensors of the given names and row counts above one another, each `depth` wide.
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

    /// [`Matrix::pack`], in the format of these weights.
    pub(crate) fn pack(&self, parts: &[Vec<f32>], depth: usize) -> Matrix {
        Matrix::pack(parts, depth, self.format)
    }

    fn load(&self, name: &str, shape: &[usize]) -> Result<(&str, Tensor), ModelError> {
        let (file, shard) = self.shard(name)?;
        let tensor = shard
            .load(name, &Device::Cpu)
            .map_err(|error| fault(file, format!("{name}: {error}")))?;
        check_shape(name, tensor.dims(), shape)?;
        Ok((file, tensor))
    }

    fn shard(&self, name: &str) -> Result<(&str, &SliceSafetensors<'_>), ModelError> {
        self.shards
            .iter()
            .find(|(_, shard)| shard.get(name).is_ok())
            .map(|(file, shard)| (*file, shard))
            .ok_or_else(|| ModelError::MissingTensor {
                name: name.to_owned(),
            })
    }
}

fn check_shape(name: &str, found: &[usize], expected: &[usize]) -> Result<(), ModelError> {
    if found == expected {
        return Ok(());
    }
    Err(ModelError::Shape {
        name: name.to_owned(),
        expected: expected.to_vec(),
        found: found.to_vec(),
    })
}

fn fault(file: &str, reason: String) -> ModelError {
    ModelError::Weights {
        file: file.to_owned(),
        reason,
    }
}
