//! Engines of other makers, over HTTP: what they have in common. How each of them speaks is its [`Dialect`].

use std::collections::VecDeque;
use std::sync::Arc;

use async_trait::async_trait;
use futures_util::StreamExt;
use refrain_protocol::engine::{Draft, Sampling};
use refrain_protocol::{ApiError, ErrorKind, NamespaceId, RequestId, TokenId};
use refrain_tokenization::Tokenizer;
use serde_json::Value;
use tokio::runtime::Handle;

use super::answer::{Abort, Answer};
use super::client::{EngineClient, no_engine, refusal};
use super::identity::{Card, card, check_tokenizer, plain_tokens};
use super::introductions::{Introductions, introduction};
use super::load::LoadSeries;
use super::streaming::{
    GenerateRequest, Generated, GeneratedEnd, GeneratedStream, StreamingCapabilities,
    StreamingEngine, StreamingLoad,
};
use super::verify::{Verified, VerifyAbilities, VerifyRequest, VerifyWay};
use crate::config::EngineConfig;

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

    /// How a draft is judged: path and body. `None`: not in this way.
    fn verify(&self, _request: &VerifyRequest) -> Option<(&'static str, Value)> {
        None
    }

    /// Reads the answer to [`Dialect::verify`].
    ///
    /// # Errors
    /// It is nothing that such an engine says.
    fn verified(&self, _request: &VerifyRequest, _answer: &[u8]) -> Result<Verified, ApiError> {
        Err(no_engine("a verdict on a draft that was not sent"))
    }

    /// Has it read a text that its own speculation is to draw on: path and body. `None`: it has no such memory.
    fn prime(&self, _tokens: &[TokenId]) -> Option<(&'static str, Value)> {
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

    /// Takes `[DONE]`.
    fn done(&mut self, _out: &mut VecDeque<Generated>) {}
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

/// An engine of another maker.
pub(super) struct ExternalEngine {
    client: EngineClient,
    dialect: Arc<dyn Dialect>,
    capabilities: StreamingCapabilities,
    served_model: String,
    card: Card,
    introductions: Introductions,
    /// The runtime that it was joined on, where aborts are sent: the one that a call was made on may be ending when the call is
    /// dropped.
    tasks: Handle,
}

impl ExternalEngine {
    /// Asks the engine what it serves, whether its tokens are ours and, if it is to be driven, how it verifies drafts.
    ///
    /// # Errors
    /// It cannot be reached (`Unavailable`, `Timeout`, `Upstream`), or serves something else (`InvalidRequest`: trying
    /// again is of no use).
    pub(super) async fn connect(
        client: EngineClient,
        dialect: Arc<dyn Dialect>,
        served: ServedAs,
        config: &EngineConfig,
    ) -> Result<Self, ApiError> {
        let card = card(&client, dialect.health(), &served.served_model).await?;
        check_tokenizer(&client, &*dialect, &card, &served.tokenizer).await?;
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
        let verifies = if config.drives() {
            verify_abilities(&client, &*dialect, &served.tokenizer).await?
        } else {
            VerifyAbilities::default()
        };
        let able = dialect.capabilities();
        let capabilities = StreamingCapabilities {
            verifies,
            model: served.model,
            // A dialect that speaks text marks it: its tokens are ours only in our reading.
            tokenizer: format!("{}{}", able.tokenizer, served.tokenizer.identity()),
            max_context,
            ..able
        };
        tracing::info!(
            url = client.base_url(),
            max_context,
            chain = verifies.chain,
            fan_out = verifies.fan_out,
            "engine connected"
        );
        Ok(ExternalEngine {
            client,
            dialect,
            capabilities,
            served_model: served.served_model,
            card,
            introductions: Introductions::new(config.introduced_namespaces_max),
            tasks: Handle::current(),
        })
    }

    async fn is_the_same(&self) -> Result<(), ApiError> {
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

    /// Tells an engine that has come back of the namespaces of late. Nobody waits for that: requests that come first go first.
    fn introduce(&self) {
        let known = self.introductions.engine_is_here();
        if known.is_empty() {
            return;
        }
        tracing::info!(namespaces = known.len(), "the engine is told of namespaces");
        let (client, dialect) = (self.client.clone(), self.dialect.clone());
        self.tasks.spawn(async move {
            for (namespace, token) in known {
                let told = async {
                    let body = dialect.body(&introduction(namespace, token)?)?;
                    client.post_read(dialect.path(), &body).await
                };
                if let Err(error) = told.await {
                    // It learns of that one with its first request.
                    tracing::debug!(kind = ?error.kind, "the engine was not told of a namespace");
                }
            }
        });
    }
}

#[async_trait]
impl StreamingEngine for ExternalEngine {
    fn capabilities(&self) -> &StreamingCapabilities {
        &self.capabilities
    }

    async fn confirm(&self) -> Result<(), ApiError> {
        let confirmed = self.is_the_same().await;
        match &confirmed {
            Ok(()) => self.introduce(),
            Err(_) => self.introductions.engine_left(),
        }
        confirmed
    }

    async fn generate(&self, request: GenerateRequest) -> Result<GeneratedStream, ApiError> {
        if let Some(keeping) = &request.keeping {
            self.introductions.met(request.namespace, &keeping.token);
        }
        let body = self.dialect.body(&request)?;
        // Made before the call: a caller that gives up while the call is under way aborts as well.
        let abort = Abort::of(&self.client, &self.tasks, &*self.dialect, &request);
        let response = self.client.post_events(self.dialect.path(), &body).await?;
        let answer = Answer::new(response, self.dialect.decoder(&request), abort);
        let stream = futures_util::stream::unfold(answer, |mut answer| async move {
            answer.next().await.map(|piece| (piece, answer))
        });
        Ok(stream.boxed())
    }

    async fn verify(&self, request: VerifyRequest) -> Result<Verified, ApiError> {
        verify(&self.client, &self.tasks, &*self.dialect, &request).await
    }

    async fn prime(&self, tokens: Vec<TokenId>) -> Result<(), ApiError> {
        let (path, body) = self
            .dialect
            .prime(&tokens)
            .ok_or_else(|| ApiError::internal("an engine of this kind is not primed"))?;
        self.client.post_read(path, &body).await.map(|_| ())
    }

    async fn load(&self) -> Result<StreamingLoad, ApiError> {
        let Some(series) = self.dialect.load() else {
            return Ok(StreamingLoad::default());
        };
        Ok(series.read(&self.client.get(series.path).await?))
    }

    async fn metrics(&self) -> Result<String, ApiError> {
        let Some(series) = self.dialect.load() else {
            let nothing = "engines of this kind have no page of metrics that is known";
            return Err(ApiError::new(ErrorKind::NotFound, nothing));
        };
        self.client.get(series.path).await
    }
}

/// One verify call.
async fn verify(
    client: &EngineClient,
    tasks: &Handle,
    dialect: &dyn Dialect,
    request: &VerifyRequest,
) -> Result<Verified, ApiError> {
    let (path, body) = dialect.verify(request).ok_or_else(|| {
        ApiError::internal("a verify call of a kind that the engine does not take")
    })?;
    let mut abort = Abort::of(client, tasks, dialect, &request.text);
    let answer = client.post_read(path, &body).await;
    if let Some(abort) = &mut abort {
        // It has answered, or was given up by the deadline of calls and may still be at work.
        abort.needed = answer.is_err();
    }
    dialect.verified(request, &answer?)
}

/// Finds out how an engine verifies, by having it verify: routes may be turned off, and answers may lack what is needed.
///
/// # Errors
/// It is away for the moment.
async fn verify_abilities(
    client: &EngineClient,
    dialect: &dyn Dialect,
    tokenizer: &Tokenizer,
) -> Result<VerifyAbilities, ApiError> {
    let mut abilities = VerifyAbilities::default();
    let tokens = plain_tokens(tokenizer);
    for (way, can) in [
        (VerifyWay::Chain, &mut abilities.chain),
        (VerifyWay::FanOut, &mut abilities.fan_out),
    ] {
        for text in tokens.chunks_exact(3).take(PROBED_TEXTS_MAX) {
            *can = judges(client, dialect, way, text).await?;
            if *can {
                break;
            }
        }
    }
    Ok(abilities)
}

/// Texts that a way of verifying is tried with: one may be followed by a near-tie, or by the engine's own end.
const PROBED_TEXTS_MAX: usize = 3;

/// Whether the engine judges the last token of a text as a draft behind the others, leaving nothing open.
///
/// # Errors
/// It is away for the moment.
async fn judges(
    client: &EngineClient,
    dialect: &dyn Dialect,
    way: VerifyWay,
    text: &[TokenId],
) -> Result<bool, ApiError> {
    let (before, draft) = text.split_at(text.len() - 1);
    let request = VerifyRequest {
        text: GenerateRequest {
            request: RequestId(0),
            call: 0,
            namespace: NamespaceId(0),
            tokens: before.to_vec(),
            prompt_len: before.len() as u32,
            tokens_max: 1,
            sampling: Sampling::default(),
            priority: None,
            keeping: None,
        },
        draft: Draft {
            tokens: draft.to_vec(),
            parents: vec![None],
        },
        way,
    };
    if dialect.verify(&request).is_none() {
        return Ok(false);
    }
    match verify(client, &Handle::current(), dialect, &request).await {
        Ok(verified) => {
            let open = verified.drawn.iter().filter(|drawn| drawn.is_none());
            let open = open.count();
            if open > 0 {
                tracing::info!(
                    way = way.as_str(),
                    open,
                    "the engine left places of a draft open"
                );
            }
            Ok(open == 0)
        }
        Err(error)
            if matches!(
                error.kind,
                ErrorKind::Unavailable | ErrorKind::Overloaded | ErrorKind::Timeout
            ) =>
        {
            Err(error)
        }
        Err(error) => {
            tracing::info!(way = way.as_str(), kind = ?error.kind, code = error.code, "the engine verifies no drafts in this way");
            Ok(false)
        }
    }
}

/// An error in the middle of a stream.
pub(super) fn error_event(error: &Value) -> ApiError {
    let status = error["code"].as_u64();
    let status = status.and_then(|status| u16::try_from(status).ok());
    refusal(status.unwrap_or(500), error.to_string().as_bytes())
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
    let mut parser = super::sse::SseParser::default();
    parser.push(recorded.as_bytes());
    let mut pieces = VecDeque::new();
    while let Some(data) = parser.next().expect("events of ordinary length") {
        if data == b"[DONE]" {
            decoder.done(&mut pieces);
        } else {
            decoder.decode(&data, &mut pieces)?;
        }
    }
    Ok(pieces.into())
}

/// A verify call for tests: a draft behind 1 2.
#[cfg(test)]
pub(super) fn verify_request(
    way: VerifyWay,
    tokens: &[TokenId],
    parents: &[Option<u32>],
    sampling: Sampling,
) -> VerifyRequest {
    VerifyRequest {
        text: request(&[1, 2], sampling),
        draft: Draft {
            tokens: tokens.to_vec(),
            parents: parents.to_vec(),
        },
        way,
    }
}

/// A request for tests.
#[cfg(test)]
pub(super) fn request(tokens: &[TokenId], sampling: Sampling) -> GenerateRequest {
    GenerateRequest {
        request: RequestId(0xab),
        call: 0xef,
        namespace: NamespaceId(0xcd),
        tokens: tokens.to_vec(),
        prompt_len: tokens.len() as u32,
        tokens_max: 7,
        sampling,
        priority: None,
        keeping: None,
    }
}
