//! Any server with OpenAI's `/v1/completions`: text in, text out.
//!
//! Its token ids are not known. The prompt goes as text, and only if that text comes back as the same tokens, so that a
//! user's text cannot become a marker of the model's. What it says is read with our tokenizer, piece by piece, and kept
//! in a namespace of its own: it may be spelled otherwise than the model did.

#[cfg(test)]
mod tests;

use std::collections::VecDeque;
use std::sync::Arc;

use refrain_protocol::{ApiError, TokenId};
use refrain_tokenization::{TEXT_ONLY_PREFIX, Tokenizer};
use serde_json::{Value, json};

use super::completions::{Event, common_body};
use super::dialect::{Decoder, Dialect, end_of};
use super::streaming::{GenerateRequest, Generated, StreamingCapabilities};

pub(super) struct TextOnly {
    pub(super) model: String,
    pub(super) tokenizer: Arc<Tokenizer>,
}

impl TextOnly {
    /// The text of a prompt, markers included, and of what has been said since.
    ///
    /// What was said came as text, and was read piece by piece: as a whole it may be read as other tokens, and need not be
    /// read as the same.
    fn text(&self, tokens: &[TokenId], prompt_len: u32) -> Result<String, ApiError> {
        let (prompt, said) = tokens.split_at(tokens.len().min(prompt_len as usize));
        let same = self.spell(prompt).filter(|text| {
            let read = self.tokenizer.encode_trusted(text);
            read.is_ok_and(|read| read == prompt)
        });
        let prompt = same.ok_or_else(|| {
            refused("this prompt, as text, would be read as other tokens; leave out the model's own markers and incomplete characters")
        })?;
        let said = self.spell(said);
        let said =
            said.ok_or_else(|| refused("the output to go on from ends inside a character"))?;
        Ok(prompt + &said)
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
            ..StreamingCapabilities::of_dialect(None)
        }
    }

    fn path(&self) -> &'static str {
        "/v1/completions"
    }

    fn body(&self, request: &GenerateRequest) -> Result<Value, ApiError> {
        let mut body = common_body(&self.model, request);
        body.insert(
            "prompt".to_owned(),
            json!(self.text(&request.tokens, request.prompt_len)?),
        );
        Ok(body.into())
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

fn refused(why: &str) -> ApiError {
    ApiError::invalid("messages", format!("the engine takes text only, and {why}"))
        .with_code("unsupported_by_engine")
}

struct TextDecoder {
    tokenizer: Arc<Tokenizer>,
}

impl Decoder for TextDecoder {
    fn decode(&mut self, data: &[u8], out: &mut VecDeque<Generated>) -> Result<(), ApiError> {
        let Some(choice) = Event::parse(data)?.choice()? else {
            return Ok(());
        };
        if !choice.text.is_empty() {
            // The tokenizer's words may quote the text, and details are logged.
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
