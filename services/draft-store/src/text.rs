//! Reading a document's text from its pieces.

use refrain_protocol::TokenId;

use crate::codec::{self, Damage, PIECE_TOKENS_MAX, PieceRecord};
use crate::log::{LogError, RecordLog};
use crate::record::{DocumentKey, piece_key, piece_start_of};

/// One stored run of tokens.
pub(crate) struct Piece {
    pub(crate) start: u32,
    /// Bytes of key and value.
    pub(crate) bytes: u32,
    pub(crate) tokens: Vec<TokenId>,
}

impl Piece {
    pub(crate) fn open(key: &[u8], value: &[u8]) -> Result<Self, Damage> {
        let start = piece_start_of(key).ok_or(Damage::Payload)?;
        let tokens = codec::open::<PieceRecord>(key, value)?.tokens()?;
        Ok(Piece {
            start,
            bytes: (key.len() + value.len()) as u32,
            tokens,
        })
    }

    pub(crate) fn end(&self) -> u32 {
        self.start + self.tokens.len() as u32
    }
}

/// The lowest key under which the piece that holds position `at` can stand.
pub(crate) fn key_before(key: DocumentKey, at: u32) -> Vec<u8> {
    piece_key(key, at.saturating_sub(PIECE_TOKENS_MAX as u32 - 1))
}

/// Why a text cannot be read.
#[derive(Debug, thiserror::Error)]
pub(crate) enum TextError {
    #[error(transparent)]
    Log(#[from] LogError),
    /// A piece is damaged or missing.
    #[error("piece: {0}")]
    Damaged(#[from] Damage),
}

/// Tokens `start..end` of a document. The caller keeps the document from changing meanwhile.
pub(crate) fn read(
    log: &dyn RecordLog,
    key: DocumentKey,
    start: u32,
    end: u32,
) -> Result<Vec<TokenId>, TextError> {
    let mut tokens = Vec::with_capacity((end - start) as usize);
    if start == end {
        return Ok(tokens);
    }
    let mut damage = None;
    log.scan(
        &key_before(key, start),
        &piece_key(key, end),
        &mut |key, value| match Piece::open(key, value) {
            Ok(piece) if piece.end() <= start => true,
            Ok(piece) => {
                let have = start + tokens.len() as u32;
                if piece.start > have {
                    return false;
                }
                let from = (have - piece.start) as usize;
                let until = (end.min(piece.end()) - piece.start) as usize;
                tokens.extend_from_slice(piece.tokens.get(from..until).unwrap_or_default());
                true
            }
            Err(found) => {
                damage = Some(found);
                false
            }
        },
    )?;
    if let Some(damage) = damage {
        return Err(damage.into());
    }
    if tokens.len() != (end - start) as usize {
        return Err(Damage::Short.into());
    }
    Ok(tokens)
}
