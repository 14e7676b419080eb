//! The bytes of a token, by its spelling in the vocabulary.
//!
//! A tokenizer file spells tokens in one of two ways. With *byte level* (GPT-2, Llama 3, Qwen), a printable character
//! represents each byte. With *sentence pieces* (Llama 2, Mistral, Gemma), a mark represents a space, and `<0xAB>` a
//! byte without a piece of its own. The decoder in the file shows which way it is. The library's text decoder is not
//! used, because tokens that are half a character have exact bytes, but no text.

use std::collections::HashMap;

use serde_json::Value;

/// The way in which a vocabulary spells its tokens.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum TokenSpelling {
    /// A character represents each byte.
    ByteLevel(HashMap<char, u8>),
    /// Tokens are text, with a mark for spaces, or `<0xAB>` for single bytes.
    Pieces {
        /// The mark that represents a space.
        mark: String,
    },
}

impl TokenSpelling {
    /// Finds the spelling in the parsed `tokenizer.json`.
    pub(crate) fn of(file: &Value) -> Result<TokenSpelling, String> {
        let mut decoders = Vec::new();
        collect(&file["decoder"], "decoders", &mut decoders);
        if decoders.is_empty() {
            collect(&file["pre_tokenizer"], "pretokenizers", &mut decoders);
        }
        for decoder in &decoders {
            match decoder["type"].as_str() {
                Some("ByteLevel") => return Ok(TokenSpelling::ByteLevel(byte_characters())),
                Some("Metaspace") => {
                    let mark = decoder["replacement"].as_str().unwrap_or("\u{2581}");
                    return Ok(TokenSpelling::Pieces {
                        mark: mark.to_owned(),
                    });
                }
                Some("Replace") if decoder["content"].as_str() == Some(" ") => {
                    if let Some(mark) = decoder["pattern"]["String"].as_str() {
                        return Ok(TokenSpelling::Pieces {
                            mark: mark.to_owned(),
                        });
                    }
                }
                _ => {}
            }
        }
        let names: Vec<_> = decoders
            .iter()
            .filter_map(|decoder| decoder["type"].as_str())
            .collect();
        Err(format!(
            "decoder {names:?} is not supported; use ByteLevel, Metaspace, or Replace of a mark by a space"
        ))
    }

    /// The byte that a token of the model's vocabulary represents, if it represents exactly one.
    pub(crate) fn byte(&self, token: &str) -> Option<u8> {
        match self {
            TokenSpelling::ByteLevel(characters) => {
                let mut token = token.chars();
                let byte = characters.get(&token.next()?);
                byte.filter(|_| token.next().is_none()).copied()
            }
            TokenSpelling::Pieces { .. } => token
                .strip_prefix("<0x")
                .and_then(|rest| rest.strip_suffix('>'))
                .filter(|digits| digits.len() == 2)
                .and_then(|digits| u8::from_str_radix(digits, 16).ok()),
        }
    }

    /// The bytes of a token of the model's vocabulary. Added tokens are not spelt: their text is their bytes.
    pub(crate) fn bytes(&self, token: &str) -> Vec<u8> {
        match self {
            TokenSpelling::ByteLevel(characters) => {
                let mut bytes = Vec::with_capacity(token.len());
                for character in token.chars() {
                    match characters.get(&character) {
                        Some(byte) => bytes.push(*byte),
                        None => {
                            bytes.extend_from_slice(character.encode_utf8(&mut [0; 4]).as_bytes());
                        }
                    }
                }
                bytes
            }
            TokenSpelling::Pieces { mark } => match self.byte(token) {
                Some(byte) => vec![byte],
                None => token.replace(mark, " ").into_bytes(),
            },
        }
    }
}

/// Collects a decoder and the decoders inside it, in order.
fn collect<'a>(decoder: &'a Value, inner: &str, found: &mut Vec<&'a Value>) {
    if decoder.is_null() {
        return;
    }
    found.push(decoder);
    for part in decoder[inner].as_array().into_iter().flatten() {
        collect(part, inner, found);
    }
}

/// GPT-2's table: printable Latin-1 characters represent themselves, and characters from U+0100 on the other bytes.
fn byte_characters() -> HashMap<char, u8> {
    let printable = |byte: u8| matches!(byte, b'!'..=b'~' | 0xA1..=0xAC | 0xAE..=0xFF);
    let mut table: HashMap<char, u8> = (0..=255u8)
        .filter(|byte| printable(*byte))
        .map(|byte| (char::from(byte), byte))
        .collect();
    let others = (0..=255u8).filter(|byte| !printable(*byte));
    table.extend(('\u{100}'..).zip(others));
    table
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn all_bytes_have_a_character() {
        let mut bytes: Vec<u8> = byte_characters().into_values().collect();
        bytes.sort_unstable();
        assert_eq!(bytes, (0..=255).collect::<Vec<u8>>());
        let spelling = TokenSpelling::ByteLevel(byte_characters());
        assert_eq!(spelling.bytes("\u{120}the\u{10a}"), b" the\n");
    }

    #[test]
    fn pieces_have_marks_and_bytes() {
        let file = json!({"decoder": {"type": "Sequence", "decoders": [
            {"type": "Replace", "pattern": {"String": "\u{2581}"}, "content": " "},
            {"type": "ByteFallback"}, {"type": "Fuse"}]}});
        let spelling = TokenSpelling::of(&file).unwrap();
        assert_eq!(spelling.bytes("\u{2581}the"), b" the");
        assert_eq!(spelling.bytes("<0xE2>"), [0xE2]);
        assert_eq!(spelling.bytes("<0xZZ>"), b"<0xZZ>");
    }

    #[test]
    fn an_unknown_decoder_is_refused_by_name() {
        let error = TokenSpelling::of(&json!({"decoder": {"type": "WordPiece"}})).unwrap_err();
        assert!(error.contains("WordPiece"), "{error}");
    }
}
