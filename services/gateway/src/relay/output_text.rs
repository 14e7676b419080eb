//! Turns tokens into the text that a client sees: whole characters, and nothing of a stop text.

use std::sync::Arc;

use refrain_protocol::TokenId;
use refrain_tokenization::{Detokenizer, Tokenizer};

/// The text of one choice as it grows.
///
/// Stop texts are searched token by token, so the cut does not depend on the number of tokens in a step.
#[derive(Clone, Debug)]
pub(crate) struct OutputText {
    detokenizer: Detokenizer,
    stops: Arc<[String]>,
    /// Whether the stop text that ends the output is a part of it.
    has_stop_text: bool,
    /// Decoded text that may be the beginning of a stop text.
    held: String,
    /// Bytes at the beginning of `held` in which no stop text may end.
    exempt: usize,
}

/// The effect of one token.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Released {
    /// Text that no stop text can take back any more.
    pub(crate) text: String,
    /// Whether a stop text is complete. Nothing may follow.
    pub(crate) stopped: bool,
}

impl OutputText {
    /// Creates an empty text.
    pub(crate) fn new(tokenizer: Arc<Tokenizer>, stops: Arc<[String]>) -> Self {
        OutputText {
            detokenizer: Detokenizer::new(tokenizer),
            stops,
            has_stop_text: false,
            held: String::new(),
            exempt: 0,
        }
    }

    /// The same text by other rules: whether it has the stop text that ends it, and the text of special tokens.
    pub(crate) fn with(mut self, has_stop_text: bool, shows_special: bool) -> Self {
        self.has_stop_text = has_stop_text;
        self.detokenizer = self.detokenizer.showing_special(shows_special);
        self
    }

    /// Whether the token that ends the output is a part of its text.
    pub(crate) fn has_stop_text(&self) -> bool {
        self.has_stop_text
    }

    /// Adds a token. No stop text ends in it unless `may_stop`.
    pub(crate) fn push(&mut self, token: TokenId, may_stop: bool) -> Released {
        let fresh = self.detokenizer.push(token);
        if self.stops.is_empty() {
            return Released {
                text: fresh,
                stopped: false,
            };
        }
        self.held.push_str(&fresh);
        if !may_stop {
            self.exempt = self.held.len();
        }
        if let Some((at, end)) = self.first_stop() {
            self.held
                .truncate(if self.has_stop_text { end } else { at });
            return Released {
                text: std::mem::take(&mut self.held),
                stopped: true,
            };
        }
        let released = self.held.len() - self.undecided_len();
        self.exempt = self.exempt.saturating_sub(released);
        let kept = self.held.split_off(released);
        Released {
            text: std::mem::replace(&mut self.held, kept),
            stopped: false,
        }
    }

    /// The bytes of the first stop text that is complete.
    fn first_stop(&self) -> Option<(usize, usize)> {
        let places = self.stops.iter().filter_map(|stop| {
            // One that begins earlier would end in the exempt text.
            let mut from = (self.exempt + 1).saturating_sub(stop.len());
            while !self.held.is_char_boundary(from) {
                from += 1;
            }
            let at = from + self.held.get(from..)?.find(stop.as_str())?;
            Some((at, at + stop.len()))
        });
        places.min()
    }

    /// Returns the text that was held back, at the end of the output.
    pub(crate) fn finish(&mut self) -> String {
        let mut text = std::mem::take(&mut self.held);
        text.push_str(&self.detokenizer.finish());
        text
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
    use refrain_tokenization::testing::{FIRST_BYTE, IM_END, byte_level_files};

    fn text(stops: &[&str]) -> OutputText {
        let stops: Vec<String> = stops.iter().map(|stop| (*stop).to_owned()).collect();
        OutputText::new(
            Arc::new(byte_level_files().tokenizer().unwrap()),
            stops.into(),
        )
    }

    /// The text released by each byte of `input`, then `!` for a stop text or the result of `finish`.
    fn run(stops: &[&str], input: &str) -> Vec<String> {
        let mut text = text(stops);
        let mut pieces = Vec::new();
        for byte in input.bytes() {
            let released = text.push(FIRST_BYTE + u32::from(byte), true);
            pieces.push(released.text);
            if released.stopped {
                pieces.push("!".into());
                return pieces;
            }
        }
        pieces.push(text.finish());
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
        assert_eq!(
            text(&["<|im_end|>"]).push(IM_END, true),
            Released {
                text: String::new(),
                stopped: false
            }
        );
    }

    #[test]
    fn rules_decide_on_stop_texts_and_special_tokens() {
        let push = |text: &mut OutputText, input: &str, may_stop: bool| {
            let mut all = String::new();
            for byte in input.bytes() {
                let released = text.push(FIRST_BYTE + u32::from(byte), may_stop);
                all.push_str(&released.text);
                if released.stopped {
                    return all + "!";
                }
            }
            all
        };
        let mut with_stop = text(&["END", "D"]).with(true, false);
        assert_eq!(push(&mut with_stop, "aEND", true), "aEND!");
        let mut special = text(&["im_end"]).with(false, true);
        let released = special.push(IM_END, true);
        assert_eq!((released.text.as_str(), released.stopped), ("<|", true));
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
}
