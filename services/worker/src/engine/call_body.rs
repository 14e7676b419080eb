//! The body of a call that generates: the fields of a dialect, and the token ids of the text.
//!
//! A text may have a hundred thousand tokens. As JSON values they would take eight times their size, and be built
//! only to be written, so the ids are written from where they are.

use refrain_protocol::{ApiError, TokenId};
use serde_json::Value;

use super::generate::GenerateRequest;

/// Bytes of the fields of most calls.
const FIELDS_BYTES: usize = 1 << 10;

/// Bytes that a token id takes in a list, for vocabularies of up to a million tokens.
const ID_BYTES: usize = 7;

/// Bytes that an id takes at most while it is written: two digits, and then eight bytes, or ten digits and a comma.
const ID_BYTES_MAX: usize = 11;

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

/// Appends a list of ids.
fn push_ids(json: &mut Vec<u8>, ids: &[TokenId]) {
    json.push(b'[');
    let mut gathered = [0; GATHERED_BYTES];
    let mut len = 0;
    for &id in ids {
        if len + ID_BYTES_MAX > GATHERED_BYTES {
            json.extend_from_slice(&gathered[..len]);
            len = 0;
        }
        let digits = id.checked_ilog10().map_or(1, |log| log as usize + 1);
        // The first digits of an id of more than eight.
        let first = digits.saturating_sub(8);
        if first > 0 {
            put(&mut gathered, len, id / 100_000_000, first);
        }
        put(&mut gathered, len + first, id % 100_000_000, digits - first);
        gathered[len + digits] = b',';
        len += digits + 1;
    }
    // Nothing follows the last id.
    json.extend_from_slice(&gathered[..len.saturating_sub(1)]);
    json.push(b']');
}

/// Writes a number of at most eight digits, of which it has `digits`, and leaves anything behind them.
fn put(gathered: &mut [u8; GATHERED_BYTES], at: usize, number: u32, digits: usize) {
    let text = eight_digits(number) >> (8 * (8 - digits));
    gathered[at..at + 8].copy_from_slice(&text.to_le_bytes());
}

/// The eight digits of a number below 10^8 as text, the first one in the lowest byte.
///
/// All are computed at once, two numbers of four digits, then four of two, then eight of one. A loop over the digits
/// takes twice as long, since the processor cannot foresee where it ends.
fn eight_digits(number: u32) -> u64 {
    let fours = u64::from(number / 10_000) | u64::from(number % 10_000) << 32;
    // x * 10486 / 2^20 is x / 100 for all x below 10,000, and x * 103 / 2^10 is x / 10 for all x below 100.
    let hundreds = ((fours * 10_486) >> 20) & 0x7f_0000_007f;
    let twos = hundreds | (fours - 100 * hundreds) << 16;
    let tens = ((twos * 103) >> 10) & 0x000f_000f_000f_000f;
    let ones = tens | (twos - 10 * tens) << 8;
    ones | u64::from_le_bytes([b'0'; 8])
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
    fn every_number_of_eight_digits_is_written_as_the_library_does() {
        // All numbers of four digits in either half.
        for half in 0..10_000 {
            for number in [half, half * 10_000, half * 10_000 + 9_999 - half] {
                let text = eight_digits(number).to_le_bytes();
                assert_eq!(text, format!("{number:08}").as_bytes());
            }
        }
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
