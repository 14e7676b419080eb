//! Reading a document's text and head, from its segment or from the log.

use refrain_protocol::TokenId;
use refrain_protocol::document::{DocumentHead, DocumentUpdate};

use crate::catalog::Catalog;
use crate::codec::{self, Damage, PIECE_TOKENS_MAX, PieceRecord};
use crate::log::{LogError, RecordLog};
use crate::record::{
    DocumentKey, HeadRecord, RecordKind, document_key, finish_of, piece_key, piece_start_of,
};
use crate::shared_store::OpenStore;

/// A stored run of tokens.
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

/// The lowest possible key of the piece that holds position `at`.
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
    catalog: &Catalog,
    log: &dyn RecordLog,
    key: DocumentKey,
    start: u32,
    end: u32,
) -> Result<Vec<TokenId>, TextError> {
    if let Some((sealed, _)) = catalog.sealed(key) {
        let text = sealed.text(key.document).ok_or(Damage::Short)?;
        let range = text.get(start as usize..end as usize);
        return Ok(range.ok_or(Damage::Short)?.to_vec());
    }
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

/// The head of a document.
pub(crate) fn head(
    catalog: &Catalog,
    log: &dyn RecordLog,
    key: DocumentKey,
) -> Result<DocumentHead, TextError> {
    if let Some((sealed, slot)) = catalog.sealed(key) {
        return Ok(sealed.head(slot.number)?);
    }
    let head_key = document_key(RecordKind::Head, key);
    let value = log.get(&head_key)?.ok_or(Damage::Short)?;
    Ok(codec::open::<HeadRecord>(&head_key, &value)?.0)
}

/// All tokens of an unsealed document, and the start positions of its pieces.
pub(crate) fn pieces(
    log: &dyn RecordLog,
    key: DocumentKey,
    len: u32,
) -> Result<(Vec<TokenId>, Vec<u32>), TextError> {
    let mut tokens = Vec::with_capacity(len as usize);
    let mut starts = Vec::new();
    let mut damage = None;
    log.scan(
        &piece_key(key, 0),
        &piece_key(key, u32::MAX),
        &mut |key, value| match Piece::open(key, value) {
            Ok(piece) if piece.start as usize == tokens.len() => {
                starts.push(piece.start);
                tokens.extend_from_slice(&piece.tokens);
                true
            }
            other => {
                damage = Some(other.err().unwrap_or(Damage::Short));
                false
            }
        },
    )?;
    match damage {
        Some(damage) => Err(damage.into()),
        None if tokens.len() != len as usize => Err(Damage::Short.into()),
        None => Ok((tokens, starts)),
    }
}

/// The complete document, as the catalog knows it.
pub(crate) fn read_document(
    open: &OpenStore,
    key: DocumentKey,
) -> Result<DocumentUpdate, TextError> {
    let known = open.catalog.document(key).ok_or(codec::Damage::Short)?;
    Ok(DocumentUpdate {
        document: key.document,
        epoch: known.state.epoch,
        prev_len: 0,
        tokens: read(&open.catalog, &*open.log, key, 0, known.state.len)?,
        head: head(&open.catalog, &*open.log, key)?,
        finish: finish_of(known.state.finish),
    })
}
