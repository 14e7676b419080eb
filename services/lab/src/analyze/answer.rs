//! The answer in words: whether drafts help, by how much, why, and what to do next.

use serde::Serialize;

use super::alpha::AlphaChoice;
use super::bootstrap::Range;
use super::repeats::{Origin, Origins};
use super::speed::{MemoryPoint, SpeedReport};

/// Sessions, or groups of samples, without which there is no figure.
pub(super) const UNITS_MIN: usize = 10;
/// Output tokens without which there is no figure.
pub(super) const TOKENS_MIN: u64 = 2_000;
/// The widest range, as its high end over its low one, that is a figure where the answer may be yes or no.
const WIDTH_MAX: f64 = 1.5;
/// Drafts help if the low end of the range is at least this.
const YES: f64 = 1.6;
/// Below this, drafts do not help: engines lose a part of what the model promises to the work of drafting and of
/// longer steps. Prose, of which hardly anything repeats, gets 1.3 to 1.4 from the model.
const NO: f64 = 1.45;
/// The part of Refrain's speed-up from which n-gram lookup alone is nearly as good.
const NEARLY: f64 = 0.95;

/// Whether drafts help.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Verdict {
    /// Decoding becomes at least 1.6 times as fast, by the low end of the range.
    Yes,
    /// It becomes faster, by less than that or less surely.
    ALittle,
    /// It becomes less than 1.45 times as fast, which an engine would mostly lose again.
    No,
    /// The calls are too few for a figure.
    TooLittleData,
}

/// The answer.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Answer {
    /// In one word.
    pub verdict: Verdict,
    /// In one sentence.
    pub sentence: String,
    /// The rest that the figures say.
    pub details: Vec<String>,
    /// The next things to do.
    pub next: Vec<String>,
}

/// The facts from which an answer is made.
pub(super) struct Facts<'a> {
    /// The speed that the answer is about.
    pub(super) speed: &'a SpeedReport,
    pub(super) origins: &'a Origins,
    pub(super) memory: &'a [MemoryPoint],
    pub(super) alphas: Vec<(&'a str, &'a AlphaChoice)>,
    /// Calls that were read and that were replayed.
    pub(super) calls: (u64, u64),
    /// Replayed output tokens.
    pub(super) tokens: u64,
    pub(super) sessions: u64,
    pub(super) units: usize,
    /// Milliseconds per output token of the log's own calls, if it says how long they took.
    pub(super) logged_ms_per_token: Option<f64>,
    pub(super) tokens_per_s: f64,
    /// Whether the log itself says so many tokens per second.
    pub(super) is_logged_rate: bool,
    pub(super) month_bytes: Option<f64>,
    /// Whether the head is an assumption.
    pub(super) is_assumed_head: bool,
}

impl Verdict {
    /// The verdict on calls with this speed-up of decoding.
    pub(super) fn of(decoding: Option<Range>, units: usize, tokens: u64) -> Self {
        match decoding {
            Some(range) if units >= UNITS_MIN && tokens >= TOKENS_MIN => match range {
                range if range.low >= YES => Verdict::Yes,
                range if range.width() > WIDTH_MAX => Verdict::TooLittleData,
                range if range.estimate >= NO => Verdict::ALittle,
                _ => Verdict::No,
            },
            _ => Verdict::TooLittleData,
        }
    }

    /// The verdict in words.
    pub fn words(self) -> &'static str {
        match self {
            Verdict::Yes => "yes",
            Verdict::ALittle => "a little",
            Verdict::No => "no",
            Verdict::TooLittleData => "too little data",
        }
    }
}

impl Answer {
    pub(super) fn new(facts: &Facts<'_>) -> Self {
        let verdict = Verdict::of(facts.speed.decoding, facts.units, facts.tokens);
        match facts
            .speed
            .decoding
            .filter(|_| verdict != Verdict::TooLittleData)
        {
            Some(range) => Answer {
                verdict,
                sentence: facts.sentence(verdict, &range),
                details: facts.details(),
                next: facts.next(verdict, &range),
            },
            None => Answer {
                verdict,
                sentence: facts.too_little(),
                details: vec![facts.sample()],
                next: vec!["Collect more calls, and run the same command again.".into()],
            },
        }
    }
}

impl Facts<'_> {
    fn sentence(&self, verdict: Verdict, range: &Range) -> String {
        let word = match verdict {
            Verdict::Yes => "Yes",
            Verdict::ALittle => "A little",
            Verdict::No | Verdict::TooLittleData => "No",
        };
        let reason = match self.origins.most() {
            _ if verdict == Verdict::No => {
                "an engine would mostly lose that again to the work of drafting"
            }
            Some(Origin::Call) => {
                "most from text that stands in the call itself, its prompt included"
            }
            Some(Origin::Session) => "most from text repeated within a session",
            Some(Origin::Group) => "most from text that samples of a group share",
            Some(Origin::Others) => "most from text repeated between sessions",
            Some(Origin::New) | None => "hardly any text repeats",
        };
        let groups = match (self.units as u64) < self.sessions {
            true => format!(" in {} groups", count_words(self.units as u64)),
            false => String::new(),
        };
        format!(
            "{word}: {} ({}, {} at once), from {} output tokens of {} sessions{groups}; {reason}.",
            range.words(),
            engine_words(&self.speed.engine_model),
            self.speed.concurrency,
            count_words(self.tokens),
            count_words(self.sessions)
        )
    }

    fn too_little(&self) -> String {
        let has = format!(
            "{} output tokens of {}",
            count_words(self.tokens),
            match self.units {
                1 => "one session".to_owned(),
                units => format!("{} independent sessions", count_words(units as u64)),
            }
        );
        if self.units >= UNITS_MIN && self.tokens >= TOKENS_MIN {
            // The range narrows with the root of the number of sessions.
            let width = self.speed.decoding.map_or(4.0, |range| range.width());
            let times = (width.ln() / WIDTH_MAX.ln()).powi(2).ceil().max(2.0);
            return format!(
                "Too little data for a figure: the log has {has}, which differ too much. It takes about {times:.0} times as \
                 many sessions."
            );
        }
        format!(
            "Too little data for a figure: the log has {has}. It takes at least {} tokens of {UNITS_MIN} sessions.",
            count_words(TOKENS_MIN)
        )
    }

    fn sample(&self) -> String {
        let (read, replayed) = self.calls;
        match read == replayed {
            true => format!("All {} calls were replayed.", count_words(read)),
            false => format!(
                "A sample was replayed: {} of {} calls, whole sessions spread evenly over the log. With all of them, drafts \
                 come from more text.",
                count_words(replayed),
                count_words(read)
            ),
        }
    }

    fn details(&self) -> Vec<String> {
        let speed = self.speed;
        let mut details = Vec::new();
        let without_reuse = speed.decoding_share_without_reuse.map(percent);
        details.push(match speed.decoding_share.zip(speed.whole_call) {
            Some((share, range)) => format!(
                "{} of a call's time{}. So a whole call becomes {} as fast.",
                match speed.decoding_share_calls {
                    0 => format!("By the model, decoding takes {}", percent(share)),
                    _ => format!("Decoding takes {}", percent(share)),
                },
                match without_reuse {
                    Some(whole) => format!(
                        " where the engine reuses prefixes of prompts, and {whole} where not"
                    ),
                    None => format!(
                        ", measured in {} calls of the log",
                        count_words(speed.decoding_share_calls)
                    ),
                },
                range.words()
            ),
            None => "That is decoding alone: the log has no prompts, so what they take of a call is not known.".into(),
        });
        if let Some(ms) = self.logged_ms_per_token {
            let modelled = speed
                .plain_tokens_per_s
                .map(|rate| 1e3 * speed.concurrency as f64 / rate);
            let modelled = modelled.map_or_else(String::new, |ms| {
                format!("; the modelled engine takes {ms:.1} ms without drafts")
            });
            details.push(format!(
                "The calls of the log took {ms:.1} ms per output token, prompts and waiting included{modelled}."
            ));
        }
        if let Some((ngram, head)) = speed.ngram.zip(speed.head) {
            let assumed = match self.is_assumed_head {
                true => ", if it brings 2.6 tokens per step, which is an assumption",
                false => "",
            };
            details.push(format!(
                "N-gram lookup alone would bring {ngram:.1}x. An EAGLE-3 head alone would bring {head:.1}x{assumed}."
            ));
        }
        let shares = self.origins.shares().map(|(_, share)| percent(share));
        let [call, session, group, others, new] = shares;
        let group = match self.origins.group > 0.0 {
            true => format!("{group} in a sample of the group, "),
            false => String::new(),
        };
        details.push(format!(
            "Of the output tokens, {call} stood before in the call itself, {session} in the session, {group}{others} in \
             other sessions, and {new} are new."
        ));
        if let [first, .., last] = self.memory
            && let Some((without, with)) = first.speedup.zip(last.speedup)
        {
            details.push(format!(
                "The last quarter of the calls gains {without:.1}x from an empty memory, and {with:.1}x with {} tokens \
                 remembered.",
                count_words(last.tokens)
            ));
        }
        details.push(self.sample());
        details
    }

    fn next(&self, verdict: Verdict, range: &Range) -> Vec<String> {
        let mut next = Vec::new();
        if verdict == Verdict::No {
            next.push(
                "Leave these drafts off: they would take memory and bring next to nothing.".into(),
            );
            if let Some(head) = self.speed.head.filter(|head| *head >= YES) {
                next.push(format!(
                    "A draft head such as EAGLE-3 needs no repeats: {head:.1}x, if its acceptance is as assumed."
                ));
            }
            return next;
        }
        if self
            .speed
            .ngram
            .is_some_and(|ngram| ngram >= NEARLY * range.estimate)
        {
            next.push(
                "Try the n-gram lookup of your engine first: it brings nearly as much without a memory.".into(),
            );
        }
        next.push(
            "Run the drafts inside your engine, where a draft costs no call: install the plug-in as docs/vllm.md says, and \
             start `vllm serve MODEL --speculative-config '{\"method\": \"suffix\"}'`. For SGLang see docs/sglang.md. In \
             front of an engine, Refrain only routes and remembers."
                .into(),
        );
        let fixed: Vec<_> = self
            .alphas
            .iter()
            .filter(|(_, choice)| choice.is_fixed())
            .collect();
        for (name, choice) in fixed {
            next.push(format!(
                "For {name}, set `{}` under `[speculation]` in the plug-in's file: it gains {:.0} % over `auto` at {} requests at once.",
                choice.config_line(),
                100.0 * choice.gain.unwrap_or_default(),
                choice.concurrency
            ));
        }
        if let Some(bytes) = self.month_bytes {
            let from = match self.is_logged_rate {
                true => "the rate of the log",
                false => "an assumed rate",
            };
            next.push(format!(
                "Plan {} of disk for a month at {from}, {} output tokens per second, and as much memory on a worker that is to \
                 hold all of it.",
                size_words(bytes),
                count_words(self.tokens_per_s.round() as u64)
            ));
        }
        next
    }
}

/// The engine model in words where its name has the form of a preset: `h100x4-70b` is a 70B model on 4 H100.
pub(super) fn engine_words(name: &str) -> String {
    let known = || {
        let (device, model) = name.split_once('-')?;
        let size: u32 = model.strip_suffix('b')?.parse().ok()?;
        Some(match device.split_once('x') {
            Some((device, count)) if count.parse::<u32>().is_ok() => {
                format!("{size}B on {count} {}", device.to_uppercase())
            }
            _ => format!("{size}B on an {}", device.to_uppercase()),
        })
    };
    known().unwrap_or_else(|| name.to_owned())
}

/// A count, in thousands or millions where it is large.
pub(super) fn count_words(count: u64) -> String {
    match count {
        0..10_000 => count.to_string(),
        10_000..1_000_000 => format!("{:.0} thousand", count as f64 / 1e3),
        _ => format!("{:.1} million", count as f64 / 1e6),
    }
}

/// Bytes as MB, GB or TB.
pub(super) fn size_words(bytes: f64) -> String {
    match bytes {
        bytes if bytes < 1e9 => format!("{:.0} MB", bytes / 1e6),
        bytes if bytes < 1e12 => format!("{:.0} GB", bytes / 1e9),
        bytes => format!("{:.1} TB", bytes / 1e12),
    }
}

/// A share in percent; all and nothing are only said of all and nothing.
pub(super) fn percent(share: f64) -> String {
    let rounded = (100.0 * share).round();
    match share {
        share if share > 0.0 && rounded == 0.0 => "under 1 %".into(),
        share if share < 1.0 && rounded == 100.0 => "over 99 %".into(),
        _ => format!("{rounded:.0} %"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn range(low: f64, estimate: f64, high: f64) -> Option<Range> {
        Some(Range {
            estimate,
            low,
            high,
        })
    }

    fn speed(decoding: Option<Range>) -> SpeedReport {
        SpeedReport {
            engine_model: "h100-8b".into(),
            concurrency: 16,
            decoding,
            whole_call: range(1.8, 2.0, 2.2),
            decoding_share: Some(0.9),
            decoding_share_calls: 0,
            decoding_share_without_reuse: Some(0.7),
            ngram: Some(1.48),
            head: Some(1.6),
            plain_tokens_per_s: Some(1600.0),
            tokens_per_step: Some(2.5),
        }
    }

    fn answer(decoding: Option<Range>, units: usize, change: impl Fn(&mut Facts<'_>)) -> Answer {
        let origins = Origins {
            call: 0.1,
            session: 0.4,
            new: 0.5,
            ..Origins::default()
        };
        let memory = [(0.0, 1.2), (1.0, 2.0)].map(|(share, speedup)| MemoryPoint {
            share,
            tokens: 75_000,
            speedup: Some(speedup),
        });
        let speed = speed(decoding);
        let mut facts = Facts {
            speed: &speed,
            origins: &origins,
            memory: &memory,
            alphas: Vec::new(),
            calls: (9000, 2000),
            tokens: 6_100_000,
            sessions: 812,
            units,
            logged_ms_per_token: None,
            tokens_per_s: 5000.0,
            is_logged_rate: false,
            month_bytes: Some(127e9),
            is_assumed_head: true,
        };
        change(&mut facts);
        Answer::new(&facts)
    }

    #[test]
    fn the_answer_is_one_sentence_with_a_range() {
        let found = answer(range(2.4, 2.6, 2.9), 812, |_| {});
        assert_eq!(
            found.sentence,
            "Yes: 2.4x to 2.9x (8B on an H100, 16 at once), from 6.1 million output tokens of 812 sessions; most from text \
             repeated within a session."
        );
        let details = found.details.join(" ");
        for wanted in [
            "decoding takes 90 % of a call's time where the engine reuses prefixes of prompts, and 70 % where not. So a \
             whole call becomes 1.8x to 2.2x as fast.",
            "N-gram lookup alone would bring 1.5x. An EAGLE-3 head alone would bring 1.6x",
            "10 % stood before in the call itself, 40 % in the session, 0 % in other sessions, and 50 % are new",
            "gains 1.2x from an empty memory, and 2.0x with 75 thousand tokens",
            "2000 of 9000 calls",
        ] {
            assert!(details.contains(wanted), "{wanted}: {details}");
        }
        let next = found.next.join(" ");
        assert!(
            next.contains("docs/vllm.md") && next.contains("Plan 127 GB of disk"),
            "{next}"
        );
        assert!(!next.contains("n-gram lookup"), "{next}");
    }

    #[test]
    fn verdicts_follow_the_range() {
        let of = |range| answer(range, 100, |_| {}).verdict;
        assert_eq!(of(range(1.61, 1.7, 1.8)), Verdict::Yes);
        assert_eq!(of(range(1.4, 1.5, 1.7)), Verdict::ALittle);
        assert_eq!(of(range(1.3, 1.4, 1.5)), Verdict::No);
        assert_eq!(of(range(1.7, 2.0, 2.9)), Verdict::Yes);
        assert_eq!(of(range(1.2, 1.5, 1.9)), Verdict::TooLittleData);
        assert_eq!(of(None), Verdict::TooLittleData);
        let no = answer(range(1.0, 1.05, 1.1), 100, |_| {});
        assert!(
            no.sentence.starts_with("No: 1.0x to 1.1x"),
            "{}",
            no.sentence
        );
        assert!(no.next[0].starts_with("Leave these drafts off"));
        assert!(no.next[1].contains("EAGLE-3 needs no repeats: 1.6x"));
    }

    #[test]
    fn little_data_gives_no_figure_and_says_how_much_it_takes() {
        let sure = range(2.0, 2.1, 2.2);
        for (found, wanted) in [
            (
                answer(sure, 9, |_| {}),
                "at least 2000 tokens of 10 sessions",
            ),
            (
                answer(sure, 100, |facts| facts.tokens = 1999),
                "the log has 1999 output tokens of 100 independent sessions",
            ),
            (
                answer(range(1.0, 2.0, 4.0), 10, |_| {}),
                "about 12 times as many",
            ),
        ] {
            assert_eq!(found.verdict, Verdict::TooLittleData);
            assert!(found.sentence.contains(wanted), "{}", found.sentence);
            let all = [
                found.sentence,
                found.details.join(" "),
                found.next.join(" "),
            ]
            .join(" ");
            assert!(!all.contains("x to ") && !all.contains("2.1x"), "{all}");
        }
    }

    #[test]
    fn n_grams_are_recommended_where_they_are_as_good() {
        let found = answer(range(1.45, 1.5, 1.55), 100, |_| {});
        assert_eq!(found.verdict, Verdict::ALittle);
        assert!(found.next[0].contains("n-gram lookup of your engine first"));
    }

    #[test]
    fn figures_are_written_for_people() {
        for (name, words) in [
            ("h100-8b", "8B on an H100"),
            ("h100x4-70b", "70B on 4 H100"),
            ("h100-8b-measured", "h100-8b-measured"),
            ("my/engine.toml", "my/engine.toml"),
        ] {
            assert_eq!(engine_words(name), words);
        }
        assert_eq!(
            [9_999, 145_212, 6_100_000].map(count_words),
            ["9999", "145 thousand", "6.1 million"]
        );
        assert_eq!(
            [4e6, 127e9, 2.5e12].map(size_words),
            ["4 MB", "127 GB", "2.5 TB"]
        );
    }
}
