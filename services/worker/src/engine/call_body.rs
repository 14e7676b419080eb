//! The body of a call that generates: the fields of a dialect, and the token ids of the text.
//!
//! A text may have a hundred thousand tokens. As JSON values they would take eight times their size, and be built
//! only to be written, so the ids are written from where they are.

use std::sync::LazyLock;

use refrain_protocol::{ApiError, TokenId};
use serde_json::Value;

use super::generate::GenerateRequest;

/// Bytes of the fields of most calls.
const FIELDS_BYTES: usize = 1 << 10;

/// Bytes that a token id takes in a list, for vocabularies of up to a million tokens.
const ID_BYTES: usize = 7;

/// Bytes that the writing of an id touches at most: the text of ten digits, and what is left of the last piece.
const ID_BYTES_MAX: usize = 24;

/// Bytes of ids that are gathered before they are appended, since an append takes longer than an id.
const GATHERED_BYTES: usize = 1 << 10;

/// The body of a call, as JSON.
pub(super) struct CallBody<'a> {
    fields: &'a Value,
    tokens: Option<(&'static str, &'a [TokenId])>,
}

impl<'a> CallBody<'a> {
    /// The body with these fields, an object, and with the tokens of `request` in the field `tokens_field`, if there
    /// is one.
    pub(super) fn new(
        fields: &'a Value,
        tokens_field: Option<&'static str>,
        request: &'a GenerateRequest,
    ) -> Self {
        CallBody {
            fields,
            tokens: tokens_field.map(|field| (field, &*request.tokens)),
        }
    }

    /// The bytes of the body.
    ///
    /// The ids of a long text are most of it, and are written by hand: with `serde_json` they were a fifth of what a
    /// chat of 50,000 tokens costs the mesh.
    ///
    /// # Errors
    /// `Internal` if a value cannot be written as JSON.
    pub(super) fn to_json(&self) -> Result<Vec<u8>, ApiError> {
        let tokens = self.tokens.map_or(0, |(_, tokens)| tokens.len());
        // A buffer that grows copies what it has.
        let mut json = Vec::with_capacity(FIELDS_BYTES + tokens * ID_BYTES);
        serde_json::to_writer(&mut json, self.fields).map_err(ApiError::internal)?;
        let Some((field, tokens)) = self.tokens else {
            return Ok(json);
        };
        // The object goes on instead of its end.
        json.pop();
        if json.len() > 1 {
            json.push(b',');
        }
        serde_json::to_writer(&mut json, field).map_err(ApiError::internal)?;
        json.push(b':');
        push_ids(&mut json, tokens);
        json.push(b'}');
        Ok(json)
    }
}

/// Numbers of four digits.
const FOUR_DIGITS: u32 = 10_000;

/// A text of at most seven bytes, from the lowest byte on, and its length in the highest byte.
#[derive(Clone, Copy)]
struct Piece(u64);

impl Piece {
    fn new(text: &str) -> Self {
        let mut bytes = [0; 8];
        for (byte, of_text) in bytes.iter_mut().zip(text.bytes()) {
            *byte = of_text;
        }
        bytes[7] = text.len() as u8;
        Piece(u64::from_le_bytes(bytes))
    }

    /// Writes the text, and leaves anything behind it. Returns where it ends.
    fn put(self, gathered: &mut [u8; GATHERED_BYTES], at: usize) -> usize {
        gathered[at..at + 8].copy_from_slice(&self.0.to_le_bytes());
        at + (self.0 >> 56) as usize
    }
}

/// The texts of all numbers of four digits. They are 320 kB, of which ids use a part.
///
/// Two pieces take half as long as a loop over the digits, whose end the processor cannot foresee. They also take
/// half as long as arithmetic on eight digits at once.
struct Pieces {
    /// The digits before the last four. Nothing for 0.
    first: Vec<Piece>,
    /// The last four digits, with the zeros before them.
    middle: Vec<Piece>,
    /// The last digits and the comma: of an id of at most four digits, then with the zeros before them.
    last: Vec<Piece>,
}

static PIECES: LazyLock<Pieces> = LazyLock::new(|| {
    let all = || 0..FOUR_DIGITS;
    let short = all().map(|number| Piece::new(&format!("{number},")));
    let long = all().map(|number| Piece::new(&format!("{number:04},")));
    let first = all().map(|number| match number {
        0 => Piece::new(""),
        _ => Piece::new(&number.to_string()),
    });
    Pieces {
        first: first.collect(),
        middle: all()
            .map(|number| Piece::new(&format!("{number:04}")))
            .collect(),
        last: short.chain(long).collect(),
    }
});

/// Appends a list of ids.
fn push_ids(json: &mut Vec<u8>, ids: &[TokenId]) {
    json.push(b'[');
    let pieces = &*PIECES;
    let mut gathered = [0; GATHERED_BYTES];
    let mut len = 0;
    for &id in ids {
        if len + ID_BYTES_MAX > GATHERED_BYTES {
            json.extend_from_slice(&gathered[..len]);
            len = 0;
        }
        let (before, last) = (id / FOUR_DIGITS, id % FOUR_DIGITS);
        let is_long = u32::from(before > 0);
        len = match before / FOUR_DIGITS {
            0 => pieces.first[before as usize].put(&mut gathered, len),
            // No vocabulary has so many tokens.
            first => {
                let len = pieces.first[first as usize].put(&mut gathered, len);
                pieces.middle[(before % FOUR_DIGITS) as usize].put(&mut gathered, len)
            }
        };
        let last = pieces.last[(is_long * FOUR_DIGITS + last) as usize];
        len = last.put(&mut gathered, len);
    }
    // Nothing follows the last id.
    json.extend_from_slice(&gathered[..len.saturating_sub(1)]);
    json.push(b']');
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn checked(fields: &Value, tokens: Option<(&'static str, &[TokenId])>) {
        let mut whole = fields.clone();
        if let Some((field, tokens)) = tokens {
            whole[field] = json!(tokens);
        }
        let body = CallBody { fields, tokens };
        let json = String::from_utf8(body.to_json().unwrap()).unwrap();
        assert_eq!(json, whole.to_string());
    }

    #[test]
    fn the_bytes_are_those_of_the_library() {
        let fields = json!({"a": "\"}", "b": {}, "c": [1.5, null]});
        let ids = [0, 1, 9, 10, 99, 100, 999_999, 1_000_000, u32::MAX];
        for tokens in [&ids[..], &ids[..1], &[]] {
            checked(&fields, Some(("prompt", tokens)));
            checked(&json!({}), Some(("prompt", tokens)));
        }
        checked(&fields, None);
        checked(&json!({}), None);
    }

    #[test]
    fn every_number_of_four_digits_is_written_as_the_library_does_wherever_it_stands() {
        let ids: Vec<TokenId> = (0..FOUR_DIGITS)
            .flat_map(|number| {
                [
                    number,
                    number * FOUR_DIGITS,
                    number * FOUR_DIGITS + 9_999 - number,
                ]
            })
            .chain((0..42).map(|number| 123_456_789 + number * 99_999_999))
            .collect();
        checked(&json!({}), Some(("prompt", &ids)));
    }

    #[test]
    fn long_lists_of_all_lengths_of_ids_are_written_as_the_library_does() {
        let ids: Vec<TokenId> = (0..3_000u32)
            .map(|at| at.wrapping_mul(2_654_435_761) >> (at % 32))
            .collect();
        for end in 2_900..3_000 {
            checked(&json!({"n": 1}), Some(("input_ids", &ids[..end])));
        }
    }
}
