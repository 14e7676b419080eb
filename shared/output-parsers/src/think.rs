//! Reasoning between two markers, at the beginning of an output.

use crate::family::blank;
use crate::sink::{Sink, floor};

/// Whitespace before the opening marker that is held. More is text.
const WHITESPACE_BYTES_MAX: usize = 64;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    /// Nothing but whitespace has come.
    Before,
    /// The reasoning is open, and nothing but whitespace has come. An opening marker may still follow.
    Begun,
    Inside,
    After,
}

/// Splits the reasoning off. An output has one block of it, which only whitespace precedes.
pub(crate) struct Think {
    open: String,
    close: String,
    /// Markers of calls that end the reasoning, where models forget the closing marker.
    also_close: &'static [&'static str],
    state: State,
    whitespace: String,
}

impl Think {
    pub(crate) fn new(
        open: &str,
        close: &str,
        is_open: bool,
        also_close: &'static [&'static str],
    ) -> Self {
        Think {
            open: open.to_owned(),
            close: close.to_owned(),
            also_close,
            state: if is_open { State::Begun } else { State::Before },
            whitespace: String::new(),
        }
    }

    pub(crate) fn markers(&self) -> [String; 2] {
        [self.open.clone(), self.close.clone()]
    }

    /// Whether the reasoning, and its beginning, are over.
    pub(crate) fn is_over(&self) -> bool {
        self.state == State::After
    }

    /// Whether the reasoning is open.
    pub(crate) fn is_open(&self) -> bool {
        matches!(self.state, State::Begun | State::Inside)
    }

    /// Reads from the beginning of a text, and returns how many bytes it took. The rest is not reasoning.
    pub(crate) fn text(&mut self, text: &str, sink: &mut Sink) -> usize {
        match self.state {
            State::After => 0,
            State::Inside | State::Begun => {
                if blank(text) < text.len() {
                    self.state = State::Inside;
                }
                sink.reasoning(text);
                text.len()
            }
            State::Before => {
                let space = blank(text).min(WHITESPACE_BYTES_MAX - self.whitespace.len());
                let space = floor(text, space);
                self.whitespace.push_str(&text[..space]);
                if space < text.len() {
                    self.state = State::After;
                }
                space
            }
        }
    }

    /// Reads a marker. Returns false where it is not of the reasoning.
    pub(crate) fn marker(&mut self, marker: &str, sink: &mut Sink) -> bool {
        match self.state {
            State::After => return false,
            State::Before if marker == self.open => {
                self.whitespace.clear();
                self.state = State::Inside;
            }
            State::Before => {
                self.state = State::After;
                return false;
            }
            State::Begun if marker == self.open => self.state = State::Inside,
            State::Begun | State::Inside if marker == self.close => self.state = State::After,
            State::Begun | State::Inside if self.also_close.contains(&marker) => {
                self.state = State::After;
                return false;
            }
            State::Begun | State::Inside => {
                self.state = State::Inside;
                sink.reasoning(marker);
            }
        }
        true
    }

    /// Whitespace that was held and belongs to the text.
    pub(crate) fn release(&mut self) -> String {
        std::mem::take(&mut self.whitespace)
    }
}
