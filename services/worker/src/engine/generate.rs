//! A call to a streaming engine, and the pieces of its stream.

use futures_util::stream::BoxStream;
use refrain_protocol::chunk::{DraftRules, Priority};
use refrain_protocol::engine::{Sampling, TokenLogprob};
use refrain_protocol::{ApiError, DocumentId, NamespaceId, RequestId, TokenId};
use serde_json::{Value, json};

use super::words::unsupported_field;

/// A text to be continued by the engine.
#[derive(Clone, Debug, PartialEq)]
pub struct GenerateRequest {
    /// The request that this call belongs to, for the engine's log.
    pub request: RequestId,
    /// Distinguishes this call from all others of the request.
    pub call: u64,
    /// The namespace of the request. An engine may share KV cache between requests of one namespace only.
    pub namespace: NamespaceId,
    /// The text so far: prompt and output.
    pub tokens: Vec<TokenId>,
    /// Length of the prompt within `tokens`.
    pub prompt_len: u32,
    /// Maximum number of tokens to generate (at least 1).
    pub tokens_max: u32,
    /// Sampling parameters.
    pub sampling: Sampling,
    /// Priority in the engine's own queue, if the engine receives one.
    pub priority: Option<Priority>,
    /// The stored document of the output, for an engine with the Refrain plugin inside.
    pub attached: Option<AttachedDocument>,
}

/// The stored document of an output, for an engine with the Refrain plugin inside. Such an engine drafts from the
/// output at once, and the worker uploads it to the store.
#[derive(Clone, Debug, PartialEq)]
pub struct AttachedDocument {
    /// The namespace as one word, signed by the gateway.
    pub token: String,
    /// Time of that signature, Unix seconds.
    pub issued_at_s: u64,
    /// The group of samples that the output belongs to.
    pub group: Option<String>,
    /// The document.
    pub document: DocumentId,
    /// The epoch of the document.
    pub epoch: u64,
    /// The rules of the request's drafts. The plugin's configuration decides what is missing.
    pub drafts: DraftRules,
}

impl GenerateRequest {
    /// A name for the engine's log and for aborts, unique to this call: a late abort must not hit the call that
    /// follows it. SGLang aborts every call whose name begins with the given name, so all names have one length.
    pub(crate) fn name(&self) -> String {
        let position = self.tokens.len();
        format!("{}-{position:010}-{:016x}", self.request, self.call)
    }

    /// Tokens of the output so far.
    pub(crate) fn written(&self) -> u32 {
        (self.tokens.len() as u32).saturating_sub(self.prompt_len)
    }

    /// Tokens that the engine must still generate before it may end.
    pub(crate) fn min_tokens_left(&self) -> u32 {
        self.sampling.min_tokens.saturating_sub(self.written())
    }

    /// The fields that the Refrain plugin inside the engine reads.
    pub(crate) fn plugin_fields(&self) -> Option<Value> {
        let attached = self.attached.as_ref()?;
        let mut fields = json!({
            "refrain_namespace": attached.token,
            "refrain_document": attached.document,
            "refrain_epoch": attached.epoch,
            "refrain_written": self.written(),
        });
        if let Some(group) = &attached.group {
            fields["refrain_group"] = json!(group);
        }
        // Each rule that is set. Older plugins ignore fields that they do not know.
        if let Value::Object(rules) = json!(attached.drafts) {
            for (name, value) in rules {
                fields[format!("refrain_{name}")] = value;
            }
        }
        Some(fields)
    }

    /// Checks that the engine samples after this text as it would have, had it generated the output so far itself. It
    /// takes all of the text for a prompt, which some parameters do not count.
    ///
    /// # Errors
    /// `InvalidRequest` that names the parameter.
    pub(crate) fn check_continuation(&self) -> Result<(), ApiError> {
        let sampling = &self.sampling;
        let written = self.written() as usize;
        if written == 0 || !sampling.depends_on_output() {
            return Ok(());
        }
        let output = &self.tokens[self.tokens.len() - written..];
        let form = sampling.form.as_deref();
        // An engine begins a form anew with each call.
        let is_in_form = form
            .and_then(|form| form.begin(output))
            .is_some_and(|begin| begin < written);
        let field = match (sampling.presence_penalty, sampling.frequency_penalty) {
            (presence, _) if presence != 0.0 => "presence_penalty",
            (_, frequency) if frequency != 0.0 => "frequency_penalty",
            _ if sampling.bad_tokens.iter().any(|word| word.len() > 1) => "bad_words",
            _ if is_in_form => "a form of the output",
            _ => return Ok(()),
        };
        let message = format!(
            "the output was interrupted, and this engine cannot continue one with {field}; send the request again"
        );
        Err(unsupported_field(field, message))
    }

    /// The seed for the engine. Engines restart their random generator with every call, so two choices or two
    /// chunks with one seed would repeat the same noise. The seed is therefore mixed with the choice and with the
    /// position where the call begins.
    pub fn engine_seed(&self) -> u64 {
        let position = (u64::from(self.sampling.choice) << 32) | self.tokens.len() as u64;
        mix(self.sampling.seed ^ mix(position))
    }
}

/// The finaliser of splitmix64.
fn mix(value: u64) -> u64 {
    let value = value.wrapping_add(0x9e37_79b9_7f4a_7c15);
    let value = (value ^ (value >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let value = (value ^ (value >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    value ^ (value >> 31)
}

/// A piece of an engine's stream.
#[derive(Clone, Debug, PartialEq)]
pub enum Generated {
    /// How much of the text the engine found in its KV cache. Engines tell it with any of their events: llama-server
    /// and SGLang before the first token, vLLM and TensorRT-LLM with the last one.
    Cached {
        /// Tokens found in the cache.
        tokens: u32,
    },
    /// The version of the weights that sample the following tokens, where the engine tells it.
    Weights {
        /// The version.
        version: u64,
    },
    /// Generated tokens, at least one.
    Tokens {
        /// The token ids.
        tokens: Vec<TokenId>,
        /// One log-probability per token, if the request asked for them.
        logprobs: Option<Vec<TokenLogprob>>,
    },
    /// The engine's own end. Nothing follows.
    End(GeneratedEnd),
}

/// The reason why an engine ended by itself.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum GeneratedEnd {
    /// An end token.
    Stop,
    /// The limit of the call, or the engine's context length.
    Length,
    /// The engine aborted the call, by the order of a trainer or by itself.
    Aborted,
}

/// The stream of an engine. Dropping it aborts the engine's work.
pub type GeneratedStream = BoxStream<'static, Result<Generated, ApiError>>;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_two_calls_draw_the_same_noise() {
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
            attached: None,
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
