//! How drafts are made, and when which.

use std::fmt;

use refrain_speculation::{
    Expansion, GateParams, HandOverParams, Mode, ProposeParams, TRIAL_STEPS_MIN, Threshold,
};
use serde::Deserialize;
use serde::de::{self, Deserializer, Visitor};

/// More cores than any machine has to spare for it.
const PROPOSE_THREADS_MAX: usize = 256;

/// How drafts are made: the parameters of SuffixDecoding, and of the fallback behind it.
#[derive(Clone, Debug, Deserialize, schemars::JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct SpeculationConfig {
    /// How `auto` requests are routed.
    pub router: RouterChoice,
    /// Requests in a step above which `auto` requests draft nothing; 0 never stops them. Of the goodput router alone.
    pub off_above_batch: u32,
    /// MAX_SPEC(p) = alpha * p + offset.
    pub alpha: f32,
    /// See `alpha`.
    pub offset: f32,
    /// Most draft tokens of one request in one step.
    pub max_spec_tokens: usize,
    /// Draft nodes less likely than this are left out.
    pub min_token_prob: f32,
    /// Shortest pattern that may draft, tokens.
    pub min_match_tokens: u32,
    /// Longest pattern that is looked up, tokens.
    pub max_pattern_tokens: u32,
    /// Drafts branch.
    pub tree: bool,
    /// The score router: a suffix draft is verified if its SCORE is above this. For both, 0 keeps `auto` requests from the
    /// fallback.
    pub score_threshold: ScoreThreshold,
    /// What serves steps without a suffix draft above the threshold.
    pub fallback: FallbackChoice,
    /// Decisions of a request that are looked back on before it is handed over to another worker.
    pub handover_after_steps: usize,
    /// Tokens per second with drafts / without, by size of batch, below which `auto` requests go without. The score router
    /// holds back suffix drafts only. 0 never holds back.
    pub gain_min: f64,
    /// The goodput router: how often a worker tells the draft store what it observed of a namespace's drafts, and hears what
    /// others did, milliseconds. 0 keeps it to itself.
    pub chances_interval_ms: u64,
    /// Threads that look for the drafts of a step, the decode loop's own included. 0 takes one less than there are cores, and
    /// sixteen at most.
    pub propose_threads: usize,
    /// Requests of a step from which on they do so together. Below, what is saved is less than what waking them takes.
    pub propose_together_min: usize,
    /// The engine's own head.
    pub eagle3: Eagle3Config,
}

/// How a step of `auto` requests is decided.
#[derive(
    Clone, Copy, Debug, PartialEq, Eq, Deserialize, schemars::JsonSchema, serde::Serialize,
)]
#[serde(rename_all = "lowercase")]
pub enum RouterChoice {
    /// Each request by itself: its suffix draft if SCORE is above the threshold, else the fallback.
    Score,
    /// The whole batch at once: what brings most tokens per second, by chances and costs that are learnt.
    Goodput,
}

/// A number, or `"auto"`: the accepted length of the fallback while it is in use, else 1.
#[derive(Clone, Copy, Debug, PartialEq, schemars::JsonSchema)]
#[schemars(untagged)]
pub enum ScoreThreshold {
    /// Follows the fallback.
    Auto,
    /// This. 0 turns the fallback off for `speculation: auto`.
    Fixed(f32),
}

/// `"self"`, `"off"`, or the name of a worker.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize, schemars::JsonSchema, serde::Serialize)]
#[serde(from = "String", into = "String")]
pub enum FallbackChoice {
    /// The engine's own EAGLE-3 head or draft model, if it has one.
    Own,
    /// None.
    Off,
    /// Requests that go badly here are handed over to this worker, chunk by chunk.
    Worker(String),
}

/// What the engine's own drafter, EAGLE-3 head or draft model, is asked for, and when it is thought worth it.
#[derive(Clone, Debug, Deserialize, schemars::JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct Eagle3Config {
    /// Longest path of a draft, tokens.
    pub depth: u32,
    /// Most children of a node. 1 is a chain: where verifying is not free, siblings rarely earn their cost.
    pub top_k: u32,
    /// Most tokens of one draft that are verified.
    pub tokens_max: u32,
    /// Paths that the head thinks less likely than this are left out.
    pub path_prob_min: f32,
    /// Whether it draws its tokens as the request samples, instead of taking the likeliest. More of them are accepted
    /// at higher temperatures, and the output keeps the engine's law, but not, token for token, what it is without
    /// drafts. Needs `top_k` 1.
    pub sampled: bool,
    /// The score router: steps of a trial, of the head or of doing without. The goodput router weighs the head step by step, so
    /// that neither this nor what follows changes what it does.
    pub probe_steps: u32,
    /// The score router: steps between trials at first.
    pub backoff_steps: u32,
    /// The score router: steps between trials at most.
    pub backoff_steps_max: u32,
    /// The score router: time that trials may lose, of all time.
    pub trial_cost_share_max: f64,
    /// The score router: tokens per second with the head / without, above which it comes into use.
    pub gain_enter: f64,
    /// The score router: the same, below which it goes out of use.
    pub gain_leave: f64,
}

impl Default for SpeculationConfig {
    fn default() -> Self {
        SpeculationConfig {
            router: RouterChoice::Goodput,
            off_above_batch: 0,
            alpha: 1.0,
            offset: 0.0,
            // Trees this large and this unlikely are for the goodput router to choose from: it verifies what pays at the
            // size of the batch. Replayed on an H100's costs they bring up to 7 % over one chain of 16 at 0.45 with up to
            // 16 requests at once, and lose up to 3 % at 64.
            max_spec_tokens: 32,
            min_token_prob: 0.1,
            min_match_tokens: 1,
            max_pattern_tokens: 64,
            tree: true,
            score_threshold: ScoreThreshold::Auto,
            fallback: FallbackChoice::Own,
            handover_after_steps: HandOverParams::default().after_steps,
            gain_min: 0.97,
            chances_interval_ms: 10_000,
            propose_threads: 0,
            // Some 100 microseconds of looking, of which waking a thread takes a good part.
            propose_together_min: 12,
            eagle3: Eagle3Config::default(),
        }
    }
}

impl Default for Eagle3Config {
    fn default() -> Self {
        let gate = GateParams::default();
        Eagle3Config {
            depth: 6,
            top_k: 1,
            tokens_max: 6,
            path_prob_min: 0.4,
            sampled: false,
            probe_steps: gate.probe_steps,
            backoff_steps: gate.backoff_steps,
            backoff_steps_max: gate.backoff_steps_max,
            trial_cost_share_max: gate.trial_cost_share_max,
            gain_enter: gate.gain_enter,
            gain_leave: gate.gain_leave,
        }
    }
}

impl SpeculationConfig {
    /// How drafts are made from memory, for an engine that verifies trees.
    pub fn params(&self) -> ProposeParams {
        ProposeParams {
            alpha: self.alpha,
            offset: self.offset,
            max_spec_tokens: self.max_spec_tokens,
            min_token_prob: self.min_token_prob,
            min_match_len: self.min_match_tokens,
            max_pattern: self.max_pattern_tokens,
            expansion: match self.tree {
                true => Expansion::Tree,
                false => Expansion::Linear,
            },
            ..ProposeParams::default()
        }
    }

    /// Checks the section; `worker` is the name of the worker that it belongs to.
    pub(super) fn check(&self, worker: &str, check: &mut impl FnMut(bool, &str)) {
        check(
            self.alpha >= 0.0 && self.alpha.is_finite(),
            "speculation.alpha: a number that is not negative",
        );
        check(
            self.offset.is_finite(),
            "speculation.offset: a finite number",
        );
        check(
            self.off_above_batch == 0 || self.router == RouterChoice::Goodput,
            "speculation.off_above_batch: the score router has no such limit; 0, or router = \"goodput\"",
        );
        check(
            (0.0..=1.0).contains(&self.min_token_prob),
            "speculation.min_token_prob: between 0 and 1",
        );
        check(
            self.max_pattern_tokens >= 1,
            "speculation.max_pattern_tokens: at least 1",
        );
        check(
            !matches!(self.score_threshold, ScoreThreshold::Fixed(score) if score.is_nan() || score < 0.0),
            "speculation.score_threshold: \"auto\", or a number that is not negative",
        );
        check(
            self.fallback != FallbackChoice::Worker(String::new()),
            "speculation.fallback: \"self\", \"off\" or the name of a worker",
        );
        check(
            self.fallback != FallbackChoice::Worker(worker.to_owned()),
            "speculation.fallback: names this worker itself; say \"self\"",
        );
        check(
            self.handover_after_steps >= 1,
            "speculation.handover_after_steps: at least 1",
        );
        check(
            self.gain_min >= 0.0 && self.gain_min.is_finite(),
            "speculation.gain_min: a number that is not negative",
        );
        check(
            self.propose_threads <= PROPOSE_THREADS_MAX,
            "speculation.propose_threads: at most 256; 0 takes one less than there are cores",
        );
        check(
            self.propose_together_min >= 2,
            "speculation.propose_together_min: at least 2; propose_threads = 1 never looks for drafts together",
        );
        let eagle3 = &self.eagle3;
        for (value, fault) in [
            (eagle3.depth, "speculation.eagle3.depth: at least 1"),
            (eagle3.top_k, "speculation.eagle3.top_k: at least 1"),
            (
                eagle3.tokens_max,
                "speculation.eagle3.tokens_max: at least 1; speculation.fallback = \"off\" turns the head off",
            ),
            (
                eagle3.backoff_steps,
                "speculation.eagle3.backoff_steps: at least 1",
            ),
        ] {
            check(value >= 1, fault);
        }
        check(
            (TRIAL_STEPS_MIN..=1024).contains(&eagle3.probe_steps),
            "speculation.eagle3.probe_steps: from 3, the least that a trial is judged by, to 1024",
        );
        check(
            (0.0..=1.0).contains(&eagle3.path_prob_min),
            "speculation.eagle3.path_prob_min: between 0 and 1",
        );
        check(
            !eagle3.sampled || eagle3.top_k == 1,
            "speculation.eagle3.sampled: draws chains, so top_k must be 1",
        );
        check(
            eagle3.backoff_steps_max >= eagle3.backoff_steps,
            "speculation.eagle3.backoff_steps_max: at least backoff_steps",
        );
        check(
            eagle3.trial_cost_share_max > 0.0 && eagle3.trial_cost_share_max <= 1.0,
            "speculation.eagle3.trial_cost_share_max: above 0, at most 1",
        );
        check(
            eagle3.gain_leave > 0.0 && eagle3.gain_enter >= eagle3.gain_leave,
            "speculation.eagle3.gain_enter: at least gain_leave, and that above 0",
        );
    }

    pub(crate) fn hand_over(&self) -> HandOverParams {
        HandOverParams {
            after_steps: self.handover_after_steps,
            ..HandOverParams::default()
        }
    }
}

impl Eagle3Config {
    pub(crate) fn gate(&self) -> GateParams {
        GateParams {
            starts_with: Mode::Plain,
            probe_steps: self.probe_steps,
            backoff_steps: self.backoff_steps,
            backoff_steps_max: self.backoff_steps_max,
            trial_cost_share_max: self.trial_cost_share_max,
            gain_enter: self.gain_enter,
            gain_leave: self.gain_leave,
        }
    }
}

impl From<ScoreThreshold> for Threshold {
    fn from(threshold: ScoreThreshold) -> Self {
        match threshold {
            ScoreThreshold::Auto => Threshold::Auto,
            ScoreThreshold::Fixed(score) => Threshold::Fixed(score),
        }
    }
}

impl From<String> for FallbackChoice {
    fn from(name: String) -> Self {
        match name.as_str() {
            "self" => FallbackChoice::Own,
            "off" => FallbackChoice::Off,
            _ => FallbackChoice::Worker(name),
        }
    }
}

impl From<FallbackChoice> for String {
    fn from(choice: FallbackChoice) -> Self {
        match choice {
            FallbackChoice::Own => "self".into(),
            FallbackChoice::Off => "off".into(),
            FallbackChoice::Worker(name) => name,
        }
    }
}

/// For the page of the configuration, which shows defaults.
impl serde::Serialize for ScoreThreshold {
    fn serialize<S: serde::Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        match self {
            ScoreThreshold::Auto => serializer.serialize_str("auto"),
            ScoreThreshold::Fixed(score) => serializer.serialize_f32(*score),
        }
    }
}

/// By hand, since serde's own error for untagged values names neither of the two.
impl<'de> Deserialize<'de> for ScoreThreshold {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct NumberOrAuto;

        impl Visitor<'_> for NumberOrAuto {
            type Value = ScoreThreshold;

            fn expecting(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
                formatter.write_str("a number or \"auto\"")
            }

            fn visit_f64<E: de::Error>(self, score: f64) -> Result<ScoreThreshold, E> {
                Ok(ScoreThreshold::Fixed(score as f32))
            }

            fn visit_i64<E: de::Error>(self, score: i64) -> Result<ScoreThreshold, E> {
                self.visit_f64(score as f64)
            }

            fn visit_u64<E: de::Error>(self, score: u64) -> Result<ScoreThreshold, E> {
                self.visit_f64(score as f64)
            }

            fn visit_str<E: de::Error>(self, word: &str) -> Result<ScoreThreshold, E> {
                match word {
                    "auto" => Ok(ScoreThreshold::Auto),
                    _ => Err(E::invalid_value(de::Unexpected::Str(word), &self)),
                }
            }
        }

        deserializer.deserialize_any(NumberOrAuto)
    }
}

#[cfg(test)]
mod tests {
    use refrain_service_kit::config::Validate;

    use super::*;
    use crate::WorkerConfig;

    fn read(json: serde_json::Value) -> Result<SpeculationConfig, String> {
        serde_json::from_value(json).map_err(|error| error.to_string())
    }

    #[test]
    fn thresholds_are_numbers_or_auto() {
        let threshold = |value: serde_json::Value| {
            read(serde_json::json!({ "score_threshold": value })).map(|read| read.score_threshold)
        };
        assert_eq!(threshold("auto".into()), Ok(ScoreThreshold::Auto));
        assert_eq!(threshold(3.into()), Ok(ScoreThreshold::Fixed(3.0)));
        assert_eq!(threshold(0.into()), Ok(ScoreThreshold::Fixed(0.0)));
        assert_eq!(threshold(2.5.into()), Ok(ScoreThreshold::Fixed(2.5)));
        for wrong in [serde_json::json!("high"), serde_json::json!(true)] {
            let error = threshold(wrong).unwrap_err();
            assert!(error.contains("a number or \"auto\""), "{error}");
        }
    }

    #[test]
    fn fallbacks_are_named() {
        let fallback = |name: &str| {
            read(serde_json::json!({ "fallback": name }))
                .map(|read| read.fallback)
                .unwrap()
        };
        assert_eq!(fallback("self"), FallbackChoice::Own);
        assert_eq!(fallback("off"), FallbackChoice::Off);
        assert_eq!(
            fallback("worker-7"),
            FallbackChoice::Worker("worker-7".into())
        );
    }

    #[test]
    fn faults_are_told() {
        type Change = fn(&mut SpeculationConfig);
        let faults = |change: Change| {
            let mut config = WorkerConfig::default();
            change(&mut config.speculation);
            config.faults().join("\n")
        };
        assert_eq!(faults(|_| {}), "");
        let cases: [(Change, &str); 12] = [
            (|of| of.alpha = f32::INFINITY, "alpha"),
            (|of| of.offset = f32::NAN, "offset"),
            (
                |of| {
                    of.router = RouterChoice::Score;
                    of.off_above_batch = 8;
                },
                "off_above_batch",
            ),
            (
                |of| of.score_threshold = ScoreThreshold::Fixed(f32::NAN),
                "score_threshold",
            ),
            (
                |of| of.score_threshold = ScoreThreshold::Fixed(-1.0),
                "score_threshold",
            ),
            (
                |of| of.fallback = FallbackChoice::Worker("worker-0".into()),
                "names this worker itself",
            ),
            (
                |of| of.fallback = FallbackChoice::Worker(String::new()),
                "fallback",
            ),
            (|of| of.eagle3.depth = 0, "eagle3.depth"),
            (|of| of.eagle3.tokens_max = 0, "eagle3.tokens_max"),
            (|of| of.eagle3.path_prob_min = f32::NAN, "path_prob_min"),
            (|of| of.eagle3.backoff_steps_max = 3, "backoff_steps_max"),
            (|of| of.eagle3.gain_enter = 0.5, "gain_enter"),
        ];
        for (change, key) in cases {
            let faults = faults(change);
            assert!(faults.contains(key), "{key}: {faults:?}");
        }
    }
}
