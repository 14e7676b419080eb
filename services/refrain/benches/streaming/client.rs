//! Reads streams, and measures how long after the engine's sending each token arrived.

use std::sync::atomic::{AtomicU64, Ordering};

use anyhow::{Context, ensure};
use futures_util::future::try_join_all;
use serde_json::{Value, json};

use crate::{Dialect, PUBLIC, unix_ns};

/// First of the token ids that serve as prompts and distinguish requests. None of them is a special token.
const FIRST_ID: u64 = 256;
static NEXT_ID: AtomicU64 = AtomicU64::new(0);
/// Number of these ids: the tokenizer has as many, and fewer requests run on one machine at once.
const IDS: u64 = 3_800;

/// The server to ask, and how.
pub(crate) struct Client {
    http: reqwest::Client,
    dialect: Dialect,
    engine: String,
    /// `None` asks the engine itself.
    mesh: Option<String>,
}

/// The outcome of a number of streams.
#[derive(Default)]
pub(crate) struct Read {
    pub(crate) tokens: u64,
    pub(crate) events: u64,
    /// Time from the engine's sending of a token to its arrival, milliseconds.
    pub(crate) delays_ms: Vec<f64>,
}

impl Client {
    pub(crate) fn new(dialect: Dialect, engine: &str, mesh: Option<&str>) -> Self {
        Client {
            http: reqwest::Client::new(),
            dialect,
            engine: engine.to_owned(),
            mesh: mesh.map(str::to_owned),
        }
    }

    /// Requests this many streams at once, of this many tokens each, and reads them to their ends.
    pub(crate) async fn read(&self, streams: usize, tokens: u64) -> anyhow::Result<Read> {
        let reads = try_join_all((0..streams).map(|_| self.stream(tokens))).await?;
        let mut all = Read::default();
        for read in reads {
            all.tokens += read.tokens;
            all.events += read.events;
            all.delays_ms.extend(read.delays_ms);
        }
        Ok(all)
    }

    async fn stream(&self, tokens: u64) -> anyhow::Result<Read> {
        let id = FIRST_ID + NEXT_ID.fetch_add(1, Ordering::Relaxed) % IDS;
        let (url, body) = match &self.mesh {
            Some(mesh) => (
                format!("{mesh}/v1/completions"),
                json!({"model": PUBLIC, "prompt": [id], "max_tokens": tokens, "stream": true}),
            ),
            None => (
                format!("{}{}", self.engine, self.dialect.path()),
                json!({"prompt": [id], self.dialect.limit(): tokens, "stream": true}),
            ),
        };
        let mut response = self.http.post(url).json(&body).send().await?;
        ensure!(
            response.status().is_success(),
            "{}: {}",
            response.status(),
            response.text().await?
        );
        let mut read = Read::default();
        let mut arrivals = Vec::new();
        let mut buffer = Vec::new();
        while let Some(bytes) = response.chunk().await? {
            let now = unix_ns();
            buffer.extend_from_slice(&bytes);
            while let Some(end) = buffer.windows(2).position(|two| two == b"\n\n") {
                let event: Vec<u8> = buffer.drain(..end + 2).collect();
                let letters = letters(&event)?;
                read.events += u64::from(letters > 0);
                arrivals.extend(std::iter::repeat_n(now, letters));
            }
        }
        let sent = self.http.get(format!("{}/sent/{id}", self.engine));
        let sent: Vec<u64> = serde_json::from_slice(&sent.send().await?.bytes().await?)?;
        ensure!(
            arrivals.len() as u64 == tokens && sent.len() as u64 >= tokens,
            "{} of {tokens} tokens came, {} were sent",
            arrivals.len(),
            sent.len()
        );
        read.tokens = tokens;
        let delays = arrivals.iter().zip(&sent);
        read.delays_ms = delays
            .map(|(came, sent)| came.saturating_sub(*sent) as f64 / 1e6)
            .collect();
        Ok(read)
    }
}

/// Tokens of an event: the letters of its text, in the mesh's format or the engine's.
fn letters(event: &[u8]) -> anyhow::Result<usize> {
    let data = event
        .strip_prefix(b"data: ")
        .context("no event of a stream")?;
    if data.starts_with(b"[DONE]") {
        return Ok(0);
    }
    let event: Value = serde_json::from_slice(data)?;
    ensure!(event["error"].is_null(), "{event}");
    let text = match &event["content"] {
        Value::Null => &event["choices"][0]["text"],
        content => content,
    };
    Ok(text.as_str().unwrap_or_default().len())
}
