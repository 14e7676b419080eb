//! The way of a family's findings to the caller: attempts at calls, their failures, and whitespace around them.

use crate::event::{Counts, Event};
use crate::options::{Delivery, Limits, Tool};

/// Whitespace beside a call that is held until it is known whether text follows. More is text.
const WHITESPACE_BYTES_MAX: usize = 64;
/// Longest name of a tool or a parameter.
pub(crate) const NAME_BYTES_MAX: usize = 256;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Attempt {
    /// The output is outside of calls.
    None,
    /// Text came that may become a call.
    Open,
    /// The call has a name, and its arguments have begun.
    Started,
}

/// A call that waits for its end, in [`Delivery::Whole`].
#[derive(Default)]
struct WaitingCall {
    id: Option<String>,
    name: String,
    arguments: String,
}

/// The part of [`crate::ParserOptions`] that is about events.
pub(crate) struct SinkOptions {
    pub(crate) tools: Vec<Tool>,
    pub(crate) delivery: Delivery,
    pub(crate) first_call_only: bool,
    pub(crate) calls_are_bound: bool,
    pub(crate) limits: Limits,
}

/// Collects events. A family opens an attempt, records its text, starts the call, and ends it or fails.
pub(crate) struct Sink {
    pub(crate) events: Vec<Event>,
    pub(crate) counts: Counts,
    pub(crate) tools: Vec<Tool>,
    pub(crate) limits: Limits,
    delivery: Delivery,
    first_call_only: bool,
    /// Whether every attempt becomes a call, unless the output ends before.
    calls_are_bound: bool,
    /// Whether the output ends now.
    is_ending: bool,
    /// Whether its end cut off a call that was bound to come. The rest of its text is syntax.
    is_cut_off: bool,
    attempt: Attempt,
    /// The attempt's text exactly as emitted. It is kept while the attempt may come out as text.
    raw: String,
    waiting: WaitingCall,
    /// Whether the started call is one too many.
    is_dropped: bool,
    /// Whitespace at the beginning, or after a call or the reasoning.
    whitespace: String,
    /// Whether nothing but that whitespace has come since.
    at_edge: bool,
}

impl Sink {
    pub(crate) fn new(options: SinkOptions) -> Self {
        Sink {
            events: Vec::new(),
            counts: Counts::default(),
            tools: options.tools,
            limits: options.limits,
            delivery: options.delivery,
            first_call_only: options.first_call_only,
            calls_are_bound: options.calls_are_bound,
            is_ending: false,
            is_cut_off: false,
            attempt: Attempt::None,
            raw: String::new(),
            waiting: WaitingCall::default(),
            is_dropped: false,
            whitespace: String::new(),
            at_edge: true,
        }
    }

    /// Text outside of calls.
    pub(crate) fn plain(&mut self, text: &str) {
        let mut text = text;
        if self.is_cut_off {
            return;
        }
        if self.at_edge {
            let blank = text.len() - text.trim_start().len();
            let fitting = blank.min(WHITESPACE_BYTES_MAX - self.whitespace.len());
            let fitting = floor(text, fitting);
            self.whitespace.push_str(&text[..fitting]);
            text = &text[fitting..];
            if text.is_empty() {
                return;
            }
            self.at_edge = false;
            let whitespace = std::mem::take(&mut self.whitespace);
            if !whitespace.is_empty() {
                Event::Text(whitespace).append(&mut self.events);
            }
        }
        if !text.is_empty() {
            Event::Text(text.to_owned()).append(&mut self.events);
        }
    }

    /// Text of the reasoning.
    pub(crate) fn reasoning(&mut self, text: &str) {
        if !text.is_empty() {
            Event::Reasoning(text.to_owned()).append(&mut self.events);
        }
    }

    /// Whitespace that was held is syntax after all.
    pub(crate) fn forget_whitespace(&mut self) {
        self.whitespace.clear();
    }

    /// From here on, text may become a call.
    pub(crate) fn open(&mut self) {
        self.raw.clear();
        self.attempt = Attempt::Open;
    }

    /// Records text of the attempt. Outside of an attempt, this text is syntax of a call that came out.
    pub(crate) fn record(&mut self, text: &str) {
        if self.is_recording() {
            self.raw.push_str(text);
        }
    }

    fn is_recording(&self) -> bool {
        match self.attempt {
            Attempt::None => false,
            Attempt::Open => true,
            Attempt::Started => self.delivery == Delivery::Whole,
        }
    }

    /// How many bytes of the attempt may still be recorded.
    pub(crate) fn room(&self) -> usize {
        let limit = match self.delivery {
            _ if !self.is_recording() => return usize::MAX,
            Delivery::Streamed => self.limits.head_bytes,
            Delivery::Whole => self.limits.call_bytes,
        };
        limit.saturating_sub(self.raw.len())
    }

    /// The attempt was none, and its text was syntax of a message. It is not counted.
    pub(crate) fn discard(&mut self) {
        self.attempt = Attempt::None;
        self.raw.clear();
    }

    /// The attempt was none, and its text is text. It is not counted.
    pub(crate) fn cancel(&mut self) {
        let raw = std::mem::take(&mut self.raw);
        self.discard();
        self.plain(&raw);
    }

    /// Whether a tool of this name was given. Without any tool, every name counts as known.
    pub(crate) fn knows(&self, name: &str) -> bool {
        self.tools.is_empty() || self.tools.iter().any(|tool| tool.name == name)
    }

    /// The attempt is a call.
    pub(crate) fn start(&mut self, id: Option<String>, name: &str) {
        self.attempt = Attempt::Started;
        self.is_dropped = self.first_call_only && self.counts.calls > 0;
        match self.delivery {
            Delivery::Whole => {
                self.waiting = WaitingCall {
                    id,
                    name: name.to_owned(),
                    arguments: String::new(),
                };
            }
            Delivery::Streamed => {
                self.raw.clear();
                self.announce(id, name.to_owned());
            }
        }
    }

    fn announce(&mut self, id: Option<String>, name: String) {
        self.whitespace.clear();
        self.at_edge = true;
        if self.is_dropped {
            self.counts.dropped += 1;
            return;
        }
        let index = self.counts.calls;
        self.counts.calls += 1;
        self.events.push(Event::CallStart { index, id, name });
    }

    /// The next fragment of the arguments of the started call.
    pub(crate) fn arguments(&mut self, delta: &str) {
        if delta.is_empty() {
        } else if self.delivery == Delivery::Whole {
            self.waiting.arguments.push_str(delta);
        } else {
            self.send_arguments(delta.to_owned());
        }
    }

    /// Text of a broken call that waited to be turned into JSON. It goes out as it is, so that it is not lost. Where
    /// the end of the output cut off a call that was bound to come, nothing is broken, and the arguments stay the
    /// beginning of JSON.
    pub(crate) fn unwritten(&mut self, text: &str) {
        let is_cut_off = self.calls_are_bound && self.is_ending;
        if self.attempt == Attempt::Started && !is_cut_off {
            self.arguments(text);
        }
    }

    fn send_arguments(&mut self, delta: String) {
        if !self.is_dropped {
            let index = self.counts.calls.saturating_sub(1);
            Event::CallArguments { index, delta }.append(&mut self.events);
        }
    }

    fn send_end(&mut self, intact: bool) {
        if !self.is_dropped {
            let index = self.counts.calls.saturating_sub(1);
            self.events.push(Event::CallEnd { index, intact });
        }
        self.discard();
    }

    /// The started call is complete and valid.
    pub(crate) fn end(&mut self) {
        if self.delivery == Delivery::Whole {
            let call = std::mem::take(&mut self.waiting);
            self.announce(call.id, call.name);
            self.send_arguments(call.arguments);
        }
        self.send_end(true);
    }

    /// Ends the call if one has started.
    pub(crate) fn end_if_started(&mut self) {
        if self.attempt == Attempt::Started {
            self.end();
        }
    }

    /// The attempt cannot be parsed. Returns whether it came out as text, so that the rest of it has to as well.
    /// Otherwise, its arguments have already begun to come, and the call ends as not intact.
    pub(crate) fn fail(&mut self) -> bool {
        let is_recording = self.is_recording();
        match self.attempt {
            Attempt::None => return false,
            _ => self.counts.failures += 1,
        }
        if self.cut_off() {
            return false;
        }
        if is_recording {
            let raw = std::mem::take(&mut self.raw);
            self.waiting = WaitingCall::default();
            self.discard();
            self.plain(&raw);
        } else {
            self.send_end(false);
        }
        is_recording
    }

    /// The output ends, so a call that is bound to come was cut off.
    pub(crate) fn end_output(&mut self) {
        self.is_ending = true;
    }

    /// Whether the beginning of a marker at the end of the output is syntax: within a call that was bound to come, or
    /// behind it.
    pub(crate) fn half_marker_is_syntax(&self) -> bool {
        let is_after = self.at_edge && self.counts.calls > 0;
        self.calls_are_bound && (self.attempt != Attempt::None || is_after)
    }

    /// If the end of the output cut off a call that was bound to come, and its name is known, the call comes out with
    /// what there is of its arguments. Returns whether it does.
    fn cut_off(&mut self) -> bool {
        if !(self.calls_are_bound && self.is_ending) {
            return false;
        }
        let call = match self.attempt {
            Attempt::Started => std::mem::take(&mut self.waiting),
            _ => match self.name_in_attempt() {
                Some(name) => WaitingCall {
                    name: name.to_owned(),
                    ..WaitingCall::default()
                },
                None => return false,
            },
        };
        if self.delivery == Delivery::Whole || self.attempt == Attempt::Open {
            self.announce(call.id, call.name);
        }
        if !call.arguments.is_empty() {
            self.send_arguments(call.arguments);
        }
        self.send_end(false);
        self.is_cut_off = true;
        true
    }

    /// The tool that the attempt calls, as far as its text tells before the arguments.
    fn name_in_attempt(&self) -> Option<&str> {
        if let [only] = &self.tools[..] {
            return Some(&only.name);
        }
        let is_part = |c: char| is_name(c.encode_utf8(&mut [0; 4]));
        let is_whole = |at: usize, name: &str| {
            let before = self.raw[..at].chars().next_back();
            let after = self.raw[at + name.len()..].chars().next();
            !before.is_some_and(is_part) && after.is_some_and(|c| !is_part(c))
        };
        let names = self.tools.iter().map(|tool| tool.name.as_str());
        let mut known = names.filter(|name| {
            let mut places = self.raw.match_indices(name);
            places.any(|(at, name)| is_whole(at, name))
        });
        // A name may also be a word of the format, so only one that stands alone counts.
        known.next().filter(|_| known.next().is_none())
    }

    /// The output has ended.
    pub(crate) fn finish(&mut self) {
        self.fail();
        let whitespace = std::mem::take(&mut self.whitespace);
        if self.counts.calls == 0 && !whitespace.is_empty() {
            Event::Text(whitespace).append(&mut self.events);
        }
    }
}

/// The last boundary between characters that is not after a place.
pub(crate) fn floor(text: &str, place: usize) -> usize {
    let mut at = place.min(text.len());
    while !text.is_char_boundary(at) {
        at -= 1;
    }
    at
}

/// Whether this can be the name of a tool or a parameter.
pub(crate) fn is_name(name: &str) -> bool {
    let is_odd = |c: char| c.is_whitespace() || c.is_control() || "<>{}[]()\"'`,;=".contains(c);
    !name.is_empty() && name.len() <= NAME_BYTES_MAX && !name.contains(is_odd)
}
