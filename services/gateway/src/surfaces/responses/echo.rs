//! The fields of a body that its answer repeats, and what the answer needs in order to be stored.

use std::sync::Arc;

use refrain_tokenization::JsonValue;
use serde_json::{Map, Value, json};

use super::history::History;
use super::store::ResponseStore;
use super::tools::ToolNames;

/// The part of a body that the answer needs.
pub struct Echo {
    /// The repeated fields.
    pub(super) fields: Map<String, Value>,
    pub(super) tenant: String,
    /// The tools, by the names of their functions.
    pub(super) tools: ToolNames,
    /// The conversation before the answer, without the instructions.
    pub(super) history: History,
    /// The place to store the answer, if it is to be stored.
    pub(super) store: Option<Arc<ResponseStore>>,
}

/// The repeated fields of a body, with OpenAI's value where it sets none.
pub(super) fn fields(given: &JsonValue, is_stored: bool) -> Map<String, Value> {
    let or = |field: &str, default: Value| {
        let value = given.get(field);
        (
            field.to_owned(),
            value.map_or(default, |value| value.to_json()),
        )
    };
    let mut fields: Map<String, Value> = [
        or("instructions", Value::Null),
        or("max_output_tokens", Value::Null),
        or("max_tool_calls", Value::Null),
        or("metadata", json!({})),
        or("parallel_tool_calls", json!(true)),
        or("previous_response_id", Value::Null),
        or("prompt_cache_key", Value::Null),
        or("reasoning", json!({"effort": null, "summary": null})),
        or("safety_identifier", Value::Null),
        or("temperature", json!(1.0)),
        or("text", json!({"format": {"type": "text"}})),
        or("tool_choice", json!("auto")),
        or("tools", json!([])),
        or("top_logprobs", json!(0)),
        or("top_p", json!(1.0)),
        or("truncation", json!("disabled")),
        or("user", Value::Null),
    ]
    .into_iter()
    .collect();
    // The tier that served the request, which is never "auto".
    let tier = given.get("service_tier");
    let tier = tier.as_ref().and_then(JsonValue::as_str);
    let tier = tier.filter(|tier| *tier != "auto").unwrap_or("default");
    fields.insert("service_tier".into(), tier.into());
    fields.insert("background".into(), false.into());
    fields.insert("store".into(), is_stored.into());
    fields
}
