//! The checks of a `tokenizer.json` before a library builds anything of it.
//!
//! The libraries make tables up to the largest id, and normalize each added token.

use serde_json::Value;

use crate::TokenId;

/// Largest accepted id. The tables need memory for every id up to the largest one.
pub(super) const TOKEN_ID_MAX: TokenId = 4_000_000;

/// Maximum number of added tokens. Models of speech have some ten thousand, and the libraries need some time for
/// each.
const ADDED_TOKENS_MAX: usize = 131_072;

/// Largest factor by which the normalizers may lengthen a text. Usual ones replace a space by a mark of three bytes.
const GROWTH_MAX: usize = 256;

/// Refuses a file of which the libraries would make far too much.
pub(super) fn check(file: &Value) -> Result<(), String> {
    let added = file["added_tokens"]
        .as_array()
        .map_or(&[][..], Vec::as_slice);
    if added.len() > ADDED_TOKENS_MAX {
        let count = added.len();
        return Err(format!(
            "{count} added tokens are more than {ADDED_TOKENS_MAX}"
        ));
    }
    let vocabulary = file["model"]["vocab"].as_object().into_iter().flatten();
    let ids = added.iter().map(|token| &token["id"]);
    let ids = ids.chain(vocabulary.map(|(_, id)| id));
    if let Some(largest) = ids.filter_map(Value::as_u64).max() {
        check_id(largest)?;
    }
    let pieces = file["model"]["vocab"].as_array().map_or(0, Vec::len);
    check_id(pieces as u64)?;
    let growth = growth(&file["normalizer"])?;
    match growth > GROWTH_MAX {
        true => Err(format!(
            "its normalizers can make a text {growth} times as long, which is more than {GROWTH_MAX} times"
        )),
        false => Ok(()),
    }
}

fn check_id(largest: u64) -> Result<(), String> {
    match largest > u64::from(TOKEN_ID_MAX) {
        true => Err(format!("token id {largest} is above {TOKEN_ID_MAX}")),
        false => Ok(()),
    }
}

/// By which factor a normalizer may lengthen a text of some length.
fn growth(normalizer: &Value) -> Result<usize, String> {
    let length = |text: &Value| text.as_str().map_or(0, str::len);
    Ok(match normalizer["type"].as_str() {
        Some("Sequence") => {
            let parts = normalizer["normalizers"].as_array().into_iter().flatten();
            parts.map(growth).try_fold(1, |product: usize, part| {
                Ok::<_, String>(product.saturating_mul(part?))
            })?
        }
        Some("Replace") => {
            let content = length(&normalizer["content"]);
            match normalizer["pattern"]["String"].as_str() {
                Some("") => return Err("a normalizer replaces an empty text".into()),
                Some(pattern) => content.div_ceil(pattern.len()).max(1),
                // It may match empty texts, between any two characters.
                None => content.saturating_add(1),
            }
        }
        Some("Prepend") => length(&normalizer["prepend"]).max(1),
        _ => 1,
    })
}
