//! An answer as its events tell it: text, the draft that each token came from, and figures.

use std::collections::{BTreeMap, VecDeque};
use std::time::Instant;

use refrain_protocol::chunk::{DraftScope, DraftSource};
use refrain_worker::SseParser;
use reqwest::Response;
use serde::Deserialize;

use super::fault::ChatFault;

/// A part of an answer.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Span {
    pub(super) text: String,
    /// Whether accepted draft tokens brought it.
    pub(super) is_drafted: bool,
    pub(super) is_reasoning: bool,
}

/// An answer that is being read.
pub(super) struct Answer {
    response: Response,
    parser: SseParser,
    asked: Instant,
    origins: Origins,
    figures: AnswerFigures,
}

/// The figures of an answer.
#[derive(Debug, Default)]
pub(super) struct AnswerFigures {
    tokens: u64,
    seconds: f64,
    /// `None` where the gateway hides it.
    decoding: Option<Decoding>,
    /// Accepted tokens by the source of their draft.
    by_source: BTreeMap<&'static str, u64>,
}

#[derive(Clone, Copy, Debug, Deserialize)]
struct Decoding {
    steps: u64,
    drafted: u64,
    accepted: u64,
}

#[derive(Deserialize)]
struct Event {
    error: Option<ChatFault>,
    #[serde(default)]
    choices: Vec<Choice>,
    usage: Option<Usage>,
    metrics: Option<Metrics>,
}

#[derive(Deserialize)]
struct Choice {
    #[serde(default)]
    delta: Delta,
    #[serde(default)]
    steps: Vec<Step>,
}

#[derive(Default, Deserialize)]
struct Delta {
    content: Option<String>,
    reasoning_content: Option<String>,
}

#[derive(Deserialize)]
struct Step {
    tokens: Vec<String>,
    scope: DraftScope,
    drafts: Vec<Draft>,
}

#[derive(Deserialize)]
struct Draft {
    source: DraftSource,
    accepted: usize,
}

#[derive(Deserialize)]
struct Usage {
    completion_tokens: u64,
}

#[derive(Deserialize)]
struct Metrics {
    speculative_decoding: Decoding,
}

impl Answer {
    /// The answer to a question that was asked then.
    pub(super) fn new(response: Response, asked: Instant) -> Self {
        Answer {
            response,
            parser: SseParser::default(),
            asked,
            origins: Origins::default(),
            figures: AnswerFigures::default(),
        }
    }

    /// The next part of the answer, or `None` at its end.
    pub(super) async fn next_spans(&mut self) -> Result<Option<Vec<Span>>, ChatFault> {
        let unreadable = || ChatFault::new("the gateway sent an event that cannot be read");
        loop {
            if let Some(data) = self.parser.next_event().map_err(|_| unreadable())? {
                if &data[..] == b"[DONE]" {
                    self.figures.seconds = self.asked.elapsed().as_secs_f64();
                    return Ok(None);
                }
                let event = serde_json::from_slice(&data).map_err(|_| unreadable())?;
                return self.read(event).map(Some);
            }
            let broken = || ChatFault::new("the answer broke off; the gateway may have ended");
            match self.response.chunk().await {
                Ok(Some(bytes)) => self.parser.push(bytes),
                Ok(None) | Err(_) => return Err(broken()),
            }
        }
    }

    /// The figures, once the answer has ended.
    pub(super) fn into_figures(self) -> AnswerFigures {
        self.figures
    }

    fn read(&mut self, event: Event) -> Result<Vec<Span>, ChatFault> {
        if let Some(error) = event.error {
            return Err(error);
        }
        if let Some(usage) = event.usage {
            self.figures.tokens = usage.completion_tokens;
        }
        if let Some(metrics) = event.metrics {
            self.figures.decoding = Some(metrics.speculative_decoding);
        }
        let mut spans = Vec::new();
        for choice in event.choices {
            for step in &choice.steps {
                self.origins.push(step);
                for draft in step.drafts.iter().filter(|draft| draft.accepted > 0) {
                    let name = name_of(draft.source, step.scope);
                    *self.figures.by_source.entry(name).or_default() += draft.accepted as u64;
                }
            }
            let Delta {
                content,
                reasoning_content,
            } = choice.delta;
            for (text, is_reasoning) in [(reasoning_content, true), (content, false)] {
                let parts = self.origins.split(&text.unwrap_or_default());
                spans.extend(parts.into_iter().map(|(text, is_drafted)| Span {
                    text,
                    is_drafted,
                    is_reasoning,
                }));
            }
        }
        Ok(spans)
    }
}

/// The words for a source of drafts.
fn name_of(source: DraftSource, scope: DraftScope) -> &'static str {
    match (source, scope) {
        (DraftSource::Suffix, DraftScope::Request) => "this conversation",
        (DraftSource::Suffix, _) => "earlier outputs",
        (DraftSource::Eagle3, _) => "the EAGLE-3 head",
        (DraftSource::DraftModel, _) => "the draft model",
        (DraftSource::Prediction, _) => "the prediction",
        (DraftSource::Grammar, _) => "the form of the output",
        (DraftSource::None, _) => "no draft",
    }
}

/// Tokens whose text has not been shown, and whether a draft brought each.
#[derive(Debug, Default)]
struct Origins {
    tokens: VecDeque<(String, bool)>,
}

impl Origins {
    /// Adds the tokens of a step. Those that its drafts brought come first.
    fn push(&mut self, step: &Step) {
        let drafted: usize = step.drafts.iter().map(|draft| draft.accepted).sum();
        let tokens = step.tokens.iter().enumerate();
        let tokens = tokens.map(|(place, text)| (text.clone(), place < drafted));
        self.tokens
            .extend(tokens.filter(|(text, _)| !text.is_empty()));
    }

    /// Splits text by the origin of its tokens. Tokens that are no part of the text, such as the marks around a
    /// reasoning, are passed over, and text that no token explains counts as the engine's own.
    fn split(&mut self, mut text: &str) -> Vec<(String, bool)> {
        let mut parts: Vec<(String, bool)> = Vec::new();
        while !text.is_empty() {
            let explains =
                |(token, _): &(String, bool)| text.starts_with(token) || token.starts_with(text);
            let (len, is_drafted) = match self.tokens.iter().position(explains) {
                None => (text.len(), false),
                Some(place) => {
                    self.tokens.drain(..place);
                    let (token, is_drafted) = self.tokens.pop_front().unwrap_or_default();
                    // The rest of a token comes with the next event.
                    if let Some(rest) = token.strip_prefix(text).filter(|rest| !rest.is_empty()) {
                        self.tokens.push_front((rest.to_owned(), is_drafted));
                    }
                    (token.len().min(text.len()), is_drafted)
                }
            };
            let (part, rest) = text.split_at(len);
            match parts.last_mut() {
                Some((last, of_last)) if *of_last == is_drafted => last.push_str(part),
                _ => parts.push((part.to_owned(), is_drafted)),
            }
            text = rest;
        }
        parts
    }
}

impl AnswerFigures {
    /// The figures in one line.
    pub(super) fn line(&self) -> String {
        let many = |count: u64, thing: &str| match count {
            1 => format!("1 {thing}"),
            count => format!("{count} {thing}s"),
        };
        let mut line = many(self.tokens, "token");
        if let Some(decoding) = self.decoding {
            let saved = self.tokens.saturating_sub(decoding.steps);
            let steps = many(decoding.steps, "engine step");
            line += &format!(" in {steps}, {saved} saved");
        }
        if self.seconds > 0.0 {
            line += &format!(", {:.0} tokens/s", self.tokens as f64 / self.seconds);
        }
        if let Some(Decoding {
            drafted, accepted, ..
        }) = self.decoding.filter(|decoding| decoding.drafted > 0)
        {
            line += &format!("; accepted {accepted} of {drafted} drafted");
            let sources: Vec<String> = self
                .by_source
                .iter()
                .map(|(name, count)| format!("{count} from {name}"))
                .collect();
            if !sources.is_empty() {
                line += &format!(": {}", sources.join(", "));
            }
        }
        line
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn step(tokens: &[&str], accepted: usize) -> Step {
        Step {
            tokens: tokens.iter().map(|token| (*token).to_owned()).collect(),
            scope: DraftScope::Tenant,
            drafts: vec![Draft {
                source: DraftSource::Suffix,
                accepted,
            }],
        }
    }

    fn split(origins: &mut Origins, text: &str) -> String {
        let parts = origins.split(text).into_iter();
        let marked = parts.map(|(text, is_drafted)| match is_drafted {
            true => format!("[{text}]"),
            false => text,
        });
        marked.collect()
    }

    #[test]
    fn text_has_the_origin_of_its_tokens() {
        let mut origins = Origins::default();
        origins.push(&step(&["SELECT", " city", " FROM"], 2));
        assert_eq!(
            split(&mut origins, "SELECT city FROM"),
            "[SELECT city] FROM"
        );
        // An event may end within a token, where a stop text could begin.
        origins.push(&step(&[" orders", ";"], 1));
        assert_eq!(split(&mut origins, " ord"), "[ ord]");
        assert_eq!(split(&mut origins, "ers;"), "[ers];");
        // Nothing is known of this text.
        assert_eq!(split(&mut origins, "more"), "more");
    }

    #[test]
    fn tokens_that_are_not_shown_are_passed_over() {
        let mut origins = Origins::default();
        origins.push(&step(&["<think>", "", "é", "</think>", "yes"], 3));
        assert_eq!(split(&mut origins, "é"), "[é]");
        assert_eq!(split(&mut origins, "yes"), "yes");
        assert!(origins.tokens.is_empty());
    }

    #[test]
    fn the_line_of_figures_says_what_is_known() {
        let mut figures = AnswerFigures {
            tokens: 28,
            seconds: 0.5,
            ..AnswerFigures::default()
        };
        assert_eq!(figures.line(), "28 tokens, 56 tokens/s");
        figures.decoding = Some(Decoding {
            steps: 1,
            drafted: 30,
            accepted: 27,
        });
        figures.by_source = [("earlier outputs", 20), ("this conversation", 7)].into();
        assert_eq!(
            figures.line(),
            "28 tokens in 1 engine step, 27 saved, 56 tokens/s; accepted 27 of 30 drafted: 20 from earlier outputs, \
             7 from this conversation"
        );
    }
}
