//! A request with the standing of its caller.

use std::ops::Deref;
use std::sync::Arc;

use refrain_accounts::tenants::{Caller, StreamShape};
use refrain_protocol::TokenId;
use refrain_protocol::chunk::{DraftRules, Urgency};
use refrain_protocol::scheduling::{RequestClass, TenantWeight};
use refrain_tokenization::Tokenizer;

use super::{EndUser, ParsedRequest};

/// A request that can be carried out: what its body says, and the standing of its caller. Only admission
/// makes one, so none is without the standing, and nobody can change it.
#[derive(Debug)]
pub struct GenerateRequest {
    parsed: ParsedRequest,
    standing: Standing,
}

/// The standing of a request, by the rules for its caller.
#[derive(Debug)]
pub(crate) struct Standing {
    /// Whether somebody waits for each token.
    pub(crate) class: RequestClass,
    /// The weight of the tenant.
    pub(crate) weight: TenantWeight,
    /// The name that the tenant has in the namespace: with the part of it that drafts and KV caches stay in.
    pub(crate) scope: String,
    /// The shape of the answer's events, if it must not tell what steps brought.
    pub(crate) shape: Option<StreamShape>,
    /// The answer has no metrics, and nothing in its usage that tells what was known before.
    pub(crate) hides_metrics: bool,
    /// How its drafts are made, where the tenant has rules of its own.
    pub(crate) drafts: DraftRules,
    pub(crate) urgency: Urgency,
}

impl ParsedRequest {
    /// Gives the request the standing of its caller. It is urgent only if it asks for that and `may_be_urgent`.
    pub(crate) fn admit(self, caller: &Caller, may_be_urgent: bool) -> Arc<GenerateRequest> {
        let policy = &caller.policy;
        let end_user = self.end_user.map(EndUser::hex);
        let standing = Standing {
            class: policy.class(self.asked_class),
            weight: policy.weight,
            scope: caller.scope(end_user.as_deref()),
            shape: policy.shape,
            hides_metrics: policy.hides_metrics,
            drafts: policy.drafts,
            urgency: match may_be_urgent {
                true => self.asked_urgency,
                false => self.asked_urgency.ordinary(),
            },
        };
        Arc::new(GenerateRequest {
            parsed: self,
            standing,
        })
    }
}

impl GenerateRequest {
    pub(crate) fn standing(&self) -> &Standing {
        &self.standing
    }

    /// Whether the answer has nothing that tells what was known before.
    pub fn hides_metrics(&self) -> bool {
        self.standing.hides_metrics
    }

    /// The tokenizer of its model.
    pub fn tokenizer(&self) -> &Tokenizer {
        &self.parsed.model.tokenizer
    }

    /// The number of the prompt of a choice.
    pub fn prompt_of(&self, choice: usize) -> usize {
        choice / self.parsed.choices_per_prompt.max(1) as usize
    }

    /// The tokens of the prompt of a choice.
    pub fn prompt_tokens(&self, choice: usize) -> Option<&[TokenId]> {
        let prompt = self.parsed.prompts.get(self.prompt_of(choice))?;
        Some(&prompt.tokens)
    }

    /// The texts that end an output.
    pub fn stops(&self) -> &[String] {
        &self.parsed.stops
    }

    /// Most likely tokens that the answer shows in each place of the output, if it has log-probabilities.
    pub fn top_logprobs(&self) -> Option<u32> {
        self.parsed.output.top_logprobs
    }

    /// The same for the prompt.
    pub fn prompt_logprobs(&self) -> Option<u32> {
        self.parsed.output.prompt_logprobs
    }
}

impl Deref for GenerateRequest {
    type Target = ParsedRequest;

    fn deref(&self) -> &ParsedRequest {
        &self.parsed
    }
}
