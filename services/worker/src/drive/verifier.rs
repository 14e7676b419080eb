//! A third-party engine that judges drafts over HTTP, and the probe that finds out which verify calls it supports.

use std::sync::Arc;

use async_trait::async_trait;
use refrain_protocol::engine::{Draft, Sampling};
use refrain_protocol::{ApiError, ErrorKind, NamespaceId, RequestId, TokenId};
use refrain_tokenization::Tokenizer;
use tokio::runtime::Handle;

use super::dialect::{VerifyDialect, verify_dialect};
use super::verify::{DraftVerdict, DraftVerifier, VerifyAbilities, VerifyMethod, VerifyRequest};
use crate::config::EngineConfig;
use crate::engine::{AbortOnDrop, EngineClient, ExpectedModel, GenerateRequest, plain_tokens};

/// A third-party engine that judges drafts.
struct HttpVerifier {
    client: EngineClient,
    dialect: Arc<dyn VerifyDialect>,
    abilities: VerifyAbilities,
    /// The runtime that connected the engine. Aborts run here, since the runtime of a dropped call may be ending.
    tasks: Handle,
}

/// Finds out which verify calls the engine supports. Returns `None` if it supports none.
///
/// # Errors
/// The engine is unavailable at the moment.
pub(crate) async fn connect_verifier(
    client: EngineClient,
    config: &EngineConfig,
    expected: &ExpectedModel,
) -> Result<Option<Arc<dyn DraftVerifier>>, ApiError> {
    let Some(dialect) = verify_dialect(config, expected) else {
        return Ok(None);
    };
    let mut verifier = HttpVerifier {
        client,
        dialect,
        abilities: VerifyAbilities::default(),
        tasks: Handle::current(),
    };
    verifier.abilities = verifier.probe_abilities(&expected.tokenizer).await?;
    let VerifyAbilities { chain, fan_out } = verifier.abilities;
    tracing::info!(chain, fan_out, "verify calls of the engine");
    Ok(match verifier.abilities.any() {
        true => Some(Arc::new(verifier)),
        false => None,
    })
}

#[async_trait]
impl DraftVerifier for HttpVerifier {
    fn abilities(&self) -> VerifyAbilities {
        self.abilities
    }

    async fn verify(&self, request: VerifyRequest) -> Result<DraftVerdict, ApiError> {
        self.call(&request).await
    }
}

/// Number of texts that a method is probed with, since one of them may end in a near-tie or in the engine's own end.
const PROBED_TEXTS_MAX: usize = 3;

impl HttpVerifier {
    /// Makes a verify call.
    async fn call(&self, request: &VerifyRequest) -> Result<DraftVerdict, ApiError> {
        let (path, body) = self.dialect.verify_call(request).ok_or_else(|| {
            ApiError::internal("a verify call of a kind that the engine does not support")
        })?;
        let dialect = &*self.dialect;
        let mut abort = AbortOnDrop::new(&self.client, &self.tasks, dialect, &request.text);
        let response = self.client.post_read(path, &body).await;
        if let Some(abort) = &mut abort {
            // After a timeout of the call the engine may still be at work.
            abort.is_armed = response.is_err();
        }
        self.dialect.verdict(request, &response?)
    }

    /// Finds out which calls the engine supports by making them: routes may be turned off, and responses may lack
    /// data.
    async fn probe_abilities(&self, tokenizer: &Tokenizer) -> Result<VerifyAbilities, ApiError> {
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
        match self.call(&request).await {
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
