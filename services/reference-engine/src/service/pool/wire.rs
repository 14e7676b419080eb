//! The calls of engines for blocks: a question in JSON, and an answer in bytes.

use std::str::FromStr as _;

use refrain_protocol::{ApiError, NamespaceId};
use serde::{Deserialize, Serialize};

use crate::pool::{BlockKey, PooledBlock, decode, encode, encoded_len};

/// The path of the route.
pub(super) const PATH: &str = "/engine/v1/kv/blocks";

/// Maximum number of blocks of a question.
pub(super) const KEYS_MAX: usize = 8_192;

/// Maximum number of bytes of blocks in one answer. A single block is sent whatever its size is.
pub(super) const ANSWER_BYTES_MAX: usize = 8 << 20;

/// Bytes of the number at the beginning of an answer.
const COUNT_BYTES: usize = size_of::<u32>();

/// A question for the blocks of a text.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct BlocksRequest {
    /// The keys in order of the text, 32 hex digits each.
    keys: Vec<String>,
    /// Maximum number of blocks in the answer. With 0 it only tells how many the engine has.
    pub(super) blocks_max: usize,
}

impl BlocksRequest {
    pub(super) fn new(keys: impl Iterator<Item = BlockKey>, blocks_max: usize) -> Self {
        BlocksRequest {
            keys: keys.take(KEYS_MAX).map(|key| key.to_string()).collect(),
            blocks_max,
        }
    }

    /// Reads the keys.
    ///
    /// # Errors
    /// `InvalidRequest` for too many keys, or one that is not hex.
    pub(super) fn keys(&self) -> Result<Vec<BlockKey>, ApiError> {
        let fault = |message: String| ApiError::invalid("keys", message);
        if self.keys.len() > KEYS_MAX {
            let count = self.keys.len();
            return Err(fault(format!(
                "{count} keys; at most {KEYS_MAX} are allowed"
            )));
        }
        // A key has the form of all other identifiers of 128 bits.
        let key = |text: &String| NamespaceId::from_str(text).map(|id| BlockKey(id.0));
        let keys: Result<Vec<BlockKey>, String> = self.keys.iter().map(key).collect();
        keys.map_err(fault)
    }
}

/// An answer: how many of the blocks the engine has without a gap, and the first of them.
pub(super) struct BlocksAnswer {
    pub(super) held: usize,
    pub(super) blocks: Vec<PooledBlock>,
    /// Whether a block was damaged, after which nothing was read.
    pub(super) is_damaged: bool,
}

/// Encodes an answer.
pub(in crate::service) fn encode_answer(held: usize, blocks: &[PooledBlock]) -> Vec<u8> {
    let held = u32::try_from(held).unwrap_or(u32::MAX);
    let mut bytes = held.to_le_bytes().to_vec();
    for block in blocks {
        encode(block, 0, &mut bytes);
    }
    bytes
}

/// Reads an answer whose blocks have `floats` floats. `None`: it is not an answer at all.
pub(super) fn decode_answer(bytes: &[u8], floats: usize) -> Option<BlocksAnswer> {
    let (held, content) = bytes.split_first_chunk::<COUNT_BYTES>()?;
    let mut answer = BlocksAnswer {
        held: u32::from_le_bytes(*held) as usize,
        blocks: Vec::new(),
        is_damaged: false,
    };
    for block in content.chunks(encoded_len(floats)) {
        match decode(block, floats) {
            Ok(block) => answer.blocks.push(block),
            Err(_) => {
                answer.is_damaged = true;
                break;
            }
        }
    }
    Some(answer)
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use refrain_protocol::TenantId;

    use super::*;
    use crate::network::BLOCK_TOKENS;
    use crate::pool::BlockId;

    fn block(number: u8) -> PooledBlock {
        PooledBlock {
            id: BlockId([number; 32]),
            tenant: TenantId(number.into()),
            tokens: [number.into(); BLOCK_TOKENS],
            floats: Arc::new(vec![f32::from(number); 24]),
        }
    }

    #[test]
    fn an_answer_is_read_up_to_the_first_damaged_byte() {
        let bytes = encode_answer(5, &[block(1), block(2)]);
        let answer = decode_answer(&bytes, 24).unwrap();
        assert_eq!((answer.held, answer.is_damaged), (5, false));
        assert_eq!(answer.blocks[1].id, block(2).id);
        for place in COUNT_BYTES..bytes.len() {
            let mut changed = bytes.clone();
            changed[place] ^= 4;
            let answer = decode_answer(&changed, 24).unwrap();
            let first = usize::from(place >= COUNT_BYTES + encoded_len(24));
            assert_eq!((answer.blocks.len(), answer.is_damaged), (first, true));
        }
        let cut = decode_answer(&bytes[..bytes.len() - 1], 24).unwrap();
        assert_eq!((cut.blocks.len(), cut.is_damaged), (1, true));
        assert!(decode_answer(&bytes[..3], 24).is_none());
    }

    #[test]
    fn keys_travel_as_hex_and_bad_ones_are_named() {
        let keys = [block(1).id.key(), block(0xab).id.key()];
        let request = BlocksRequest::new(keys.into_iter(), 3);
        let body = serde_json::to_string(&request).unwrap();
        let read: BlocksRequest = serde_json::from_str(&body).unwrap();
        assert_eq!(read.keys().unwrap(), keys);
        for keys in [vec!["xy".to_owned()], vec!["0".repeat(32); KEYS_MAX + 1]] {
            let bad = BlocksRequest {
                keys,
                blocks_max: 0,
            };
            assert_eq!(bad.keys().unwrap_err().param.as_deref(), Some("keys"));
        }
    }
}
