//! The parser of an output: reasoning first, then text and calls.

use crate::event::{Counts, Event};
use crate::families::{self, ForcedTool};
use crate::family::{Family, read_marker, read_text};
use crate::options::{ParserOptions, Piece, TokenId};
use crate::registry::ReasoningParserKind;
use crate::scanner::{Scanner, Symbol};
use crate::sink::{Sink, SinkOptions};
use crate::think::Think;

/// Parses one output. Its events are the same for every way in which the output is cut into pieces.
pub struct OutputParser {
    scanner: Scanner,
    reader: Reader,
}

/// Everything behind the scanner.
struct Reader {
    think: Option<Think>,
    family: Box<dyn Family>,
    sink: Sink,
    work: u64,
}

impl OutputParser {
    /// Creates a parser. `token_of` gives the token of a marker, if the tokenizer has one for exactly this text.
    ///
    /// Such a marker is recognised by its token alone: the same text made of other tokens is text. A user's text
    /// never forms special tokens, so it does not become a call when the model repeats it. In a piece without a
    /// token, every marker is searched.
    pub fn new(options: ParserOptions, token_of: impl Fn(&str) -> Option<TokenId>) -> Self {
        let mut family = families::family(options.tools_as, options.reasoning_as.is_harmony());
        if let Some(tool) = options.forced_tool {
            family = Box::new(ForcedTool::new(tool, family));
        }
        let is_harmony = family.markers().contains(&"<|channel|>");
        let think = match is_harmony {
            true => None,
            false => think(&options.reasoning_as, options.reasoning_is_open),
        };
        let markers = family.markers().iter().map(|marker| (*marker).to_owned());
        let mut markers: Vec<String> = markers.collect();
        markers.extend(think.iter().flat_map(Think::markers));
        let sink = Sink::new(SinkOptions {
            tools: options.tools,
            delivery: options.delivery,
            first_call_only: options.first_call_only,
            calls_are_bound: options.calls_are_bound,
            limits: options.limits,
        });
        OutputParser {
            scanner: Scanner::new(markers, token_of),
            reader: Reader {
                think,
                family,
                sink,
                work: 0,
            },
        }
    }

    /// Reads what a step brought, and appends the events that follow from it.
    pub fn push(&mut self, pieces: &[Piece<'_>], events: &mut Vec<Event>) {
        std::mem::swap(&mut self.reader.sink.events, events);
        for piece in pieces {
            let reader = &mut self.reader;
            self.scanner.push(*piece, &mut |symbol| reader.read(symbol));
        }
        std::mem::swap(&mut self.reader.sink.events, events);
    }

    /// Ends the output. Everything that was held back comes out.
    pub fn finish(mut self, events: &mut Vec<Event>) -> Counts {
        std::mem::swap(&mut self.reader.sink.events, events);
        let reader = &mut self.reader;
        reader.sink.end_output();
        // Only the beginning of a marker is held here.
        let is_syntax = reader.sink.half_marker_is_syntax();
        self.scanner.finish(&mut |symbol| match symbol {
            Symbol::Text(_) if is_syntax => {}
            symbol => reader.read(symbol),
        });
        reader.finish();
        std::mem::swap(&mut self.reader.sink.events, events);
        self.reader.sink.counts
    }

    /// The numbers of the output so far.
    pub fn counts(&self) -> Counts {
        self.reader.sink.counts
    }

    /// Whether this token is a marker.
    pub fn is_marker(&self, token: TokenId) -> bool {
        self.scanner.is_marker(token)
    }

    /// Whether the output is within the reasoning now.
    pub fn is_reasoning(&self) -> bool {
        let reader = &self.reader;
        match &reader.think {
            Some(think) => think.is_open(),
            None => reader.family.is_reasoning(),
        }
    }

    /// Bytes and runs that were looked at.
    #[cfg(test)]
    pub(crate) fn work(&self) -> u64 {
        self.scanner.work + self.reader.work
    }
}

impl std::fmt::Debug for OutputParser {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        // The output itself must not get into a log.
        f.debug_struct("OutputParser")
            .field("counts", &self.counts())
            .finish_non_exhaustive()
    }
}

/// The parser of a kind of reasoning.
fn think(kind: &ReasoningParserKind, is_open: Option<bool>) -> Option<Think> {
    let (open, close) = kind.markers()?;
    let is_open = is_open.unwrap_or(kind.is_usually_open());
    Some(Think::new(open, close, is_open, kind.call_markers()))
}

impl Reader {
    fn read(&mut self, symbol: Symbol<'_>) {
        match symbol {
            Symbol::Text(text) => {
                let taken = self.think_text(text);
                self.work += read_text(self.family.as_mut(), &text[taken..], &mut self.sink);
            }
            Symbol::Marker(marker) => {
                if !self.think_marker(marker) {
                    self.work += read_marker(self.family.as_mut(), marker, &mut self.sink);
                }
            }
        }
    }

    fn think_text(&mut self, text: &str) -> usize {
        let Some(think) = &mut self.think else {
            return 0;
        };
        let taken = think.text(text, &mut self.sink);
        self.leave_thinking();
        taken
    }

    fn think_marker(&mut self, marker: &str) -> bool {
        let Some(think) = &mut self.think else {
            return false;
        };
        let is_taken = think.marker(marker, &mut self.sink);
        self.leave_thinking();
        is_taken
    }

    fn leave_thinking(&mut self) {
        if let Some(think) = self.think.take_if(|think| think.is_over()) {
            self.release(think);
        }
    }

    fn release(&mut self, mut think: Think) {
        let whitespace = think.release();
        self.work += read_text(self.family.as_mut(), &whitespace, &mut self.sink);
    }

    fn finish(&mut self) {
        if let Some(think) = self.think.take() {
            self.release(think);
        }
        self.family.finish(&mut self.sink);
        self.sink.finish();
    }
}
