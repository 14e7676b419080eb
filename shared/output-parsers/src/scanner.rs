//! Finds markers in the output, by token where the tokenizer has one for them, or else in the text.

use crate::options::{Piece, TokenId};

/// A part of the output as parsers see it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Symbol<'a> {
    Text(&'a str),
    Marker(&'a str),
}

struct Marker {
    text: String,
    token: Option<TokenId>,
}

/// Cuts the output into text and markers, independent of how it arrives.
pub(crate) struct Scanner {
    markers: Vec<Marker>,
    /// The first bytes of all markers.
    firsts: Vec<u8>,
    /// The end of the text so far that may become a marker. It is shorter than the longest marker.
    held: String,
    /// Whether the held text may become a marker that has a token.
    held_without_tokens: bool,
    /// Bytes looked at, for the proof that the work is linear.
    pub(crate) work: u64,
}

impl Scanner {
    pub(crate) fn new(markers: Vec<String>, token_of: impl Fn(&str) -> Option<TokenId>) -> Self {
        let mut firsts: Vec<u8> = markers.iter().filter_map(|m| m.bytes().next()).collect();
        firsts.sort_unstable();
        firsts.dedup();
        let with_token = |text: String| Marker {
            token: token_of(&text),
            text,
        };
        Scanner {
            markers: markers.into_iter().map(with_token).collect(),
            firsts,
            held: String::new(),
            held_without_tokens: false,
            work: 0,
        }
    }

    /// Whether this token is a marker.
    pub(crate) fn is_marker(&self, token: TokenId) -> bool {
        self.markers
            .iter()
            .any(|marker| marker.token == Some(token))
    }

    /// Reads a piece. Text that may still become a marker stays here.
    pub(crate) fn push(&mut self, piece: Piece<'_>, emit: &mut impl FnMut(Symbol<'_>)) {
        let marker = piece
            .token
            .and_then(|token| self.markers.iter().position(|m| m.token == Some(token)));
        if let Some(at) = marker {
            self.release(emit);
            let marker = &self.markers[at].text;
            // Bytes of an incomplete character come out with the token that ends them.
            let before = piece.text.strip_suffix(marker.as_str());
            let before = before.unwrap_or(piece.text);
            if !before.is_empty() {
                emit(Symbol::Text(before));
            }
            emit(Symbol::Marker(marker));
        } else if !piece.hidden {
            self.text(piece.text, piece.token.is_none(), emit);
        }
    }

    /// Ends the output.
    pub(crate) fn finish(&mut self, emit: &mut impl FnMut(Symbol<'_>)) {
        self.release(emit);
    }

    fn release(&mut self, emit: &mut impl FnMut(Symbol<'_>)) {
        if !self.held.is_empty() {
            emit(Symbol::Text(&self.held));
            self.held.clear();
        }
    }

    fn text(&mut self, mut text: &str, without_tokens: bool, emit: &mut impl FnMut(Symbol<'_>)) {
        if self.held_without_tokens != without_tokens {
            self.release(emit);
            self.held_without_tokens = without_tokens;
        }
        loop {
            if self.held.is_empty() {
                let begins = |byte: &u8| self.firsts.contains(byte);
                let at = text.as_bytes().iter().position(begins);
                let at = at.unwrap_or(text.len());
                self.work += at as u64;
                if at > 0 {
                    emit(Symbol::Text(&text[..at]));
                    text = &text[at..];
                }
            }
            let Some(next) = text.chars().next() else {
                return;
            };
            text = &text[next.len_utf8()..];
            self.held.push(next);
            self.work += next.len_utf8() as u64;
            self.settle(emit);
        }
    }

    /// Lets go of text that cannot become a marker. Every turn lets go of a character, so there are no more turns
    /// than characters of the output.
    fn settle(&mut self, emit: &mut impl FnMut(Symbol<'_>)) {
        let mut gone = 0;
        while let Some(first) = self.held[gone..].chars().next() {
            let rest = &self.held[gone..];
            let mut candidates = self
                .markers
                .iter()
                .filter(|m| self.held_without_tokens || m.token.is_none())
                .filter(|m| m.text.starts_with(rest));
            let Some(marker) = candidates.next() else {
                gone += first.len_utf8();
                self.work += 1;
                continue;
            };
            if marker.text.len() == rest.len() {
                if gone > 0 {
                    emit(Symbol::Text(&self.held[..gone]));
                }
                emit(Symbol::Marker(&marker.text));
                self.held.clear();
                return;
            }
            break;
        }
        if gone > 0 {
            emit(Symbol::Text(&self.held[..gone]));
            self.held.drain(..gone);
        }
    }
}
