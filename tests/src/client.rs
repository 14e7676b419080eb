//! A client of OpenAI's API that shows every byte of an answer.

use std::time::Duration;

use anyhow::{Context, bail};
use futures_util::stream::{self, BoxStream, StreamExt, TryStreamExt};
use reqwest::header::HeaderMap;
use serde_json::{Value, json};

use crate::prompts::{TINY_MODEL, long_task, special_tokens};
use crate::{Scrape, wait_until};

/// A caller with a key.
#[derive(Clone, Debug)]
pub struct Client {
    http: reqwest::Client,
    url: String,
    key: Option<String>,
}

/// A chat request. By default it is greedy, with seed 0 and at most 48 tokens.
#[derive(Clone, Debug)]
pub struct Chat {
    body: Value,
}

/// Any HTTP answer, including errors.
#[derive(Clone, Debug)]
pub struct Reply {
    /// HTTP status.
    pub status: u16,
    /// The HTTP headers.
    pub headers: HeaderMap,
    /// The body as text.
    pub text: String,
}

/// A chat answer.
#[derive(Clone, Debug)]
pub struct Answer {
    /// The first choice's text.
    pub text: String,
    /// The reason why it ended.
    pub finish_reason: String,
    /// The whole body.
    pub body: Value,
}

/// An event of a stream.
#[derive(Clone, Debug, PartialEq)]
pub enum Event {
    /// A chunk of the answer.
    Data(Value),
    /// `[DONE]`.
    Done,
}

/// How long an answer may take. Those of many requests at once share a machine that may be busy with other things.
const ANSWER_MAX: Duration = Duration::from_secs(1_800);

/// A stream of events. Dropping it closes the connection.
pub struct EventStream {
    body: BoxStream<'static, reqwest::Result<bytes::Bytes>>,
    buffer: Vec<u8>,
}

impl Client {
    /// A caller of the mesh at `url`.
    pub fn new(url: &str, key: &str) -> Self {
        refrain_service_kit::telemetry::install_crypto_provider();
        // A client with default settings can always be built.
        let http = reqwest::Client::builder()
            .no_proxy()
            .timeout(ANSWER_MAX)
            .build()
            .unwrap_or_default();
        Client {
            http,
            url: url.trim_end_matches('/').to_owned(),
            key: Some(key.to_owned()),
        }
    }

    /// The same caller without a key.
    pub fn without_key(&self) -> Self {
        Client {
            key: None,
            ..self.clone()
        }
    }

    /// The base URL of the mesh.
    pub fn url(&self) -> &str {
        &self.url
    }

    /// A request with the caller's key.
    pub fn request(&self, method: reqwest::Method, path: &str) -> reqwest::RequestBuilder {
        let request = self.http.request(method, format!("{}{path}", self.url));
        match &self.key {
            Some(key) => request.bearer_auth(key),
            None => request,
        }
    }

    /// Sends a request.
    ///
    /// # Errors
    /// There was no answer.
    pub async fn send(&self, request: reqwest::RequestBuilder) -> anyhow::Result<Reply> {
        let response = request.send().await?;
        let status = response.status().as_u16();
        let headers = response.headers().clone();
        Ok(Reply {
            status,
            headers,
            text: response.text().await?,
        })
    }

    /// Gets a path.
    ///
    /// # Errors
    /// There was no answer.
    pub async fn get(&self, path: &str) -> anyhow::Result<Reply> {
        self.send(self.request(reqwest::Method::GET, path)).await
    }

    /// Posts a body.
    ///
    /// # Errors
    /// There was no answer.
    pub async fn post(&self, path: &str, body: impl Into<reqwest::Body>) -> anyhow::Result<Reply> {
        let request = self
            .request(reqwest::Method::POST, path)
            .header("content-type", "application/json")
            .body(body);
        self.send(request).await
    }

    /// Sends a chat request and waits for the whole answer.
    ///
    /// # Errors
    /// The status is not 200.
    pub async fn chat(&self, chat: &Chat) -> anyhow::Result<Answer> {
        Answer::read(
            self.post("/v1/chat/completions", chat.body.to_string())
                .await?,
        )
    }

    /// Sends a chat request whose answer is streamed.
    ///
    /// # Errors
    /// The status is not 200.
    pub async fn stream(&self, chat: &Chat) -> anyhow::Result<EventStream> {
        let body = chat.clone().set("stream", true).body;
        let request = self
            .request(reqwest::Method::POST, "/v1/chat/completions")
            .json(&body);
        let response = request.send().await?;
        if !response.status().is_success() {
            bail!("{}: {}", response.status(), response.text().await?);
        }
        Ok(EventStream {
            body: response.bytes_stream().boxed(),
            buffer: Vec::new(),
        })
    }

    /// Sends chat requests with one mode of speculation, several at once. Returns the answers in order.
    ///
    /// # Errors
    /// The status of one is not 200.
    pub async fn chat_all(
        &self,
        chats: &[Chat],
        mode: &str,
        at_once: usize,
    ) -> anyhow::Result<Vec<Answer>> {
        stream::iter(chats)
            .map(|chat| async { self.chat(&chat.clone().speculation(mode)).await })
            .buffered(at_once)
            .try_collect()
            .await
    }

    /// Waits until the service is ready.
    pub async fn ready(&self, service: &str) {
        wait_until(&format!("{service} is ready"), async || {
            let reply = self.get("/readyz").await.ok()?;
            (reply.status == 200).then_some(())
        })
        .await;
    }

    /// Reads `/metrics`.
    ///
    /// # Errors
    /// There was no answer.
    pub async fn scrape(&self) -> anyhow::Result<Scrape> {
        Ok(Scrape::parse(&self.get("/metrics").await?.text))
    }
}

impl Chat {
    /// Creates a request for the tiny model.
    pub fn new(prompt: &str) -> Self {
        Chat {
            body: json!({
                "model": TINY_MODEL,
                "messages": [{"role": "user", "content": prompt}],
                "temperature": 0,
                "seed": 0,
                "max_tokens": 48,
            }),
        }
    }

    /// A request with the highest temperature whose output always reaches its limit. The output hardly repeats
    /// itself, so drafts must come from an earlier answer to the same request.
    pub fn random(number: usize) -> Self {
        Chat::new(&long_task(number))
            .sampled(2.0, 7 + number as u64)
            .endless()
    }

    /// Sets a field of the body.
    pub fn set(mut self, field: &str, value: impl Into<Value>) -> Self {
        self.body[field] = value.into();
        self
    }

    /// Sets the limit of output tokens.
    pub fn max_tokens(self, tokens: u32) -> Self {
        self.set("max_tokens", tokens)
    }

    /// Samples instead of decoding greedily.
    pub fn sampled(self, temperature: f64, seed: u64) -> Self {
        self.set("temperature", temperature).set("seed", seed)
    }

    /// Sets the drafts that it may use: `auto`, `suffix` or `off`.
    pub fn speculation(self, mode: &str) -> Self {
        self.set("speculation", mode)
    }

    /// Makes end tokens nearly impossible, so that the output always reaches its limit.
    pub fn endless(self) -> Self {
        let bias: serde_json::Map<String, Value> = special_tokens()
            .into_iter()
            .map(|token| (token.to_string(), json!(-100)))
            .collect();
        self.set("logit_bias", bias)
    }

    /// The body as JSON.
    pub fn body(&self) -> &Value {
        &self.body
    }
}

impl Reply {
    /// The body as JSON, or null if it is not JSON.
    pub fn json(&self) -> Value {
        serde_json::from_str(&self.text).unwrap_or_default()
    }

    /// A header's value.
    pub fn header(&self, name: &str) -> Option<&str> {
        self.headers.get(name).and_then(|value| value.to_str().ok())
    }
}

impl Answer {
    fn read(reply: Reply) -> anyhow::Result<Self> {
        if reply.status != 200 {
            bail!("{}: {}", reply.status, reply.text);
        }
        let body = reply.json();
        let choice = &body["choices"][0];
        let message = &choice["message"];
        let content = message["content"].as_str();
        // A message that only calls tools has no content.
        let calls = message["tool_calls"].is_array().then_some("");
        let text = content.or(calls).context("an answer without content")?;
        let text = text.to_owned();
        let finish_reason = choice["finish_reason"]
            .as_str()
            .context("an answer that did not end")?
            .to_owned();
        Ok(Answer {
            text,
            finish_reason,
            body,
        })
    }

    /// A number in the answer by its JSON pointer, such as `/usage/prompt_tokens`.
    ///
    /// # Panics
    /// There is no such number.
    pub fn number(&self, pointer: &str) -> u64 {
        let value = self.body.pointer(pointer).and_then(Value::as_u64);
        value.unwrap_or_else(|| panic!("{pointer} is missing in {}", self.body))
    }

    /// Output tokens.
    pub fn completion_tokens(&self) -> u64 {
        self.number("/usage/completion_tokens")
    }

    /// Tokens of the prompt.
    pub fn prompt_tokens(&self) -> u64 {
        self.number("/usage/prompt_tokens")
    }

    /// Draft tokens that the engine accepted.
    pub fn accepted(&self) -> u64 {
        self.number("/metrics/speculative_decoding/accepted")
    }

    /// Draft tokens of a source that the engine accepted, or 0 if there were none.
    pub fn accepted_from(&self, source: &str) -> u64 {
        let pointer = format!("/metrics/speculative_decoding/by_source/{source}/accepted");
        let value = self.body.pointer(&pointer).and_then(Value::as_u64);
        value.unwrap_or(0)
    }
}

impl EventStream {
    /// The next event, or `None` when the connection has ended.
    ///
    /// # Errors
    /// The connection broke, or the data is not an event.
    pub async fn next(&mut self) -> anyhow::Result<Option<Event>> {
        loop {
            if let Some(end) = self.buffer.windows(2).position(|pair| pair == b"\n\n") {
                let event: Vec<u8> = self.buffer.drain(..end + 2).collect();
                let text = std::str::from_utf8(&event)?.trim_end();
                if text.starts_with(':') {
                    continue;
                }
                let data = text
                    .strip_prefix("data: ")
                    .with_context(|| format!("no event: {text}"))?;
                if data == "[DONE]" {
                    return Ok(Some(Event::Done));
                }
                return Ok(Some(Event::Data(serde_json::from_str(data)?)));
            }
            match self.body.next().await {
                Some(bytes) => self.buffer.extend_from_slice(&bytes?),
                None if self.buffer.is_empty() => return Ok(None),
                None => bail!("the stream ends inside an event"),
            }
        }
    }

    /// Reads until `pieces` events have brought text. Returns that text.
    ///
    /// # Errors
    /// The stream ends first.
    pub async fn read_pieces(&mut self, pieces: usize) -> anyhow::Result<String> {
        let mut text = String::new();
        let mut seen = 0;
        while seen < pieces {
            match self.next().await? {
                Some(Event::Data(data)) => {
                    let piece = piece(&data)?;
                    seen += usize::from(!piece.is_empty());
                    text += &piece;
                }
                _ => bail!("the stream ended after {seen} of {pieces} pieces"),
            }
        }
        Ok(text)
    }

    /// Reads to the end, which must be `[DONE]`. Returns the text.
    ///
    /// # Errors
    /// The stream ends in another way.
    pub async fn read_to_done(&mut self) -> anyhow::Result<String> {
        let mut text = String::new();
        while let Some(event) = self.next().await? {
            match event {
                Event::Data(data) => text += &piece(&data)?,
                Event::Done => {
                    anyhow::ensure!(self.next().await?.is_none(), "events after [DONE]");
                    return Ok(text);
                }
            }
        }
        bail!("the stream ended without [DONE]")
    }
}

/// The text of an event.
fn piece(data: &Value) -> anyhow::Result<String> {
    if let Some(error) = data.get("error") {
        bail!("an error in the stream: {error}");
    }
    Ok(data["choices"][0]["delta"]["content"]
        .as_str()
        .unwrap_or_default()
        .to_owned())
}
