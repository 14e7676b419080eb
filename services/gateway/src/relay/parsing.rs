//! The parser of one output: calls get ids, and it is known which pieces are reasoning.

use refrain_output_parsers::{Counts, Event, OutputParser, Piece};
use refrain_protocol::TokenId;

/// How the text is parsed.
#[derive(Debug, Default)]
pub(crate) struct Parsing {
    /// `None`: all is text.
    parser: Option<OutputParser>,
    /// Whether markers are searched in the text alone, since the engine speaks only text.
    pub(super) by_text: bool,
    call_ids: CallIds,
    counts: Counts,
    /// Calls that are complete and valid.
    intact_calls: u32,
}

/// Gives calls their ids, where the model itself gives none.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct CallIds {
    /// A random number of the choice.
    pub(crate) base: u128,
    /// Whether ids have nine letters and digits, as templates of Mistral's models demand.
    pub(crate) are_short: bool,
}

impl CallIds {
    fn id(self, index: u32) -> String {
        let number = self.base.wrapping_add(u128::from(index));
        match self.are_short {
            true => format!("{:09x}", number & 0xF_FFFF_FFFF),
            false => format!("call_{:024x}", number & ((1 << 96) - 1)),
        }
    }
}

impl Parsing {
    /// Parses with this parser.
    pub(crate) fn new(parser: Option<OutputParser>, by_text: bool, call_ids: CallIds) -> Self {
        Parsing {
            parser,
            by_text,
            call_ids,
            counts: Counts::default(),
            intact_calls: 0,
        }
    }

    /// Whether this token marks something.
    pub(super) fn is_marker(&self, token: TokenId) -> bool {
        let parser = self.parser.as_ref();
        !self.by_text && parser.is_some_and(|parser| parser.is_marker(token))
    }

    /// Whether the output is within the reasoning.
    fn is_reasoning(&self) -> bool {
        self.parser.as_ref().is_some_and(OutputParser::is_reasoning)
    }

    /// Parses a piece. Returns whether it belongs to the reasoning.
    pub(super) fn push(&mut self, piece: Piece<'_>, events: &mut Vec<Event>) -> bool {
        let was_reasoning = self.is_reasoning();
        let from = events.len();
        match &mut self.parser {
            Some(parser) => {
                parser.push(&[piece], events);
                self.counts = parser.counts();
            }
            None if piece.hidden || piece.text.is_empty() => {}
            None => Event::Text(piece.text.to_owned()).append(events),
        }
        self.note_calls(&mut events[from..]);
        was_reasoning || self.is_reasoning()
    }

    /// Ends the output.
    pub(super) fn finish(&mut self, events: &mut Vec<Event>) {
        let from = events.len();
        if let Some(parser) = self.parser.take() {
            self.counts = parser.finish(events);
        }
        self.note_calls(&mut events[from..]);
    }

    /// The numbers of calls so far.
    pub(super) fn counts(&self) -> Counts {
        self.counts
    }

    /// Whether the output has a call that a client can carry out.
    pub(super) fn has_calls(&self) -> bool {
        self.intact_calls > 0
    }

    /// Gives new calls their ids, and counts those that have ended.
    fn note_calls(&mut self, events: &mut [Event]) {
        for event in events {
            match event {
                Event::CallStart { index, id, .. } => {
                    id.get_or_insert_with(|| self.call_ids.id(*index));
                }
                Event::CallEnd { intact, .. } => self.intact_calls += u32::from(*intact),
                _ => {}
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ids_are_of_the_form_that_templates_demand() {
        let id = |are_short| {
            CallIds {
                base: u128::MAX,
                are_short,
            }
            .id(1)
        };
        assert_eq!(id(false), "call_000000000000000000000000");
        assert_eq!(id(true), "000000000");
    }
}
