//! A block as bytes, the same in the file and between engines. Any change to any byte is found.

use std::sync::Arc;

use refrain_protocol::{TenantId, TokenId};
use xxhash_rust::xxh3::{xxh3_64, xxh3_128};

use super::chain::BlockId;
use crate::network::{BLOCK_TOKENS, BlockFloats};

const MAGIC: [u8; 8] = *b"RFKVBLK2";
const TOKENS_BYTES: usize = BLOCK_TOKENS * size_of::<TokenId>();

/// Where the parts of the head begin.
const ORDER_AT: usize = MAGIC.len();
const ID_AT: usize = ORDER_AT + size_of::<u64>();
const TENANT_AT: usize = ID_AT + size_of::<BlockId>();
const TOKENS_AT: usize = TENANT_AT + size_of::<TenantId>();
const FLOATS_COUNT_AT: usize = TOKENS_AT + TOKENS_BYTES;
const FLOATS_HASH_AT: usize = FLOATS_COUNT_AT + size_of::<u64>();
const HEAD_HASH_AT: usize = FLOATS_HASH_AT + size_of::<u128>();

/// Bytes of the head, which is before the floats.
pub(super) const HEAD_BYTES: usize = HEAD_HASH_AT + size_of::<u64>();

/// A block of KV with its name and its text.
#[derive(Clone, Debug)]
pub(crate) struct PooledBlock {
    pub(crate) id: BlockId,
    /// The tenant whose text it is.
    pub(crate) tenant: TenantId,
    pub(crate) tokens: [TokenId; BLOCK_TOKENS],
    pub(crate) floats: BlockFloats,
}

/// Why bytes are not a block.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub(crate) enum Damage {
    /// There are fewer bytes than a block of this model has.
    #[error("it is cut off")]
    Short,
    /// It is not the beginning of a block.
    #[error("it does not begin as a block does")]
    NoBlock,
    /// The head has another checksum.
    #[error("the checksum of its head is wrong")]
    Head,
    /// The block is of a model with another shape.
    #[error("it is of a model with another shape")]
    Shape,
    /// The floats have another checksum.
    #[error("the checksum of its content is wrong")]
    Floats,
}

/// The head of a block in the file.
#[derive(Clone, Copy, Debug)]
pub(super) struct BlockHead {
    pub(super) id: BlockId,
    pub(super) tenant: TenantId,
    /// The number of its write; later ones are greater.
    pub(super) order: u64,
    tokens: [TokenId; BLOCK_TOKENS],
    floats_hash: u128,
}

/// Returns the length of an encoded block.
pub(crate) fn encoded_len(floats: usize) -> usize {
    HEAD_BYTES + floats * size_of::<f32>()
}

/// Appends a block to `out`. `order` tells which of two copies in a file is the later one.
pub(crate) fn encode(block: &PooledBlock, order: u64, out: &mut Vec<u8>) {
    let start = out.len();
    out.reserve(encoded_len(block.floats.len()));
    out.extend(MAGIC);
    out.extend(order.to_le_bytes());
    out.extend(block.id.0);
    out.extend(block.tenant.0.to_le_bytes());
    for token in block.tokens {
        out.extend(token.to_le_bytes());
    }
    out.extend((block.floats.len() as u64).to_le_bytes());
    let floats: &[u8] = bytemuck::cast_slice(&block.floats);
    out.extend(xxh3_128(floats).to_le_bytes());
    let head_hash = xxh3_64(&out[start..]);
    out.extend(head_hash.to_le_bytes());
    out.extend_from_slice(floats);
}

/// Reads a field of known length. The head is long enough.
fn field<const N: usize>(head: &[u8], at: usize) -> Result<[u8; N], Damage> {
    let bytes = head.get(at..).and_then(<[u8]>::first_chunk::<N>);
    bytes.copied().ok_or(Damage::Short)
}

/// Reads the head of a block whose model has `floats` floats per block.
///
/// # Errors
/// The bytes are not the head of such a block.
pub(super) fn decode_head(bytes: &[u8], floats: usize) -> Result<BlockHead, Damage> {
    let head: [u8; HEAD_BYTES] = field(bytes, 0)?;
    if !head.starts_with(&MAGIC) {
        return Err(Damage::NoBlock);
    }
    if xxh3_64(&head[..HEAD_HASH_AT]) != u64::from_le_bytes(field(&head, HEAD_HASH_AT)?) {
        return Err(Damage::Head);
    }
    if u64::from_le_bytes(field(&head, FLOATS_COUNT_AT)?) != floats as u64 {
        return Err(Damage::Shape);
    }
    let mut tokens = [0; BLOCK_TOKENS];
    let (words, _) = head[TOKENS_AT..FLOATS_COUNT_AT].as_chunks();
    for (token, bytes) in tokens.iter_mut().zip(words) {
        *token = TokenId::from_le_bytes(*bytes);
    }
    Ok(BlockHead {
        id: BlockId(field(&head, ID_AT)?),
        tenant: TenantId(u128::from_le_bytes(field(&head, TENANT_AT)?)),
        order: u64::from_le_bytes(field(&head, ORDER_AT)?),
        tokens,
        floats_hash: u128::from_le_bytes(field(&head, FLOATS_HASH_AT)?),
    })
}

/// Reads a block whose model has `floats` floats per block.
///
/// # Errors
/// The bytes are not such a block, or a byte has changed.
pub(crate) fn decode(bytes: &[u8], floats: usize) -> Result<PooledBlock, Damage> {
    let head = decode_head(bytes, floats)?;
    let content = bytes.get(HEAD_BYTES..encoded_len(floats));
    let content = content.ok_or(Damage::Short)?;
    if xxh3_128(content) != head.floats_hash {
        return Err(Damage::Floats);
    }
    let mut values = vec![0f32; floats];
    bytemuck::cast_slice_mut(&mut values).copy_from_slice(content);
    Ok(PooledBlock {
        id: head.id,
        tenant: head.tenant,
        tokens: head.tokens,
        floats: Arc::new(values),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    const FLOATS: usize = 40;

    fn block() -> PooledBlock {
        let floats = (0..FLOATS).map(|number| number as f32 * 0.37 - 3.0);
        PooledBlock {
            id: BlockId(std::array::from_fn(|number| number as u8)),
            tenant: TenantId(0x0102_0304),
            tokens: std::array::from_fn(|number| number as TokenId * 17),
            floats: Arc::new(floats.collect()),
        }
    }

    #[test]
    fn a_block_comes_back_bit_for_bit() {
        let (block, mut bytes) = (block(), Vec::new());
        encode(&block, 9, &mut bytes);
        assert_eq!(bytes.len(), encoded_len(FLOATS));
        let back = decode(&bytes, FLOATS).unwrap();
        let named = |block: &PooledBlock| (block.id, block.tenant, block.tokens);
        assert_eq!(named(&back), named(&block));
        let bits = |floats: &[f32]| {
            floats
                .iter()
                .map(|float| float.to_bits())
                .collect::<Vec<_>>()
        };
        assert_eq!(bits(&back.floats), bits(&block.floats));
        assert_eq!(decode_head(&bytes, FLOATS).unwrap().order, 9);
        assert_eq!(decode(&bytes, FLOATS + 1).unwrap_err(), Damage::Shape);
    }

    #[test]
    fn every_changed_byte_and_every_cut_is_found() {
        let mut bytes = Vec::new();
        encode(&block(), 1, &mut bytes);
        for place in 0..bytes.len() {
            for change in [1, 0x80, 0xff] {
                let mut changed = bytes.clone();
                changed[place] ^= change;
                assert!(decode(&changed, FLOATS).is_err(), "byte {place}");
            }
            assert!(decode(&bytes[..place], FLOATS).is_err(), "cut at {place}");
        }
        assert_eq!(decode(&[0; 1000], FLOATS).unwrap_err(), Damage::NoBlock);
    }
}
