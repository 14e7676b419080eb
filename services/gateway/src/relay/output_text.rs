//! Turns tokens into what a client sees: whole characters, nothing of a stop text, and calls and reasoning apart.
//!
//! Stop texts come first: they are searched in all text of the output, calls and reasoning included, as vLLM does.
//! The parser reads the rest. A token that marks something and has no visible text ends the search of a stop
//! text that has begun, since that text would not be in one piece.

use std::collections::VecDeque;
use std::sync::Arc;

use refrain_output_parsers::{Counts, Event, Piece};
use refrain_protocol::TokenId;
use refrain_tokenization::{Detokenizer, Tokenizer};

use crate::relay::parsing::Parsing;

/// The output of one choice as it grows.
///
/// Stop texts are searched token by token, so the cut does not depend on the number of tokens in a step.
#[derive(Debug)]
pub(crate) struct OutputText {
    tokenizer: Arc<Tokenizer>,
    detokenizer: Detokenizer,
    stops: Arc<[String]>,
    /// Whether the stop text that ends the output is a part of it.
    has_stop_text: bool,
    /// Whether special tokens have text.
    shows_special: bool,
    /// Decoded text that may be the beginning of a stop text.
    held: String,
    /// The tokens of the held text, and how many of its bytes each has.
    held_tokens: VecDeque<(TokenId, usize)>,
    parsing: Parsing,
    reasoning_tokens: u64,
    state: State,
    /// Bytes at the beginning of `held` in which no stop text may end.
    exempt: usize,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    Open,
    /// The stop text with this number came. The text behind it must never be sent.
    Stopped(usize),
    Finished,
}

/// A token that no vocabulary has. It stands for text that belongs to no whole token.
const NO_TOKEN: TokenId = TokenId::MAX;

impl OutputText {
    /// Creates an empty text.
    pub(crate) fn new(tokenizer: Arc<Tokenizer>, stops: Arc<[String]>, parsing: Parsing) -> Self {
        OutputText {
            detokenizer: Detokenizer::new(tokenizer.clone()),
            tokenizer,
            stops,
            has_stop_text: false,
            shows_special: false,
            held: String::new(),
            exempt: 0,
            held_tokens: VecDeque::new(),
            parsing,
            reasoning_tokens: 0,
            state: State::Open,
        }
    }

    /// The same text by other rules: whether it has the stop text that ends it, and the text of special tokens.
    pub(crate) fn with(mut self, has_stop_text: bool, shows_special: bool) -> Self {
        self.has_stop_text = has_stop_text;
        self.shows_special = shows_special;
        self.detokenizer = self.detokenizer.showing_special(shows_special);
        self
    }

    /// Whether the token that ends the output is a part of its text.
    pub(crate) fn has_stop_text(&self) -> bool {
        self.has_stop_text
    }

    /// Adds a token, and appends the events that no stop text can take back any more. No stop text ends in it unless
    /// `may_stop`. Returns whether a stop text is complete, after which nothing may follow.
    pub(crate) fn push(&mut self, token: TokenId, may_stop: bool, events: &mut Vec<Event>) -> bool {
        if !self.shows_special && self.tokenizer.is_special(token) {
            self.hidden(token, events);
            return false;
        }
        let fresh = self.detokenizer.push(token);
        if self.stops.is_empty() {
            self.parse(token, &fresh, true, events);
            return false;
        }
        self.held.push_str(&fresh);
        self.held_tokens.push_back((token, fresh.len()));
        if !may_stop {
            self.exempt = self.held.len();
        }
        if let Some((at, number, end)) = self.first_stop() {
            let shown = if self.has_stop_text { end } else { at };
            self.release(shown, true, events);
            self.held.clear();
            self.held_tokens.clear();
            self.state = State::Stopped(number);
            return true;
        }
        self.release(self.held.len() - self.undecided_len(), false, events);
        false
    }

    /// Adds the token that ends the output. It has no text, but may end a call.
    pub(crate) fn push_end(&mut self, token: TokenId, events: &mut Vec<Event>) {
        self.hidden(token, events);
    }

    /// Ends the output, and appends the events that were held back.
    pub(crate) fn finish(&mut self, events: &mut Vec<Event>) {
        if self.state == State::Open {
            self.release(self.held.len(), true, events);
        }
        if self.state != State::Finished {
            self.parsing.finish(events);
            self.state = State::Finished;
        }
    }

    /// The number of the stop text that came, until the end is taken.
    pub(crate) fn stop_text(&self) -> Option<usize> {
        match self.state {
            State::Stopped(number) => Some(number),
            State::Open | State::Finished => None,
        }
    }

    /// The numbers of calls so far.
    pub(crate) fn counts(&self) -> Counts {
        self.parsing.counts()
    }

    /// Whether the output has a call that a client can carry out.
    pub(crate) fn has_calls(&self) -> bool {
        self.parsing.has_calls()
    }

    /// Tokens of the reasoning so far.
    pub(crate) fn reasoning_tokens(&self) -> u64 {
        self.reasoning_tokens
    }

    /// Parses a token without visible text, if it marks something.
    fn hidden(&mut self, token: TokenId, events: &mut Vec<Event>) {
        if self.parsing.is_marker(token) {
            self.release(self.held.len(), true, events);
            let is_reasoning = self.parsing.push(Piece::hidden(token), events);
            self.reasoning_tokens += u64::from(is_reasoning);
        }
    }

    /// Parses text of a token. `is_whole` says whether the token ends with it.
    fn parse(&mut self, token: TokenId, text: &str, is_whole: bool, events: &mut Vec<Event>) {
        let piece = match self.parsing.by_text {
            true => Piece::text(text),
            false => Piece::token(token, text),
        };
        let is_reasoning = self.parsing.push(piece, events);
        self.reasoning_tokens += u64::from(is_whole && is_reasoning);
    }

    /// Parses the beginning of the held text. A token that marks something is parsed only as a whole, or as plain
    /// text if there is no more of it.
    fn release(&mut self, len: usize, is_last: bool, events: &mut Vec<Event>) {
        let mut from = 0;
        while let Some((token, bytes)) = self.held_tokens.front().copied() {
            let taken = bytes.min(len - from);
            let is_whole = taken == bytes;
            let is_marker = !is_whole && self.parsing.is_marker(token);
            if !is_whole && (taken == 0 || is_marker && !is_last) {
                break;
            }
            let text = self.held[from..from + taken].to_owned();
            from += taken;
            let token = if is_marker { NO_TOKEN } else { token };
            self.parse(token, &text, is_whole, events);
            if !is_whole {
                self.held_tokens[0].1 -= taken;
                break;
            }
            self.held_tokens.pop_front();
        }
        self.held.drain(..from);
        self.exempt = self.exempt.saturating_sub(from);
    }

    /// The first stop text that is complete: its beginning, its number and its end.
    fn first_stop(&self) -> Option<(usize, usize, usize)> {
        let places = self.stops.iter().enumerate().filter_map(|(number, stop)| {
            // One that begins earlier would end in the exempt text.
            let mut from = (self.exempt + 1).saturating_sub(stop.len());
            while !self.held.is_char_boundary(from) {
                from += 1;
            }
            let at = from + self.held.get(from..)?.find(stop.as_str())?;
            Some((at, number, at + stop.len()))
        });
        places.min()
    }

    /// Length in bytes of the end of the held text that may be the beginning of a stop text.
    fn undecided_len(&self) -> usize {
        let starts = |stop: &String| {
            let most = stop.len().saturating_sub(1).min(self.held.len());
            (1..=most)
                .rev()
                .find(|len| {
                    let from = self.held.len() - len;
                    self.held.is_char_boundary(from)
                        && stop.as_bytes().starts_with(&self.held.as_bytes()[from..])
                })
                .unwrap_or(0)
        };
        self.stops.iter().map(starts).max().unwrap_or(0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::relay::parsing::CallIds;
    use refrain_output_parsers::{
        OutputParser, ParserOptions, ReasoningParserKind, ToolParserKind,
    };
    use refrain_tokenization::testing::{FIRST_BYTE, IM_END, byte_level_files};

    fn text(stops: &[&str]) -> OutputText {
        let stops: Vec<String> = stops.iter().map(|stop| (*stop).to_owned()).collect();
        OutputText::new(
            Arc::new(byte_level_files().tokenizer().unwrap()),
            stops.into(),
            Parsing::default(),
        )
    }

    /// The visible text of events.
    fn visible(events: &[Event]) -> String {
        let text = |event: &Event| match event {
            Event::Text(text) => text.clone(),
            other => panic!("{other:?}"),
        };
        events.iter().map(text).collect()
    }

    /// The text released by each byte of `input`, then `!` for a stop text or the result of `finish`.
    fn run(stops: &[&str], input: &str) -> Vec<String> {
        let mut text = text(stops);
        let mut pieces = Vec::new();
        for byte in input.bytes() {
            let mut events = Vec::new();
            let is_stopped = text.push(FIRST_BYTE + u32::from(byte), true, &mut events);
            pieces.push(visible(&events));
            if is_stopped {
                pieces.push("!".into());
                return pieces;
            }
        }
        let mut events = Vec::new();
        text.finish(&mut events);
        pieces.push(visible(&events));
        pieces
    }

    #[test]
    fn text_that_may_become_a_stop_waits() {
        assert_eq!(run(&["END"], "aEND"), ["a", "", "", "", "!"]);
        assert_eq!(run(&["END"], "ENEx"), ["", "", "EN", "Ex", ""]);
        assert_eq!(run(&["END"], "EN"), ["", "", "EN"]);
        assert_eq!(run(&["aab"], "aaab"), ["", "", "a", "", "!"]);
    }

    #[test]
    fn the_first_complete_stop_text_counts() {
        assert_eq!(run(&["abcd", "c"], "abcd"), ["", "", "ab", "!"]);
        assert_eq!(run(&["x", "ab"], "abx"), ["", "", "!"]);
    }

    #[test]
    fn without_stops_text_flows_and_half_characters_wait() {
        assert_eq!(run(&[], "a\u{e9}"), ["a", "", "\u{e9}", ""]);
        assert_eq!(
            run(&["\u{e9}!"], "\u{e8}\u{e9}?"),
            ["", "\u{e8}", "", "", "\u{e9}?", ""]
        );
    }

    #[test]
    fn special_tokens_give_no_text() {
        let mut events = Vec::new();
        assert!(!text(&["<|im_end|>"]).push(IM_END, true, &mut events));
        assert_eq!(events, []);
    }

    #[test]
    fn rules_decide_on_stop_texts_and_special_tokens() {
        let push = |text: &mut OutputText, input: &str, may_stop: bool| {
            let mut all = String::new();
            for byte in input.bytes() {
                let mut events = Vec::new();
                let is_stopped = text.push(FIRST_BYTE + u32::from(byte), may_stop, &mut events);
                all.push_str(&visible(&events));
                if is_stopped {
                    return all + "!";
                }
            }
            all
        };
        let mut with_stop = text(&["END", "D"]).with(true, false);
        assert_eq!(push(&mut with_stop, "aEND", true), "aEND!");
        let mut special = text(&["im_end"]).with(false, true);
        let mut events = Vec::new();
        assert!(special.push(IM_END, true, &mut events));
        assert_eq!(visible(&events), "<|");
        // A stop text that is complete too early stays; one that ends later counts, wherever it begins.
        let mut late = text(&["ab", "xabc"]);
        assert_eq!(push(&mut late, "1ab2xab", false), "1ab2");
        assert_eq!(push(&mut late, "d3xa", true), "xabd3");
        assert_eq!(push(&mut late, "b", true), "x!");
        let mut across = text(&["END"]);
        assert_eq!(push(&mut across, "EN", false), "");
        assert_eq!(push(&mut across, "D", true), "!");
    }

    #[test]
    fn no_split_changes_the_text() {
        let input = "say <stop or <<stop> no <sto";
        for stops in [
            &["<stop>"][..],
            &["<stop>", "or <<"],
            &["never"],
            &["\n", "zz"],
        ] {
            let whole: String = run(stops, input).concat();
            let expected = stops.iter().filter_map(|stop| input.find(stop)).min();
            let expected = expected.map_or(input.to_owned(), |at| format!("{}!", &input[..at]));
            assert_eq!(whole, expected);
        }
    }

    /// An output of Hermes calls and reasoning, whose markers are no tokens of the small vocabulary.
    fn parsed(stops: &[&str], by_text: bool) -> OutputText {
        let options = ParserOptions {
            tools_as: ToolParserKind::Hermes,
            reasoning_as: ReasoningParserKind::Qwen3,
            ..ParserOptions::default()
        };
        let parser = OutputParser::new(options, |_| None);
        let call_ids = CallIds {
            base: 10,
            are_short: false,
        };
        let mut text = text(stops);
        text.parsing = Parsing::new(Some(parser), by_text, call_ids);
        text
    }

    fn events_of(mut text: OutputText, input: &str) -> (Vec<Event>, bool, u64) {
        let mut events = Vec::new();
        let mut is_stopped = false;
        for byte in input.bytes() {
            if text.push(FIRST_BYTE + u32::from(byte), true, &mut events) {
                is_stopped = true;
                break;
            }
        }
        text.finish(&mut events);
        // To finish twice changes nothing.
        text.finish(&mut events);
        (events, is_stopped, text.reasoning_tokens())
    }

    #[test]
    fn stop_texts_cut_before_calls_are_parsed() {
        let call = |arguments: &str, intact| {
            vec![
                Event::CallStart {
                    index: 0,
                    id: Some(format!("call_{:024x}", 10)),
                    name: "f".into(),
                },
                Event::CallArguments {
                    index: 0,
                    delta: arguments.into(),
                },
                Event::CallEnd { index: 0, intact },
            ]
        };
        let input = "<tool_call>{\"name\": \"f\", \"arguments\": {\"a\": \"x y\"}}</tool_call>";
        for by_text in [false, true] {
            let cut = |stop: &str| {
                let (events, is_stopped, _) = events_of(parsed(&[stop], by_text), input);
                (events, is_stopped)
            };
            assert_eq!(cut("never"), (call("{\"a\": \"x y\"}", true), false));
            assert_eq!(cut("x y"), (call("{\"a\": \"", false), true));
            assert_eq!(cut("</tool"), (call("{\"a\": \"x y\"}", true), true));
        }
    }

    #[test]
    fn tokens_of_the_reasoning_are_counted_with_its_markers() {
        let input = "<think>hm</think>hi";
        let reasoning = |stops: &[&str]| events_of(parsed(stops, false), input);
        let expected = vec![Event::Reasoning("hm".into()), Event::Text("hi".into())];
        // The first bytes of a marker become reasoning only with its last one.
        let markers_end = "hm</think>".len() as u64 + 1;
        assert_eq!(reasoning(&[]), (expected.clone(), false, markers_end));
        assert_eq!(reasoning(&["zz"]), (expected, false, markers_end));
        let cut = vec![Event::Reasoning("h".into())];
        assert_eq!(reasoning(&["m<"]).0, cut);
    }
}
