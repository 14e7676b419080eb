//! Halves of calls that wait for their other half, in bounded memory.

use std::collections::{HashMap, VecDeque};

use super::call::Content;
use super::forms::Form;
use super::names::Names;
use super::shapes::{Answers, Prompt};

const HALVES_MAX: usize = 100_000;
const BYTES_MAX: usize = 256 << 20;

pub(super) enum Half {
    Prompt(Prompt),
    Answers(Answers),
}

/// A half, with what its record says besides.
pub(super) struct Waiting {
    pub(super) half: Half,
    pub(super) names: Names,
    pub(super) form: Form,
    pub(super) position: String,
}

/// Halves by the id of their call.
#[derive(Default)]
pub(super) struct Halves {
    waiting: HashMap<String, Waiting>,
    /// The ids, the oldest first. Some are of calls that found their other half.
    order: VecDeque<String>,
    bytes: usize,
}

impl Halves {
    pub(super) fn take(&mut self, id: &str) -> Option<Waiting> {
        let taken = self.waiting.remove(id)?;
        self.bytes -= taken.half.bytes();
        Some(taken)
    }

    pub(super) fn keep(&mut self, id: String, waiting: Waiting) {
        self.bytes += waiting.half.bytes();
        self.order.push_back(id.clone());
        if let Some(earlier) = self.waiting.insert(id, waiting) {
            self.bytes -= earlier.half.bytes();
        }
    }

    /// The oldest half, if there are too many or `all` are wanted.
    pub(super) fn give_up(&mut self, all: bool) -> Option<Waiting> {
        while all || self.bytes > BYTES_MAX || self.order.len() > HALVES_MAX {
            let oldest = self.order.pop_front()?;
            if let Some(waiting) = self.take(&oldest) {
                return Some(waiting);
            }
        }
        None
    }
}

impl Half {
    fn bytes(&self) -> usize {
        let content = |content: &Content| match content {
            Content::Tokens(tokens) => tokens.len() * 4,
            Content::Text(pieces) => pieces.iter().map(|piece| piece.len()).sum(),
        };
        match self {
            Half::Prompt(Prompt::Turns(turns)) => turns.iter().map(|turn| turn.text.len()).sum(),
            Half::Prompt(Prompt::Plain(text)) => content(text),
            Half::Answers(answers) => answers.choices.iter().map(content).sum(),
        }
    }
}
