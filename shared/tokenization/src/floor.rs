//! The fewest tokens that a text can have, told without tokenizing it.
//!
//! Whatever a tokenizer does, its tokens cover the text one after the other. So a text has no fewer tokens than
//! pieces of the vocabulary are needed to cover it. Beside the tokens, every beginning of a token is allowed as a
//! piece here: this can only lower the number, and then a covering of some text covers every shorter beginning of it
//! as well. The fewest pieces that cover a text therefore never fall as it grows, and the last piece may as well be
//! the longest one that fits: `fewest(i) = fewest(i - longest(i)) + 1`. The longest piece that ends at each byte is
//! what the automaton of Aho and Corasick knows (`floor/pieces.rs`). One pass over the bytes does it, and it ends as
//! soon as there are too many.
//!
//! Dividing by the longest token alone was not enough: vocabularies hold runs of a hundred spaces.
//!
//! Some tokenizers throw text away or melt any amount of it into one token. Those have no floor
//! ([`TokenFloor::new`]).

mod pieces;

use std::iter;

use serde_json::Value;
use unicode_normalization_alignments::char::canonical_combining_class;
use unicode_normalization_alignments::{IsNormalized, is_nfc_quick};

use crate::bytes::Spelling;
use pieces::Pieces;

/// Under NFC, bytes of text that can become one byte. (A test goes through all characters.)
const NFC_SHRINK: usize = 4;

/// Counts the fewest tokens of texts, for one vocabulary.
#[derive(Debug)]
pub(crate) struct TokenFloor {
    pieces: Pieces,
    /// Stands for a space in the vocabulary, and may be written in a text as well.
    mark: Option<char>,
    /// Whether some token swallows the white space around it.
    swallows_spaces: bool,
    /// Whether the text is brought to NFC first.
    composes: bool,
}

/// The entries of a vocabulary.
pub(crate) struct Vocabulary<'a> {
    /// As written in the model's part of the file.
    pub(crate) tokens: Vec<&'a str>,
    /// Those that are found in the text before the model sees it.
    pub(crate) added: Vec<&'a str>,
    /// Whether one of these swallows white space.
    pub(crate) swallows_spaces: bool,
}

impl TokenFloor {
    /// From the parsed `tokenizer.json`. `None` if nothing can be promised: the tokenizer may drop text, shorten it
    /// in ways that are not known here, or have one token for any amount of unknown text.
    pub(crate) fn new(
        file: &Value,
        spelling: &Spelling,
        vocabulary: &Vocabulary<'_>,
    ) -> Option<Self> {
        if !covers_all(file, spelling, &vocabulary.tokens) {
            return None;
        }
        let mut steps = Steps::default();
        steps.normalizer(&file["normalizer"], spelling)?;
        steps.pre_tokenizer(&file["pre_tokenizer"])?;
        let mark = match spelling {
            Spelling::ByteLevel(_) if !steps.byte_level => return None,
            Spelling::ByteLevel(_) => None,
            Spelling::Pieces { mark } => {
                let mut characters = mark.chars();
                let first = characters.next()?;
                if characters.next().is_some() {
                    return None;
                }
                Some(first)
            }
        };
        let mut covers: Vec<Vec<u8>> = Vec::new();
        let mut add = |bytes: Vec<u8>| {
            // The space in front may be the tokenizer's own, so the text need not have it.
            if steps.adds_space && bytes.len() > 1 && bytes[0] == b' ' {
                covers.push(bytes[1..].to_vec());
            }
            covers.push(bytes);
        };
        let unmarked = |text: &str| match mark {
            Some(mark) => text.replace(mark, " ").into_bytes(),
            None => text.as_bytes().to_vec(),
        };
        for token in &vocabulary.tokens {
            add(spelling.bytes(token));
            // `<0x41>` is one byte, and may also be found where a text has these six characters.
            if mark.is_some() {
                add(unmarked(token));
            }
        }
        for text in &vocabulary.added {
            add(unmarked(text));
            if steps.adds_space {
                add([b" ".to_vec(), unmarked(text)].concat());
            }
        }
        covers.retain(|bytes| !bytes.is_empty());
        Some(TokenFloor {
            pieces: Pieces::new(covers)?,
            mark,
            swallows_spaces: vocabulary.swallows_spaces,
            composes: steps.composes,
        })
    }

    /// `Some` with a number of tokens above `most` that the text has at least; `None` if it may have `most` or
    /// fewer. `left_out` is a character that is taken out of the text before it is tokenized.
    pub(crate) fn above(&self, text: &str, left_out: Option<char>, most: usize) -> Option<usize> {
        if left_out.is_none() && !self.swallows_spaces {
            let by_length = text.len().div_ceil(self.token_bytes_max());
            if by_length > most {
                return Some(by_length);
            }
        }
        let mut count = Count::new(self);
        for character in text.chars() {
            if Some(character) == left_out {
                continue;
            }
            count.push(character);
            // The next character may change the last one.
            let sure = if self.composes {
                count.before
            } else {
                count.tokens
            };
            if sure > most {
                return Some(sure);
            }
        }
        (count.tokens > most).then_some(count.tokens)
    }

    /// Most bytes of a text that become one token, unless that swallows spaces.
    fn token_bytes_max(&self) -> usize {
        let composed = if self.composes { NFC_SHRINK } else { 1 };
        self.pieces.longest() * composed * self.mark.map_or(1, char::len_utf8)
    }
}

/// The pass over a text.
struct Count<'a> {
    floor: &'a TokenFloor,
    state: pieces::State,
    /// Fewest tokens up to each of the last bytes, as many as a piece is long.
    fewest: Vec<usize>,
    /// Bytes so far.
    at: usize,
    /// Fewest tokens of the text so far.
    tokens: usize,
    /// The same before the last character.
    before: usize,
    /// The next so many bytes may all belong to a token that is counted already.
    free: usize,
}

impl<'a> Count<'a> {
    fn new(floor: &'a TokenFloor) -> Self {
        Count {
            floor,
            state: pieces::State::default(),
            fewest: vec![0; floor.pieces.longest() + 1],
            at: 0,
            tokens: 0,
            before: 0,
            free: 0,
        }
    }

    fn push(&mut self, character: char) {
        if self.floor.composes && changes_by_composition(character) {
            // It may become something else, together with the character before it, so neither counts. The first
            // token that begins behind them does so within the length of a token, and what is before it does not
            // count either.
            self.tokens = self.before;
            self.free = self.floor.pieces.longest();
            self.set();
            return;
        }
        self.before = self.tokens;
        let mark = self.floor.mark;
        let character = if Some(character) == mark {
            ' '
        } else {
            character
        };
        let swallowed = self.floor.swallows_spaces && character.is_whitespace();
        for byte in character.encode_utf8(&mut [0; 4]).bytes() {
            self.state = self.floor.pieces.next(self.state, byte);
            self.at += 1;
            if self.free > 0 {
                self.free -= 1;
            } else if !swallowed {
                let place = (self.at - self.floor.pieces.len(self.state)) % self.fewest.len();
                self.tokens = self.fewest[place] + 1;
            }
            self.set();
        }
    }

    fn set(&mut self) {
        let place = self.at % self.fewest.len();
        self.fewest[place] = self.tokens;
    }
}

/// Whether NFC may change this character, or what stands before it because of it.
fn changes_by_composition(character: char) -> bool {
    // Nothing below the first combining mark.
    character >= '\u{300}'
        && (canonical_combining_class(character) != 0
            || is_nfc_quick(iter::once(character)) != IsNormalized::Yes)
}

/// Whether the model has a token for every byte, so that it leaves nothing out and needs no token for the unknown.
fn covers_all(file: &Value, spelling: &Spelling, tokens: &[&str]) -> bool {
    let model = &file["model"];
    let is_empty = |value: &Value| value.as_str().is_none_or(str::is_empty);
    let kind = match model["type"].as_str() {
        Some(kind) => kind,
        None if model["merges"].is_array() => "BPE",
        None => "",
    };
    let is_known = match (kind, spelling) {
        ("BPE", Spelling::ByteLevel(_)) => true,
        ("BPE" | "Unigram", Spelling::Pieces { .. }) => model["byte_fallback"] == true,
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

/// The steps that a text goes through before the model sees it.
#[derive(Default)]
struct Steps {
    /// Bytes become their stand-ins.
    byte_level: bool,
    /// Some pieces of the text get a space in front.
    adds_space: bool,
    composes: bool,
}

impl Steps {
    /// `None` at a step that may shorten the text in another way than NFC does.
    fn normalizer(&mut self, step: &Value, spelling: &Spelling) -> Option<()> {
        if step.is_null() {
            return Some(());
        }
        let mark = match spelling {
            Spelling::Pieces { mark } => mark.as_str(),
            Spelling::ByteLevel(_) => " ",
        };
        match step["type"].as_str()? {
            "Sequence" => {
                for part in step["normalizers"].as_array()? {
                    self.normalizer(part, spelling)?;
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

    /// `None` at a step that may drop text.
    fn pre_tokenizer(&mut self, step: &Value) -> Option<()> {
        if step.is_null() {
            return Some(());
        }
        match step["type"].as_str()? {
            "Sequence" => {
                for part in step["pretokenizers"].as_array()? {
                    self.pre_tokenizer(part)?;
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

#[cfg(test)]
mod tests;
