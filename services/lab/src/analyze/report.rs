//! The report of an analysis, for people and for programs.

use refrain_speculation::draft::Setting;
use serde::Serialize;

use super::alpha::{ALPHAS, AlphaChoice, FixedAlpha};
use super::answer::{Answer, Facts, Verdict, percent};
use super::bootstrap::Range;
use super::entropy::entropy_of_calls;
use super::experiments::{Answers, Experiment};
use super::options::AnalyzeOptions;
use super::repeats::{Origin, Origins, Repeats};
use super::speed::{MemoryPoint, Row, SpeedReport, memory_points};
use crate::logs::LogSummary;
use crate::replay::Policy;
use crate::text_table::{number, text_table};

/// A month has 30 days, as in the capacity table of the operations manual.
const MONTH_S: f64 = 30.0 * 24.0 * 3600.0;
/// The rate that is assumed if the log has none.
const TOKENS_PER_S: f64 = 5000.0;
/// The shortest log whose rate is taken for that of a month.
const RATE_SPAN_S: f64 = 600.0;

/// The report. A figure is `null` if nothing happened that it could be measured on, or if there is too little data.
#[derive(Clone, Debug, Serialize)]
pub struct AnalyzeReport {
    /// The answer in words.
    pub answer: Answer,
    /// The gain of the whole log by drafts, by engine model and requests at once; empty with too little data.
    pub speeds: Vec<SpeedReport>,
    /// How that grows with what is remembered, on the first engine model; empty with too little data.
    pub memory: Vec<MemoryPoint>,
    /// Where the output tokens stood before.
    pub origins: Origins,
    /// Real passages that repeat; empty without a tokenizer, and with `--private`.
    pub passages: Vec<PassageReport>,
    /// One row per workload and tenant, in the order in which they first occur.
    pub rows: Vec<WorkloadReport>,
    /// Calls that were read.
    pub docs_read: u64,
    /// Output tokens of these.
    pub tokens_read: u64,
    /// Calls that were replayed.
    pub docs: u64,
    /// Output tokens of these.
    pub output_tokens: u64,
    /// Sessions of these; a call without a session is one by itself.
    pub sessions: u64,
    /// Independent units of these: sessions, those of one group of samples being one.
    pub units: usize,
    /// Seconds from the first call of the log to the last, if it has times.
    pub span_s: Option<f64>,
    /// Output tokens per second of which a month is computed.
    pub tokens_per_s: f64,
    /// Bytes of a month of outputs.
    pub month_bytes: Option<f64>,
    /// The forms and records of the logs, and those that were left out.
    pub log: LogSummary,
    /// The options of the analysis.
    pub settings: AnalyzeOptions,
    /// The day of the analysis in UTC; empty where a program asked.
    pub date: String,
    /// The command; empty where a program asked.
    pub command: String,
    /// The version of Refrain.
    pub version: &'static str,
}

/// A piece of an output that repeats.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct PassageReport {
    /// The row that it is from.
    pub row: String,
    /// Where most of its repeated text stood before.
    pub origin: Origin,
    /// Its text, cut where the origin changes.
    pub parts: Vec<(Origin, String)>,
}

/// One workload of one tenant.
#[derive(Clone, Debug, Serialize)]
pub struct WorkloadReport {
    /// Name of the row in the table.
    pub name: String,
    /// The calls' workload; `null` if they name none.
    pub workload: Option<String>,
    /// The calls' tenant; `null` if they name none.
    pub tenant: Option<String>,
    /// Calls that were read.
    pub docs_read: u64,
    /// Output tokens of the calls that were read.
    pub tokens_read: u64,
    /// Calls that were replayed.
    pub docs: u64,
    /// Output tokens of the calls that were replayed.
    pub output_tokens: u64,
    /// Sessions of the calls that were replayed.
    pub sessions: u64,
    /// Mean entropy of the next token, bits (SuffixDecoding, A.2.3). Repetitive text has less.
    pub entropy_bits: Option<f64>,
    /// Whether drafts help.
    pub helps: Verdict,
    /// The gain by drafts, by engine model and requests at once; empty with too little data.
    pub speeds: Vec<SpeedReport>,
    /// How that grows with what is remembered; empty with too little data.
    pub memory: Vec<MemoryPoint>,
    /// Where the output tokens stood before.
    pub origins: Origins,
    /// The alpha to set.
    pub alpha: AlphaChoice,
    /// Bytes of the sealed index of all outputs, per output token.
    pub index_bytes_per_token: Option<f64>,
}

/// The answer of one question for these rows: no figures if there is too little data.
struct Spoken {
    verdict: Verdict,
    speeds: Vec<SpeedReport>,
    headline: SpeedReport,
    memory: Vec<MemoryPoint>,
}

impl Spoken {
    fn of(rows: &[&Row<'_>], options: &AnalyzeOptions) -> Self {
        let units = rows.iter().map(|row| row.workload.unit_count).sum();
        let tokens = rows.iter().map(|row| row.workload.output_tokens()).sum();
        let at = |model: usize, concurrency: usize| {
            SpeedReport::new(rows, model, (&options.engine_model[model], concurrency))
        };
        let headline = at(0, options.headline_concurrency());
        let verdict = Verdict::of(headline.decoding, units, tokens);
        let has_figures = verdict != Verdict::TooLittleData;
        let models = (0..options.engine_model.len()).filter(|_| has_figures);
        let speeds = models.flat_map(|model| {
            let concurrency = options.concurrency.iter();
            concurrency.map(move |&concurrency| at(model, concurrency))
        });
        Spoken {
            verdict,
            speeds: speeds.collect(),
            headline,
            memory: match has_figures {
                true => memory_points(rows),
                false => Vec::new(),
            },
        }
    }
}

impl WorkloadReport {
    fn new(row: &Row<'_>, repeats: &Repeats, options: &AnalyzeOptions) -> Self {
        let spoken = Spoken::of(&[row], options);
        let workload = row.workload;
        let index_bytes_per_token = row.answers.of(Experiment::Size).and_then(|measured| {
            let costs = &measured.outcome.costs;
            let (bytes, tokens) = (costs.sizes.segment_bytes, costs.warmed.tokens);
            (tokens > 0).then(|| bytes as f64 / tokens as f64)
        });
        WorkloadReport {
            name: workload.name(),
            workload: workload.workload.clone(),
            tenant: workload.tenant.clone(),
            docs_read: workload.calls_read,
            tokens_read: workload.tokens_read,
            docs: workload.calls.len() as u64,
            output_tokens: workload.output_tokens(),
            sessions: workload.sessions,
            entropy_bits: entropy_of_calls(&workload.calls),
            helps: spoken.verdict,
            speeds: spoken.speeds,
            memory: spoken.memory,
            origins: Origins::of(repeats.tokens.map(|count| count as f64)),
            alpha: alpha(row.answers, options),
            index_bytes_per_token,
        }
    }

    /// The speed on the first engine model with this many requests at once.
    pub fn speed(&self, concurrency: usize) -> Option<&SpeedReport> {
        self.speeds
            .iter()
            .find(|speed| speed.concurrency == concurrency)
    }
}

fn alpha(answers: &Answers, options: &AnalyzeOptions) -> AlphaChoice {
    let concurrency = options.headline_concurrency();
    let goodput = |experiment| answers.of(experiment)?.outcome.goodput_tokens_per_s();
    let fixed = ALPHAS.map(|alpha| FixedAlpha {
        alpha,
        goodput_tokens_per_s: goodput(Experiment::Alpha(Setting::Fixed(alpha))),
    });
    let auto = goodput(Experiment::Policy {
        model: 0,
        policy: Policy::Goodput,
        concurrency,
    });
    AlphaChoice::new(concurrency, auto, fixed.to_vec())
}

impl AnalyzeReport {
    /// Makes the report of these rows with their repeats. `span_s` is the time that the log spans.
    pub(super) fn new(
        rows: &[(Row<'_>, Repeats)],
        span_s: Option<f64>,
        passages: Vec<PassageReport>,
        log: LogSummary,
        options: &AnalyzeOptions,
    ) -> Self {
        let all: Vec<&Row<'_>> = rows.iter().map(|(row, _)| row).collect();
        let spoken = Spoken::of(&all, options);
        let reports: Vec<WorkloadReport> = rows
            .iter()
            .map(|(row, repeats)| WorkloadReport::new(row, repeats, options))
            .collect();
        let sum = |of: fn(&WorkloadReport) -> u64| reports.iter().map(of).sum::<u64>();
        let tokens_read = sum(|row| row.tokens_read);
        let mut origins = [0.0; 5];
        let mut month = (0.0, 0.0);
        for ((row, repeats), report) in rows.iter().zip(&reports) {
            for (sum, count) in origins.iter_mut().zip(repeats.tokens) {
                *sum += row.workload.weight() * count as f64;
            }
            if let Some(bytes) = report.index_bytes_per_token {
                month.0 += bytes * report.tokens_read as f64;
                month.1 += report.tokens_read as f64;
            }
        }
        let logged_rate = span_s.filter(|span_s| *span_s >= RATE_SPAN_S);
        let logged_rate = logged_rate.map(|span_s| tokens_read as f64 / span_s);
        let rate = options.tokens_per_s.or(logged_rate).unwrap_or(TOKENS_PER_S);
        let month_bytes = (month.1 > 0.0).then(|| month.0 / month.1 * rate * MONTH_S);
        let origins = Origins::of(origins);
        let timed = all.iter().flat_map(|row| &row.workload.calls);
        let timed =
            timed.filter_map(|call| Some((call.duration_ms? as f64, call.output.len() as f64)));
        let (ms, tokens) = timed.fold((0.0, 0.0), |sum, call| (sum.0 + call.0, sum.1 + call.1));
        let units = all.iter().map(|row| row.workload.unit_count).sum();
        let sure = reports.iter().filter(|row| !row.speeds.is_empty());
        let answer = Answer::new(&Facts {
            speed: &spoken.headline,
            origins: &origins,
            memory: &spoken.memory,
            alphas: sure.map(|row| (&*row.name, &row.alpha)).collect(),
            calls: (sum(|row| row.docs_read), sum(|row| row.docs)),
            tokens: sum(|row| row.output_tokens),
            sessions: sum(|row| row.sessions),
            units,
            logged_ms_per_token: (ms > 0.0 && tokens > 0.0).then(|| ms / tokens),
            tokens_per_s: rate,
            is_logged_rate: options.tokens_per_s.is_none() && logged_rate.is_some(),
            month_bytes,
            is_assumed_head: options.eagle3.is_none(),
        });
        AnalyzeReport {
            answer,
            speeds: spoken.speeds,
            memory: spoken.memory,
            origins,
            passages,
            docs_read: sum(|row| row.docs_read),
            tokens_read,
            docs: sum(|row| row.docs),
            output_tokens: sum(|row| row.output_tokens),
            sessions: sum(|row| row.sessions),
            units,
            rows: reports,
            span_s,
            tokens_per_s: rate,
            month_bytes,
            log,
            settings: options.clone(),
            date: String::new(),
            command: String::new(),
            version: env!("CARGO_PKG_VERSION"),
        }
    }

    /// The report as text for people: the answer, tables, and what the figures assume.
    pub fn table(&self) -> String {
        let listed = |title: &str, sentences: &[String]| {
            let lines: Vec<String> = sentences.iter().map(|said| format!("  {said}\n")).collect();
            format!("\n{title}:\n{}", lines.concat())
        };
        let mut text = format!("{}\n", self.answer.sentence);
        text += &listed("Why", &self.answer.details);
        text += &listed("Next", &self.answer.next);
        for lines in [self.speed_lines(), self.row_lines()] {
            if lines.len() > 1 {
                text.push('\n');
                text += &text_table(1, &[], lines);
            }
        }
        text += &listed("What was read", &self.log.sentences());
        text + &listed("How it was measured", &self.settings.assumptions())
    }

    /// The cells of the table of speeds; the first line is its head.
    pub(super) fn speed_lines(&self) -> Vec<Vec<String>> {
        let head = [
            "engine model",
            "at once",
            "decoding",
            "whole call",
            "n-grams alone",
            "EAGLE-3 alone",
            "share of decoding",
            "tokens per step",
        ];
        let times =
            |speedup: Option<f64>| speedup.map_or("-".into(), |speedup| format!("{speedup:.2}x"));
        let lines = self.speeds.iter().map(|speed| {
            let range = |range: Option<Range>| range.map_or("-".into(), |range| range.words());
            vec![
                speed.engine_model.clone(),
                speed.concurrency.to_string(),
                range(speed.decoding),
                range(speed.whole_call),
                times(speed.ngram),
                times(speed.head),
                match (
                    speed.decoding_share.map(percent),
                    speed.decoding_share_calls,
                ) {
                    (Some(share), 0) => share,
                    (Some(share), _) => format!("{share} measured"),
                    (None, _) => "-".into(),
                },
                number(speed.tokens_per_step, 2),
            ]
        });
        [head.map(str::to_owned).to_vec()]
            .into_iter()
            .chain(lines)
            .collect()
    }

    /// The cells of the table of workloads; the first line is its head.
    pub(super) fn row_lines(&self) -> Vec<Vec<String>> {
        let concurrency = self.settings.headline_concurrency();
        let at = format!("at {concurrency}");
        let head = [
            "workload", "calls", "replayed", "tokens", "sessions", "entropy", "helps", &at,
            "new text", "B/token", "alpha",
        ];
        let lines = self.rows.iter().map(|row| {
            let decoding = row.speed(concurrency).and_then(|speed| speed.decoding);
            vec![
                row.name.clone(),
                row.docs_read.to_string(),
                row.docs.to_string(),
                row.output_tokens.to_string(),
                row.sessions.to_string(),
                number(row.entropy_bits, 2),
                row.helps.words().to_owned(),
                decoding.map_or("-".into(), |range| range.words()),
                percent(row.origins.new),
                number(row.index_bytes_per_token, 1),
                match row.speeds.is_empty() {
                    true => "-".into(),
                    false => row.alpha.value(),
                },
            ]
        });
        [head.map(str::to_owned).to_vec()]
            .into_iter()
            .chain(lines)
            .collect()
    }
}
