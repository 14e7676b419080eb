//! Whether an engine is the one that it is taken for: the model it serves, and the tokens it speaks.

use refrain_protocol::error::code;
use refrain_protocol::{ApiError, TokenId};
use refrain_tokenization::Tokenizer;
use serde::Deserialize;
use serde_json::Value;

use super::client::{EngineClient, no_engine};
use super::dialect::Dialect;

/// An entry of an engine's list of models: of it, what tells one model from another.
#[derive(Clone, Debug, PartialEq, Deserialize)]
pub(super) struct Card {
    id: String,
    #[serde(default)]
    root: Option<String>,
    #[serde(default)]
    pub(super) max_model_len: Option<u32>,
    #[serde(default)]
    meta: Option<CardMeta>,
}

/// What llama-server says of a model's shape.
#[derive(Clone, Debug, PartialEq, Deserialize)]
pub(super) struct CardMeta {
    n_vocab: Option<u32>,
    n_params: Option<u64>,
    size: Option<u64>,
}

#[derive(Deserialize)]
struct Cards {
    data: Vec<Card>,
}

/// The engine's entry for the model.
pub(super) async fn card(
    client: &EngineClient,
    health: Option<&'static str>,
    model: &str,
) -> Result<Card, ApiError> {
    if let Some(path) = health {
        client.get(path).await?;
    }
    let cards: Cards = client.get_json("/v1/models").await?;
    let names: Vec<String> = cards.data.iter().map(|card| card.id.clone()).collect();
    let found = cards.data.into_iter().find(|card| card.id == model);
    found.ok_or_else(|| {
        let message = format!(
            "the engine at {} serves {}, not {model}; set worker.engine.served_model to its name for the model",
            client.base_url(),
            names.join(", ")
        );
        ApiError::invalid("worker.engine.served_model", message).with_code(code::MODEL_NOT_FOUND)
    })
}

/// Tokens that are compared.
const COMPARED_TOKENS: usize = 64;

/// Compares the engine's tokens with ours: their number, if it says so, and what some of them spell.
///
/// # Errors
/// `InvalidRequest` if they are others.
pub(super) async fn check_tokenizer(
    client: &EngineClient,
    dialect: &dyn Dialect,
    card: &Card,
    tokenizer: &Tokenizer,
) -> Result<(), ApiError> {
    let size = card.meta.as_ref().and_then(|meta| meta.n_vocab);
    if size.is_some_and(|size| size < tokenizer.vocab_size()) {
        return Err(other_tokenizer(client));
    }
    check_tokens(client, dialect, tokenizer).await
}

/// Tokens whose text is plain, so that no engine can take them for anything else.
pub(super) fn plain_tokens(tokenizer: &Tokenizer) -> Vec<TokenId> {
    let plain = |token: &TokenId| {
        let bytes = tokenizer.token_bytes(*token);
        bytes.len() > 1 && bytes.iter().all(u8::is_ascii_alphanumeric)
    };
    (0..tokenizer.vocab_size())
        .filter(|token| !tokenizer.is_special(*token))
        .filter(plain)
        .collect()
}

/// Compares what some tokens spell here and there. Names of vocabularies say little, their sizes not much more.
async fn check_tokens(
    client: &EngineClient,
    dialect: &dyn Dialect,
    tokenizer: &Tokenizer,
) -> Result<(), ApiError> {
    let usable = plain_tokens(tokenizer);
    let every = usable.len().div_ceil(COMPARED_TOKENS).max(1);
    let compared: Vec<TokenId> = usable.into_iter().step_by(every).collect();
    let Some((path, body, field)) = dialect.detokenize(&compared) else {
        return Ok(());
    };
    let answer: Value = client.post_json(path, &body).await?;
    let text = answer[field]
        .as_str()
        .ok_or_else(|| no_engine(format!("{path} without {field}")))?;
    if text.trim() == tokenizer.decode(&compared) {
        Ok(())
    } else {
        Err(other_tokenizer(client))
    }
}

fn other_tokenizer(client: &EngineClient) -> ApiError {
    let message = format!(
        "the engine at {} has another tokenizer than worker.engine.files: the same tokens spell another text there",
        client.base_url()
    );
    ApiError::invalid("worker.engine.files", message)
}
