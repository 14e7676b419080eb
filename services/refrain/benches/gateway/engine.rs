//! A server that stands in for the engine and answers at once, in vLLM's format for the mesh and as a chat for other
//! gateways. It reads nothing of a request but the number of tokens, and its events are written in advance.

use std::time::Duration;

use actix_web::web::{self, Bytes, Data, Json};
use actix_web::{App, HttpResponse, HttpServer};
use anyhow::Context;
use futures_util::stream::unfold;
use refrain_tokenization::{ModelFiles, Tokenizer};
use serde_json::{Value, json};
use tokio::time::Instant;

use crate::{CONTEXT_TOKENS, MODEL, MODEL_FILES};

/// The text of every token of an answer.
const TOKEN_TEXT: &str = "a";
/// Largest body, bytes.
const BODY_BYTES_MAX: usize = 64 << 20;

/// State that all requests share.
struct Engine {
    tokenizer: Tokenizer,
    completions: Events,
    chats: Events,
    began: Instant,
}

/// The events of a stream.
struct Events {
    token: Bytes,
    last_token: Bytes,
    end: Bytes,
}

/// Listens, prints the address, and serves until it is killed.
pub(crate) fn serve() -> anyhow::Result<()> {
    let tokenizer = ModelFiles::from_dir(MODEL_FILES)?.tokenizer()?;
    let token = *tokenizer
        .encode(TOKEN_TEXT)?
        .first()
        .context("the tokenizer has no token for the answer")?;
    let engine = Data::new(Engine {
        tokenizer,
        completions: completion_events(token),
        chats: chat_events(),
        began: Instant::now(),
    });
    actix_web::rt::System::new().block_on(async move {
        let server = HttpServer::new(move || {
            App::new()
                .app_data(engine.clone())
                .app_data(web::PayloadConfig::new(BODY_BYTES_MAX))
                .app_data(web::JsonConfig::default().limit(BODY_BYTES_MAX))
                .route("/health", web::get().to(async || HttpResponse::Ok()))
                .route("/metrics", web::get().to(async || HttpResponse::Ok()))
                .route("/version", web::get().to(version))
                .route("/v1/models", web::get().to(models))
                .route("/detokenize", web::post().to(detokenize))
                .route("/v1/completions", web::post().to(complete))
                .route("/v1/chat/completions", web::post().to(chat))
        })
        .workers(1)
        .bind(("127.0.0.1", 0))?;
        println!("{}", server.addrs().first().context("no address")?);
        Ok(server.run().await?)
    })
}

fn event(value: &Value) -> Bytes {
    format!("data: {value}\n\n").into()
}

fn completion_events(token: u32) -> Events {
    let of_token = |finish: Option<&str>| {
        event(&json!({
            "id": "cmpl-0123456789abcdef0123456789abcdef", "object": "text_completion", "created": 1_700_000_000,
            "model": MODEL,
            "choices": [{
                "index": 0, "text": TOKEN_TEXT, "logprobs": null, "stop_reason": null, "prompt_token_ids": null,
                "finish_reason": finish, "token_ids": [token],
            }],
            "usage": null,
        }))
    };
    let usage = event(&json!({
        "id": "cmpl-0123456789abcdef0123456789abcdef", "object": "text_completion", "created": 1_700_000_000,
        "model": MODEL, "choices": [], "usage": {"prompt_tokens": 1, "prompt_tokens_details": {"cached_tokens": 0}},
    }));
    Events {
        token: of_token(None),
        last_token: of_token(Some("length")),
        end: [&usage[..], b"data: [DONE]\n\n"].concat().into(),
    }
}

fn chat_events() -> Events {
    let of_token = |finish: Option<&str>| {
        event(&json!({
            "id": "chatcmpl-0123456789abcdef", "object": "chat.completion.chunk", "created": 1_700_000_000,
            "model": MODEL,
            "choices": [{"index": 0, "delta": {"content": TOKEN_TEXT}, "logprobs": null, "finish_reason": finish}],
        }))
    };
    Events {
        token: of_token(None),
        last_token: of_token(Some("length")),
        end: b"data: [DONE]\n\n"[..].into(),
    }
}

async fn version() -> Json<Value> {
    Json(json!({"version": "0.20.0"}))
}

async fn models() -> Json<Value> {
    Json(
        json!({"object": "list", "data": [{"id": MODEL, "object": "model", "owned_by": "vllm", "root": MODEL,
        "max_model_len": CONTEXT_TOKENS}]}),
    )
}

async fn detokenize(engine: Data<Engine>, body: Json<Value>) -> Json<Value> {
    let tokens: Vec<u32> = serde_json::from_value(body["tokens"].clone()).unwrap_or_default();
    Json(json!({"prompt": engine.tokenizer.decode(&tokens)}))
}

/// The number behind a key of a body. A text inside the body cannot contain the key, since its quotes are escaped.
fn number(body: &[u8], key: &str) -> Option<u64> {
    let body = std::str::from_utf8(body).ok()?;
    let rest = body[body.find(key)? + key.len()..].trim_start();
    let end = rest.find(|character: char| !character.is_ascii_digit())?;
    rest[..end].parse().ok()
}

async fn complete(engine: Data<Engine>, body: Bytes) -> HttpResponse {
    let tokens = number(&body, "\"max_tokens\":").unwrap_or(1);
    stream(engine, |engine| &engine.completions, tokens, rate(&body))
}

async fn chat(engine: Data<Engine>, body: Bytes) -> HttpResponse {
    let tokens = number(&body, "\"max_tokens\":").unwrap_or(1);
    let is_stream = std::str::from_utf8(&body).is_ok_and(|body| body.contains("\"stream\":true"));
    if is_stream {
        return stream(engine, |engine| &engine.chats, tokens, rate(&body));
    }
    HttpResponse::Ok().json(json!({
        "id": "chatcmpl-0123456789abcdef", "object": "chat.completion", "created": 1_700_000_000, "model": MODEL,
        "choices": [{
            "index": 0, "message": {"role": "assistant", "content": TOKEN_TEXT.repeat(tokens as usize)},
            "logprobs": null, "finish_reason": "length",
        }],
        "usage": {"prompt_tokens": 1, "completion_tokens": tokens, "total_tokens": tokens + 1},
    }))
}

/// Tokens per second of a stream; `None`: at once. The number stands in the request's `top_k`, since that is a field
/// which the mesh and other gateways pass on.
fn rate(body: &[u8]) -> Option<u64> {
    number(body, "\"top_k\":").filter(|rate| *rate > 0)
}

/// A stream of tokens, each of which is written by itself.
fn stream(
    engine: Data<Engine>,
    events: fn(&Engine) -> &Events,
    tokens: u64,
    rate: Option<u64>,
) -> HttpResponse {
    let period = rate.map(|rate| Duration::from_secs_f64(1.0 / rate as f64));
    let parts = unfold((engine, 0), move |(engine, sent)| async move {
        if sent > tokens {
            return None;
        }
        match period {
            // All requests share the ticks, as in an engine that decodes them together.
            Some(period) if sent < tokens => {
                let ticks = engine.began.elapsed().as_nanos() / period.as_nanos() + 1;
                let ticks = u32::try_from(ticks).unwrap_or(u32::MAX);
                tokio::time::sleep_until(engine.began + period * ticks).await;
            }
            _ if sent > 0 && sent < tokens => tokio::task::yield_now().await,
            _ => {}
        }
        let events = events(&engine);
        let part = match sent {
            sent if sent == tokens => events.end.clone(),
            sent if sent + 1 == tokens => events.last_token.clone(),
            _ => events.token.clone(),
        };
        Some((Ok::<_, std::io::Error>(part), (engine, sent + 1)))
    });
    HttpResponse::Ok()
        .content_type("text/event-stream")
        .streaming(parts)
}
