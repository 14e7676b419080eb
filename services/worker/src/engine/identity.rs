//! Identity checks of a third-party engine: the model that it serves, and its tokenizer.

use refrain_protocol::error::code;
use refrain_protocol::{ApiError, TokenId};
use refrain_tokenization::Tokenizer;
use serde::Deserialize;
use serde_json::Value;

use super::client::{EngineClient, parse, unexpected_response};
use super::dialect::Dialect;

/// An entry of an engine's list of models: the fields that distinguish one model from another.
#[derive(Clone, Debug, PartialEq, Deserialize)]
pub(super) struct ModelCard {
    id: String,
    /// The directory or the name of the model's files.
    #[serde(default)]
    pub(super) root: Option<String>,
    #[serde(default)]
    pub(super) max_model_len: Option<u32>,
    #[serde(default)]
    meta: Option<ModelMeta>,
}

/// The shape of a model as llama-server reports it.
#[derive(Clone, Debug, PartialEq, Deserialize)]
pub(super) struct ModelMeta {
    n_vocab: Option<u32>,
    n_params: Option<u64>,
    size: Option<u64>,
}

#[derive(Deserialize)]
struct ModelList {
    data: Vec<ModelCard>,
}

impl ModelCard {
    /// The card with the names of another one, which say nothing about the model.
    pub(super) fn named_as(self, other: &ModelCard) -> Self {
        ModelCard {
            id: other.id.clone(),
            root: other.root.clone(),
            ..self
        }
    }
}

/// Checks the engine's health, and returns its entry for the model.
pub(super) async fn model_card(
    client: &EngineClient,
    health: Option<&'static str>,
    model: &str,
) -> Result<ModelCard, ApiError> {
    if let Some(path) = health {
        client.get(path).await?;
    }
    let cards: ModelList = parse(&client.get("/v1/models").await?)?;
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

/// Number of tokens that are compared.
const COMPARED_TOKENS: usize = 64;

/// Compares the tokenizers by the size of the vocabulary, if the engine reports it, and by the text of some tokens.
///
/// # Errors
/// `InvalidRequest` if the tokenizers differ.
pub(super) async fn check_tokenizer(
    client: &EngineClient,
    dialect: &dyn Dialect,
    card: &ModelCard,
    tokenizer: &Tokenizer,
) -> Result<(), ApiError> {
    let size = card.meta.as_ref().and_then(|meta| meta.n_vocab);
    if size.is_some_and(|size| size < tokenizer.vocab_size()) {
        return Err(tokenizer_differs(client));
    }
    // Names and sizes of vocabularies prove little.
    let usable = plain_tokens(tokenizer);
    let every = usable.len().div_ceil(COMPARED_TOKENS).max(1);
    let compared: Vec<TokenId> = usable.into_iter().step_by(every).collect();
    let Some((path, body, field)) = dialect.detokenize(&compared) else {
        return Ok(());
    };
    let answer: Value = parse(&client.post(path, &body).await?)?;
    let text = answer[field]
        .as_str()
        .ok_or_else(|| unexpected_response(format!("{path} without {field}")))?;
    if text.trim() == tokenizer.decode(&compared) {
        Ok(())
    } else {
        Err(tokenizer_differs(client))
    }
}

/// Tokens of plain alphanumeric text, which every engine spells in the same way.
fn plain_tokens(tokenizer: &Tokenizer) -> Vec<TokenId> {
    let plain = |token: &TokenId| {
        let bytes = tokenizer.token_bytes(*token);
        bytes.len() > 1 && bytes.iter().all(u8::is_ascii_alphanumeric)
    };
    (0..tokenizer.vocab_size())
        .filter(|token| !tokenizer.is_special(*token))
        .filter(plain)
        .collect()
}

fn tokenizer_differs(client: &EngineClient) -> ApiError {
    let message = format!(
        "the engine at {} has another tokenizer than worker.engine.files: it spells the same tokens as another text",
        client.base_url()
    );
    ApiError::invalid("worker.engine.files", message)
}
