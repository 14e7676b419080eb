//! An engine that generates by itself: it receives a text and streams the continuation.

use async_trait::async_trait;
use refrain_protocol::engine::Sampling;
use refrain_protocol::engine_order::{EngineAnswer, EngineOrder};
use refrain_protocol::scheduling::KvReport;
use refrain_protocol::{ApiError, TokenId};

use super::forms::FormAbilities;
use super::generate::{GenerateRequest, GeneratedStream};
use super::order_calls::no_order;
use super::slots::EngineSlots;
use super::words::{unsupported, unsupported_field};

/// OpenAI's log-probability for a token that is as good as impossible; JSON has no infinity.
pub(super) const LOGPROB_MIN: f32 = -9999.0;

/// Maximum number of alternatives to request from an engine that names no limit: it sorts the whole vocabulary
/// for them.
pub(super) const TOP_LOGPROBS_MAX: u32 = 128;

/// The capabilities of a streaming engine. A request for anything else is refused by name, never changed silently.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StreamingCapabilities {
    /// Public name of the model.
    pub model: String,
    /// Tokenizer identity (see [`refrain_protocol::Namespace::tokenizer`]).
    pub tokenizer: String,
    /// Longest text, tokens.
    pub max_context: u32,
    /// Maximum number of alternatives per token; `None`: no log-probabilities at all.
    pub top_logprobs_max: Option<u32>,
    /// The engine supports top-k sampling.
    pub top_k: bool,
    /// The engine supports min-p sampling.
    pub min_p: bool,
    /// The engine supports a bias per token id.
    pub logit_bias: bool,
    /// The engine supports the penalties that count the output.
    pub output_penalties: bool,
    /// The engine supports the penalty that counts prompt and output.
    pub repetition_penalty: bool,
    /// The engine can hold back its end tokens.
    pub min_tokens: bool,
    /// The engine can go on past its end tokens.
    pub ignore_eos: bool,
    /// The engine can keep texts out of its output.
    pub bad_words: bool,
    /// The forms that the engine can hold an output to.
    pub forms: FormAbilities,
}

impl StreamingCapabilities {
    /// The capabilities of an engine that supports all sampling fields but the rare ones. The connection fills in the
    /// model, the tokenizer and the context length.
    pub(super) fn of_dialect(top_logprobs_max: Option<u32>) -> Self {
        StreamingCapabilities {
            model: String::new(),
            tokenizer: String::new(),
            max_context: 0,
            top_logprobs_max,
            top_k: true,
            min_p: true,
            logit_bias: true,
            output_penalties: true,
            repetition_penalty: true,
            min_tokens: true,
            ignore_eos: true,
            bad_words: false,
            forms: FormAbilities::default(),
        }
    }

    /// Checks that the engine supports the sampling parameters of a request.
    ///
    /// # Errors
    /// `InvalidRequest` that names the unsupported field.
    pub fn check(&self, sampling: &Sampling) -> Result<(), ApiError> {
        let refuse = |field: &str| {
            let message = format!(
                "the engine behind {} does not support {field}; leave it out",
                self.model
            );
            Err(unsupported_field(field, message))
        };
        let unsupported = [
            ("top_k", sampling.top_k > 0 && !self.top_k),
            ("min_p", sampling.min_p > 0.0 && !self.min_p),
            (
                "logit_bias",
                !sampling.logit_bias.is_empty() && !self.logit_bias,
            ),
            (
                "presence_penalty",
                sampling.presence_penalty != 0.0 && !self.output_penalties,
            ),
            (
                "frequency_penalty",
                sampling.frequency_penalty != 0.0 && !self.output_penalties,
            ),
            (
                "repetition_penalty",
                sampling.repetition_penalty != 1.0 && !self.repetition_penalty,
            ),
            ("min_tokens", sampling.min_tokens > 0 && !self.min_tokens),
            ("ignore_eos", sampling.ignore_eos && !self.ignore_eos),
            (
                "bad_words",
                !sampling.bad_tokens.is_empty() && !self.bad_words,
            ),
            // These engines score prompts only apart from their streams.
            (
                "prompt_logprobs or echo with logprobs",
                !sampling.forced_output.is_empty(),
            ),
        ];
        if let Some((field, _)) = unsupported.iter().find(|(_, is_asked)| *is_asked) {
            return refuse(field);
        }
        let form = sampling.form.as_ref().map(|form| &form.text);
        if let Some((field, name)) = form.and_then(|form| self.forms.lacks(form)) {
            let message = format!(
                "{field}: the engine behind {} cannot hold its output to {name}",
                self.model
            );
            return Err(unsupported_field(field, message));
        }
        match (sampling.top_logprobs, self.top_logprobs_max) {
            (Some(_), None) => refuse("logprobs"),
            (Some(asked), Some(most)) if asked > most => Err(ApiError::invalid(
                "top_logprobs",
                format!("the engine behind {} gives at most {most}", self.model),
            )),
            _ => Ok(()),
        }
    }
}

/// The load that an engine reports; values that it does not report are `None`.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct StreamingLoad {
    /// Requests in its batch.
    pub running: Option<f64>,
    /// Requests in its queue.
    pub waiting: Option<f64>,
    /// Share of its KV cache in use.
    pub kv_usage: Option<f64>,
    /// Tokens that its KV cache holds at most.
    pub kv_capacity: Option<f64>,
    /// Milliseconds to read a thousand tokens of a prompt.
    pub prefill_ms_per_1k: Option<f64>,
}

impl StreamingLoad {
    /// The state of the KV cache, if the engine tells its size and its use. These engines do not count what they
    /// merely keep as used, and do not say what they hold.
    pub(crate) fn kv_report(&self) -> Option<KvReport> {
        let (capacity, share) = (self.kv_capacity?, self.kv_usage?);
        if !(capacity.is_finite() && capacity >= 1.0 && share.is_finite()) {
            return None;
        }
        Some(KvReport {
            capacity_tokens: capacity as u64,
            running_tokens: (capacity * share.clamp(0.0, 1.0)).round() as u64,
            kept_tokens: 0,
            prefill_ms_per_1k: self.prefill_ms_per_1k.map(|price| price as f32),
            held: None,
        })
    }
}

/// Outcomes of introducing namespaces to a restarted engine.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct IntroductionCounts {
    /// The engine accepted the namespace.
    pub succeeded: u64,
    /// The engine could not be reached, or refused the namespace.
    pub failed: u64,
    /// The signature of the namespace had become too old.
    pub expired: u64,
}

/// The weights that an engine was given after others could not be loaded.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RestoredWeights {
    /// None: it never loses its weights, or they could not be brought back.
    None,
    /// Those that it had.
    Earlier,
    /// Those that it was started with.
    Initial,
}

/// An engine that generates by itself and cannot be driven step by step.
#[async_trait]
pub trait StreamingEngine: Send + Sync {
    /// The capabilities of the engine. They do not change while it lives.
    fn capabilities(&self) -> &StreamingCapabilities;

    /// Its URL, if it is in another process.
    fn url(&self) -> Option<&str> {
        None
    }

    /// Checks that the engine is reachable and still matches its capabilities.
    ///
    /// # Errors
    /// The engine cannot be reached, or it serves another model now. Its output must then not be stored under
    /// the old model's name.
    async fn confirm(&self) -> Result<(), ApiError>;

    /// Starts to generate.
    ///
    /// # Errors
    /// The engine cannot be reached or refuses. It has generated nothing then, so the call may be repeated.
    async fn generate(&self, request: GenerateRequest) -> Result<GeneratedStream, ApiError>;

    /// Checks that the engine has words for an order of a trainer.
    ///
    /// # Errors
    /// `InvalidRequest` if it has none.
    fn check_order(&self, order: &EngineOrder) -> Result<(), ApiError> {
        Err(no_order("this engine", order))
    }

    /// Carries out an order of a trainer, which may take minutes. The answer is that to a call that was passed on.
    ///
    /// # Errors
    /// `InvalidRequest` for what the engine cannot do, and whatever failed.
    async fn order(&self, order: EngineOrder) -> Result<Option<EngineAnswer>, ApiError> {
        Err(no_order("this engine", &order))
    }

    /// Brings back weights that the engine has lost because others could not be loaded.
    async fn restore_weights(&self) -> RestoredWeights {
        RestoredWeights::None
    }

    /// The load of the engine.
    ///
    /// # Errors
    /// The engine cannot be reached, or does not report its load.
    async fn load(&self) -> Result<StreamingLoad, ApiError>;

    /// The slots of an engine whose own drafts can be primed.
    ///
    /// # Errors
    /// The engine cannot be reached, does not draft by itself, or has no slot to spare.
    async fn slots(&self) -> Result<EngineSlots, ApiError> {
        Err(unsupported("this engine has no drafts that can be primed"))
    }

    /// Has the engine read a text in the primer's slot, so that it drafts from it.
    ///
    /// # Errors
    /// The engine cannot be reached, or refuses.
    async fn prime(&self, _text: &[TokenId]) -> Result<(), ApiError> {
        Err(unsupported("this engine has no drafts that can be primed"))
    }

    /// Outcomes of introductions since the last call. All zero for an engine without the Refrain plugin inside.
    fn take_introduction_counts(&self) -> IntroductionCounts {
        IntroductionCounts::default()
    }

    /// The engine's own page of Prometheus metrics, unchanged.
    ///
    /// # Errors
    /// The engine cannot be reached, or has no such page (`NotFound`).
    async fn metrics(&self) -> Result<String, ApiError>;
}

#[cfg(test)]
mod tests {
    use refrain_protocol::engine::{OutputForm, TextForm};

    use super::*;

    fn capabilities() -> StreamingCapabilities {
        StreamingCapabilities {
            model: "m".into(),
            tokenizer: "t".into(),
            max_context: 100,
            top_logprobs_max: None,
            top_k: false,
            min_p: false,
            logit_bias: false,
            output_penalties: false,
            repetition_penalty: false,
            min_tokens: false,
            ignore_eos: false,
            bad_words: false,
            forms: FormAbilities::default(),
        }
    }

    #[test]
    fn unsupported_parameters_are_refused_by_name() {
        let plain = Sampling::default();
        let asks = [
            (
                "top_k",
                Sampling {
                    top_k: 5,
                    ..plain.clone()
                },
            ),
            (
                "min_p",
                Sampling {
                    min_p: 0.1,
                    ..plain.clone()
                },
            ),
            (
                "logit_bias",
                Sampling {
                    logit_bias: vec![(1, 1.0)],
                    ..plain.clone()
                },
            ),
            (
                "logprobs",
                Sampling {
                    top_logprobs: Some(0),
                    ..plain.clone()
                },
            ),
            (
                "presence_penalty",
                Sampling {
                    presence_penalty: -0.5,
                    ..plain.clone()
                },
            ),
            (
                "frequency_penalty",
                Sampling {
                    frequency_penalty: 0.5,
                    ..plain.clone()
                },
            ),
            (
                "repetition_penalty",
                Sampling {
                    repetition_penalty: 1.1,
                    ..plain.clone()
                },
            ),
            (
                "min_tokens",
                Sampling {
                    min_tokens: 1,
                    ..plain.clone()
                },
            ),
            (
                "ignore_eos",
                Sampling {
                    ignore_eos: true,
                    ..plain.clone()
                },
            ),
            (
                "bad_words",
                Sampling {
                    bad_tokens: vec![vec![1]],
                    ..plain.clone()
                },
            ),
            (
                "prompt_logprobs or echo with logprobs",
                Sampling {
                    forced_output: vec![1],
                    ..plain.clone()
                },
            ),
        ];
        assert_eq!(capabilities().check(&plain), Ok(()));
        for (field, sampling) in asks {
            let error = capabilities().check(&sampling).unwrap_err();
            assert_eq!(error.param.as_deref(), Some(field));
            assert_eq!(error.kind, refrain_protocol::ErrorKind::InvalidRequest);
        }
        for (field, text) in [
            ("response_format", TextForm::JsonObject),
            ("structured_outputs.regex", TextForm::Regex("a".into())),
            (
                "structured_outputs.choice",
                TextForm::Choice(vec!["a".into()]),
            ),
            (
                "structured_outputs.grammar",
                TextForm::Ebnf("root ::= \"a\"".into()),
            ),
            (
                "structured_outputs.grammar",
                TextForm::Lark("start: \"a\"".into()),
            ),
            ("tools", TextForm::AnyOf(vec![TextForm::JsonObject])),
        ] {
            let sampling = Sampling {
                form: Some(Box::new(OutputForm::new(text))),
                ..plain.clone()
            };
            let error = capabilities().check(&sampling).unwrap_err();
            assert_eq!(error.param.as_deref(), Some(field));
            assert!(error.has_code("unsupported_by_engine"));
            let able = StreamingCapabilities {
                forms: FormAbilities {
                    json: true,
                    regex: true,
                    choice: true,
                    ebnf: true,
                    lark: true,
                    structural_tags: true,
                },
                ..capabilities()
            };
            assert_eq!(able.check(&sampling), Ok(()));
        }
        let some = StreamingCapabilities {
            top_logprobs_max: Some(5),
            ..capabilities()
        };
        for (asked, holds) in [(5, true), (6, false)] {
            let sampling = Sampling {
                top_logprobs: Some(asked),
                ..plain.clone()
            };
            assert_eq!(some.check(&sampling).is_ok(), holds);
        }
    }
}
