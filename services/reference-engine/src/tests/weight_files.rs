//! Tensors that tests make up and write as safetensors files.

use std::borrow::Cow;
use std::collections::HashMap;
use std::path::Path;

use half::{bf16, f16};
use safetensors::{Dtype, View};

/// A tensor as it stands in a weight file.
#[derive(Clone)]
pub(crate) struct FileTensor {
    dtype: Dtype,
    shape: Vec<usize>,
    bytes: Vec<u8>,
}

impl FileTensor {
    pub(crate) fn new(dtype: Dtype, shape: &[usize], bytes: Vec<u8>) -> Self {
        let elements: usize = shape.iter().product();
        assert_eq!(elements * dtype.bitsize() / 8, bytes.len());
        FileTensor {
            dtype,
            shape: shape.to_vec(),
            bytes,
        }
    }

    /// Rounds `values` to `dtype`.
    pub(crate) fn floats(dtype: Dtype, shape: &[usize], values: &[f32]) -> Self {
        let bytes = match dtype {
            Dtype::F32 => values.iter().flat_map(|x| x.to_le_bytes()).collect(),
            Dtype::F16 => {
                let round = |x: &f32| f16::from_f32(*x).to_le_bytes();
                values.iter().flat_map(round).collect()
            }
            Dtype::BF16 => {
                let round = |x: &f32| bf16::from_f32(*x).to_le_bytes();
                values.iter().flat_map(round).collect()
            }
            other => panic!("no float type: {other}"),
        };
        FileTensor::new(dtype, shape, bytes)
    }

    pub(crate) fn integers(values: &[i64]) -> Self {
        let bytes = values.iter().flat_map(|x| x.to_le_bytes()).collect();
        FileTensor::new(Dtype::I64, &[values.len()], bytes)
    }

    pub(crate) fn zeros(dtype: Dtype, shape: &[usize]) -> Self {
        let elements: usize = shape.iter().product();
        FileTensor::new(dtype, shape, vec![0; elements * dtype.bitsize() / 8])
    }

    pub(crate) fn shape(&self) -> &[usize] {
        &self.shape
    }

    /// The values of an f32 tensor.
    pub(crate) fn values(&self) -> Vec<f32> {
        assert_eq!(self.dtype, Dtype::F32);
        let (values, _) = self.bytes.as_chunks();
        values.iter().map(|x| f32::from_le_bytes(*x)).collect()
    }
}

impl View for &FileTensor {
    fn dtype(&self) -> Dtype {
        self.dtype
    }

    fn shape(&self) -> &[usize] {
        &self.shape
    }

    fn data(&self) -> Cow<'_, [u8]> {
        Cow::Borrowed(&self.bytes)
    }

    fn data_len(&self) -> usize {
        self.bytes.len()
    }
}

/// Writes a weight file.
pub(crate) fn write_weights(path: &Path, tensors: &HashMap<String, FileTensor>) {
    let bytes = safetensors::serialize(tensors, None).unwrap();
    std::fs::write(path, bytes).unwrap();
}
