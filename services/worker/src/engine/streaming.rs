//! An engine that generates by itself: it is handed a text and streams what follows.

use async_trait::async_trait;
use futures_util::stream::BoxStream;
use refrain_protocol::chunk::Priority;
use refrain_protocol::engine::{Sampling, TokenLogprob};
use refrain_protocol::{ApiError, DocumentId, NamespaceId, RequestId, TokenId};

use super::verify::{Verified, VerifyAbilities, VerifyRequest};

/// OpenAI's value for what is as good as impossible; JSON has no infinity.
pub(super) const LOGPROB_MIN: f32 = -9999.0;

/// Most alternatives that are asked for where the engine names no limit: it sorts the whole vocabulary for them.
pub(super) const TOP_LOGPROBS_MAX: u32 = 128;

/// What a streaming engine can do. What it cannot is refused by name, never dropped in silence.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StreamingCapabilities {
    /// Public name of the model.
    pub model: String,
    /// Tokenizer identity (see [`refrain_protocol::Namespace::tokenizer`]).
    pub tokenizer: String,
    /// Longest text, tokens.
    pub max_context: u32,
    /// Most alternatives beside each token; `None`: no log-probabilities at all.
    pub top_logprobs_max: Option<u32>,
    /// Keeps the k most likely tokens.
    pub top_k: bool,
    /// Keeps tokens by their likelihood beside the most likely one's.
    pub min_p: bool,
    /// Takes biases by token id.
    pub logit_bias: bool,
    /// How it can be made to judge drafts.
    pub verifies: VerifyAbilities,
}

impl StreamingCapabilities {
    /// What an engine can do that samples by all fields; its names, its longest text and how it verifies are filled in by
    /// who connects.
    pub(super) fn of_dialect(top_logprobs_max: Option<u32>) -> Self {
        StreamingCapabilities {
            model: String::new(),
            tokenizer: String::new(),
            max_context: 0,
            top_logprobs_max,
            top_k: true,
            min_p: true,
            logit_bias: true,
            verifies: VerifyAbilities::default(),
        }
    }

    /// Whether it can do what a request asks for.
    ///
    /// # Errors
    /// `InvalidRequest` that names the field.
    pub fn check(&self, sampling: &Sampling) -> Result<(), ApiError> {
        let refuse = |field: &str| {
            let message = format!(
                "the engine behind {} does not support {field}; leave it out",
                self.model
            );
            Err(ApiError::invalid(field, message).with_code("unsupported_by_engine"))
        };
        if sampling.top_k > 0 && !self.top_k {
            return refuse("top_k");
        }
        if sampling.min_p > 0.0 && !self.min_p {
            return refuse("min_p");
        }
        if !sampling.logit_bias.is_empty() && !self.logit_bias {
            return refuse("logit_bias");
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

/// What is to be generated.
#[derive(Clone, Debug, PartialEq)]
pub struct GenerateRequest {
    /// The request that it belongs to, for the engine's log.
    pub request: RequestId,
    /// Tells this call from all others of the request.
    pub call: u64,
    /// Whose it is: an engine that shares KV between requests does so within a namespace only.
    pub namespace: NamespaceId,
    /// The text so far: prompt and output.
    pub tokens: Vec<TokenId>,
    /// How much of it is the prompt.
    pub prompt_len: u32,
    /// Most tokens (at least 1).
    pub tokens_max: u32,
    /// How to sample.
    pub sampling: Sampling,
    /// What it counts in the engine's own queue, where that is told.
    pub priority: Option<Priority>,
    /// For an engine that has the drafts inside.
    pub keeping: Option<Keeping>,
}

/// Whose an output is, for an engine that has the drafts inside: it drafts from what it says at once, and leaves it to the
/// worker to write it to the store.
#[derive(Clone, Debug, PartialEq)]
pub struct Keeping {
    /// The namespace as one word, signed by the gateway.
    pub token: String,
    /// When that was signed, Unix seconds.
    pub issued_at_s: u64,
    /// Its group of samples.
    pub group: Option<String>,
    /// Its document.
    pub document: DocumentId,
    /// The document's epoch.
    pub epoch: u64,
}

impl GenerateRequest {
    /// A name for the engine's log and aborts, every call's own: an abort may come late, and must not hit the call that
    /// goes on. SGLang aborts all whose names begin with what it is told, so all are of one length.
    pub(super) fn name(&self) -> String {
        let place = self.tokens.len();
        format!("{}-{place:010}-{:016x}", self.request, self.call)
    }

    /// The engine's seed. Engines draw noise from a generator that starts anew with every call, so the same seed for
    /// two choices, or for two chunks of one output, would repeat the same noise: it is mixed with the choice and with
    /// where the call begins.
    pub fn engine_seed(&self) -> u64 {
        let place = (u64::from(self.sampling.choice) << 32) | self.tokens.len() as u64;
        mix(self.sampling.seed ^ mix(place))
    }
}

/// The finaliser of splitmix64.
fn mix(value: u64) -> u64 {
    let value = value.wrapping_add(0x9e37_79b9_7f4a_7c15);
    let value = (value ^ (value >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let value = (value ^ (value >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    value ^ (value >> 31)
}

/// A piece of what an engine generates.
#[derive(Clone, Debug, PartialEq)]
pub enum Generated {
    /// It is at work: it has read, or read some of, the text. Of it, this many tokens were in its KV cache.
    Begun {
        /// Tokens found in the cache.
        cached_tokens: u32,
    },
    /// Tokens, at least one.
    Tokens {
        /// The ids.
        tokens: Vec<TokenId>,
        /// One per token, if asked for.
        logprobs: Option<Vec<TokenLogprob>>,
    },
    /// The engine's own end. Nothing follows.
    End(GeneratedEnd),
}

/// Why an engine ended by itself.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum GeneratedEnd {
    /// An end token.
    Stop,
    /// The limit of the call, or the engine's context.
    Length,
}

/// What an engine generates. Dropping it aborts the engine's work.
pub type GeneratedStream = BoxStream<'static, Result<Generated, ApiError>>;

/// How busy an engine says it is; what it does not say is `None`.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct StreamingLoad {
    /// Requests in its batch.
    pub running: Option<f64>,
    /// Requests that wait.
    pub waiting: Option<f64>,
    /// Share of its KV cache in use.
    pub kv_usage: Option<f64>,
}

/// How often an engine that came back was told of a namespace, or was not.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Introduced {
    /// It was.
    pub told: u64,
    /// It could not be reached or refused, and is told again or not.
    pub failed: u64,
    /// The namespace's token had become too old.
    pub expired: u64,
}

/// An engine that generates by itself and cannot be driven step by step.
#[async_trait]
pub trait StreamingEngine: Send + Sync {
    /// What it can do. Does not change while it lives.
    fn capabilities(&self) -> &StreamingCapabilities;

    /// Whether it is there and still the engine that its capabilities describe.
    ///
    /// # Errors
    /// It cannot be reached, or serves another model now: what it says must not be kept under the old name.
    async fn confirm(&self) -> Result<(), ApiError>;

    /// Starts to generate.
    ///
    /// # Errors
    /// The engine cannot be reached or refuses. It has generated nothing then, so it may be asked again.
    async fn generate(&self, request: GenerateRequest) -> Result<GeneratedStream, ApiError>;

    /// Judges a draft, by one of the ways of its capabilities, and generates nothing beyond it. Dropping the future aborts
    /// the engine's work.
    ///
    /// # Errors
    /// The engine cannot be reached or refuses. The text is as it was.
    async fn verify(&self, request: VerifyRequest) -> Result<Verified, ApiError>;

    /// How busy it is.
    ///
    /// # Errors
    /// It cannot be reached, or does not say.
    async fn load(&self) -> Result<StreamingLoad, ApiError>;

    /// What it was told of namespaces since this was last asked. Nothing, where no drafts are inside.
    fn take_introduced(&self) -> Introduced {
        Introduced::default()
    }

    /// What it shows Prometheus by itself, unchanged.
    ///
    /// # Errors
    /// It cannot be reached, or shows nothing (`NotFound`).
    async fn metrics(&self) -> Result<String, ApiError>;
}

#[cfg(test)]
mod tests {
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
            verifies: VerifyAbilities::default(),
        }
    }

    #[test]
    fn what_an_engine_cannot_do_is_refused_by_name() {
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
        ];
        assert_eq!(capabilities().check(&plain), Ok(()));
        for (field, sampling) in asks {
            let error = capabilities().check(&sampling).unwrap_err();
            assert_eq!(error.param.as_deref(), Some(field));
            assert_eq!(error.kind, refrain_protocol::ErrorKind::InvalidRequest);
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

    #[test]
    fn noise_is_never_drawn_twice() {
        let request = |seed, choice, len| GenerateRequest {
            request: RequestId(1),
            call: 1,
            namespace: NamespaceId(1),
            tokens: vec![0; len],
            prompt_len: len as u32,
            tokens_max: 1,
            sampling: Sampling {
                seed,
                choice,
                ..Sampling::default()
            },
            priority: None,
            keeping: None,
        };
        let seeds: std::collections::HashSet<u64> = (0..8u64)
            .flat_map(|seed| (0..8).map(move |choice| (seed, choice)))
            .flat_map(|(seed, choice)| (1..9).map(move |len| (seed, choice, len)))
            .map(|(seed, choice, len)| request(seed, choice, len).engine_seed())
            .collect();
        assert_eq!(seeds.len(), 8 * 8 * 8);
        assert_eq!(
            request(7, 1, 3).engine_seed(),
            request(7, 1, 3).engine_seed()
        );
    }
}
