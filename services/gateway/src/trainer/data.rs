//! The way of a rollout: its body, the wait for room, and its answer. At each step the trainer may abort it.

use std::sync::Arc;
use std::time::Instant;

use actix_web::web::{self, Data};
use actix_web::{FromRequest as _, HttpRequest, HttpResponse};
use bytes::Bytes;
use refrain_protocol::ApiError;
use refrain_protocol::openai::{FinishReason, Usage};
use refrain_service_kit::http::{AccessNote, RawBody};
use serde_json::Value;
use tokio::sync::Mutex;
use tracing::Instrument as _;

use super::hold::{Limit, Slots};
use super::in_flight::{Entry, Outcome};
use super::read_context::ReadContext;
use super::sglang::{self, SglangShape};
use super::sglang_writer::{self, SglangWriter};
use super::state::TrainerState;
use super::tracked_writer::TrackedWriter;
use super::vllm;
use super::vllm_writer::{self, VllmWriter};
use crate::http::{GatewayState, announced_bytes, finish, request_span};
use crate::intake::AdmittedRequest;
use crate::relay::{ChoiceProgress, RelayEvent, RequestEvents, RequestSummary};
use crate::request::{GenerateRequest, ParsedRequest};
use crate::response::SurfaceWriter;
use crate::surfaces::{AcceptedRequest, ParsedBody, Surface};
use crate::tenants::Caller;

/// The interface that was called.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum DataSurface {
    /// SGLang's `/generate`.
    Sglang,
    /// vLLM's `/inference/v1/generate`.
    Vllm,
    /// Text completions, as on the other listener.
    Completion,
    /// Chats, as on the other listener. Trainers evaluate with them, and agents speak nothing else.
    Chat,
}

/// The shape of an answer.
enum AnswerShape {
    Sglang(SglangShape),
    Vllm(Option<String>),
    OpenAi,
}

/// A request that was read.
struct ReadRequest {
    request: ParsedRequest,
    shape: AnswerShape,
}

impl DataSurface {
    /// All of them.
    pub(super) const ALL: [DataSurface; 4] = [
        DataSurface::Sglang,
        DataSurface::Vllm,
        DataSurface::Completion,
        DataSurface::Chat,
    ];

    /// The route, which is a label of metrics.
    pub(super) fn route(self) -> &'static str {
        match self {
            DataSurface::Sglang => "/generate",
            DataSurface::Vllm => "/inference/v1/generate",
            DataSurface::Completion => "/v1/completions",
            DataSurface::Chat => "/v1/chat/completions",
        }
    }

    fn read(self, body: Bytes, context: &ReadContext<'_>) -> Result<ReadRequest, ApiError> {
        let (request, shape) = match self {
            DataSurface::Sglang => {
                let (request, shape) = sglang::read(&body, context)?;
                (request, AnswerShape::Sglang(shape))
            }
            DataSurface::Vllm => {
                let (request, name) = vllm::read(&body, context)?;
                (request, AnswerShape::Vllm(name))
            }
            DataSurface::Completion => (context.completion(body)?, AnswerShape::OpenAi),
            DataSurface::Chat => (context.chat(body)?, AnswerShape::OpenAi),
        };
        Ok(ReadRequest { request, shape })
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
            DataSurface::Chat => serde_json::json!({
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
            AnswerShape::OpenAi => Vec::new(),
        }
    }

    fn writer(
        self,
        accepted: AcceptedRequest,
        version: u64,
    ) -> Result<Box<dyn SurfaceWriter>, ApiError> {
        let request = accepted.request.clone();
        Ok(match self {
            AnswerShape::Sglang(shape) => Box::new(SglangWriter::new(request, shape, version)?),
            AnswerShape::Vllm(name) => Box::new(VllmWriter::new(request, name, version)?),
            AnswerShape::OpenAi => accepted.writer()?,
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
    finish(Surface::Completion, received, outcome)
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
        let caller = self.gateway.callers.of_listener(&self.tenant)?;
        let note = AccessNote::of(request);
        note.note(|facts| facts.tenant = Some(caller.tenant.to_string()));
        let bytes = announced_bytes(request).and_then(|bytes| bytes.try_into().ok());
        let bytes = bytes.unwrap_or(self.body_bytes_max);
        let room = self.hold.body_room(&self.tenant, bytes);
        let Some(room) = entry.abort.run_until_cancelled(room).await else {
            entry.ended(Outcome::Aborted);
            return Ok(HttpResponse::Ok().json(surface.aborted_unread(self.fleet.version())));
        };
        let room = room?;
        let read = self.read(surface, entry, request, payload, received).await;
        let ReadRequest { request, shape } = read.inspect_err(|error| self.refused(error))?;
        entry.named(&shape.names());
        let model = request.model.id.clone();
        note.note(|facts| facts.model = Some(model));
        let mut parsed = ParsedBody::of(request);
        let admitted = self.admit(&mut parsed.request, entry, &caller).await;
        let admitted = admitted.inspect_err(|error| self.refused(error))?;
        drop(room);
        let may_be_urgent = admitted
            .as_ref()
            .is_some_and(|(one, _)| one.may_be_urgent());
        let accepted = parsed.admit(&caller, may_be_urgent);
        let request = accepted.request.clone();
        let span = request_span(&request);
        let is_stream = request.is_stream;
        let writer = shape.writer(accepted, self.fleet.version())?;
        let (events, slots) = match admitted {
            Some((admitted, slots)) => {
                let relay = &self.gateway.relay;
                let events = span.in_scope(|| relay.carry_out(request, admitted, received));
                (events.noted(note), Some(slots))
            }
            None => (aborted_events(&request), None),
        };
        let writer = Box::new(TrackedWriter::new(writer, entry.clone(), slots));
        let answered = self.gateway.respond(events, writer, is_stream);
        answered.instrument(span).await
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
    ) -> Result<ReadRequest, ApiError> {
        let body = RawBody::from_request(request, &mut payload.into_inner()).await;
        let RawBody(body) = body.map_err(|error| error.0)?;
        let parse = || {
            let (model, abort) = (self.model.clone(), entry.abort.clone());
            let read = move |gateway: &GatewayState, body: Bytes, tenant: &str| {
                let context = ReadContext {
                    models: &gateway.models,
                    tuning: &gateway.tuning,
                    tenant,
                    model: &model,
                    abort,
                };
                surface.read(body, &context)
            };
            let body = body.clone();
            self.gateway.parse(&self.tenant, body, received, read)
        };
        self.hold
            .until_room(Limit::Parsing, &self.tenant, parse)
            .await
    }

    /// Waits until every limit has room for a request. `None`: it was aborted before.
    async fn admit(
        &self,
        request: &mut ParsedRequest,
        entry: &Entry,
        caller: &Caller,
    ) -> Result<Option<(AdmittedRequest, Slots)>, ApiError> {
        let (gateway, tenant) = (&self.gateway, &*self.tenant);
        let admit = async {
            let judged = Mutex::new(&mut *request);
            let judge = || async { gateway.judge(&mut **judged.lock().await, caller).await };
            self.hold.until_room(Limit::Forms, tenant, judge).await?;
            let request = &*request;
            let class = caller.policy.class(request.asked_class);
            let choices = request.choice_count();
            let slots = self.hold.slots(tenant, choices).await?;
            let admit = || async {
                let mut ticket = gateway.admission.admit(tenant)?;
                ticket.decide(class, choices)?;
                Ok(ticket)
            };
            let ticket = self
                .hold
                .until_room(Limit::Admission, tenant, admit)
                .await?;
            let begin = || gateway.limiter.begin(caller, Instant::now());
            let quota = Mutex::new(self.hold.until_room(Limit::Requests, tenant, begin).await?);
            let reserve = || async { gateway.reserve(request, &mut *quota.lock().await).await };
            let reserved = self.hold.until_room(Limit::Tokens, tenant, reserve).await?;
            let quota = quota.into_inner();
            let admitted = gateway
                .begin(request, caller, ticket, quota, reserved)
                .await?;
            Ok((admitted, slots))
        };
        let admitted = entry.abort.run_until_cancelled(admit).await;
        admitted.transpose()
    }
}

/// The events of a request that was aborted before it began: all its choices end without a token.
fn aborted_events(request: &GenerateRequest) -> RequestEvents {
    let (choices, prompt_tokens) = (request.choice_count() as u32, request.input_tokens());
    RequestEvents::new(1, move |events| async move {
        for index in 0..choices {
            let progress = ChoiceProgress {
                finish: Some(FinishReason::Abort),
                ..ChoiceProgress::default()
            };
            // An error means that the reader has left.
            let _ = events.send(RelayEvent::Progress { index, progress }).await;
        }
        let usage = Usage {
            prompt_tokens,
            total_tokens: prompt_tokens,
            ..Usage::default()
        };
        let summary = RequestSummary {
            usage,
            metrics: None,
        };
        let _ = events.send(RelayEvent::Done(Box::new(summary))).await;
    })
}
