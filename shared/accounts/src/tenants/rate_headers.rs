//! The headers that tell a client what is left of its limits, in the words of OpenAI and of Anthropic.

use std::time::{Duration, Instant};

use refrain_service_kit::clock;

use super::directory::Caller;
use super::file::expiry_text;
use super::limit_usage::PerMinute;
use super::limiter::{LimitState, Limiter};

/// The words of an API.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum HeaderWords {
    /// `x-ratelimit-limit-requests`, with durations such as `6m0s`.
    OpenAi,
    /// `anthropic-ratelimit-requests-limit`, with times of RFC 3339.
    Anthropic,
}

impl Limiter {
    /// The headers for the limits that a caller has, with their names.
    pub(crate) fn headers(
        &self,
        caller: &Caller,
        words: HeaderWords,
    ) -> impl Iterator<Item = (String, String)> {
        let (now, now_unix_s) = (Instant::now(), clock::unix_s());
        let limits = [
            (PerMinute::Requests, "requests"),
            (PerMinute::Tokens, "tokens"),
            (PerMinute::InputTokens, "input-tokens"),
            (PerMinute::OutputTokens, "output-tokens"),
        ];
        let states = limits.into_iter().filter_map(move |(of, what)| {
            let state = self.state(caller, of, now)?;
            Some(described(state, words, what, now_unix_s))
        });
        states.flatten()
    }
}

fn described(
    state: LimitState,
    words: HeaderWords,
    what: &str,
    now_unix_s: u64,
) -> [(String, String); 3] {
    let LimitState {
        limit,
        left,
        until_full,
    } = state;
    let name = |part: &str| match words {
        HeaderWords::OpenAi => format!("x-ratelimit-{part}-{what}"),
        HeaderWords::Anthropic => format!("anthropic-ratelimit-{what}-{part}"),
    };
    let reset = match words {
        HeaderWords::OpenAi => duration_text(until_full),
        HeaderWords::Anthropic => {
            let full_at = now_unix_s + until_full.as_secs_f64().ceil() as u64;
            expiry_text(full_at.cast_signed()).unwrap_or_default()
        }
    };
    [
        (name("limit"), limit.to_string()),
        (name("remaining"), left.to_string()),
        (name("reset"), reset),
    ]
}

/// A duration as OpenAI writes it: `120ms`, `7.5s`, `6m0s`.
fn duration_text(duration: Duration) -> String {
    let ms = duration.as_millis();
    match ms {
        0..1_000 => format!("{ms}ms"),
        1_000..60_000 => format!("{}s", (ms / 10) as f64 / 100.0),
        _ => format!("{}m{}s", ms / 60_000, ms % 60_000 / 1_000),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn both_apis_have_their_own_words() {
        let state = LimitState {
            limit: 600,
            left: 12,
            until_full: Duration::from_millis(58_800),
        };
        let openai = described(state, HeaderWords::OpenAi, "requests", 0);
        let pair = |name: &str, value: &str| (name.to_owned(), value.to_owned());
        assert_eq!(
            openai,
            [
                pair("x-ratelimit-limit-requests", "600"),
                pair("x-ratelimit-remaining-requests", "12"),
                pair("x-ratelimit-reset-requests", "58.8s"),
            ]
        );
        let anthropic = described(state, HeaderWords::Anthropic, "input-tokens", 1_800_000_000);
        assert_eq!(
            anthropic[2],
            pair(
                "anthropic-ratelimit-input-tokens-reset",
                "2027-01-15T08:00:59Z"
            )
        );
        assert_eq!(anthropic[0].0, "anthropic-ratelimit-input-tokens-limit");
    }

    #[test]
    fn durations_are_written_as_clients_read_them() {
        let text = |ms| duration_text(Duration::from_millis(ms));
        assert_eq!(text(0), "0ms");
        assert_eq!(text(120), "120ms");
        assert_eq!(text(7_500), "7.5s");
        assert_eq!(text(360_400), "6m0s");
    }
}
