//! Verify calls of SGLang: chains and fan-outs over `/generate`.

#[cfg(test)]
mod tests;

use refrain_protocol::ApiError;
use serde_json::{Value, json};

use super::VerifyDialect;
use crate::drive::verify::{DraftVerdict, SingleToken, VerifyMethod, VerifyRequest, certain_best};
use crate::engine::dialect::{Dialect, SgLang, SgLangEvent};
use crate::engine::{parse, unexpected_response};

impl VerifyDialect for SgLang {
    fn verify_call(&self, request: &VerifyRequest) -> Option<(&'static str, Value)> {
        let mut body = self.body(&request.text).ok()?;
        let parameters = body["sampling_params"].as_object_mut()?;
        parameters.insert("max_new_tokens".to_owned(), json!(1));
        // One seed for all prompts would draw the same noise at each node.
        parameters.remove("sampling_seed");
        body["stream"] = json!(false);
        match request.method {
            VerifyMethod::Chain => {
                body["input_ids"] = json!(request.chained_prompt());
                body["return_logprob"] = json!(true);
                // SGLang uses its cache up to this position only, so that every position of the draft is scored.
                body["logprob_start_len"] = json!(request.text.tokens.len() - 1);
                // The two best, to tell a tie from a certain best.
                body["top_logprobs_num"] = json!(2);
            }
            VerifyMethod::FanOut => {
                let prompts = request.prompts();
                // Each prompt has a name of its own. An abort by their common prefix hits them all.
                let name = request.text.name();
                let names: Vec<String> = (0..prompts.len())
                    .map(|at| format!("{name}-{at}"))
                    .collect();
                body["rid"] = json!(names);
                body["input_ids"] = json!(prompts);
            }
        }
        Some((self.path(), body))
    }

    fn verdict(&self, request: &VerifyRequest, response: &[u8]) -> Result<DraftVerdict, ApiError> {
        match request.method {
            VerifyMethod::Chain => {
                let response: SgLangEvent = parse(response)?;
                let last = single_token(&response);
                let meta = response
                    .meta_info
                    .ok_or_else(|| unexpected_response("no meta_info"))?;
                let rows = meta.input_top_logprobs.unwrap_or_default();
                let best = rows.iter().map(|row| {
                    let row = row.as_ref()?.iter();
                    certain_best(row.map(|(logprob, id, _)| (*id, logprob.unwrap_or(f32::NAN))))
                });
                Ok(DraftVerdict::from_chain(request, best, last))
            }
            VerifyMethod::FanOut => {
                let responses: Vec<SgLangEvent> = parse(response)?;
                let tokens = responses.iter().map(single_token);
                DraftVerdict::from_fan_out(request, tokens.enumerate())
            }
        }
    }
}

fn single_token(response: &SgLangEvent) -> SingleToken {
    let (token, is_end) = response.last_token();
    SingleToken { token, is_end }
}
