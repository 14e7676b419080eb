//! The calls to the gateway.

use std::time::{Duration, Instant};

use reqwest::{RequestBuilder, Response};
use serde::Deserialize;
use serde_json::Value;

use super::answer::Answer;
use super::fault::ChatFault;

/// A gateway that can be reached answers at once, though not with all of its answer.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(5);

/// A gateway, and a key for it.
pub(super) struct ChatClient {
    http: reqwest::Client,
    url: String,
    key: String,
}

impl ChatClient {
    /// # Errors
    /// The system has no settings that an HTTP client needs.
    pub(super) fn connect(url: &str, key: String) -> anyhow::Result<Self> {
        let http = reqwest::Client::builder()
            .no_proxy()
            .connect_timeout(CONNECT_TIMEOUT)
            .build()?;
        // Clients of OpenAI have the version at the end of their URL.
        let url = url.trim_end_matches('/');
        Ok(ChatClient {
            http,
            url: url.strip_suffix("/v1").unwrap_or(url).to_owned(),
            key,
        })
    }

    /// The first model that the gateway lists.
    pub(super) async fn first_model(&self) -> Result<String, ChatFault> {
        let url = format!("{}/v1/models", self.url);
        let answer = self.send(self.http.get(url)).await?;
        let models: Value = answer.json().await.map_err(|_| no_gateway(&self.url))?;
        let first = models["data"][0]["id"].as_str();
        Ok(first.ok_or_else(|| no_gateway(&self.url))?.to_owned())
    }

    /// Sends a chat whose answer is streamed.
    pub(super) async fn ask(&self, body: &Value) -> Result<Answer, ChatFault> {
        let url = format!("{}/v1/chat/completions", self.url);
        let asked = Instant::now();
        let answer = self.send(self.http.post(url).json(body)).await?;
        Ok(Answer::new(answer, asked))
    }

    async fn send(&self, request: RequestBuilder) -> Result<Response, ChatFault> {
        let sent = request.bearer_auth(&self.key).send().await;
        let answer = sent.map_err(|error| {
            ChatFault::new(match error.is_connect() {
                true => format!(
                    "nothing answers at {}; `refrain up` starts a mesh",
                    self.url
                ),
                false => format!("the call to {} failed: {error}", self.url),
            })
        })?;
        let status = answer.status();
        if status.is_success() {
            return Ok(answer);
        }
        #[derive(Deserialize)]
        struct Refusal {
            error: ChatFault,
        }
        Err(match answer.json::<Refusal>().await {
            Ok(refusal) => refusal.error,
            Err(_) => ChatFault::new(format!("{} answered with status {status}", self.url)),
        })
    }
}

fn no_gateway(url: &str) -> ChatFault {
    ChatFault::new(format!(
        "{url} lists no model; --url names a running gateway"
    ))
}
