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
    /// Decoded text that may be the beginning of a stop text.
    held: String,
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
            held: String::new(),
        }
    }

    /// Adds a token.
    pub(crate) fn push(&mut self, token: TokenId) -> Released {
        let fresh = self.detokenizer.push(token);
        if self.stops.is_empty() {
            return Released {
                text: fresh,
                stopped: false,
            };
        }
        self.held.push_str(&fresh);
        if let Some(at) = self
            .stops
            .iter()
            .filter_map(|stop| self.held.find(stop.as_str()))
            .min()
        {
            self.held.truncate(at);
            return Released {
                text: std::mem::take(&mut self.held),
                stopped: true,
            };
        }
        let kept = self.held.split_off(self.held.len() - self.undecided_len());
        Released {
            text: std::mem::replace(&mut self.held, kept),
            stopped: false,
        }
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
            let released = text.push(FIRST_BYTE + u32::from(byte));
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
            text(&["<|im_end|>"]).push(IM_END),
            Released {
                text: String::new(),
                stopped: false
            }
        );
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
