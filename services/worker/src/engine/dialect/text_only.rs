//! Any server with OpenAI's `/v1/completions`: text in, text out.
//!
//! Such a server does not send token ids. A prompt is sent as text, and only if our tokenizer reads that text as the
//! same tokens again, so that a user's text cannot become one of the model's markers. The output is tokenized piece
//! by piece with our tokenizer. It is stored in a separate namespace, since the model may have used other tokens for
//! it.

#[cfg(test)]
mod tests;

use std::collections::VecDeque;
use std::sync::Arc;

use refrain_protocol::engine_order::EngineOrder;
use refrain_protocol::{ApiError, TokenId};
use refrain_tokenization::{TEXT_ONLY_PREFIX, Tokenizer};
use serde_json::{Value, json};

use super::completions::{CompletionEvent, common_body};
use super::{Decoder, Dialect, end_of};
use crate::engine::generate::{GenerateRequest, Generated};
use crate::engine::order_calls::{OrderCall, no_order};
use crate::engine::streaming::StreamingCapabilities;
use crate::engine::words::unsupported_field;

/// A text-only server.
pub(crate) struct TextOnly {
    pub(crate) model: String,
    pub(crate) tokenizer: Arc<Tokenizer>,
}

impl TextOnly {
    /// The text of the prompt, markers included, and of the output so far.
    ///
    /// Only the prompt has to survive the round trip. The output came as text and was tokenized piece by piece, so as
    /// a whole it may tokenize differently.
    fn text(&self, tokens: &[TokenId], prompt_len: u32) -> Result<String, ApiError> {
        let (prompt, output) = tokens.split_at(tokens.len().min(prompt_len as usize));
        let prompt_text = self.spell(prompt).filter(|text| {
            let tokens = self.tokenizer.encode_trusted(text);
            tokens.is_ok_and(|tokens| tokens == prompt)
        });
        let prompt_text = prompt_text.ok_or_else(|| {
            unsupported(
                "this prompt would be read as other tokens; leave out the model's own markers and \
                         incomplete characters",
            )
        })?;
        let output_text = self
            .spell(output)
            .ok_or_else(|| unsupported("the output so far ends inside a character"))?;
        Ok(prompt_text + &output_text)
    }

    fn spell(&self, tokens: &[TokenId]) -> Option<String> {
        let bytes = tokens
            .iter()
            .flat_map(|token| self.tokenizer.token_bytes(*token))
            .copied()
            .collect();
        String::from_utf8(bytes).ok()
    }
}

impl Dialect for TextOnly {
    fn capabilities(&self) -> StreamingCapabilities {
        StreamingCapabilities {
            tokenizer: TEXT_ONLY_PREFIX.to_owned(),
            top_k: false,
            min_p: false,
            logit_bias: false,
            repetition_penalty: false,
            min_tokens: false,
            ignore_eos: false,
            ..StreamingCapabilities::of_dialect(None)
        }
    }

    fn path(&self) -> &'static str {
        "/v1/completions"
    }

    fn tokens_field(&self) -> Option<&'static str> {
        None
    }

    fn body(&self, request: &GenerateRequest) -> Result<Value, ApiError> {
        let mut body = common_body(&self.model, request);
        body.insert(
            "prompt".to_owned(),
            json!(self.text(&request.tokens, request.prompt_len)?),
        );
        let sampling = &request.sampling;
        for (name, value) in [
            ("presence_penalty", sampling.presence_penalty),
            ("frequency_penalty", sampling.frequency_penalty),
        ] {
            if value != 0.0 {
                body.insert(name.to_owned(), json!(value));
            }
        }
        Ok(body.into())
    }

    fn order_calls(&self, order: &EngineOrder) -> Result<Vec<OrderCall>, ApiError> {
        Err(no_order("an engine of the kind `openai`", order))
    }

    fn decoder(&self, _request: &GenerateRequest) -> Box<dyn Decoder> {
        Box::new(TextDecoder {
            tokenizer: self.tokenizer.clone(),
        })
    }

    fn health(&self) -> Option<&'static str> {
        None
    }
}

fn unsupported(why: &str) -> ApiError {
    let message = format!("the engine accepts text only, and {why}");
    unsupported_field("messages", message)
}

struct TextDecoder {
    tokenizer: Arc<Tokenizer>,
}

impl Decoder for TextDecoder {
    fn decode(&mut self, data: &[u8], out: &mut VecDeque<Generated>) -> Result<(), ApiError> {
        let Some(choice) = CompletionEvent::parse(data)?.choice()? else {
            return Ok(());
        };
        if !choice.text.is_empty() {
            // The tokenizer's error may quote the text, and details are logged.
            let tokens = self.tokenizer.encode(&choice.text);
            let tokens = tokens.map_err(|_| {
                ApiError::internal("the model's vocabulary cannot spell the engine's text")
            })?;
            out.push_back(Generated::Tokens {
                tokens,
                logprobs: None,
            });
        }
        if let Some(reason) = choice.finish_reason {
            out.push_back(Generated::End(end_of(&reason)?));
        }
        Ok(())
    }
}
