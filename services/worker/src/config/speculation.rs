//! How drafts are made and routed.

use refrain_speculation::draft::{Expansion, ProposeParams, ProposeRules, Setting};
use refrain_speculation::router::{GainParams, TrialParams};
use serde::Deserialize;

/// How drafts are made and routed: the parameters of SuffixDecoding, and of the fallback behind it.
///
/// Fields that are not deserialised are constants of production; tests in one process may set them.
#[derive(Clone, Debug, Deserialize, schemars::JsonSchema)]
#[serde(default)]
pub struct SpeculationConfig {
    /// How drafts of `auto` requests are chosen: `goodput` for the whole batch at once, or `score` for each request
    /// by itself.
    pub router: RouterChoice,
    /// Requests in a step above which `auto` requests draft nothing, under the goodput router; 0 never stops them.
    pub off_above_batch: u32,
    /// Safety limit of the draft tokens of one request in one step; 0 turns suffix drafts off. Drafts end where they
    /// are no longer likely enough.
    pub max_spec_tokens: usize,
    /// How long drafts are: a match of p tokens allows alpha * p draft tokens. With `auto`, drafts end where they no
    /// longer pay, by what is learnt about such tokens and by the measured price of a token.
    pub alpha: Setting,
    /// Draft tokens with a smaller share of the continuations that were seen are left out. With `auto`, only those
    /// are left out that do not pay. Where both this and `alpha` are set, drafts that no router divides are as
    /// SuffixDecoding makes them, and nothing learnt is used.
    pub min_token_prob: Setting,
    /// Longest match that is looked for, tokens. A longer one counts as one of this length.
    pub match_tokens_max: u32,
    /// The shape of drafts: `tree`, `linear` for one chain, or `{ paths = N }` for up to N chains that may share a
    /// beginning. Engines that verify no trees get one chain whatever is set. Look-ups in a draft store bring trees
    /// or one chain: under `paths`, one chain.
    pub expansion: ExpansionChoice,
    /// Whether the form of an output, such as a JSON schema, is a source of drafts: what it forces is drafted, and
    /// what it forbids is cut out of drafts.
    pub grammar: bool,
    /// The SCORE that a suffix draft must exceed under the score router: a number, or `auto`. Under both routers, 0
    /// keeps `auto` requests from the fallback.
    pub score_threshold: Setting,
    /// The drafter for steps without a good suffix draft: `self` for the engine's own head or draft model, `off`, or
    /// the name of a worker.
    pub fallback: FallbackChoice,
    /// The engine's own drafter.
    pub drafter: DrafterConfig,
    /// The other rules by which drafts are made from suffix indexes. The goodput router chooses from large trees of
    /// unlikely tokens whatever pays at the size of the batch.
    #[serde(skip)]
    pub propose: ProposeParams,
    /// Tokens per second with drafts over those without, by batch size, below which `auto` requests go without drafts
    /// (under the score router, without suffix drafts); 0 never holds drafts back.
    #[serde(skip)]
    pub gain_min: f64,
    /// Steps that count for the gain from drafts, and when that is shown.
    #[serde(skip)]
    pub gain: GainParams,
    /// How often a worker saves the acceptance statistics of a namespace in the draft store, milliseconds; 0 never
    /// saves.
    #[serde(skip)]
    pub statistics_interval_ms: u64,
}

/// How the drafts of `auto` requests are chosen.
#[derive(
    Clone, Copy, Debug, PartialEq, Eq, Deserialize, schemars::JsonSchema, serde::Serialize,
)]
#[serde(rename_all = "lowercase")]
pub enum RouterChoice {
    /// Each request by itself: its suffix draft if SCORE is above the threshold, else the fallback.
    Score,
    /// The whole batch at once: the drafts that bring the most tokens per second, by learnt probabilities and costs.
    Goodput,
}

/// The shape of drafts from suffix indexes: `"tree"`, `"linear"` or `{ paths = N }`.
#[derive(
    Clone, Copy, Debug, PartialEq, Eq, Deserialize, schemars::JsonSchema, serde::Serialize,
)]
#[serde(rename_all = "lowercase")]
pub enum ExpansionChoice {
    /// A tree, the likeliest tokens first.
    Tree,
    /// One chain of the likeliest tokens.
    Linear,
    /// At most this many chains, the likeliest ones at every depth. Each may be as long as one match allows.
    Paths(usize),
}

impl From<ExpansionChoice> for Expansion {
    fn from(choice: ExpansionChoice) -> Self {
        match choice {
            ExpansionChoice::Tree => Expansion::Tree,
            ExpansionChoice::Linear => Expansion::Linear,
            ExpansionChoice::Paths(paths) => Expansion::Paths(paths),
        }
    }
}

/// The drafter behind suffix drafts: `"self"`, `"off"`, or the name of a worker.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize, schemars::JsonSchema, serde::Serialize)]
pub enum FallbackChoice {
    /// The engine's own EAGLE-3 head or draft model, if it has one.
    #[serde(rename = "self")]
    Own,
    /// None.
    #[serde(rename = "off")]
    Off,
    /// Requests that suffix drafts serve badly here are transferred to this worker between two chunks.
    #[serde(untagged)]
    Worker(String),
}

/// The drafts that the engine's own drafter, an EAGLE-3 head or a draft model, is asked for.
#[derive(Clone, Debug, Deserialize, schemars::JsonSchema)]
#[serde(default)]
pub struct DrafterConfig {
    /// Longest path of a draft, tokens.
    pub depth: u32,
    /// Maximum number of children of a node. 1 is a chain: where verifying is not free, siblings rarely earn their
    /// cost.
    pub top_k: u32,
    /// Maximum number of tokens of one draft that are verified.
    pub tokens_max: u32,
    /// Whether the head draws its tokens as the request samples, instead of taking the likeliest. More of them are
    /// accepted at higher temperatures. The output keeps the engine's distribution, but not, token for token, the
    /// output without drafts. Needs `top_k` 1.
    pub sampled: bool,
    /// Paths that the head thinks less likely than this are left out.
    #[serde(skip)]
    pub path_prob_min: f32,
    /// Trials of the head under the score router.
    #[serde(skip)]
    pub trials: TrialParams,
}

impl Default for SpeculationConfig {
    fn default() -> Self {
        let propose = ProposeParams::default();
        SpeculationConfig {
            router: RouterChoice::Goodput,
            off_above_batch: 0,
            max_spec_tokens: propose.max_spec_tokens,
            alpha: Setting::Auto,
            min_token_prob: Setting::Auto,
            match_tokens_max: propose.max_pattern,
            expansion: ExpansionChoice::Tree,
            grammar: true,
            score_threshold: Setting::Auto,
            fallback: FallbackChoice::Own,
            drafter: DrafterConfig::default(),
            propose,
            gain_min: 0.97,
            gain: GainParams::default(),
            statistics_interval_ms: 60_000,
        }
    }
}

impl Default for DrafterConfig {
    fn default() -> Self {
        DrafterConfig {
            depth: 6,
            top_k: 1,
            tokens_max: 6,
            path_prob_min: 0.4,
            sampled: false,
            trials: TrialParams::default(),
        }
    }
}

impl SpeculationConfig {
    /// How drafts are made from suffix indexes, for an engine that verifies trees.
    pub fn rules(&self) -> ProposeRules {
        ProposeRules {
            params: ProposeParams {
                expansion: self.expansion.into(),
                max_spec_tokens: self.max_spec_tokens,
                max_pattern: self.match_tokens_max,
                ..self.propose.clone()
            },
            alpha: self.alpha,
            min_token_prob: self.min_token_prob,
        }
    }

    /// Checks the section; `worker` is the name of the worker that it belongs to.
    pub(super) fn check(&self, worker: &str, check: &mut impl FnMut(bool, &str)) {
        check(
            self.off_above_batch == 0 || self.router == RouterChoice::Goodput,
            "speculation.off_above_batch: the score router has no such limit; 0, or router = \"goodput\"",
        );
        check(
            !matches!(self.score_threshold, Setting::Fixed(score) if score.is_nan() || score < 0.0),
            "speculation.score_threshold: \"auto\", or a number that is not negative",
        );
        self.rules().check(check);
        check(
            self.expansion != ExpansionChoice::Paths(0),
            "speculation.expansion: \"tree\", \"linear\", or at least 1 path",
        );
        check(
            self.fallback != FallbackChoice::Worker(String::new()),
            "speculation.fallback: \"self\", \"off\" or the name of a worker",
        );
        check(
            self.fallback != FallbackChoice::Worker(worker.to_owned()),
            "speculation.fallback: names this worker itself; say \"self\"",
        );
        let drafter = &self.drafter;
        check(drafter.depth >= 1, "speculation.drafter.depth: at least 1");
        check(drafter.top_k >= 1, "speculation.drafter.top_k: at least 1");
        check(
            drafter.tokens_max >= 1,
            "speculation.drafter.tokens_max: at least 1; speculation.fallback = \"off\" turns the head off",
        );
        check(
            !drafter.sampled || drafter.top_k == 1,
            "speculation.drafter.sampled: draws chains, so top_k must be 1",
        );
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
        assert_eq!(threshold("auto".into()), Ok(Setting::Auto));
        assert_eq!(threshold(3.into()), Ok(Setting::Fixed(3.0)));
        assert_eq!(threshold(0.into()), Ok(Setting::Fixed(0.0)));
        assert_eq!(threshold(2.5.into()), Ok(Setting::Fixed(2.5)));
        for wrong in [serde_json::json!("high"), serde_json::json!(true)] {
            let error = threshold(wrong).unwrap_err();
            assert!(error.contains("a number or \"auto\""), "{error}");
        }
    }

    #[test]
    fn constants_are_not_keys() {
        let schema = schemars::schema_for!(SpeculationConfig);
        let keys = &schema.as_value()["properties"];
        assert!(keys["score_threshold"].is_object());
        for key in ["propose", "gain_min", "gain", "statistics_interval_ms"] {
            assert!(keys[key].is_null(), "{key}");
        }
    }

    #[test]
    fn drafts_are_trees_chains_or_so_many_paths() {
        let expansion = |set: serde_json::Value| {
            read(serde_json::json!({ "expansion": set })).map(|read| read.rules().params.expansion)
        };
        for (set, wanted) in [
            (serde_json::json!("tree"), Expansion::Tree),
            (serde_json::json!("linear"), Expansion::Linear),
            (serde_json::json!({ "paths": 3 }), Expansion::Paths(3)),
        ] {
            assert_eq!(expansion(set), Ok(wanted));
        }
        for wrong in [
            serde_json::json!("bush"),
            serde_json::json!(3),
            serde_json::json!("paths"),
            serde_json::json!({ "paths": -1 }),
            serde_json::json!({ "paths": "all" }),
        ] {
            assert!(expansion(wrong.clone()).is_err(), "{wrong}");
        }
        let default = SpeculationConfig::default().rules();
        assert_eq!(default.params.expansion, Expansion::Tree);
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
        let cases: [(Change, &str); 11] = [
            (
                |of| {
                    of.router = RouterChoice::Score;
                    of.off_above_batch = 8;
                },
                "off_above_batch",
            ),
            (
                |of| of.score_threshold = Setting::Fixed(f32::NAN),
                "score_threshold",
            ),
            (
                |of| of.score_threshold = Setting::Fixed(-1.0),
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
            (|of| of.alpha = Setting::Fixed(0.0), "speculation.alpha"),
            (
                |of| of.min_token_prob = Setting::Fixed(1.5),
                "min_token_prob",
            ),
            (|of| of.match_tokens_max = 0, "match_tokens_max"),
            (
                |of| of.expansion = ExpansionChoice::Paths(0),
                "at least 1 path",
            ),
            (|of| of.drafter.depth = 0, "drafter.depth"),
            (|of| of.drafter.tokens_max = 0, "drafter.tokens_max"),
        ];
        for (change, key) in cases {
            let faults = faults(change);
            assert!(faults.contains(key), "{key}: {faults:?}");
        }
    }
}
