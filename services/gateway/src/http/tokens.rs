//! Routes that count and show the tokens of a request, in the shapes of vLLM and Anthropic.

use std::sync::Arc;
use std::time::Instant;

use actix_web::{HttpRequest, HttpResponse, web};
use bytes::Bytes;
use refrain_accounts::NONE;
use refrain_accounts::tenants::Caller;
use refrain_accounts::tenants::file::KeyEndpoint;
use refrain_protocol::openai::JsonObject;
use refrain_protocol::{ApiError, TokenId};
use refrain_tokenization::{JsonValue, TokenizationError};
use serde::Deserialize;
use serde_json::{Value, json};

use crate::http::state::{GatewayState, finish};
use crate::models::Model;
use crate::request::{ParsedRequest, RequestReader, read};
use crate::surfaces::{ChatBody, Surface};

/// Fields of a chat that decide its prompt.
const PROMPT_FIELDS: [&str; 6] = [
    "messages",
    "tools",
    "add_generation_prompt",
    "continue_final_message",
    "chat_template_kwargs",
    "reasoning_effort",
];

/// `POST /v1/messages/count_tokens` and `/v1/responses/input_tokens`.
pub(super) async fn count(
    gateway: web::Data<GatewayState>,
    surface: Surface,
    request: HttpRequest,
    payload: web::Payload,
) -> HttpResponse {
    let read = move |gateway: &GatewayState, reader: &RequestReader<'_>, body| {
        let (asked, _) = surface.read(body, reader, &gateway.stored)?;
        let tokens = asked.input_tokens();
        Ok(match surface {
            Surface::ResponsesCount => {
                json!({"object": "response.input_tokens", "input_tokens": tokens})
            }
            _ => json!({"input_tokens": tokens}),
        })
    };
    let endpoint = surface.endpoint();
    carry_out(gateway, surface, endpoint, &request, payload, read).await
}

/// `POST /tokenize`.
pub(super) async fn tokenize(
    gateway: web::Data<GatewayState>,
    request: HttpRequest,
    payload: web::Payload,
) -> HttpResponse {
    let endpoint = KeyEndpoint::Tokenize;
    carry_out(
        gateway,
        Surface::Chat,
        endpoint,
        &request,
        payload,
        tokenized,
    )
    .await
}

/// `POST /detokenize`.
pub(super) async fn detokenize(
    gateway: web::Data<GatewayState>,
    request: HttpRequest,
    payload: web::Payload,
) -> HttpResponse {
    #[derive(Deserialize)]
    struct Body {
        model: Option<String>,
        tokens: Vec<TokenId>,
    }
    let read = |gateway: &GatewayState, reader: &RequestReader<'_>, body: Bytes| {
        let JsonObject(given): JsonObject<Body> = read(&body)?;
        let model = gateway.model(reader.tenant, given.model.as_deref())?;
        let size = model.tokenizer.vocab_size();
        if let Some(id) = given.tokens.iter().find(|id| **id >= size) {
            return Err(ApiError::invalid(
                "tokens",
                format!("tokens: token {id} is not in the vocabulary, which has {size} tokens"),
            ));
        }
        // Special tokens are shown, as vLLM does.
        let bytes: Vec<u8> = given
            .tokens
            .iter()
            .flat_map(|id| model.tokenizer.token_bytes(*id))
            .copied()
            .collect();
        Ok(json!({"prompt": String::from_utf8_lossy(&bytes)}))
    };
    let endpoint = KeyEndpoint::Tokenize;
    carry_out(gateway, Surface::Chat, endpoint, &request, payload, read).await
}

/// Answers a request that generates nothing. It has the limits of the others.
async fn carry_out(
    gateway: web::Data<GatewayState>,
    surface: Surface,
    endpoint: KeyEndpoint,
    request: &HttpRequest,
    payload: web::Payload,
    read: impl FnOnce(&GatewayState, &RequestReader<'_>, Bytes) -> Result<Value, ApiError>
    + Send
    + 'static,
) -> HttpResponse {
    let received = Instant::now();
    let gateway = gateway.into_inner();
    let answer = async |caller: &Caller| {
        let admitted = gateway.admit(caller, request, payload, received).await?;
        let answer = gateway
            .parse(&caller.tenant, admitted.body, received, read)
            .await?;
        drop((admitted.ticket, admitted.quota));
        gateway.metrics.ended(&caller.tenant, NONE, "200");
        Ok(HttpResponse::Ok().json(answer))
    };
    let answered = gateway.for_caller(request, endpoint, answer);
    finish(surface, received, answered.await)
}

fn tokenized(
    gateway: &GatewayState,
    reader: &RequestReader<'_>,
    body: Bytes,
) -> Result<Value, ApiError> {
    let given: JsonValue = read(&body)?;
    drop(body);
    if !given.is_object() {
        return Err(ApiError::invalid("body", "the body must be an object"));
    }
    let name = given.get("model");
    let name = name.as_ref().map(|name| name.as_str().unwrap_or_default());
    let model = gateway.model(reader.tenant, name)?;
    let flag = |field: &str| given.get(field).and_then(|value| value.as_bool());
    let context = gateway.models.max_context(&model);
    let text = given.get("prompt");
    let tokens: Arc<[TokenId]> = match text.as_ref().map(|text| text.as_str()) {
        Some(None) => return Err(ApiError::invalid("prompt", "prompt: must be a text")),
        Some(Some(text)) => {
            let context = context as usize;
            let encoded = match flag("add_special_tokens") {
                Some(false) => model.tokenizer.encode_within(text, context),
                _ => model.tokenizer.encode_sequence_within(text, context),
            };
            encoded.map_err(|error| too_long(&error, context))?.into()
        }
        None => {
            let mut chat = ChatBody::default();
            chat.set("model", &model.id)?;
            chat.set("max_tokens", &1)?;
            for field in PROMPT_FIELDS {
                chat.take(&given, field, field)?;
            }
            let request = ParsedRequest::chat(chat.finish(), reader)?;
            request
                .prompts
                .iter()
                .flat_map(|prompt| prompt.tokens.iter().copied())
                .collect()
        }
    };
    let tokenizer = &model.tokenizer;
    let text = |id: &TokenId| String::from_utf8_lossy(tokenizer.token_bytes(*id)).into_owned();
    let wants_texts = flag("return_token_strs").unwrap_or(false);
    let texts = wants_texts.then(|| tokens.iter().map(text).collect::<Vec<_>>());
    Ok(json!({
        "count": tokens.len(),
        "max_model_len": context,
        "tokens": &*tokens,
        "token_strs": texts,
    }))
}

fn too_long(error: &TokenizationError, context: usize) -> ApiError {
    match error {
        TokenizationError::TooLong { at_least } => ApiError::invalid(
            "prompt",
            format!(
                "prompt: has at least {at_least} tokens, and the context of the model has {context}; send less"
            ),
        ),
        error => ApiError::invalid("prompt", format!("prompt: {error}")),
    }
}

impl GatewayState {
    /// The model of this name, or the tenant's only one where a request names none.
    fn model(&self, tenant: &str, name: Option<&str>) -> Result<Arc<Model>, ApiError> {
        match (name, self.models.only(tenant)) {
            (Some(name), _) => self.models.get(tenant, name),
            (None, Some(only)) => Ok(only),
            (None, None) => Err(ApiError::invalid(
                "model",
                "model: is required where there are several models",
            )),
        }
    }
}
