//! Token ids as engines hold them: lists of integers, or arrays of 32-bit integers.

use pyo3::buffer::PyBuffer;
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;

/// The tokens of a call.
pub(crate) struct Tokens(pub(crate) Vec<u32>);

impl<'py> FromPyObject<'_, 'py> for Tokens {
    type Error = PyErr;

    fn extract(tokens: Borrowed<'_, 'py, PyAny>) -> PyResult<Self> {
        if let Ok(array) = PyBuffer::<i32>::get(&tokens) {
            if array.dimensions() != 1 {
                return Err(PyValueError::new_err(
                    "tokens: the array must have one dimension",
                ));
            }
            let signed = array.to_vec(tokens.py())?;
            let tokens: Option<Vec<u32>> = signed
                .into_iter()
                .map(|token| u32::try_from(token).ok())
                .collect();
            let tokens =
                tokens.ok_or_else(|| PyValueError::new_err("tokens: a token id is negative"))?;
            return Ok(Tokens(tokens));
        }
        tokens.extract().map(Tokens)
    }
}
