//! Verify calls, and which of them an engine takes.

use refrain_protocol::engine::{Draft, Sampling};
use refrain_protocol::{ApiError, ErrorKind, NamespaceId, RequestId, TokenId};
use refrain_tokenization::Tokenizer;
use tokio::runtime::Handle;

use super::answer::Abort;
use super::client::EngineClient;
use super::dialect::Dialect;
use super::identity::plain_tokens;
use super::streaming::GenerateRequest;
use super::verify::{Verified, VerifyAbilities, VerifyRequest, VerifyWay};

/// One verify call.
pub(super) async fn verify(
    client: &EngineClient,
    tasks: &Handle,
    dialect: &dyn Dialect,
    request: &VerifyRequest,
) -> Result<Verified, ApiError> {
    let (path, body) = dialect.verify(request).ok_or_else(|| {
        ApiError::internal("a verify call of a kind that the engine does not take")
    })?;
    let mut abort = Abort::of(client, tasks, dialect, &request.text);
    let answer = client.post_read(path, &body).await;
    if let Some(abort) = &mut abort {
        // It has answered, or was given up by the deadline of calls and may still be at work.
        abort.needed = answer.is_err();
    }
    dialect.verified(request, &answer?)
}

/// Finds out how an engine verifies, by having it verify: routes may be turned off, and answers may lack what is needed.
///
/// # Errors
/// It is away for the moment.
pub(super) async fn verify_abilities(
    client: &EngineClient,
    dialect: &dyn Dialect,
    tokenizer: &Tokenizer,
) -> Result<VerifyAbilities, ApiError> {
    let mut abilities = VerifyAbilities::default();
    let tokens = plain_tokens(tokenizer);
    for (way, can) in [
        (VerifyWay::Chain, &mut abilities.chain),
        (VerifyWay::FanOut, &mut abilities.fan_out),
    ] {
        for text in tokens.chunks_exact(3).take(PROBED_TEXTS_MAX) {
            *can = judges(client, dialect, way, text).await?;
            if *can {
                break;
            }
        }
    }
    Ok(abilities)
}

/// Texts that a way of verifying is tried with: one may be followed by a near-tie, or by the engine's own end.
const PROBED_TEXTS_MAX: usize = 3;

/// Whether the engine judges the last token of a text as a draft behind the others, leaving nothing open.
///
/// # Errors
/// It is away for the moment.
async fn judges(
    client: &EngineClient,
    dialect: &dyn Dialect,
    way: VerifyWay,
    text: &[TokenId],
) -> Result<bool, ApiError> {
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
            keeping: None,
        },
        draft: Draft {
            tokens: draft.to_vec(),
            parents: vec![None],
        },
        way,
    };
    if dialect.verify(&request).is_none() {
        return Ok(false);
    }
    match verify(client, &Handle::current(), dialect, &request).await {
        Ok(verified) => {
            let open = verified.drawn.iter().filter(|drawn| drawn.is_none());
            let open = open.count();
            if open > 0 {
                tracing::info!(
                    way = way.as_str(),
                    open,
                    "the engine left places of a draft open"
                );
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
            tracing::info!(way = way.as_str(), kind = ?error.kind, code = error.code, "the engine verifies no drafts in this way");
            Ok(false)
        }
    }
}
