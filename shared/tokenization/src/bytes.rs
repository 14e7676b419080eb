//! What bytes a token of the vocabulary stands for.
//!
//! A tokenizer file spells tokens in one of two ways. *Byte level* (GPT-2, Llama 3, Qwen): every byte has a
//! printable stand-in character. *Sentence pieces* (Llama 2, Mistral, Gemma): text with a mark in the place
//! of spaces, and `<0xAB>` for bytes without a piece of their own. The decoder named in the file says which.
//! Going through bytes, rather than through the library's text decoder, keeps tokens that are half a
//! character exact.

use std::collections::HashMap;

use serde_json::Value;

/// How a vocabulary is spelt.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Spelling {
    /// Each byte has a stand-in character.
    ByteLevel(HashMap<char, u8>),
    /// Text with this mark for a space, and `<0xAB>`.
    Pieces {
        /// Stands for a space.
        mark: String,
    },
}

impl Spelling {
    /// Finds out from the parsed `tokenizer.json`.
    pub(crate) fn of(file: &Value) -> Result<Spelling, String> {
        let mut decoders = Vec::new();
        collect(&file["decoder"], "decoders", &mut decoders);
        if decoders.is_empty() {
            collect(&file["pre_tokenizer"], "pretokenizers", &mut decoders);
        }
        for decoder in &decoders {
            match decoder["type"].as_str() {
                Some("ByteLevel") => return Ok(Spelling::ByteLevel(stand_ins())),
                Some("Metaspace") => {
                    let mark = decoder["replacement"].as_str().unwrap_or("\u{2581}");
                    return Ok(Spelling::Pieces {
                        mark: mark.to_owned(),
                    });
                }
                Some("Replace") if decoder["content"].as_str() == Some(" ") => {
                    if let Some(mark) = decoder["pattern"]["String"].as_str() {
                        return Ok(Spelling::Pieces {
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
            "decoder {names:?} is not supported: ByteLevel, Metaspace, or Replace of a mark by a space"
        ))
    }

    /// The byte that a token of the model's vocabulary is there for, if it is there for one byte.
    pub(crate) fn byte(&self, token: &str) -> Option<u8> {
        match self {
            Spelling::ByteLevel(stand_ins) => {
                let mut characters = token.chars();
                let byte = stand_ins.get(&characters.next()?);
                byte.filter(|_| characters.next().is_none()).copied()
            }
            Spelling::Pieces { .. } => token
                .strip_prefix("<0x")
                .and_then(|rest| rest.strip_suffix('>'))
                .filter(|digits| digits.len() == 2)
                .and_then(|digits| u8::from_str_radix(digits, 16).ok()),
        }
    }

    /// The bytes of a token of the model's vocabulary (not of an added one, which stands for itself).
    pub(crate) fn bytes(&self, token: &str) -> Vec<u8> {
        match self {
            Spelling::ByteLevel(stand_ins) => {
                let mut bytes = Vec::with_capacity(token.len());
                for character in token.chars() {
                    match stand_ins.get(&character) {
                        Some(byte) => bytes.push(*byte),
                        None => {
                            bytes.extend_from_slice(character.encode_utf8(&mut [0; 4]).as_bytes())
                        }
                    }
                }
                bytes
            }
            Spelling::Pieces { mark } => match self.byte(token) {
                Some(byte) => vec![byte],
                None => token.replace(mark, " ").into_bytes(),
            },
        }
    }
}

/// A decoder and those inside it, in order.
fn collect<'a>(decoder: &'a Value, inner: &str, found: &mut Vec<&'a Value>) {
    if decoder.is_null() {
        return;
    }
    found.push(decoder);
    for part in decoder[inner].as_array().into_iter().flatten() {
        collect(part, inner, found);
    }
}

/// GPT-2's table: printable Latin-1 stands for itself, the other bytes for the characters from U+0100 on.
fn stand_ins() -> HashMap<char, u8> {
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
    fn all_bytes_have_a_stand_in() {
        let mut bytes: Vec<u8> = stand_ins().into_values().collect();
        bytes.sort_unstable();
        assert_eq!(bytes, (0..=255).collect::<Vec<u8>>());
        let spelling = Spelling::ByteLevel(stand_ins());
        assert_eq!(spelling.bytes("\u{120}the\u{10a}"), b" the\n");
    }

    #[test]
    fn pieces_have_marks_and_bytes() {
        let file = json!({"decoder": {"type": "Sequence", "decoders": [
            {"type": "Replace", "pattern": {"String": "\u{2581}"}, "content": " "},
            {"type": "ByteFallback"}, {"type": "Fuse"}]}});
        let spelling = Spelling::of(&file).unwrap();
        assert_eq!(spelling.bytes("\u{2581}the"), b" the");
        assert_eq!(spelling.bytes("<0xE2>"), [0xE2]);
        assert_eq!(spelling.bytes("<0xZZ>"), b"<0xZZ>");
    }

    #[test]
    fn an_unknown_decoder_is_refused_by_name() {
        let error = Spelling::of(&json!({"decoder": {"type": "WordPiece"}})).unwrap_err();
        assert!(error.contains("WordPiece"), "{error}");
    }
}
