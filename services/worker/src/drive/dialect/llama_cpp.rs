//! Verify calls of llama-server: fan-outs over `/completion`.

#[cfg(test)]
mod tests;

use refrain_protocol::{ApiError, TokenId};
use serde::Deserialize;
use serde_json::{Value, json};

use super::VerifyDialect;
use crate::drive::verify::{DraftVerdict, SingleToken, VerifyMethod, VerifyRequest};
use crate::engine::dialect::{Dialect, LlamaCpp};
use crate::engine::parse;

impl VerifyDialect for LlamaCpp {
    fn verify_call(&self, request: &VerifyRequest) -> Option<(&'static str, Value)> {
        if request.method != VerifyMethod::FanOut {
            return None;
        }
        let mut body = self.body(&request.text).ok()?;
        body["prompt"] = json!(request.prompts());
        body["n_predict"] = json!(1);
        body["response_fields"] = json!(["index", "tokens", "stop_type"]);
        for of_streams in ["stream", "return_progress"] {
            body[of_streams] = json!(false);
        }
        // One seed for all prompts would draw the same noise at each node. This seed makes the server draw another
        // one for each prompt.
        body["seed"] = json!(u32::MAX);
        Some((self.path(), body))
    }

    fn verdict(&self, request: &VerifyRequest, response: &[u8]) -> Result<DraftVerdict, ApiError> {
        let responses: Vec<PromptResponse> = parse(response)?;
        let tokens = responses
            .iter()
            .map(|response| (response.index, response.single_token()));
        DraftVerdict::from_fan_out(request, tokens)
    }
}

/// The response to one of several prompts.
#[derive(Debug, Deserialize)]
struct PromptResponse {
    index: usize,
    #[serde(default)]
    tokens: Vec<TokenId>,
    #[serde(default)]
    stop_type: Option<String>,
}

impl PromptResponse {
    fn single_token(&self) -> SingleToken {
        SingleToken {
            token: self.tokens.first().copied(),
            is_end: self.stop_type.as_deref() == Some("eos"),
        }
    }
}
