//! The trait of all formats of calls.

use crate::sink::{Sink, floor};

/// A way of models to write tool calls: a state machine over text and markers.
///
/// A family sees every byte once, and its state after some text does not depend on how the text was cut. That is why
/// its decisions stand at characters: a run of text is the same as its characters one by one.
pub(crate) trait Family: Send {
    /// All markers of the format. None of them is the beginning of another, and no end of one begins another.
    fn markers(&self) -> &'static [&'static str];

    /// Reads from the beginning of the text, which is not empty, and returns how many bytes it took. Each byte that
    /// it takes goes to [`Sink::plain`] or [`Sink::record`]. It takes none only where its state changes.
    fn text(&mut self, text: &str, sink: &mut Sink) -> usize;

    /// Reads a marker. Returns false where the marker means nothing here, so that it is read as text.
    fn marker(&mut self, marker: &str, sink: &mut Sink) -> bool;

    /// Whether the output is within reasoning, in formats that include it.
    fn is_reasoning(&self) -> bool {
        false
    }

    /// The attempt at a call is given up, because it has grown too long. Its text has already come out.
    fn give_up(&mut self);

    /// The output ends. A call that is complete ends here; the sink fails any other attempt.
    fn finish(&mut self, sink: &mut Sink);
}

/// Reads text with a family, within the bounds of the attempt.
pub(crate) fn read_text(family: &mut dyn Family, mut text: &str, sink: &mut Sink) -> u64 {
    let mut turns = 0;
    while let Some(next) = text.chars().next() {
        turns += 1;
        let room = sink.room();
        if next.len_utf8() > room {
            sink.fail();
            family.give_up();
            continue;
        }
        let offered = &text[..floor(text, room)];
        let taken = family.text(offered, sink);
        text = &text[taken..];
    }
    turns
}

/// Reads a marker with a family, as text where it means nothing.
pub(crate) fn read_marker(family: &mut dyn Family, marker: &str, sink: &mut Sink) -> u64 {
    if marker.len() > sink.room() {
        sink.fail();
        family.give_up();
    }
    match family.marker(marker, sink) {
        true => 1,
        false => read_text(family, marker, sink),
    }
}

/// How many bytes of whitespace a text begins with.
pub(crate) fn blank(text: &str) -> usize {
    text.len() - text.trim_start().len()
}
