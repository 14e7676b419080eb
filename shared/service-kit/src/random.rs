//! Random numbers from the system, for ids, seeds and keys.
//!
//! If the system has none, that is an error and never a zero: two requests with the same id would share what must be
//! kept apart.

use refrain_protocol::ApiError;

/// `N` random bytes.
///
/// # Errors
/// `Internal` if the system has no random numbers. The same holds for the functions below.
pub fn bytes<const N: usize>() -> Result<[u8; N], ApiError> {
    let mut bytes = [0u8; N];
    getrandom::fill(&mut bytes)
        .map_err(|error| ApiError::internal(format!("no random numbers: {error}")))?;
    Ok(bytes)
}

/// 64 random bits.
pub fn u64() -> Result<u64, ApiError> {
    bytes().map(u64::from_le_bytes)
}

/// 128 random bits, which are enough for ids that no authority hands out.
pub fn u128() -> Result<u128, ApiError> {
    bytes().map(u128::from_le_bytes)
}
