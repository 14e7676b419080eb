//! The way of a rollout: its body, the wait for room, and its answer. At each step the trainer may abort it.

use std::sync::Arc;
use std::time::Instant;

use actix_web::web::{self, Data};
use actix_web::{FromRequest as _, HttpRequest, HttpResponse};
use bytes::Bytes;
use refrain_gateway::{
    EnteredRequest, GatewayHandle, ParsedRequest, RequestReader, ResponseStore, Surface,
    SurfaceWriter, announced_bytes, session_of_heads,
};
use refrain_protocol::ApiError;
use refrain_protocol::openai::FinishReason;
use refrain_service_kit::http::{AccessNote, RawBody};
use serde_json::Value;

use super::agent_fields::{AgentFields, FactsWriter, GivenPrompt};
use super::in_flight::{Entry, Outcome};
use super::sessions::{KnownSession, Recorder};
use super::sglang::{self, SglangShape};
use super::sglang_writer::{self, SglangWriter};
use super::state::TrainerState;
use super::tracked_writer::TrackedWriter;
use super::vllm;
use super::vllm_writer::{self, VllmWriter};

/// The interface that was called.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum DataSurface {
    /// SGLang's `/generate`.
    Sglang,
    /// vLLM's `/inference/v1/generate`.
    Vllm,
    /// Text completions, as on the other listener.
    Completion,
    /// Chats, messages and responses, as on the other listener. Trainers evaluate with them, and agents speak nothing
    /// else.
    Agent(Surface),
}

/// The shape of an answer.
enum AnswerShape {
    Sglang(SglangShape),
    Vllm(Option<String>),
    Agent(refrain_gateway::AnswerShape, Box<AgentFields>),
}

impl DataSurface {
    /// All of them.
    pub(super) const ALL: [DataSurface; 6] = [
        DataSurface::Sglang,
        DataSurface::Vllm,
        DataSurface::Completion,
        DataSurface::Agent(Surface::Chat),
        DataSurface::Agent(Surface::Messages),
        DataSurface::Agent(Surface::Responses),
    ];

    /// The route, which is a label of metrics.
    pub(super) fn route(self) -> &'static str {
        match self {
            DataSurface::Sglang => "/generate",
            DataSurface::Vllm => "/inference/v1/generate",
            DataSurface::Completion => "/v1/completions",
            DataSurface::Agent(Surface::Messages) => "/v1/messages",
            DataSurface::Agent(Surface::Responses) => "/v1/responses",
            DataSurface::Agent(_) => "/v1/chat/completions",
        }
    }

    /// Reads a body. `model` is that of a body that names none.
    fn read(
        self,
        body: Bytes,
        reader: &RequestReader<'_>,
        model: &str,
        stored: &Arc<ResponseStore>,
    ) -> Result<(ParsedRequest, AnswerShape), ApiError> {
        Ok(match self {
            DataSurface::Sglang => {
                let (request, shape) = sglang::read(&body, reader, model)?;
                (request, AnswerShape::Sglang(shape))
            }
            DataSurface::Vllm => {
                let (request, name) = vllm::read(&body, reader, model)?;
                (request, AnswerShape::Vllm(name))
            }
            DataSurface::Completion => {
                let request = ParsedRequest::completion(body, reader, Some(model), None)?;
                (
                    request,
                    AnswerShape::Agent(refrain_gateway::AnswerShape::OpenAi, Box::default()),
                )
            }
            DataSurface::Agent(surface) => {
                let mut fields = AgentFields::read(&body)?;
                if fields.shows_facts() && surface != Surface::Chat {
                    let message = "return_meta_info: only chats have it";
                    return Err(ApiError::invalid("return_meta_info", message));
                }
                let given = fields.input_ids.take().map(GivenPrompt);
                let reader = match &given {
                    Some(_) if reader.has_known_turns() => {
                        let message =
                            "input_ids: a session knows the tokens of its prompts; leave them out";
                        return Err(ApiError::invalid("input_ids", message));
                    }
                    Some(given) => reader.with_known_turns(given),
                    None => *reader,
                };
                let (request, shape) = surface.read(body, &reader, stored)?;
                (request, AnswerShape::Agent(shape, Box::new(fields)))
            }
        })
    }

    /// The answer to a request that was aborted before its body was read. Nobody knows how many prompts it had.
    fn aborted_unread(self, version: u64) -> Value {
        match self {
            DataSurface::Sglang => sglang_writer::aborted_unread(version),
            DataSurface::Vllm => vllm_writer::aborted_unread(version),
            DataSurface::Completion => serde_json::json!({
                "id": "",
                "object": "text_completion",
                "choices": [{
                    "index": 0,
                    "text": "",
                    "logprobs": {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []},
                    "finish_reason": FinishReason::Abort,
                    "weight_versions": [],
                }],
            }),
            DataSurface::Agent(Surface::Messages) => serde_json::json!({
                "id": "",
                "type": "message",
                "role": "assistant",
                "content": [],
                "stop_reason": null,
            }),
            DataSurface::Agent(Surface::Responses) => serde_json::json!({
                "id": "",
                "object": "response",
                "status": "incomplete",
                "output": [],
            }),
            DataSurface::Agent(_) => serde_json::json!({
                "id": "",
                "object": "chat.completion",
                "choices": [{
                    "index": 0,
                    "message": {"role": "assistant", "content": ""},
                    "logprobs": null,
                    "finish_reason": FinishReason::Abort,
                }],
            }),
        }
    }
}

impl AnswerShape {
    /// The names that the trainer gave the request.
    fn names(&self) -> Vec<String> {
        match self {
            AnswerShape::Sglang(shape) => shape.names.clone(),
            AnswerShape::Vllm(name) => name.iter().cloned().collect(),
            AnswerShape::Agent(_, fields) => fields.names().to_vec(),
        }
    }

    fn writer(
        self,
        entered: &mut EnteredRequest,
        version: u64,
    ) -> Result<Box<dyn SurfaceWriter>, ApiError> {
        let request = entered.request().clone();
        Ok(match self {
            AnswerShape::Sglang(shape) => Box::new(SglangWriter::new(request, shape, version)?),
            AnswerShape::Vllm(name) => Box::new(VllmWriter::new(request, name, version)?),
            AnswerShape::Agent(shape, fields) => {
                let writer = shape.writer(&request)?;
                if !fields.shows_facts() {
                    return Ok(writer);
                }
                let facts = SglangWriter::new(request, fields.shape(), version)?;
                let (writer, observer) = FactsWriter::new(writer, facts);
                entered.observe(observer);
                Box::new(writer)
            }
        })
    }
}

/// Carries a rollout out and answers it.
pub(super) async fn carry_out(
    trainer: Data<TrainerState>,
    surface: DataSurface,
    request: HttpRequest,
    payload: web::Payload,
) -> HttpResponse {
    let received = Instant::now();
    let entry = trainer.in_flight.begin(surface.route());
    let answered = trainer.answer(surface, &entry, &request, payload, received);
    let outcome = answered.await;
    if let Err(error) = &outcome {
        let is_refused = error.kind.status() < 500;
        entry.ended(match is_refused {
            true => Outcome::Refused,
            false => Outcome::Failed,
        });
    }
    let surface = match surface {
        DataSurface::Agent(surface) => surface,
        _ => Surface::Completion,
    };
    GatewayHandle::finish(surface, received, outcome)
}

impl TrainerState {
    async fn answer(
        &self,
        surface: DataSurface,
        entry: &Arc<Entry>,
        request: &HttpRequest,
        payload: web::Payload,
        received: Instant,
    ) -> Result<HttpResponse, ApiError> {
        let caller = self.gateway.caller(&self.tenant)?;
        let note = AccessNote::of(request);
        note.note(|facts| facts.tenant = Some(caller.tenant.to_string()));
        let bytes = announced_bytes(request).and_then(|bytes| bytes.try_into().ok());
        let room = self.hold.body_room(bytes.unwrap_or(self.body_bytes_max));
        let Some(room) = entry.abort.run_until_cancelled(room).await else {
            entry.ended(Outcome::Aborted);
            return Ok(HttpResponse::Ok().json(surface.aborted_unread(self.fleet.version())));
        };
        let room = room?;
        let known = self.known_session(surface, request)?;
        let read = self.read(surface, entry, request, payload, received, known.clone());
        let (mut parsed, shape) = read.await.inspect_err(|error| self.refused(error))?;
        parsed.name_session(request.headers());
        entry.named(&shape.names());
        note.note(|facts| facts.model = Some(parsed.model_id().to_owned()));
        let entered = self.gateway.enter(parsed, &caller, &self.hold).await;
        let (mut entered, slots) = entered.inspect_err(|error| self.refused(error))?;
        drop(room);
        if let Some(known) = known {
            let session = known.entered().inspect_err(|error| self.refused(error))?;
            let request = entered.request().clone();
            entered.observe(Box::new(Recorder::new(session, request)));
        }
        let writer = shape.writer(&mut entered, self.fleet.version())?;
        let writer = Box::new(TrackedWriter::new(writer, entry.clone(), slots));
        self.gateway.answer(entered, writer, received, note).await
    }

    /// The session of a request of an agent: that of its path, or else one that was made before and that its head
    /// names.
    fn known_session(
        &self,
        surface: DataSurface,
        request: &HttpRequest,
    ) -> Result<Option<KnownSession>, ApiError> {
        if !matches!(surface, DataSurface::Agent(_)) {
            return Ok(None);
        }
        match (
            request.match_info().get("id"),
            session_of_heads(request.headers()),
        ) {
            (Some(id), _) => KnownSession::of_path(&self.sessions, id).map(Some),
            (None, Some(name)) => KnownSession::of_head(&self.sessions, &name),
            (None, None) => Ok(None),
        }
    }

    fn refused(&self, error: &ApiError) {
        self.gateway.count_refused(&self.tenant, error);
    }

    /// Reads the body. A large one waits for its turn to be parsed.
    async fn read(
        &self,
        surface: DataSurface,
        entry: &Arc<Entry>,
        request: &HttpRequest,
        payload: web::Payload,
        received: Instant,
        known: Option<KnownSession>,
    ) -> Result<(ParsedRequest, AnswerShape), ApiError> {
        let body = RawBody::from_request(request, &mut payload.into_inner()).await;
        let RawBody(body) = body.map_err(|error| error.0)?;
        let (model, abort) = (self.model.clone(), entry.abort.clone());
        let stored = self.gateway.stored().clone();
        let read = move |reader: &RequestReader<'_>, body: Bytes| {
            let reader = reader.for_model(&model);
            let reader = match &known {
                Some(known) => reader.with_known_turns(known),
                None => reader,
            };
            let (request, shape) = surface.read(body, &reader, &model, &stored)?;
            let request = request.into_rollout(abort.clone());
            let request = match &known {
                Some(known) => request.into_turn(known.id()),
                None => request,
            };
            Ok((request, shape))
        };
        let read = self
            .gateway
            .read(&self.tenant, &body, received, &self.hold, read);
        read.await
    }
}
