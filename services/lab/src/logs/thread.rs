//! A conversation whose turns come one after the other.

use std::sync::Arc;

use xxhash_rust::xxh3::xxh3_64_with_seed;

use super::call::{Content, LoggedCall};
use super::names::Names;
use super::turns::{OPENING, Role, Turn};

/// Turns of a prompt. A prompt has its last ones, since each of the many calls of a long conversation has a list of
/// them.
const TURNS_MAX: usize = 2048;

/// A conversation gives a call for each turn of the assistant; the prompt is what stood before it.
pub(super) struct Thread {
    names: Names,
    /// The turns so far, as they stand in a prompt.
    pieces: Vec<Arc<str>>,
    /// A digest of the turns so far.
    hash: u64,
    /// The turn that the assistant is saying: tools log its parts one by one.
    saying: Option<(Names, Turn)>,
}

impl Thread {
    pub(super) fn new(names: Names) -> Self {
        Thread {
            names,
            pieces: Vec::new(),
            hash: 0,
            saying: None,
        }
    }

    /// Adds a turn, with the names of its own record. Returns the call that ended before it, and a digest of that.
    pub(super) fn add(&mut self, turn: Turn, names: Option<&Names>) -> Option<(u64, LoggedCall)> {
        if turn.role == Role::Assistant {
            match &mut self.saying {
                Some((_, said)) => said.go_on(&turn.text),
                None => {
                    let names =
                        names.map_or_else(|| self.names.clone(), |names| names.beside(&self.names));
                    self.saying = Some((names, turn));
                }
            }
            return None;
        }
        let ended = self.end();
        self.push(&turn);
        ended
    }

    /// Ends the turn that the assistant is saying.
    pub(super) fn end(&mut self) -> Option<(u64, LoggedCall)> {
        let (names, said) = self.saying.take()?;
        let first = self.pieces.len().saturating_sub(TURNS_MAX);
        let mut prompt = self.pieces[first..].to_vec();
        prompt.push(OPENING.into());
        self.push(&said);
        let call = LoggedCall {
            head: names.head(),
            prompt: Content::Text(prompt),
            output: Content::text(said.text),
        };
        (!call.output.is_empty()).then_some((self.hash, call))
    }

    fn push(&mut self, turn: &Turn) {
        let piece = turn.segment();
        self.hash = xxh3_64_with_seed(piece.as_bytes(), self.hash);
        self.pieces.push(piece);
    }
}
