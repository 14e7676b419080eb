//! Output without calls.

use crate::family::Family;
use crate::sink::Sink;

/// Everything is text.
pub(crate) struct Plain;

impl Family for Plain {
    fn markers(&self) -> &'static [&'static str] {
        &[]
    }

    fn text(&mut self, text: &str, sink: &mut Sink) -> usize {
        sink.plain(text);
        text.len()
    }

    fn marker(&mut self, _marker: &str, _sink: &mut Sink) -> bool {
        false
    }

    fn give_up(&mut self) {}

    fn finish(&mut self, _sink: &mut Sink) {}
}
