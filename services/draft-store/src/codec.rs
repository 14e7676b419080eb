//! The envelope of every value in the log: encoding, checksum and decoding.
//!
//! A value consists of magic (2 bytes), version (1), flags (1), payload length (4), xxh3 of key, header and payload
//! (8), and the payload. All of it is checked before a byte of the payload is decoded, because most single bit flips
//! in a bare bincode payload decode silently to a wrong value. The key is part of the checksum, so a value under a
//! wrong key is damage too.
//!
//! The payload is bincode with fixed-width little-endian integers (`legacy`, which other crates write byte for byte),
//! under a size limit. It is compressed with zstd if it is not tiny and that makes it smaller.

use std::cell::RefCell;

use bincode::{Decode, Encode};
use refrain_protocol::TokenId;
use xxhash_rust::xxh3::Xxh3;

/// Largest stored value. sled moves leaves with larger ones into blob files, which it never syncs.
pub(crate) const VALUE_BYTES_MAX: usize = 4096;

/// Largest payload after decompression.
const PAYLOAD_BYTES_MAX: usize = 64 << 10;
const MAGIC: [u8; 2] = *b"Rf";
const VERSION: u8 = 1;
const FLAG_ZSTD: u8 = 1;
const HEADER_BYTES: usize = 8;
const ENVELOPE_BYTES: usize = HEADER_BYTES + 8;

/// Below this size, compression takes long and gains some dozen bytes, until the document is sealed. The state and
/// the head of a document are that small.
const COMPRESSION: Compression = Compression {
    level: 3,
    from_bytes: 192,
};

/// How much time is spent to make something smaller.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Compression {
    /// zstd's level.
    pub(crate) level: i32,
    /// Fewer bytes than this stay as they are.
    pub(crate) from_bytes: usize,
}

/// Why a value cannot be trusted.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub(crate) enum Damage {
    #[error("shorter than an envelope")]
    Short,
    #[error("wrong magic")]
    Magic,
    #[error("unknown version or flags")]
    Version,
    #[error("length differs from the header")]
    Length,
    #[error("checksum differs")]
    Checksum,
    #[error("payload does not decode")]
    Payload,
}

fn config() -> impl bincode::config::Config {
    bincode::config::legacy().with_limit::<PAYLOAD_BYTES_MAX>()
}

thread_local! {
    // Creating a zstd context costs more than compressing a small value with it. The level is the one of the context.
    static COMPRESSOR: RefCell<Option<(i32, zstd::bulk::Compressor<'static>)>> = const { RefCell::new(None) };
    static DECOMPRESSOR: RefCell<Option<zstd::bulk::Decompressor<'static>>> = const { RefCell::new(None) };
}

/// Decompresses at most `bytes_max` bytes. The buffer is as large as the frame says, and no larger than that.
pub(crate) fn decompress(payload: &[u8], bytes_max: usize) -> Option<Vec<u8>> {
    let said = zstd::zstd_safe::get_frame_content_size(payload)
        .ok()
        .flatten();
    let said = said.and_then(|bytes| usize::try_from(bytes).ok());
    let capacity = said.map_or(bytes_max, |bytes| bytes.min(bytes_max));
    DECOMPRESSOR.with_borrow_mut(|slot| {
        if slot.is_none() {
            *slot = zstd::bulk::Decompressor::new().ok();
        }
        slot.as_mut()?.decompress(payload, capacity).ok()
    })
}

/// The compressed bytes, if they are fewer.
pub(crate) fn compress(plain: &[u8], how: Compression) -> Option<Vec<u8>> {
    if plain.len() < how.from_bytes {
        return None;
    }
    COMPRESSOR.with_borrow_mut(|slot| {
        if slot.is_none() {
            let made = zstd::bulk::Compressor::new(how.level).ok()?;
            *slot = Some((how.level, made));
        }
        let (level, compressor) = slot.as_mut()?;
        if *level != how.level {
            compressor.set_compression_level(how.level).ok()?;
            *level = how.level;
        }
        let compressed = compressor.compress(plain).ok()?;
        (compressed.len() < plain.len()).then_some(compressed)
    })
}

fn checksum(key: &[u8], header: &[u8], payload: &[u8]) -> [u8; 8] {
    let mut hash = Xxh3::new();
    hash.update(&(key.len() as u64).to_le_bytes());
    hash.update(key);
    hash.update(header);
    hash.update(payload);
    hash.digest().to_le_bytes()
}

/// Puts a record into an envelope that belongs to `key`.
///
/// The caller keeps records small enough; see [`split`] for the only kind that grows.
pub(crate) fn seal<T: Encode>(key: &[u8], record: &T) -> Vec<u8> {
    // Records are plain structs far below the limit, so encoding cannot fail. If it ever did, the empty payload would
    // decode to damage, which costs that record alone.
    let plain = bincode::encode_to_vec(record, config()).unwrap_or_default();
    let (flags, payload) = match compress(&plain, COMPRESSION) {
        Some(compressed) => (FLAG_ZSTD, compressed),
        None => (0, plain),
    };
    let mut value = Vec::with_capacity(ENVELOPE_BYTES + payload.len());
    value.extend_from_slice(&MAGIC);
    value.push(VERSION);
    value.push(flags);
    value.extend_from_slice(&(payload.len() as u32).to_le_bytes());
    let sum = checksum(key, &value, &payload);
    value.extend_from_slice(&sum);
    value.extend_from_slice(&payload);
    value
}

/// Checks an envelope without decoding its payload.
pub(crate) fn check<'a>(key: &[u8], value: &'a [u8]) -> Result<(u8, &'a [u8]), Damage> {
    if value.len() < ENVELOPE_BYTES {
        return Err(Damage::Short);
    }
    let (header, rest) = value.split_at(HEADER_BYTES);
    let (sum, payload) = rest.split_at(8);
    if header[..2] != MAGIC {
        return Err(Damage::Magic);
    }
    if header[2] != VERSION || header[3] & !FLAG_ZSTD != 0 {
        return Err(Damage::Version);
    }
    if header[4..] != (payload.len() as u32).to_le_bytes() {
        return Err(Damage::Length);
    }
    if sum != checksum(key, header, payload) {
        return Err(Damage::Checksum);
    }
    Ok((header[3], payload))
}

/// Takes a record out of the envelope that belongs to `key`.
pub(crate) fn open<T: Decode<()>>(key: &[u8], value: &[u8]) -> Result<T, Damage> {
    let (flags, payload) = check(key, value)?;
    let unpacked;
    let plain = if flags & FLAG_ZSTD != 0 {
        unpacked = decompress(payload, PAYLOAD_BYTES_MAX).ok_or(Damage::Payload)?;
        &unpacked[..]
    } else {
        payload
    };
    match bincode::decode_from_slice(plain, config()) {
        Ok((record, used)) if used == plain.len() => Ok(record),
        _ => Err(Damage::Payload),
    }
}

/// A run of tokens in LEB128. A token takes two or three bytes for real vocabularies, and zstd finds repeats as well
/// as in fixed-width ids.
#[derive(Clone, Debug, PartialEq, Eq, Encode, Decode)]
pub(crate) struct PieceRecord {
    count: u32,
    packed: Vec<u8>,
}

/// Most tokens of one piece.
pub(crate) const PIECE_TOKENS_MAX: usize = 1024;

impl PieceRecord {
    pub(crate) fn new(tokens: &[TokenId]) -> Self {
        let mut packed = Vec::with_capacity(tokens.len() * 3);
        for &token in tokens {
            let mut rest = token;
            while rest >= 0x80 {
                packed.push(rest as u8 | 0x80);
                rest >>= 7;
            }
            packed.push(rest as u8);
        }
        PieceRecord {
            count: tokens.len() as u32,
            packed,
        }
    }

    /// Number of tokens.
    pub(crate) fn len(&self) -> usize {
        self.count as usize
    }

    /// The tokens, or an error if the bytes are no valid run.
    pub(crate) fn tokens(&self) -> Result<Vec<TokenId>, Damage> {
        let mut tokens = Vec::with_capacity((self.count as usize).min(self.packed.len()));
        let (mut token, mut shift) = (0u64, 0u32);
        for &byte in &self.packed {
            token |= u64::from(byte & 0x7f) << shift;
            shift += 7;
            if byte & 0x80 == 0 {
                tokens.push(TokenId::try_from(token).map_err(|_| Damage::Payload)?);
                (token, shift) = (0, 0);
            } else if shift > 28 {
                return Err(Damage::Payload);
            }
        }
        if shift == 0 && tokens.len() == self.count as usize {
            Ok(tokens)
        } else {
            Err(Damage::Payload)
        }
    }
}

/// Splits tokens into sealed pieces under the keys that `key_of(start)` gives. Each piece stays within
/// [`VALUE_BYTES_MAX`] for any ids. Returns (start, key, value) in order.
pub(crate) fn split(
    start: u32,
    tokens: &[TokenId],
    key_of: &impl Fn(u32) -> Vec<u8>,
) -> Vec<(u32, Vec<u8>, Vec<u8>)> {
    let mut pieces = Vec::new();
    let mut at = 0;
    while at < tokens.len() {
        let mut end = tokens.len().min(at + PIECE_TOKENS_MAX);
        loop {
            let piece_start = start + at as u32;
            let key = key_of(piece_start);
            let value = seal(&key, &PieceRecord::new(&tokens[at..end]));
            // One token always fits, so the halving ends.
            if value.len() <= VALUE_BYTES_MAX || end - at == 1 {
                pieces.push((piece_start, key, value));
                break;
            }
            end = at + (end - at) / 2;
        }
        at = end;
    }
    pieces
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn every_flipped_bit_is_noticed() {
        let key = b"key";
        for count in [3u32, 500] {
            let record = PieceRecord::new(&(0..count).map(|i| i * 37 % 50_000).collect::<Vec<_>>());
            let value = seal(key, &record);
            assert_eq!(open::<PieceRecord>(key, &value).unwrap(), record);
            for bit in 0..value.len() * 8 {
                let mut damaged = value.clone();
                damaged[bit / 8] ^= 1 << (bit % 8);
                assert!(open::<PieceRecord>(key, &damaged).is_err(), "bit {bit}");
            }
            for len in 0..value.len() {
                assert!(open::<PieceRecord>(key, &value[..len]).is_err());
            }
            assert_eq!(open::<PieceRecord>(b"yek", &value), Err(Damage::Checksum));
        }
    }

    #[test]
    fn a_false_length_allocates_nothing() {
        // A correct envelope around a payload that claims 2^60 packed bytes.
        #[derive(Encode)]
        struct Liar(u32, u64);
        let value = seal(b"k", &Liar(4, 1 << 60));
        assert_eq!(open::<PieceRecord>(b"k", &value), Err(Damage::Payload));
    }

    proptest! {
        #[test]
        fn pieces_keep_the_tokens_and_the_size_limit(
            tokens in proptest::collection::vec(any::<u32>(), 0..5000),
            start in 0u32..1000,
        ) {
            let key_of = |at: u32| at.to_be_bytes().to_vec();
            let mut read = Vec::new();
            for (at, key, value) in split(start, &tokens, &key_of) {
                prop_assert_eq!(at, start + read.len() as u32);
                prop_assert!(value.len() <= VALUE_BYTES_MAX);
                read.extend(open::<PieceRecord>(&key, &value).unwrap().tokens().unwrap());
            }
            prop_assert_eq!(read, tokens);
        }

        #[test]
        fn any_bytes_are_refused_or_read_without_panic(bytes in proptest::collection::vec(any::<u8>(), 0..200)) {
            let _ = open::<PieceRecord>(b"k", &bytes);
            let record = PieceRecord { count: bytes.len() as u32, packed: bytes };
            let _ = record.tokens();
        }
    }
}
