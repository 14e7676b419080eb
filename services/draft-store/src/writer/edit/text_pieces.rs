//! A document's text in pieces: small ones as they come, which are merged now and then.

use refrain_protocol::TokenId;

use crate::codec::{self, Damage, PIECE_TOKENS_MAX};
use crate::reading::document_text::{Piece, TextError, key_before};
use crate::record::{DocumentKey, StateRecord, piece_key};
use crate::writer::edit::pending_writes::PendingWrites;

/// Small pieces of a document before they are merged. Fewer cause more writes of the same text; more take more memory
/// until the document is sealed.
const TAIL_PIECES_MAX: u16 = 64;

/// Stores tokens at `at`, in place of everything from there on.
pub(super) fn store_text(
    writes: &mut PendingWrites,
    key: DocumentKey,
    state: &mut StateRecord,
    at: u32,
    tokens: &[TokenId],
) -> Result<(), TextError> {
    let len = state.len;
    let merges = state.tail_pieces >= TAIL_PIECES_MAX || tokens.len() >= PIECE_TOKENS_MAX;
    let mut from = at;
    let mut joined = Vec::new();
    if at < len || (merges && state.tail_pieces > 0) {
        let mut lowest = if at < len {
            key_before(key, at)
        } else {
            piece_key(key, at)
        };
        if merges {
            lowest = lowest.min(piece_key(key, state.tail_start));
        }
        for piece in pieces(writes, key, lowest, len)? {
            // A piece before the cut stays, unless it is one of the small ones that are merged now.
            let merged = merges && piece.start >= state.tail_start;
            if piece.end() <= at && !merged {
                continue;
            }
            state.bytes = state.bytes.saturating_sub(piece.bytes);
            writes.remove(piece_key(key, piece.start));
            if piece.start < at {
                let kept = ((at - piece.start) as usize).min(piece.tokens.len());
                from = from.min(piece.start);
                joined.extend_from_slice(&piece.tokens[..kept]);
            }
        }
    }
    joined.extend_from_slice(tokens);
    let pieces = codec::split(from, &joined, &|start| piece_key(key, start));
    state.len = at + tokens.len() as u32;
    if from <= state.tail_start {
        state.tail_start = from;
        state.tail_pieces = 0;
    }
    if merges {
        // A last piece with space left is merged again when the document continues.
        let last = pieces.last().map_or(state.len, |(start, ..)| *start);
        let open = ((state.len - last) as usize) < PIECE_TOKENS_MAX;
        state.tail_start = if open { last } else { state.len };
        state.tail_pieces = u16::from(open && last < state.len);
    } else {
        state.tail_pieces = state.tail_pieces.saturating_add(pieces.len() as u16);
    }
    for (_, piece_key, value) in pieces {
        state.bytes = state
            .bytes
            .saturating_add((piece_key.len() + value.len()) as u32);
        writes.batch.put(piece_key, value);
    }
    Ok(())
}

/// The pieces of a document from a key on, including the writes of this commit. They are contiguous and end at
/// `len`.
pub(super) fn pieces(
    writes: &PendingWrites,
    key: DocumentKey,
    from: Vec<u8>,
    len: u32,
) -> Result<Vec<Piece>, TextError> {
    let records = writes.scan(&from, &piece_key(key, u32::MAX))?;
    let mut pieces: Vec<Piece> = Vec::with_capacity(records.len());
    for (key, value) in &records {
        let piece = Piece::open(key, value)?;
        if pieces.last().is_some_and(|last| last.end() != piece.start) {
            return Err(Damage::Short.into());
        }
        pieces.push(piece);
    }
    if pieces.last().map_or(0, Piece::end) != len && len > 0 {
        return Err(Damage::Short.into());
    }
    Ok(pieces)
}
