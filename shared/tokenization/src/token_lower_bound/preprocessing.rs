//! The steps of a `tokenizer.json` before the model, and whether they keep all text.

use serde_json::Value;

use crate::token_spelling::TokenSpelling;

/// Whether the model has a token for every byte. Then it never drops text and never needs a token for unknown text.
pub(super) fn covers_all_bytes(file: &Value, spelling: &TokenSpelling, tokens: &[&str]) -> bool {
    let model = &file["model"];
    let is_empty = |value: &Value| value.as_str().is_none_or(str::is_empty);
    let kind = match model["type"].as_str() {
        Some(kind) => kind,
        None if model["merges"].is_array() => "BPE",
        None => "",
    };
    let is_known = match (kind, spelling) {
        ("BPE", TokenSpelling::ByteLevel(_)) => true,
        ("BPE" | "Unigram", TokenSpelling::Pieces { .. }) => model["byte_fallback"] == true,
        _ => false,
    };
    let mut has = [false; 256];
    for byte in tokens.iter().filter_map(|token| spelling.byte(token)) {
        has[usize::from(byte)] = true;
    }
    is_known
        && is_empty(&model["continuing_subword_prefix"])
        && is_empty(&model["end_of_word_suffix"])
        && has.iter().all(|has| *has)
}

/// The steps through which a text goes before the model sees it.
#[derive(Default)]
pub(super) struct Preprocessing {
    /// Bytes become the characters that represent them.
    pub(super) byte_level: bool,
    /// Some pieces of the text get a space in front.
    pub(super) adds_space: bool,
    /// The text is normalised to NFC.
    pub(super) composes: bool,
}

impl Preprocessing {
    /// Reads the steps of the parsed `tokenizer.json`. `None` if one of them may shorten the text in an unknown way.
    pub(super) fn read(file: &Value, spelling: &TokenSpelling) -> Option<Self> {
        let mut steps = Preprocessing::default();
        steps.add_normalizer(&file["normalizer"], spelling)?;
        steps.add_pre_tokenizer(&file["pre_tokenizer"])?;
        Some(steps)
    }

    /// Adds a normalizer. `None` if it may shorten the text in another way than NFC does.
    fn add_normalizer(&mut self, step: &Value, spelling: &TokenSpelling) -> Option<()> {
        if step.is_null() {
            return Some(());
        }
        let mark = match spelling {
            TokenSpelling::Pieces { mark } => mark.as_str(),
            TokenSpelling::ByteLevel(_) => " ",
        };
        match step["type"].as_str()? {
            "Sequence" => {
                for part in step["normalizers"].as_array()? {
                    self.add_normalizer(part, spelling)?;
                }
            }
            "NFC" => self.composes = true,
            "ByteLevel" => self.byte_level = true,
            "Prepend" if step["prepend"] == mark => self.adds_space = true,
            "Replace" if step["pattern"]["String"] == " " && step["content"] == mark => {}
            _ => return None,
        }
        Some(())
    }

    /// Adds a pre-tokenizer. `None` if it may drop text.
    fn add_pre_tokenizer(&mut self, step: &Value) -> Option<()> {
        if step.is_null() {
            return Some(());
        }
        match step["type"].as_str()? {
            "Sequence" => {
                for part in step["pretokenizers"].as_array()? {
                    self.add_pre_tokenizer(part)?;
                }
            }
            "ByteLevel" => {
                self.byte_level = true;
                self.adds_space |= step["add_prefix_space"] != false;
            }
            "Metaspace" => self.adds_space = true,
            "Split" | "Punctuation" if step["behavior"] != "Removed" => {}
            "Digits" | "UnicodeScripts" => {}
            _ => return None,
        }
        Some(())
    }
}
