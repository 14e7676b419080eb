//! A request that generates: from its head to its answer, whole or as a stream.

use std::sync::Arc;
use std::time::Instant;

use actix_web::http::header::{CACHE_CONTROL, CONTENT_TYPE, HeaderName, HeaderValue};
use actix_web::{HttpRequest, HttpResponse, web};
use refrain_accounts::tenants::{Caller, QuotaTicket};
use refrain_accounts::{AccountedRequest, NONE, RequestAccount};
use refrain_protocol::ApiError;
use refrain_protocol::error::code;
use refrain_service_kit::http::AccessNote;
use tracing::{Instrument, Span};

use crate::http::state::{GatewayState, finish};
use crate::intake::{AdmissionTicket, AdmittedRequest, FormVerdict};
use crate::models::unknown_model;
use crate::relay::{EventObserver, RelayEvent, RequestEvents};
use crate::request::{GenerateRequest, ParsedRequest, RequestReader};
use crate::response::{EventStreamBody, SurfaceWriter};
use crate::surfaces::{AnswerShape, Surface};

/// Carries out a request and answers it.
pub(crate) async fn generate(
    gateway: web::Data<GatewayState>,
    surface: Surface,
    request: HttpRequest,
    payload: web::Payload,
) -> HttpResponse {
    let received = Instant::now();
    let gateway = gateway.into_inner();
    let note = AccessNote::of(&request);
    // The key comes first: the body of a caller without one is not read.
    let caller = match gateway.caller_at(&request, surface.endpoint()).await {
        Ok(caller) => caller,
        Err(error) => {
            gateway.count_refused(NONE, &error);
            return finish(surface, received, Err(error));
        }
    };
    let outcome = async {
        let accepted = gateway.accept(surface, &caller, &request, payload, received);
        let (entered, shape) = accepted
            .await
            .inspect_err(|error| gateway.count_refused(&caller.tenant, error))?;
        let writer = shape.writer(&entered.request)?;
        gateway.answer(entered, writer, received, note).await
    };
    let mut response = finish(surface, received, outcome.await);
    let words = surface.header_words();
    for (name, value) in gateway.accounts.limit_headers(&caller, words) {
        let (name, value) = (HeaderName::try_from(name), HeaderValue::try_from(value));
        if let (Ok(name), Ok(value)) = (name, value) {
            response.headers_mut().insert(name, value);
        }
    }
    response
}

/// A request that all limits have let in, or that was aborted before.
pub struct EnteredRequest {
    request: Arc<GenerateRequest>,
    admitted: Option<AdmittedRequest>,
    observers: Vec<Box<dyn EventObserver>>,
}

impl EnteredRequest {
    /// Gives a request the standing of its caller. Without an admission it is answered as an aborted one.
    pub(crate) fn new(
        request: ParsedRequest,
        caller: &Caller,
        admitted: Option<AdmittedRequest>,
    ) -> Self {
        let account = admitted.as_ref().map(|admitted| &admitted.account);
        let may_be_urgent = account.is_some_and(RequestAccount::is_urgent);
        EnteredRequest {
            request: request.admit(caller, may_be_urgent),
            admitted,
            observers: Vec::new(),
        }
    }

    /// Shows each event of the request to an observer before it is answered.
    pub fn observe(&mut self, observer: Box<dyn EventObserver>) {
        self.observers.push(observer);
    }

    /// The request, for the writer of its answer.
    pub fn request(&self) -> &Arc<GenerateRequest> {
        &self.request
    }
}

/// The span of a request that generates.
fn request_span(request: &GenerateRequest) -> Span {
    let operation = request.endpoint.operation();
    tracing::info_span!(
        "generate",
        otel.name = format!("{operation} {}", request.model.id),
        gen_ai.operation.name = operation,
        gen_ai.provider.name = "refrain",
        gen_ai.request.model = request.model.id,
        gen_ai.request.choice.count = request.choices_per_prompt,
        gen_ai.usage.input_tokens = tracing::field::Empty,
        gen_ai.usage.output_tokens = tracing::field::Empty,
        refrain.usage.drafted_tokens = tracing::field::Empty,
        refrain.usage.accepted_tokens = tracing::field::Empty,
        otel.status_code = tracing::field::Empty,
        "error.type" = tracing::field::Empty,
    )
}

impl GatewayState {
    /// Turns the head and body of a request into one that can be carried out.
    async fn accept(
        self: &Arc<Self>,
        surface: Surface,
        caller: &Caller,
        request: &HttpRequest,
        payload: web::Payload,
        received: Instant,
    ) -> Result<(EnteredRequest, AnswerShape), ApiError> {
        let admitted = self.admit(caller, request, payload, received).await?;
        let (mut ticket, mut quota) = (admitted.ticket, admitted.quota);
        let read = move |gateway: &GatewayState, reader: &RequestReader<'_>, body| {
            surface.read(body, reader, &gateway.stored)
        };
        let (mut asked, shape) = self
            .parse(&caller.tenant, admitted.body, received, read)
            .await?;
        asked.name_session(request.headers());
        AccessNote::of(request).note(|facts| facts.model = Some(asked.model.id.clone()));
        self.judge(&mut asked, caller).await?;
        let class = caller.policy.class(asked.asked_class);
        ticket.decide(class, asked.choice_count())?;
        let reserved = self.reserve(&asked, &mut quota).await?;
        let admitted = self.begin(&asked, caller, ticket, quota, reserved).await?;
        Ok((EnteredRequest::new(asked, caller, Some(admitted)), shape))
    }

    /// Checks what a request asks for.
    ///
    /// # Errors
    /// `NotFound` for a model that is not for this caller, `InvalidRequest` for what the engine cannot do.
    pub(crate) async fn judge(
        &self,
        request: &mut ParsedRequest,
        caller: &Caller,
    ) -> Result<(), ApiError> {
        self.unknown_fields.met(&request.unknown_fields)?;
        if !caller.may_use(&request.model.id) {
            return Err(unknown_model());
        }
        // Other engines judge a form by themselves, and may know more than these grammars, or less.
        if self.models.compiles_forms(&request.model) {
            let is_tight = self.forms.tighten(request).await;
            if !is_tight && self.forms.check(request).await? == FormVerdict::CompilesLoosely {
                request.loosen_form();
            }
        } else if request.sampling.form.is_some()
            && request.chunk_tokens.is_some()
            && self.models.worker_count(&request.model) > 0
        {
            let message = format!(
                "chunk_tokens: the engine behind {} begins a form anew with each call; leave it out",
                request.model.id
            );
            let error = ApiError::invalid("chunk_tokens", message);
            return Err(error.with_code(code::UNSUPPORTED_BY_ENGINE));
        }
        request.check_trace(caller)
    }

    /// Reserves the tokens of a request in the limits of its caller. Returns those of prompts and outputs.
    ///
    /// # Errors
    /// As [`QuotaTicket::reserve`].
    pub(crate) async fn reserve(
        &self,
        request: &ParsedRequest,
        quota: &mut QuotaTicket,
    ) -> Result<(u64, u64), ApiError> {
        let prompts = &request.prompts;
        let per_prompt = request.choices_per_prompt as usize;
        let choices = prompts
            .iter()
            .flat_map(|prompt| std::iter::repeat_n(u64::from(prompt.max_new_tokens), per_prompt));
        let input = request.input_tokens();
        quota.reserve(input, choices, Instant::now()).await
    }

    /// Begins a request that all limits have let in.
    ///
    /// # Errors
    /// `Unavailable` where its usage cannot be written down.
    pub(crate) async fn begin(
        &self,
        request: &ParsedRequest,
        caller: &Caller,
        ticket: AdmissionTicket,
        quota: QuotaTicket,
        reserved: (u64, u64),
    ) -> Result<AdmittedRequest, ApiError> {
        let hides_metrics = caller.policy.hides_metrics;
        let series = self
            .metrics
            .series(&caller.tenant, &request.model.id, hides_metrics);
        let account = self.accounts.open(
            caller,
            AccountedRequest {
                model: request.model.id.clone(),
                input_tokens: request.input_tokens(),
                choices_per_prompt: request.choices_per_prompt as usize,
                choices: request.choice_count(),
                asks_urgency: request.asked_urgency.is_urgent(),
                quota,
                reserved,
                tokens: series.tokens.clone(),
            },
        );
        Ok(AdmittedRequest {
            _ticket: ticket,
            account: account.await?,
            series,
        })
    }

    /// Carries a request out and answers it, whole or as a stream.
    ///
    /// # Errors
    /// The error of the request, if it has one before the head of the answer is sent.
    pub(crate) async fn answer(
        &self,
        entered: EnteredRequest,
        writer: Box<dyn SurfaceWriter>,
        received: Instant,
        note: AccessNote,
    ) -> Result<HttpResponse, ApiError> {
        let EnteredRequest {
            request,
            admitted,
            observers,
        } = entered;
        let span = request_span(&request);
        let is_stream = request.is_stream;
        let events = match admitted {
            Some(admitted) => {
                let events = || self.relay.carry_out(request, admitted, received);
                span.in_scope(events).noted(note)
            }
            None => RequestEvents::aborted(request.choice_count() as u32, request.input_tokens()),
        };
        let answered = self.respond(events.observed(observers), writer, is_stream);
        answered.instrument(span).await
    }

    /// Answers with the events of a request, whole or as a stream.
    ///
    /// # Errors
    /// The error of the request, if it has one before the head of the answer is sent.
    async fn respond(
        &self,
        mut events: RequestEvents,
        writer: Box<dyn SurfaceWriter>,
        is_stream: bool,
    ) -> Result<HttpResponse, ApiError> {
        if !is_stream {
            let body = writer.collect(&mut events).await?;
            return Ok(HttpResponse::Ok()
                .content_type("application/json")
                .body(body));
        }
        // An early error gets its own status. Without an event for too long, the head is sent and the status is 200.
        let first = match tokio::time::timeout(self.tuning.stream_head_wait, events.next()).await {
            Ok(None) => return Err(ApiError::internal("a request ended without a last event")),
            Ok(Some(RelayEvent::Failed(error))) => return Err(error),
            Ok(Some(event)) => Some(event),
            Err(_) => None,
        };
        Ok(HttpResponse::Ok()
            .insert_header((CONTENT_TYPE, "text/event-stream; charset=utf-8"))
            .insert_header((CACHE_CONTROL, "no-cache"))
            // Otherwise nginx would buffer the events.
            .insert_header(("x-accel-buffering", "no"))
            .streaming(EventStreamBody::new(
                first,
                events,
                writer,
                self.tuning.stream_keep_alive,
            )))
    }
}
