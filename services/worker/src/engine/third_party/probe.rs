//! The probe that finds out which verify calls an engine supports.

use refrain_protocol::engine::{Draft, Sampling};
use refrain_protocol::{ApiError, ErrorKind, NamespaceId, RequestId, TokenId};
use refrain_tokenization::Tokenizer;

use super::ThirdPartyEngine;
use crate::engine::generate::GenerateRequest;
use crate::engine::identity::plain_tokens;
use crate::engine::streaming::StreamingEngine;
use crate::engine::verify::{VerifyAbilities, VerifyMethod, VerifyRequest};

/// Number of texts that a method is probed with, since one of them may end in a near-tie or in the engine's own end.
const PROBED_TEXTS_MAX: usize = 3;

impl ThirdPartyEngine {
    /// Finds out which calls the engine supports by making them: routes may be turned off, and responses may lack
    /// data.
    ///
    /// # Errors
    /// The engine is unavailable at the moment.
    pub(super) async fn probe_abilities(
        &self,
        tokenizer: &Tokenizer,
    ) -> Result<VerifyAbilities, ApiError> {
        let mut abilities = VerifyAbilities::default();
        let tokens = plain_tokens(tokenizer);
        for (method, can) in [
            (VerifyMethod::Chain, &mut abilities.chain),
            (VerifyMethod::FanOut, &mut abilities.fan_out),
        ] {
            for text in tokens.chunks_exact(3).take(PROBED_TEXTS_MAX) {
                *can = self.probe(method, text).await?;
                if *can {
                    break;
                }
            }
        }
        let VerifyAbilities { chain, fan_out } = abilities;
        tracing::info!(chain, fan_out, "verify calls of the engine");
        Ok(abilities)
    }

    /// Whether the engine judges the last token of a text as a draft after the others, and leaves no position open.
    ///
    /// # Errors
    /// The engine is unavailable at the moment.
    async fn probe(&self, method: VerifyMethod, text: &[TokenId]) -> Result<bool, ApiError> {
        let (before, draft) = text.split_at(text.len() - 1);
        let request = VerifyRequest {
            text: GenerateRequest {
                request: RequestId(0),
                call: 0,
                namespace: NamespaceId(0),
                tokens: before.to_vec(),
                prompt_len: before.len() as u32,
                tokens_max: 1,
                sampling: Sampling::default(),
                priority: None,
                attached: None,
            },
            draft: Draft {
                tokens: draft.to_vec(),
                parents: vec![None],
            },
            method,
        };
        if self.dialect.verify_call(&request).is_none() {
            return Ok(false);
        }
        let method = method.as_str();
        match self.verify(request).await {
            Ok(verdict) => {
                let open = verdict.next_tokens.iter().filter(|next| next.is_none());
                let open = open.count();
                if open > 0 {
                    tracing::info!(method, open, "the engine left positions of a draft open");
                }
                Ok(open == 0)
            }
            Err(error)
                if matches!(
                    error.kind,
                    ErrorKind::Unavailable | ErrorKind::Overloaded | ErrorKind::Timeout
                ) =>
            {
                Err(error)
            }
            Err(error) => {
                tracing::info!(
                    method,
                    kind = ?error.kind,
                    code = error.code,
                    "the engine does not support this kind of verify call"
                );
                Ok(false)
            }
        }
    }
}
