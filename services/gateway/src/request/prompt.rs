//! Turns prompts and predictions into tokens, and computes the output limit that the context leaves.

use std::sync::Arc;

use refrain_protocol::error::code;
use refrain_protocol::openai::Prompt;
use refrain_protocol::{ApiError, TokenId};
use refrain_tokenization::{ChatInput, JsonList, JsonMap, JsonValue, TokenizationError};

use super::body::ChatFields;
use super::fields::check_ids;
use super::known_turns::{KnownTurns, TemplatedChat};
use crate::models::{BeyondContext, Model, template_failed};

/// The words of a refusal for lack of context. Programs parse them: they then summarize, or ask for less.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) enum ContextWords {
    #[default]
    OpenAi,
    Anthropic,
}

/// The tokens that a prompt and its output may have.
#[derive(Clone, Copy, Debug)]
pub(super) struct PromptRoom {
    /// Longest text of the model.
    context: u32,
    /// Keeps only that many tokens, the last ones.
    keep: Option<usize>,
    beyond: BeyondContext,
    words: ContextWords,
}

impl PromptRoom {
    /// The room of a model with this context, tokens. A prompt is cut to `keep` tokens, if that is given.
    pub(super) fn new(
        model: &Model,
        context: u32,
        keep: Option<usize>,
        words: ContextWords,
    ) -> Self {
        PromptRoom {
            context,
            keep,
            beyond: model.beyond_context,
            words,
        }
    }

    /// Largest number of tokens of a text that is encoded at all. One that is cut afterwards may have any number.
    fn tokens_max(self) -> usize {
        match self.keep {
            Some(_) => usize::MAX,
            None => prompt_tokens_max(self.context),
        }
    }

    /// Cuts a prompt to its last tokens.
    fn cut(self, mut tokens: Vec<TokenId>) -> Vec<TokenId> {
        if let Some(keep) = self.keep {
            let keep = keep.min(prompt_tokens_max(self.context));
            tokens.drain(..tokens.len().saturating_sub(keep));
        }
        tokens
    }

    /// The output limit in tokens: the one that was asked for, otherwise the fallback or the rest of the context,
    /// whichever is less. Programs ask for the same limit all the time, so one beyond the context is cut to the room
    /// that is left, unless the model says otherwise. The output is the same, and ends with the context.
    ///
    /// # Errors
    /// `context_length_exceeded` if it does not fit the context.
    pub(super) fn output_limit(
        self,
        param: &str,
        prompt_tokens: usize,
        asked: Option<u64>,
        fallback: Option<u64>,
    ) -> Result<u32, ApiError> {
        let context = self.context;
        let room = u64::from(context).saturating_sub(prompt_tokens as u64);
        if room == 0 {
            return Err(self.prompt_too_long(param, prompt_tokens, ""));
        }
        match (asked, self.beyond) {
            (Some(asked), BeyondContext::Refuse) if asked > room => {
                let message = match self.words {
                    ContextWords::OpenAi => format!(
                        "This model's maximum context length is {context} tokens. However, you requested {} tokens \
                         ({prompt_tokens} in the {param}, {asked} in the completion). Shorten the {param}, or ask for \
                         at most {room}.",
                        asked.saturating_add(prompt_tokens as u64)
                    ),
                    ContextWords::Anthropic => format!(
                        "input length and `max_tokens` exceed context limit: {prompt_tokens} + {asked} > {context}, \
                         decrease input length or `max_tokens` and try again"
                    ),
                };
                Err(ApiError::invalid(param, message).with_code(code::CONTEXT_LENGTH_EXCEEDED))
            }
            (Some(asked), _) => Ok(asked.min(room) as u32),
            (None, _) => Ok(fallback.unwrap_or(room).clamp(1, room) as u32),
        }
    }

    /// The error of a prompt of so many tokens. `at_least` says so where they were not counted.
    fn prompt_too_long(self, param: &str, tokens: usize, at_least: &str) -> ApiError {
        let context = self.context;
        let message = match self.words {
            ContextWords::OpenAi => format!(
                "This model's maximum context length is {context} tokens. However, your {param} resulted in \
                 {at_least}{tokens} tokens. Please reduce the length of the {param}."
            ),
            // The pattern has no place for words between.
            ContextWords::Anthropic => {
                format!("prompt is too long: {tokens} tokens > {context} maximum")
            }
        };
        ApiError::invalid(param, message).with_code(code::CONTEXT_LENGTH_EXCEEDED)
    }

    fn refused(self, param: &str, error: &TokenizationError) -> ApiError {
        match error {
            TokenizationError::TooLong { at_least } => {
                self.prompt_too_long(param, *at_least, "at least ")
            }
            TokenizationError::Render(_) => template_failed(&error.to_string()),
            error => ApiError::invalid(param, error.to_string()),
        }
    }
}

/// The end of the prompt of a chat.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum PromptEnd {
    /// The beginning of an answer.
    OpenAnswer,
    /// The last message as a whole.
    Closed,
    /// The text of the last message, with which the model goes on.
    Continued,
}

impl PromptEnd {
    /// The end that a request asks for.
    pub(super) fn of(chat: &ChatFields) -> Result<Self, ApiError> {
        let continues = chat.continue_final_message == Some(true);
        match (continues, chat.add_generation_prompt) {
            (true, Some(true)) => Err(ApiError::invalid(
                "continue_final_message",
                "continue_final_message: cannot be combined with add_generation_prompt: true",
            )),
            (true, _) => Ok(PromptEnd::Continued),
            (false, Some(false)) => Ok(PromptEnd::Closed),
            (false, _) => Ok(PromptEnd::OpenAnswer),
        }
    }
}

/// Renders the messages of a chat by the model's template and tokenizes them, unless `known` has their tokens.
pub(super) fn chat(
    messages: JsonList,
    tools: Option<JsonList>,
    kwargs: Option<JsonMap>,
    model: &Model,
    room: PromptRoom,
    end: PromptEnd,
    known: Option<&dyn KnownTurns>,
) -> Result<Vec<TokenId>, ApiError> {
    let Some(template) = &model.template else {
        return Err(model.no_chat());
    };
    let input = ChatInput::new(messages, tools, kwargs);
    let (tokenizer, most) = (&model.tokenizer, room.tokens_max());
    if let Some(known) = known.filter(|_| end != PromptEnd::Continued) {
        let chat = TemplatedChat {
            input: &input,
            template,
            tokenizer,
            model: &model.id,
            ends: &model.stop_token_ids,
            open_answer: end == PromptEnd::OpenAnswer,
            tokens_max: most,
        };
        let prompt = known.prompt(&chat);
        if let Some(tokens) = prompt.map_err(|error| room.refused("messages", &error))? {
            return match tokens.len() > most {
                true => Err(room.prompt_too_long("messages", tokens.len(), "")),
                false => Ok(room.cut(tokens)),
            };
        }
    }
    let tokens = match end {
        PromptEnd::Continued => template.encode_continued_within(tokenizer, &input, most),
        PromptEnd::OpenAnswer => template.encode_within(tokenizer, &input, true, most),
        PromptEnd::Closed => template.encode_within(tokenizer, &input, false, most),
    };
    let tokens = tokens.map_err(|error| room.refused("messages", &error))?;
    Ok(room.cut(tokens))
}

/// Number of prompts of a text completion.
pub(super) fn count(prompt: &Prompt) -> usize {
    match prompt {
        Prompt::Texts(texts) => texts.len(),
        Prompt::Tokens(lists) => lists.len(),
    }
}

/// Tokenizes the prompts of a text completion.
pub(super) fn completions(
    prompt: Prompt,
    model: &Model,
    room: PromptRoom,
) -> Result<Vec<Vec<TokenId>>, ApiError> {
    let encode = |text: &String| {
        let most = room.tokens_max();
        let encoded = model.tokenizer.encode_sequence_within(text, most);
        let tokens = encoded.map_err(|error| room.refused("prompt", &error))?;
        // The texts behind one that does not fit are not encoded.
        match tokens.len() > most {
            true => Err(room.prompt_too_long("prompt", tokens.len(), "")),
            false => Ok(tokens),
        }
    };
    let prompts = match prompt {
        Prompt::Texts(texts) => texts.iter().map(encode).collect::<Result<_, _>>()?,
        Prompt::Tokens(lists) => lists,
    };
    if prompts.is_empty() || prompts.iter().any(Vec::is_empty) {
        return Err(ApiError::invalid(
            "prompt",
            "prompt: must have at least one token",
        ));
    }
    for tokens in &prompts {
        check_ids("prompt", tokens, model)?;
    }
    Ok(prompts.into_iter().map(|tokens| room.cut(tokens)).collect())
}

/// Tokenizes the predicted answer, whose field was checked before. `None` if nothing is predicted.
pub(super) fn prediction(
    prediction: Option<JsonValue>,
    model: &Model,
    room: PromptRoom,
) -> Result<Option<Arc<[TokenId]>>, ApiError> {
    let context = room.context;
    let Some(content) = prediction.and_then(|prediction| prediction.get("content")) else {
        return Ok(None);
    };
    let too_long = |tokens: String| {
        ApiError::invalid(
            "prediction.content",
            format!(
                "prediction.content: has {tokens} tokens, more than the context of the model, which is {context}"
            ),
        )
    };
    let joined: String;
    let text = match content.as_str() {
        Some(text) => text,
        None => {
            let parts = content.items().into_iter().flatten();
            let texts = parts.filter_map(|part| part.get("text").or_else(|| part.get("refusal")));
            joined = texts.fold(String::new(), |all, text| {
                all + text.as_str().unwrap_or_default()
            });
            &joined
        }
    };
    let tokens = match model.tokenizer.encode_within(text, context as usize) {
        Err(TokenizationError::TooLong { at_least }) => {
            return Err(too_long(format!("at least {at_least}")));
        }
        tokens => tokens.map_err(|error| room.refused("prediction.content", &error))?,
    };
    if tokens.len() > context as usize {
        return Err(too_long(tokens.len().to_string()));
    }
    Ok(Some(tokens.into()))
}

/// Maximum number of tokens of a prompt. The context must have room for at least one token of output.
fn prompt_tokens_max(context: u32) -> usize {
    context.saturating_sub(1) as usize
}
