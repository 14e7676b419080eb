//! Records one after the other in a file: each is its length, a checksum, and its bytes in bincode.
//!
//! A process may end in the middle of a write, so a reader takes the records up to the first that is not whole.

use refrain_protocol::ApiError;
use serde::Serialize;
use serde::de::DeserializeOwned;
use xxhash_rust::xxh3::xxh3_64;

use crate::{decode_bincode, encode_bincode};

/// Bytes of a record's length and checksum.
const FRAME_BYTES: usize = 4 + 8;

/// Appends a record to the bytes of a file.
///
/// # Errors
/// As [`encode_bincode`].
pub fn append_record<T: Serialize>(record: &T, bytes: &mut Vec<u8>) -> Result<(), ApiError> {
    let payload = encode_bincode(record)?;
    // A message of bincode is shorter than 4 GiB.
    let len = u32::try_from(payload.len()).map_err(ApiError::internal)?;
    bytes.extend(len.to_le_bytes());
    bytes.extend(xxh3_64(&payload).to_le_bytes());
    bytes.extend(payload);
    Ok(())
}

/// The whole records at the beginning of `bytes`, and the number of bytes after them.
pub fn read_records<T: DeserializeOwned>(mut bytes: &[u8]) -> (Vec<T>, usize) {
    let mut records = Vec::new();
    while let Some((record, after)) = read_record(bytes) {
        records.push(record);
        bytes = after;
    }
    (records, bytes.len())
}

fn read_record<T: DeserializeOwned>(bytes: &[u8]) -> Option<(T, &[u8])> {
    let (frame, rest) = bytes.split_at_checked(FRAME_BYTES)?;
    let (len, checksum) = frame.split_first_chunk()?;
    let len = u32::from_le_bytes(*len) as usize;
    let (payload, rest) = rest.split_at_checked(len)?;
    let is_whole = xxh3_64(payload).to_le_bytes() == *checksum;
    let record = is_whole.then(|| decode_bincode(payload).ok())??;
    Some((record, rest))
}
