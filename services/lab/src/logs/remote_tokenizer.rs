//! The tokenizer of a server: a gateway of Refrain, or vLLM. Both have `POST /tokenize` in the same form.

use std::time::Duration;

use anyhow::{Context, bail};
use futures_util::{StreamExt, TryStreamExt, stream};
use refrain_service_kit::backoff::Backoff;
use refrain_service_kit::telemetry::install_crypto_provider;
use refrain_suffix_index::Token;
use reqwest::StatusCode;
use serde::Deserialize;
use serde_json::{Value, json};
use tokio::runtime::Runtime;

/// Texts that are sent at once.
const TEXTS_AT_ONCE: usize = 16;
/// Attempts of a request that a server is too busy for.
const ATTEMPTS_MAX: u32 = 6;
/// The first and the longest pause between attempts.
const PAUSES_S: [u64; 2] = [1, 10];
const TIMEOUT: Duration = Duration::from_secs(60);

/// A client of `POST /tokenize` and `POST /detokenize`.
#[derive(Debug)]
pub(crate) struct RemoteTokenizer {
    runtime: Runtime,
    http: reqwest::Client,
    url: String,
    key: Option<String>,
    model: Option<String>,
}

#[derive(Deserialize)]
struct Tokenized {
    tokens: Vec<Token>,
}

#[derive(Deserialize)]
struct Detokenized {
    prompt: String,
}

impl RemoteTokenizer {
    /// Asks the server once, so that a wrong URL, key or model is reported before hours of work.
    ///
    /// # Errors
    /// A server that cannot be reached, or that refuses a text of one letter.
    pub(super) fn connect(
        url: &str,
        key: Option<String>,
        model: Option<String>,
    ) -> anyhow::Result<Self> {
        install_crypto_provider();
        let runtime = tokio::runtime::Builder::new_multi_thread()
            .worker_threads(1)
            .enable_all()
            .build()?;
        let url = url.trim_end_matches('/');
        let server = RemoteTokenizer {
            runtime,
            http: reqwest::Client::builder().timeout(TIMEOUT).build()?,
            // Clients name the API of a model by this path.
            url: url.trim_end_matches("/v1").to_owned(),
            key,
            model,
        };
        server
            .encode_all(&[("a", false)])
            .with_context(|| format!("--tokenizer {url}"))?;
        Ok(server)
    }

    /// The tokens of each text. One that begins a sequence, which is said beside it, has the tokens that begin one.
    pub(super) fn encode_all(&self, texts: &[(&str, bool)]) -> anyhow::Result<Vec<Vec<Token>>> {
        let asked = texts.iter().map(|(text, is_beginning)| {
            let body = json!({"prompt": text, "add_special_tokens": is_beginning});
            async {
                let answer: Tokenized = self.answer("tokenize", body).await?;
                anyhow::Ok(answer.tokens)
            }
        });
        let answers = stream::iter(asked).buffered(TEXTS_AT_ONCE).try_collect();
        self.runtime.block_on(answers)
    }

    pub(super) fn decode(&self, tokens: &[Token]) -> anyhow::Result<String> {
        let answer = self.answer::<Detokenized>("detokenize", json!({"tokens": tokens}));
        Ok(self.runtime.block_on(answer)?.prompt)
    }

    async fn answer<T: for<'a> Deserialize<'a>>(
        &self,
        path: &str,
        mut body: Value,
    ) -> anyhow::Result<T> {
        if let Some(model) = &self.model {
            body["model"] = json!(model);
        }
        let body = body.to_string();
        let [first, longest] = PAUSES_S.map(Duration::from_secs);
        let mut backoff = Backoff::new(first, longest);
        let mut attempts = 0;
        loop {
            let mut request = self
                .http
                .post(format!("{}/{path}", self.url))
                .header("content-type", "application/json")
                .body(body.clone());
            if let Some(key) = &self.key {
                request = request.bearer_auth(key);
            }
            let response = request.send().await.context(
                "the server cannot be reached; name a running gateway or vLLM, or a tokenizer.json",
            )?;
            attempts += 1;
            let status = response.status();
            let is_busy = matches!(status.as_u16(), 429 | 502..=504);
            if !is_busy || attempts == ATTEMPTS_MAX {
                return match status.is_success() {
                    true => response.json().await.with_context(not_a_tokenizer),
                    false => bail!("the server answered {status}: {}", advice(status)),
                };
            }
            tokio::time::sleep(backoff.pause()).await;
        }
    }
}

fn not_a_tokenizer() -> &'static str {
    "the server has no tokenizer; name a gateway of Refrain or vLLM, or a tokenizer.json"
}

/// The way out after an answer. The server's own words are not shown, since some repeat the text.
fn advice(status: StatusCode) -> &'static str {
    match status.as_u16() {
        401 | 403 => {
            "give a key that may ask for tokens in the variable REFRAIN_API_KEY; `refrain up` without tenants has \
             `refrain-dev`"
        }
        400 | 413 | 422 => {
            "a text may be longer than the model's context, or the model must be named with --tokenizer-model; a \
             tokenizer.json has no limit"
        }
        404 | 405 => {
            "there is no such model, or no `POST /tokenize`; name one with --tokenizer-model, or a tokenizer.json"
        }
        429 => "the limits of the key are too low for a log; raise them, or name a tokenizer.json",
        _ => "look into its log, or name a tokenizer.json",
    }
}
