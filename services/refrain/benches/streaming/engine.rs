//! A server that streams in the format of llama-server or vLLM and decodes nothing. At every tick each running
//! request gets one token, as from an engine whose step time does not depend on the batch. The server remembers when
//! it sent each token.

use std::collections::HashMap;
use std::time::Duration;

use actix_web::web::{self, Data, Json};
use actix_web::{App, HttpResponse, HttpServer};
use anyhow::Context;
use bytes::Bytes;
use futures_util::stream::unfold;
use parking_lot::{Mutex, MutexGuard};
use refrain_tokenization::{ModelFiles, Tokenizer};
use serde_json::{Value, json};
use tokio::time::Instant;

use crate::{Dialect, SERVED, unix_ns};

const MODEL: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../reference-engine/model");
/// The tokens of outputs. Each is one letter, so the length of a text is its number of tokens.
const LETTERS: &str = "abcdefghijklmnopqrstuvwxyz";

/// State that all requests share.
struct Engine {
    dialect: Dialect,
    tokenizer: Tokenizer,
    letters: Vec<(char, u32)>,
    began: Instant,
    period: Duration,
    /// When each token was sent, by the first token of the prompt, nanoseconds of the system's clock.
    sent: Mutex<HashMap<u64, Vec<u64>>>,
}

/// A request that is being answered.
struct Stream {
    engine: Data<Engine>,
    id: u64,
    said: u64,
    most: u64,
    part: Part,
}

enum Part {
    Begin,
    Tokens,
    Last,
    Over,
}

/// Listens, prints the address, and serves until it is killed.
pub(crate) fn serve(dialect: Dialect, rate: f64) -> anyhow::Result<()> {
    let files = ModelFiles::from_dir(MODEL)?;
    let tokenizer = files.tokenizer()?;
    let letters = LETTERS.chars().map(|letter| {
        let token = tokenizer.encode(&letter.to_string())?;
        match token[..] {
            [token] => Ok((letter, token)),
            _ => anyhow::bail!("the tokenizer has no token for {letter}"),
        }
    });
    let engine = Data::new(Engine {
        dialect,
        letters: letters.collect::<anyhow::Result<_>>()?,
        tokenizer,
        began: Instant::now(),
        period: Duration::from_secs_f64(1.0 / rate),
        sent: Mutex::default(),
    });
    actix_web::rt::System::new().block_on(async move {
        let server = HttpServer::new(move || {
            App::new()
                .app_data(engine.clone())
                .app_data(web::JsonConfig::default().limit(64 << 20))
                .route("/health", web::get().to(async || HttpResponse::Ok()))
                .route("/v1/models", web::get().to(models))
                .route("/props", web::get().to(props))
                .route("/metrics", web::get().to(async || HttpResponse::Ok()))
                .route("/detokenize", web::post().to(detokenize))
                .route(dialect.path(), web::post().to(generate))
                .route("/sent/{id}", web::get().to(sent))
        })
        .workers(1)
        .bind(("127.0.0.1", 0))?;
        println!("{}", server.addrs().first().context("no address")?);
        Ok(server.run().await?)
    })
}

async fn models() -> Json<Value> {
    Json(json!({"data": [{"id": SERVED}]}))
}

async fn props() -> Json<Value> {
    Json(json!({"default_generation_settings": {"n_ctx": 1 << 20}}))
}

async fn detokenize(engine: Data<Engine>, body: Json<Value>) -> Json<Value> {
    let tokens: Vec<u32> = serde_json::from_value(body["tokens"].clone()).unwrap_or_default();
    let text = engine.tokenizer.decode(&tokens);
    Json(json!({"content": text, "prompt": text}))
}

async fn sent(engine: Data<Engine>, id: web::Path<u64>) -> Json<Vec<u64>> {
    Json(engine.sent().remove(&id).unwrap_or_default())
}

async fn generate(engine: Data<Engine>, body: Json<Value>) -> HttpResponse {
    let most = &body[engine.dialect.limit()];
    let stream = Stream {
        id: body["prompt"][0].as_u64().unwrap_or_default(),
        said: 0,
        most: most.as_u64().unwrap_or(1),
        part: Part::Begin,
        engine,
    };
    let events = unfold(stream, |mut stream| async move {
        let event = stream.next().await?;
        Some((Ok::<_, std::io::Error>(event), stream))
    });
    HttpResponse::Ok()
        .content_type("text/event-stream")
        .streaming(events)
}

impl Engine {
    fn sent(&self) -> MutexGuard<'_, HashMap<u64, Vec<u64>>> {
        self.sent.lock()
    }

    /// Waits for the next tick. All requests share the ticks; a late one waits for the next.
    async fn tick(&self) {
        let ticks = self.began.elapsed().as_nanos() / self.period.as_nanos() + 1;
        let ticks = u32::try_from(ticks).unwrap_or(u32::MAX);
        tokio::time::sleep_until(self.began + self.period * ticks).await;
    }
}

impl Stream {
    async fn next(&mut self) -> Option<Bytes> {
        let dialect = self.engine.dialect;
        let event = match self.part {
            Part::Begin => {
                self.part = Part::Tokens;
                match dialect {
                    Dialect::LlamaCpp => json!({
                        "index": 0, "content": "", "tokens": [], "stop": false, "id_slot": 0, "tokens_predicted": 0,
                        "tokens_evaluated": 1,
                        "prompt_progress": {"total": 1, "cache": 0, "processed": 1, "time_ms": 1},
                    }),
                    // The engine sends nothing before the first token.
                    Dialect::Vllm => return Box::pin(self.next()).await,
                }
            }
            Part::Tokens => {
                self.engine.tick().await;
                self.said += 1;
                if self.said == self.most {
                    self.part = Part::Last;
                }
                let event = self.token();
                let mut sent = self.engine.sent();
                sent.entry(self.id).or_default().push(unix_ns());
                event
            }
            Part::Last => {
                self.part = Part::Over;
                match dialect {
                    Dialect::LlamaCpp => {
                        json!({"stop": true, "stop_type": "limit", "tokens_predicted": self.said})
                    }
                    Dialect::Vllm => {
                        let usage = json!({
                            "id": "cmpl-1", "object": "text_completion", "created": 1, "model": SERVED, "choices": [],
                            "usage": {"prompt_tokens": 1, "prompt_tokens_details": {"cached_tokens": 0}},
                        });
                        return Some(format!("data: {usage}\n\ndata: [DONE]\n\n").into());
                    }
                }
            }
            Part::Over => return None,
        };
        Some(format!("data: {event}\n\n").into())
    }

    /// The event of one token, with the fields of the real servers.
    fn token(&self) -> Value {
        let letters = &self.engine.letters;
        let (letter, token) = letters[self.said as usize % letters.len()];
        match self.engine.dialect {
            Dialect::LlamaCpp => json!({
                "index": 0, "content": letter, "tokens": [token], "stop": false, "id_slot": -1,
                "tokens_predicted": self.said, "tokens_evaluated": 1,
            }),
            Dialect::Vllm => json!({
                "id": format!("cmpl-{:032x}-0000000001-{:016x}", self.id, self.id), "object": "text_completion",
                "created": 1_700_000_000, "model": SERVED,
                "choices": [{
                    "index": 0, "text": letter, "logprobs": null, "stop_reason": null, "prompt_token_ids": null,
                    "finish_reason": (self.said == self.most).then_some("length"), "token_ids": [token],
                }],
                "usage": null,
            }),
        }
    }
}
