//! A lower bound of the number of tokens of a text, without encoding it.
//!
//! The tokens of a text cover it one after the other. So a text has at least as many tokens as pieces of the
//! vocabulary are needed to cover it. Here, every prefix of a token is allowed as a piece too. That can only lower
//! the number. A covering of a text then also covers every prefix of the text, so the smallest number of pieces never
//! falls as the text grows. Therefore the last piece can always be the longest one that fits: `fewest(i) = fewest(i -
//! longest(i)) + 1`. The automaton of Aho and Corasick knows the longest piece that ends at each byte
//! (`piece_automaton.rs`). One pass over the bytes is enough, and it stops as soon as there are too many tokens.
//!
//! Dividing the length by the longest token was not enough, because vocabularies contain runs of a hundred spaces.
//!
//! Some tokenizers drop text, or turn any amount of it into one token. They have no lower bound, see
//! [`TokenLowerBound::new`] and `preprocessing.rs`.

mod piece_automaton;
mod preprocessing;

use std::iter;

use serde_json::Value;
use unicode_normalization_alignments::char::canonical_combining_class;
use unicode_normalization_alignments::{IsNormalized, is_nfc_quick};

use self::piece_automaton::{PieceAutomaton, PieceState};
use self::preprocessing::{Preprocessing, covers_all_bytes};
use crate::token_spelling::TokenSpelling;

#[cfg(test)]
mod tests;

/// Maximum number of bytes of text that NFC can turn into one byte. A test checks this with all characters.
const NFC_SHRINK: usize = 4;

/// Computes lower bounds of the number of tokens, for one vocabulary.
#[derive(Debug)]
pub(crate) struct TokenLowerBound {
    pieces: PieceAutomaton,
    /// The character that represents a space in the vocabulary. A text may contain it as well.
    mark: Option<char>,
    /// Whether some token absorbs the white space around it.
    absorbs_spaces: bool,
    /// Whether the text is normalised to NFC first.
    composes: bool,
}

/// The entries of a vocabulary.
pub(crate) struct Vocabulary<'a> {
    /// The tokens of the model, as spelt in the file.
    pub(crate) tokens: Vec<&'a str>,
    /// The added tokens, which are found in the text before the model sees it.
    pub(crate) added: Vec<&'a str>,
    /// Whether an added token absorbs white space.
    pub(crate) absorbs_spaces: bool,
}

impl TokenLowerBound {
    /// Reads the parsed `tokenizer.json`. `None` if there is no bound: the tokenizer may drop text, shorten it in
    /// unknown ways, or have one token for any amount of unknown text.
    pub(crate) fn new(
        file: &Value,
        spelling: &TokenSpelling,
        vocabulary: &Vocabulary<'_>,
    ) -> Option<Self> {
        if !covers_all_bytes(file, spelling, &vocabulary.tokens) {
            return None;
        }
        let steps = Preprocessing::read(file, spelling)?;
        let mark = match spelling {
            TokenSpelling::ByteLevel(_) if !steps.byte_level => return None,
            TokenSpelling::ByteLevel(_) => None,
            TokenSpelling::Pieces { mark } => {
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
            // The tokenizer may add the space in front itself, so the text need not contain it.
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
            // `<0x41>` is one byte, and may also match these six characters in a text.
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
        Some(TokenLowerBound {
            pieces: PieceAutomaton::new(covers)?,
            mark,
            absorbs_spaces: vocabulary.absorbs_spaces,
            composes: steps.composes,
        })
    }

    /// A lower bound of the text's tokens if it is above `tokens_max`, and `None` if the text may have `tokens_max`
    /// or fewer. `left_out` is a character that is removed from the text before it is encoded.
    pub(crate) fn above(
        &self,
        text: &str,
        left_out: Option<char>,
        tokens_max: usize,
    ) -> Option<usize> {
        if left_out.is_none() && !self.absorbs_spaces {
            let by_length = text.len().div_ceil(self.token_bytes_max());
            if by_length > tokens_max {
                return Some(by_length);
            }
        }
        let mut count = TokenCount::new(self);
        for character in text.chars() {
            if Some(character) == left_out {
                continue;
            }
            count.push(character);
            // The next character may still change the last one.
            let certain = if self.composes {
                count.tokens_before
            } else {
                count.tokens
            };
            if certain > tokens_max {
                return Some(certain);
            }
        }
        (count.tokens > tokens_max).then_some(count.tokens)
    }

    /// Maximum number of bytes of a text that can become one token, not counting absorbed spaces.
    fn token_bytes_max(&self) -> usize {
        let composed = if self.composes { NFC_SHRINK } else { 1 };
        self.pieces.longest() * composed * self.mark.map_or(1, char::len_utf8)
    }
}

/// One pass over a text.
struct TokenCount<'a> {
    bound: &'a TokenLowerBound,
    state: PieceState,
    /// Fewest tokens up to each of the last bytes, as many bytes as the longest piece has.
    fewest: Vec<usize>,
    /// Number of bytes so far.
    at: usize,
    /// Fewest tokens of the text so far.
    tokens: usize,
    /// Fewest tokens of the text before its last character.
    tokens_before: usize,
    /// The next bytes of this number may all belong to a token that is counted already.
    uncounted: usize,
}

impl<'a> TokenCount<'a> {
    fn new(bound: &'a TokenLowerBound) -> Self {
        TokenCount {
            bound,
            state: PieceState::default(),
            fewest: vec![0; bound.pieces.longest() + 1],
            at: 0,
            tokens: 0,
            tokens_before: 0,
            uncounted: 0,
        }
    }

    fn push(&mut self, character: char) {
        if self.bound.composes && changes_by_composition(character) {
            // The character may merge with the one before it, so neither counts. The next token begins within the
            // length of a token, and the bytes before that do not count either.
            self.tokens = self.tokens_before;
            self.uncounted = self.bound.pieces.longest();
            self.store();
            return;
        }
        self.tokens_before = self.tokens;
        let mark = self.bound.mark;
        let character = if Some(character) == mark {
            ' '
        } else {
            character
        };
        let absorbed = self.bound.absorbs_spaces && character.is_whitespace();
        for byte in character.encode_utf8(&mut [0; 4]).bytes() {
            self.state = self.bound.pieces.next(self.state, byte);
            self.at += 1;
            if self.uncounted > 0 {
                self.uncounted -= 1;
            } else if !absorbed {
                let start = (self.at - self.bound.pieces.len(self.state)) % self.fewest.len();
                self.tokens = self.fewest[start] + 1;
            }
            self.store();
        }
    }

    fn store(&mut self) {
        let at = self.at % self.fewest.len();
        self.fewest[at] = self.tokens;
    }
}

/// Whether NFC may change this character, or the text before it because of it.
fn changes_by_composition(character: char) -> bool {
    // NFC changes nothing below the first combining mark.
    character >= '\u{300}'
        && (canonical_combining_class(character) != 0
            || is_nfc_quick(iter::once(character)) != IsNormalized::Yes)
}
