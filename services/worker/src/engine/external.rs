//! Engines of other makers, over HTTP: what they have in common. How each of them speaks is its [`Dialect`].

use std::collections::VecDeque;
use std::sync::Arc;

use async_trait::async_trait;
use futures_util::StreamExt;
use futures_util::stream::BoxStream;
use refrain_protocol::{ApiError, ErrorKind, TokenId};
use refrain_tokenization::Tokenizer;
use serde::Deserialize;
use serde_json::Value;

use super::client::{EngineClient, lost, no_engine, refusal};
use super::sse::SseParser;
use super::streaming::{
    GenerateRequest, Generated, GeneratedEnd, GeneratedStream, StreamingCapabilities,
    StreamingEngine, StreamingLoad,
};

/// How one kind of engine is spoken to. Pure: bodies out of requests, pieces out of events.
pub(super) trait Dialect: Send + Sync {
    /// What it can do. `model`, `tokenizer` and `max_context` are filled in by who connects.
    fn capabilities(&self) -> StreamingCapabilities;

    /// Where generation is asked for.
    fn path(&self) -> &'static str;

    /// What is asked.
    ///
    /// # Errors
    /// The request cannot be put in its words.
    fn body(&self, request: &GenerateRequest) -> Result<Value, ApiError>;

    /// Reads one answer.
    fn decoder(&self, request: &GenerateRequest) -> Box<dyn Decoder>;

    /// How generation is aborted, where closing the connection is not enough.
    fn abort(&self, _request: &GenerateRequest) -> Option<(&'static str, Value)> {
        None
    }

    /// Answers with success when the engine is ready; `None`: its list of models says it.
    fn health(&self) -> Option<&'static str> {
        Some("/health")
    }

    /// Its figures of load.
    fn load(&self) -> Option<LoadSeries> {
        None
    }

    /// Asks for the text of tokens: path, body, and the field of the answer that holds it.
    fn detokenize(&self, _tokens: &[TokenId]) -> Option<(&'static str, Value, &'static str)> {
        None
    }

    /// Longest text that it takes, if it says so elsewhere than in its list of models: path and JSON pointer.
    fn context(&self) -> Option<(&'static str, &'static str)> {
        None
    }
}

/// Reads the events of one answer.
pub(super) trait Decoder: Send {
    /// Takes an event's data (never `[DONE]`).
    ///
    /// # Errors
    /// It is nothing that such an engine says.
    fn decode(&mut self, data: &[u8], out: &mut VecDeque<Generated>) -> Result<(), ApiError>;
}

/// Names of Prometheus series.
#[derive(Clone, Copy, Debug)]
pub(super) struct LoadSeries {
    pub(super) path: &'static str,
    pub(super) running: &'static str,
    pub(super) waiting: &'static str,
    pub(super) kv_usage: Option<&'static str>,
}

/// What the worker knows of the model beforehand.
#[derive(Clone)]
pub struct ServedAs {
    /// Public name.
    pub model: String,
    /// Its name at the engine.
    pub served_model: String,
    /// Its tokenizer.
    pub tokenizer: Arc<Tokenizer>,
    /// Longest text, tokens, if files or configuration say.
    pub max_context: Option<u32>,
}

/// An entry of an engine's list of models: of it, what tells one model from another.
#[derive(Clone, Debug, PartialEq, Deserialize)]
struct Card {
    id: String,
    #[serde(default)]
    root: Option<String>,
    #[serde(default)]
    max_model_len: Option<u32>,
    #[serde(default)]
    meta: Option<CardMeta>,
}

/// What llama-server says of a model's shape.
#[derive(Clone, Debug, PartialEq, Deserialize)]
struct CardMeta {
    n_vocab: Option<u32>,
    n_params: Option<u64>,
    size: Option<u64>,
}

#[derive(Deserialize)]
struct Cards {
    data: Vec<Card>,
}

/// An engine of another maker.
pub(super) struct ExternalEngine {
    client: EngineClient,
    dialect: Box<dyn Dialect>,
    capabilities: StreamingCapabilities,
    served_model: String,
    card: Card,
}

impl ExternalEngine {
    /// Asks the engine what it serves, and whether its tokens are ours.
    ///
    /// # Errors
    /// It cannot be reached (`Unavailable`, `Timeout`, `Upstream`), or serves something else (`InvalidRequest`: trying
    /// again is of no use).
    pub(super) async fn connect(
        client: EngineClient,
        dialect: Box<dyn Dialect>,
        served: ServedAs,
    ) -> Result<Self, ApiError> {
        let card = card(&client, dialect.health(), &served.served_model).await?;
        let vocabulary = card.meta.as_ref().and_then(|meta| meta.n_vocab);
        if vocabulary.is_some_and(|size| size < served.tokenizer.vocab_size()) {
            return Err(other_tokenizer(&client));
        }
        check_tokens(&client, &*dialect, &served.tokenizer).await?;
        let mut said = card.max_model_len;
        if let Some((path, pointer)) = dialect.context() {
            let properties: Value = client.get_json(path).await?;
            let length = properties.pointer(pointer).and_then(Value::as_u64);
            said = length.and_then(|length| u32::try_from(length).ok());
        }
        let max_context = match (said, served.max_context) {
            (Some(engine), Some(ours)) => engine.min(ours),
            (Some(one), None) | (None, Some(one)) => one,
            (None, None) => {
                return Err(ApiError::invalid(
                    "worker.engine.max_context",
                    "neither the engine nor the model's files say how long a text may be; set worker.engine.max_context",
                ));
            }
        };
        let able = dialect.capabilities();
        let capabilities = StreamingCapabilities {
            model: served.model,
            // A dialect that speaks text marks it: its tokens are ours only in our reading.
            tokenizer: format!("{}{}", able.tokenizer, served.tokenizer.identity()),
            max_context,
            ..able
        };
        tracing::info!(url = client.base_url(), max_context, "engine connected");
        Ok(ExternalEngine {
            client,
            dialect,
            capabilities,
            served_model: served.served_model,
            card,
        })
    }
}

#[async_trait]
impl StreamingEngine for ExternalEngine {
    fn capabilities(&self) -> &StreamingCapabilities {
        &self.capabilities
    }

    async fn confirm(&self) -> Result<(), ApiError> {
        let now = card(&self.client, self.dialect.health(), &self.served_model).await?;
        if now == self.card {
            return Ok(());
        }
        let message = format!(
            "the engine serves another model as {} now; restart this worker",
            self.served_model
        );
        Err(ApiError::new(ErrorKind::Unavailable, message))
    }

    async fn generate(&self, request: GenerateRequest) -> Result<GeneratedStream, ApiError> {
        let body = self.dialect.body(&request)?;
        // Made before the call: a caller that gives up while the call is under way aborts as well.
        let abort = self.dialect.abort(&request).map(|(path, body)| Abort {
            client: self.client.clone(),
            path,
            body,
            needed: true,
        });
        let response = self.client.post_events(self.dialect.path(), &body).await?;
        let answer = Answer {
            body: response.bytes_stream().boxed(),
            parser: SseParser::default(),
            decoder: self.dialect.decoder(&request),
            pieces: VecDeque::new(),
            abort,
            over: false,
        };
        let stream = futures_util::stream::unfold(answer, |mut answer| async move {
            answer.next().await.map(|piece| (piece, answer))
        });
        Ok(stream.boxed())
    }

    async fn load(&self) -> Result<StreamingLoad, ApiError> {
        let Some(series) = self.dialect.load() else {
            return Ok(StreamingLoad::default());
        };
        let shown = self.client.get(series.path).await?;
        Ok(StreamingLoad {
            running: sum_of(&shown, series.running),
            waiting: sum_of(&shown, series.waiting),
            kv_usage: series.kv_usage.and_then(|name| sum_of(&shown, name)),
        })
    }
}

/// The engine's entry for the model.
async fn card(
    client: &EngineClient,
    health: Option<&'static str>,
    model: &str,
) -> Result<Card, ApiError> {
    if let Some(path) = health {
        client.get(path).await?;
    }
    let cards: Cards = client.get_json("/v1/models").await?;
    let names: Vec<String> = cards.data.iter().map(|card| card.id.clone()).collect();
    let found = cards.data.into_iter().find(|card| card.id == model);
    found.ok_or_else(|| {
        let message = format!(
            "the engine at {} serves {}, not {model}; set worker.engine.served_model to its name for the model",
            client.base_url(),
            names.join(", ")
        );
        ApiError::invalid("worker.engine.served_model", message).with_code("model_not_found")
    })
}

/// Tokens that are compared.
const COMPARED_TOKENS: usize = 64;

/// Compares what some tokens spell here and there. Names of vocabularies say little, their sizes not much more.
async fn check_tokens(
    client: &EngineClient,
    dialect: &dyn Dialect,
    tokenizer: &Tokenizer,
) -> Result<(), ApiError> {
    let plain = |token: &TokenId| {
        let bytes = tokenizer.token_bytes(*token);
        bytes.len() > 1 && bytes.iter().all(u8::is_ascii_alphanumeric)
    };
    let usable: Vec<TokenId> = (0..tokenizer.vocab_size())
        .filter(|token| !tokenizer.is_special(*token))
        .filter(plain)
        .collect();
    let every = usable.len().div_ceil(COMPARED_TOKENS).max(1);
    let compared: Vec<TokenId> = usable.into_iter().step_by(every).collect();
    let Some((path, body, field)) = dialect.detokenize(&compared) else {
        return Ok(());
    };
    let answer: Value = client.post_json(path, &body).await?;
    let text = answer[field]
        .as_str()
        .ok_or_else(|| no_engine(format!("{path} without {field}")))?;
    if text.trim() == tokenizer.decode(&compared) {
        Ok(())
    } else {
        Err(other_tokenizer(client))
    }
}

fn other_tokenizer(client: &EngineClient) -> ApiError {
    let message = format!(
        "the engine at {} has another tokenizer than worker.engine.files: the same tokens spell another text there",
        client.base_url()
    );
    ApiError::invalid("worker.engine.files", message)
}

/// The sum of a series over its labels.
fn sum_of(shown: &str, name: &str) -> Option<f64> {
    let values = shown.lines().filter_map(|line| {
        let rest = line.strip_prefix(name)?;
        let value = match rest.strip_prefix('{') {
            Some(labels) => labels.rsplit_once('}')?.1,
            None => rest,
        };
        value.strip_prefix(' ')?.trim().parse::<f64>().ok()
    });
    values.fold(None, |sum, value| Some(sum.unwrap_or(0.0) + value))
}

/// Tells the engine to stop when it goes out of scope.
struct Abort {
    client: EngineClient,
    path: &'static str,
    body: Value,
    /// Until the engine has ended by itself.
    needed: bool,
}

impl Drop for Abort {
    fn drop(&mut self) {
        if !self.needed {
            return;
        }
        let (client, path, body) = (self.client.clone(), self.path, self.body.take());
        if let Ok(tasks) = tokio::runtime::Handle::try_current() {
            tasks.spawn(async move {
                if let Err(error) = client.post(path, &body).await {
                    tracing::debug!(%error, "the engine did not take an abort");
                }
            });
        }
    }
}

/// An answer while it streams.
struct Answer {
    body: BoxStream<'static, reqwest::Result<bytes::Bytes>>,
    parser: SseParser,
    decoder: Box<dyn Decoder>,
    pieces: VecDeque<Generated>,
    abort: Option<Abort>,
    over: bool,
}

impl Answer {
    async fn next(&mut self) -> Option<Result<Generated, ApiError>> {
        loop {
            if let Some(piece) = self.pieces.pop_front() {
                if matches!(piece, Generated::End(_)) {
                    self.over = true;
                    if let Some(abort) = &mut self.abort {
                        abort.needed = false;
                    }
                }
                return Some(Ok(piece));
            }
            if self.over {
                // Read to its end, so that the connection can be used again.
                while let Some(Ok(_)) = self.body.next().await {}
                return None;
            }
            if let Err(error) = self.read().await {
                self.over = true;
                return Some(Err(error));
            }
        }
    }

    /// Takes the next events.
    async fn read(&mut self) -> Result<(), ApiError> {
        let bytes = match self.body.next().await {
            Some(Ok(bytes)) => bytes,
            Some(Err(error)) => return Err(lost(&error)),
            None => {
                return Err(ApiError::new(
                    ErrorKind::Upstream,
                    "the engine broke off in the middle of its answer",
                ));
            }
        };
        self.parser.push(&bytes);
        loop {
            let data = match self.parser.next() {
                Ok(Some(data)) => data,
                Ok(None) => return Ok(()),
                Err(_) => return Err(no_engine("an event without end")),
            };
            if data != b"[DONE]" {
                self.decoder.decode(&data, &mut self.pieces)?;
            }
        }
    }
}

/// An error in the middle of a stream.
pub(super) fn error_event(event: &Value) -> Option<ApiError> {
    let error = event.get("error").filter(|error| !error.is_null())?;
    let status = error["code"].as_u64().unwrap_or(500);
    Some(refusal(
        u16::try_from(status).unwrap_or(500),
        event.to_string().as_bytes(),
    ))
}

/// `finish_reason`, in the words that all of them share.
pub(super) fn end_of(reason: &str) -> Result<GeneratedEnd, ApiError> {
    match reason {
        "stop" => Ok(GeneratedEnd::Stop),
        "length" => Ok(GeneratedEnd::Length),
        other => Err(
            ApiError::new(ErrorKind::Upstream, "the engine gave the request up")
                .with_detail(format!("finish reason {other}")),
        ),
    }
}

/// What a decoder makes of a recorded answer, up to its first error.
#[cfg(test)]
pub(super) fn read_recorded(
    mut decoder: Box<dyn Decoder>,
    recorded: &str,
) -> Result<Vec<Generated>, ApiError> {
    let mut parser = SseParser::default();
    parser.push(recorded.as_bytes());
    let mut pieces = VecDeque::new();
    while let Some(data) = parser.next().expect("events of ordinary length") {
        if data != b"[DONE]" {
            decoder.decode(&data, &mut pieces)?;
        }
    }
    Ok(pieces.into())
}

/// A request for tests.
#[cfg(test)]
pub(super) fn request(
    tokens: &[TokenId],
    sampling: refrain_protocol::engine::Sampling,
) -> GenerateRequest {
    GenerateRequest {
        request: refrain_protocol::RequestId(0xab),
        namespace: refrain_protocol::NamespaceId(0xcd),
        tokens: tokens.to_vec(),
        tokens_max: 7,
        sampling,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn series_are_summed_over_their_labels() {
        let shown = "# HELP vllm:num_requests_running x\nvllm:num_requests_running{engine=\"0\",model_name=\"a b\"} 2.0\n\
                     vllm:num_requests_running{engine=\"1\",model_name=\"a b\"} 3.0\nvllm:num_requests_running_other 9\nplain 1e-1\n";
        assert_eq!(sum_of(shown, "vllm:num_requests_running"), Some(5.0));
        assert_eq!(sum_of(shown, "plain"), Some(0.1));
        assert_eq!(sum_of(shown, "missing"), None);
    }
}
