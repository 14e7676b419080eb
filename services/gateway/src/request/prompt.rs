//! Prompts to tokens, what the context leaves for the output, and what the client predicts of it.

use std::sync::Arc;

use refrain_protocol::openai::{ChatRequest, Content, Prompt};
use refrain_protocol::{ApiError, TokenId};
use refrain_tokenization::{ChatInput, TokenizationError};

use super::fields::check_ids;
use crate::models::Model;

/// The prompt of a chat: the model's template over its messages.
pub(super) fn chat(
    body: &[u8],
    chat: &ChatRequest,
    model: &Model,
) -> Result<Vec<TokenId>, ApiError> {
    let Some(template) = &model.template else {
        return Err(ApiError::invalid(
            "model",
            "this model has no chat template; use /v1/completions",
        ));
    };
    let mut input = ChatInput::from_json(body).map_err(|error| refused("messages", &error))?;
    if chat
        .tool_choice
        .as_ref()
        .is_some_and(|choice| choice == "none")
    {
        input = input.without_tools();
    }
    template
        .encode(&model.tokenizer, &input, true)
        .map_err(|error| refused("messages", &error))
}

/// The prompts of a text completion.
pub(super) fn completions(
    prompt: &Prompt,
    model: &Model,
    most: u32,
) -> Result<Vec<Vec<TokenId>>, ApiError> {
    let encode = |text: &String| {
        model
            .tokenizer
            .encode_sequence(text)
            .map_err(|error| refused("prompt", &error))
    };
    let count = match prompt {
        Prompt::Text(_) | Prompt::Tokens(_) => 1,
        Prompt::Texts(texts) => texts.len(),
        Prompt::TokenLists(lists) => lists.len(),
    };
    // Before anything is encoded: a body may hold millions of empty prompts.
    if count > most as usize {
        return Err(ApiError::invalid(
            "prompt",
            format!("{count} prompts in one request; at most {most}"),
        ));
    }
    let prompts = match prompt {
        Prompt::Text(text) => vec![encode(text)?],
        Prompt::Texts(texts) => texts.iter().map(encode).collect::<Result<_, _>>()?,
        Prompt::Tokens(tokens) => vec![tokens.clone()],
        Prompt::TokenLists(lists) => lists.clone(),
    };
    if prompts.is_empty() || prompts.iter().any(Vec::is_empty) {
        return Err(ApiError::invalid("prompt", "prompt: at least one token"));
    }
    for tokens in &prompts {
        check_ids("prompt", tokens, model)?;
    }
    Ok(prompts)
}

/// `prediction`: the tokens that the answer is predicted to be. `None` if nothing is predicted.
pub(super) fn prediction(
    chat: &ChatRequest,
    model: &Model,
    context: u32,
) -> Result<Option<Arc<[TokenId]>>, ApiError> {
    let Some(prediction) = &chat.prediction else {
        return Ok(None);
    };
    let text = match &prediction.content {
        Content::Text(text) => text.clone(),
        Content::Parts(parts) => parts
            .iter()
            .filter_map(|part| part.text.as_deref())
            .collect(),
    };
    let tokens = model
        .tokenizer
        .encode(&text)
        .map_err(|error| refused("prediction.content", &error))?;
    if tokens.len() > context as usize {
        return Err(ApiError::invalid(
            "prediction.content",
            format!(
                "prediction.content: {} tokens, more than the model's context of {context}",
                tokens.len()
            ),
        ));
    }
    Ok(Some(tokens.into()))
}

/// How many tokens the output may have: as many as asked for, else the fallback or what the context leaves,
/// whichever is less.
///
/// # Errors
/// `context_length_exceeded` if that does not fit.
pub(super) fn output_limit(
    param: &str,
    prompt_tokens: usize,
    asked: Option<u64>,
    fallback: Option<u64>,
    context: u32,
) -> Result<u32, ApiError> {
    let room = u64::from(context).saturating_sub(prompt_tokens as u64);
    let exceeded = |message: String| {
        Err(ApiError::invalid(param, message).with_code("context_length_exceeded"))
    };
    if room == 0 {
        return exceeded(format!(
            "the model's context is {context} tokens and the prompt has {prompt_tokens}; shorten it"
        ));
    }
    match asked {
        Some(0) => Err(ApiError::invalid("max_tokens", "max_tokens: at least 1")),
        Some(asked) if asked > room => exceeded(format!(
            "the model's context is {context} tokens; the prompt has {prompt_tokens} and {asked} were asked for: \
             shorten the prompt, or ask for at most {room}"
        )),
        Some(asked) => Ok(asked as u32),
        None => Ok(fallback.unwrap_or(room).clamp(1, room) as u32),
    }
}

fn refused(param: &str, error: &TokenizationError) -> ApiError {
    ApiError::invalid(param, error.to_string())
}
