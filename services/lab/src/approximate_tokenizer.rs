//! A tokenizer without a vocabulary, for logs of models whose tokenizer is not at hand.
//!
//! It splits text where the tokenizers of today's models do: into words with the space before them, numbers of three
//! digits, marks, and white space. Their vocabularies have most words whole, so each piece is one token; long pieces
//! are cut. Gains are ratios: they depend on how much of a text repeats, and little on where words are cut.

use std::collections::HashMap;

use parking_lot::Mutex;
use refrain_suffix_index::Token;
use xxhash_rust::xxh3::xxh3_64_with_seed;

/// Bytes of the longest piece of a word. Vocabularies of 100,000 to 200,000 tokens have few longer words. In other
/// scripts than Latin they have fewer characters a token.
const WORD_BYTES_MAX: usize = 10;
/// Bytes of the longest piece of a word after a mark, as in `the_name`. Texts have these less often than words after
/// a space, so vocabularies have fewer of them whole.
const NAME_BYTES_MAX: usize = 5;
/// Bytes of the longest piece of a word in capitals, for the same reason.
const CAPITALS_BYTES_MAX: usize = 6;
/// Bytes of the longest piece of marks.
const MARKS_BYTES_MAX: usize = 3;
/// Bytes of the longest piece of white space, as the indentation of code.
const SPACE_BYTES_MAX: usize = 80;
const DIGITS_MAX: usize = 3;

/// Pieces whose text is kept, for tokens that are shown as text.
const PIECES_MAX: usize = 1 << 20;

/// Turns text into tokens. The token of a piece is its hash, so it is the same in each run with the same seed; of a
/// million pieces a few hundred share theirs, which changes no figure.
#[derive(Debug, Default)]
pub(crate) struct ApproximateTokenizer {
    seed: u64,
    pieces: Mutex<HashMap<Token, Box<str>>>,
}

impl ApproximateTokenizer {
    /// A tokenizer whose tokens say nothing to whoever does not know the seed.
    pub(crate) fn with_seed(seed: u64) -> Self {
        ApproximateTokenizer {
            seed,
            ..ApproximateTokenizer::default()
        }
    }

    /// The tokens of a text.
    pub(crate) fn encode(&self, text: &str) -> Vec<Token> {
        let mut pieces = self.pieces.lock();
        let mut token = |piece: &str| {
            // Engines count tokens by signed numbers.
            let token = (xxh3_64_with_seed(piece.as_bytes(), self.seed) >> 33) as Token;
            if pieces.len() < PIECES_MAX {
                pieces.entry(token).or_insert_with(|| piece.into());
            }
            token
        };
        let mut tokens = Vec::with_capacity(text.len() / 4);
        let mut rest = text;
        while let Some((mut whole, bytes_max)) = next_piece(rest) {
            rest = &rest[whole.len()..];
            // The first piece of a word has the mark or space before it as well.
            let mut at = cut(whole, bytes_max + 1);
            while !whole.is_empty() {
                let (piece, more) = whole.split_at(at);
                tokens.push(token(piece));
                whole = more;
                at = cut(whole, bytes_max);
            }
        }
        tokens
    }

    /// The text of tokens of this tokenizer.
    pub(crate) fn decode(&self, tokens: &[Token]) -> String {
        let pieces = self.pieces.lock();
        let texts: Vec<&str> = tokens
            .iter()
            .map(|token| pieces.get(token).map_or("\u{fffd}", AsRef::as_ref))
            .collect();
        texts.concat()
    }
}

/// The end of the longest beginning that has at most `bytes_max` bytes, and at least one character.
fn cut(text: &str, bytes_max: usize) -> usize {
    let mut end = bytes_max.min(text.len());
    while !text.is_char_boundary(end) {
        end -= 1;
    }
    end.max(text.chars().next().map_or(0, char::len_utf8))
}

/// The next word, number, run of marks or white space of a text, and the bytes of its longest piece.
fn next_piece(text: &str) -> Option<(&str, usize)> {
    let is_mark = |c: char| !c.is_alphanumeric() && !c.is_whitespace();
    let is_break = |c: char| matches!(c, '\n' | '\r');
    let first = text.chars().next()?;
    // Words come with one space or mark before them.
    let before = match first {
        _ if first.is_alphanumeric() || is_break(first) => 0,
        _ => first.len_utf8(),
    };
    let (capitals, others) = word_lens(&text[before..]);
    if capitals + others > 0 {
        let bytes_max = match is_mark(first) {
            _ if capitals > 1 && others == 0 => CAPITALS_BYTES_MAX,
            true => NAME_BYTES_MAX,
            false => WORD_BYTES_MAX,
        };
        return Some((&text[..before + capitals + others], bytes_max));
    }
    if first.is_numeric() {
        let digits = text.chars().take(DIGITS_MAX);
        let len = digits
            .take_while(|c| c.is_numeric())
            .map(char::len_utf8)
            .sum();
        return Some((&text[..len], WORD_BYTES_MAX));
    }
    // Marks come with one space before them, and with the ends of lines behind.
    let before = usize::from(first == ' ');
    let marks = before + run_len(&text[before..], is_mark);
    if marks > before {
        let marks = marks + run_len(&text[marks..], |c| is_break(c) || c == '/');
        return Some((&text[..marks], MARKS_BYTES_MAX));
    }
    let space = &text[..run_len(text, char::is_whitespace)];
    let len = match space.rfind(is_break) {
        Some(at) => at + 1,
        // The last space belongs to the word that follows.
        None if space.len() < text.len() && space.len() > 1 => {
            let last = space.chars().next_back().map_or(0, char::len_utf8);
            space.len() - last
        }
        None => space.len(),
    };
    // A character of no kind is a piece of its own.
    let len = if len == 0 { first.len_utf8() } else { len };
    Some((&text[..len], SPACE_BYTES_MAX))
}

/// Bytes of the word at the beginning: of its capitals, and of the other letters behind them. `aWord` is two words.
fn word_lens(text: &str) -> (usize, usize) {
    let capitals = run_len(text, char::is_uppercase);
    let is_letter = |c: char| c.is_alphabetic() && !c.is_uppercase();
    (capitals, run_len(&text[capitals..], is_letter))
}

/// Bytes of the characters of this kind at the beginning.
fn run_len(text: &str, is_kind: impl Fn(char) -> bool) -> usize {
    text.find(|c| !is_kind(c)).unwrap_or(text.len())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn pieces(text: &str) -> Vec<String> {
        let tokenizer = ApproximateTokenizer::default();
        let tokens = tokenizer.encode(text);
        assert_eq!(tokenizer.decode(&tokens), text);
        tokens
            .iter()
            .map(|token| tokenizer.decode(&[*token]))
            .collect()
    }

    #[test]
    fn text_is_split_where_models_split_it() {
        for (text, expected) in [
            ("", &[][..]),
            ("Say it again.", &["Say", " it", " again", "."]),
            (
                "let parsedValue=x1;",
                &["let", " parsed", "Value", "=x", "1", ";"],
            ),
            ("HTTPServer 12345", &["HTTPServer", " ", "123", "45"]),
            (
                "a\n\n    return (b)\n",
                &["a", "\n\n", "   ", " return", " (", "b", ")\n"],
            ),
            ("f(\"a\"):\n  ", &["f", "(\"", "a", "\"):\n", "  "]),
            ("incomprehensible", &["incomprehen", "sible"]),
            ("the_descriptions", &["the", "_descr", "iptio", "ns"]),
            (
                "DESCRIBE t; SELECT b",
                &["DESCRIB", "E", " t", ";", " SELECT", " b"],
            ),
            ("======", &["====", "=="]),
            ("不知道吗", &["不知道", "吗"]),
            ("naïve 🙂!", &["naïve", " ", "🙂", "!"]),
        ] {
            assert_eq!(pieces(text), expected, "{text}");
        }
    }

    #[test]
    fn any_text_comes_back_whole() {
        bolero::check!().with_type::<String>().for_each(|text| {
            pieces(text);
        });
    }

    #[test]
    fn equal_pieces_have_equal_tokens_in_each_run() {
        let tokenizer = ApproximateTokenizer::default();
        let tokens = tokenizer.encode("a b a b");
        assert_eq!((tokens[1], tokens.len()), (tokens[3], 4));
        assert_eq!(ApproximateTokenizer::default().encode("a b a b"), tokens);
        assert_ne!(ApproximateTokenizer::with_seed(7).encode("a b a b"), tokens);
        assert_eq!(tokenizer.decode(&[tokens[1], 7]), " b\u{fffd}");
    }
}
