//! The routes, and the way of a request through the modules of the gateway.

mod probes;
mod stored;
mod tokens;

use std::sync::Arc;
use std::time::Instant;

use actix_web::body::BoxBody;
use actix_web::http::ConnectionType;
use actix_web::http::header::{
    AUTHORIZATION, CACHE_CONTROL, CONTENT_LENGTH, CONTENT_TYPE, HeaderName, HeaderValue,
};
use actix_web::{HttpRequest, HttpResponse, ResponseError, web};
use bytes::Bytes;
use refrain_protocol::error::code;
use refrain_protocol::{ApiError, ErrorKind};
use refrain_service_kit::clock::millis;
use refrain_service_kit::http::{AccessNote, HttpError, Readiness, get, post};
use tracing::Instrument;

use crate::config::GatewayTuning;
use crate::intake::{
    Admission, AdmissionTicket, ApiKeys, BodyReader, TokenizingLimiter, UnknownFields,
};
use crate::metrics::GatewayMetrics;
use crate::models::Models;
use crate::relay::{RelayContext, RelayEvent};
use crate::response::EventStreamBody;
use crate::surfaces::{AcceptedRequest, ResponseStore, Surface, SurfaceContext};

/// The state that all handlers share.
pub(crate) struct GatewayState {
    pub(crate) keys: ApiKeys,
    pub(crate) models: Arc<Models>,
    pub(crate) admission: Admission,
    pub(crate) tokenizing: TokenizingLimiter,
    pub(crate) relay: Arc<RelayContext>,
    pub(crate) metrics: Arc<GatewayMetrics>,
    pub(crate) bodies: BodyReader,
    pub(crate) unknown_fields: UnknownFields,
    pub(crate) tuning: GatewayTuning,
    pub(crate) readiness: Readiness,
    pub(crate) stored: Arc<ResponseStore>,
}

/// The body of a request that was admitted.
struct AdmittedBody {
    tenant: String,
    body: Bytes,
    ticket: AdmissionTicket,
}

/// Bodies of this size and more are parsed and tokenized on a separate thread. To encode a megabyte takes long enough
/// to delay the other requests of an HTTP thread.
const SEPARATE_THREAD_BYTES: usize = 32 << 10;

/// Time after which a client may retry an unavailable service, if the error tells no other.
const RETRY_AFTER_MS: u64 = 1_000;

/// The head in which Anthropic's clients send the key.
const X_API_KEY: &str = "x-api-key";

/// Adds the routes.
pub(crate) fn routes(gateway: &Arc<GatewayState>, app: &mut web::ServiceConfig) {
    app.app_data(web::Data::from(gateway.clone()))
        .service(post("/v1/chat/completions", |gateway, request, payload| {
            generate(gateway, Surface::Chat, request, payload)
        }))
        .service(post("/v1/completions", |gateway, request, payload| {
            generate(gateway, Surface::Completion, request, payload)
        }))
        .service(post("/v1/messages", |gateway, request, payload| {
            generate(gateway, Surface::Messages, request, payload)
        }))
        .service(post("/v1/messages/count_tokens", tokens::count))
        .service(post("/v1/responses", |gateway, request, payload| {
            generate(gateway, Surface::Responses, request, payload)
        }))
        .service(stored::responses("/v1/responses/{id}"))
        .service(post("/tokenize", tokens::tokenize))
        .service(post("/detokenize", tokens::detokenize))
        .service(probes::readiness("/health"))
        .service(probes::readiness("/ping").route(web::post().to(probes::ready)))
        .service(get("/version", probes::version))
        .service(get("/v1/models", list_models))
        .service(get("/v1/models/{id:.*}", get_model));
}

async fn list_models(
    gateway: web::Data<GatewayState>,
    request: HttpRequest,
) -> Result<HttpResponse, HttpError> {
    let tenant = gateway.tenant(&request)?;
    Ok(HttpResponse::Ok().json(gateway.models.list(&tenant)))
}

async fn get_model(
    gateway: web::Data<GatewayState>,
    request: HttpRequest,
    id: web::Path<String>,
) -> Result<HttpResponse, HttpError> {
    let tenant = gateway.tenant(&request)?;
    let model = gateway.models.get(&tenant, &id)?;
    Ok(HttpResponse::Ok().json(gateway.models.card(&model)))
}

/// The length of the body that the head announces.
fn announced_bytes(request: &HttpRequest) -> Option<u64> {
    let length = request.headers().get(CONTENT_LENGTH)?;
    length.to_str().ok()?.parse().ok()
}

async fn generate(
    gateway: web::Data<GatewayState>,
    surface: Surface,
    request: HttpRequest,
    payload: web::Payload,
) -> HttpResponse {
    let received = Instant::now();
    let gateway = gateway.into_inner();
    let note = AccessNote::of(&request);
    let outcome = match gateway.accept(surface, &request, payload, received).await {
        Ok((accepted, ticket)) => {
            let span = tracing::info_span!(
                "generate",
                otel.name = format!("{} {}", surface.operation(), accepted.request.model.id),
                gen_ai.operation.name = surface.operation(),
                gen_ai.provider.name = "refrain",
                gen_ai.request.model = accepted.request.model.id,
                gen_ai.request.choice.count = accepted.request.choices_per_prompt,
                gen_ai.usage.input_tokens = tracing::field::Empty,
                gen_ai.usage.output_tokens = tracing::field::Empty,
                "error.type" = tracing::field::Empty,
            );
            gateway
                .answer(accepted, ticket, received, note)
                .instrument(span)
                .await
        }
        Err(error) => {
            gateway.count_refused(&error);
            Err(error)
        }
    };
    finish(surface, received, outcome)
}

/// Turns the outcome of a request into its response.
fn finish(
    surface: Surface,
    received: Instant,
    outcome: Result<HttpResponse, ApiError>,
) -> HttpResponse {
    let mut response = outcome.unwrap_or_else(|mut error| {
        if error.kind == ErrorKind::Unavailable {
            // It may pass, whichever service is unavailable.
            error.retry_after_ms.get_or_insert(RETRY_AFTER_MS);
        }
        // The rest of such a body is not read.
        let is_unread = matches!(error.kind, ErrorKind::RequestTimeout | ErrorKind::TooLarge);
        let body = surface.error_body(&error);
        let mut response = HttpError(error).error_response();
        if let Some(body) = body {
            response = response.map_body(|_, _| BoxBody::new(body));
        }
        if is_unread {
            response
                .head_mut()
                .set_connection_type(ConnectionType::Close);
        }
        response
    });
    response.headers_mut().insert(
        HeaderName::from_static("openai-processing-ms"),
        HeaderValue::from(millis(received.elapsed())),
    );
    response
}

impl GatewayState {
    /// The tenant of a request, by either header that clients send keys in.
    fn tenant(&self, request: &HttpRequest) -> Result<String, ApiError> {
        let headers = request.headers();
        // A header that is not text matches no key.
        let text = |value: &HeaderValue| value.to_str().unwrap_or("Bearer \u{fffd}").to_owned();
        let found = match (headers.get(AUTHORIZATION), headers.get(X_API_KEY)) {
            (None, Some(key)) => self.keys.tenant_of_key(&text(key)),
            (authorization, _) => self.keys.tenant(authorization.map(text).as_deref()),
        };
        let tenant = found.map(str::to_owned)?;
        AccessNote::of(request).note(|facts| facts.tenant = Some(tenant.clone()));
        Ok(tenant)
    }

    fn surface_context(&self) -> SurfaceContext<'_> {
        SurfaceContext {
            models: &self.models,
            tuning: &self.tuning,
            stored: &self.stored,
        }
    }

    fn count_refused(&self, error: &ApiError) {
        self.metrics.ended(&error.kind.status().to_string());
        if error.has_code(code::CONTEXT_LENGTH_EXCEEDED) {
            self.metrics.rejected("context");
        }
    }

    /// Authenticates a request, reads its body and admits it.
    async fn admit(
        &self,
        request: &HttpRequest,
        payload: web::Payload,
        received: Instant,
    ) -> Result<AdmittedBody, ApiError> {
        // The key comes first: the body of a caller without one is not read.
        let tenant = self.tenant(request)?;
        // A full gateway refuses before it reads the body. The request is admitted only when there is something to
        // do.
        self.admission.check(&tenant)?;
        let body = self
            .bodies
            .read(&tenant, announced_bytes(request), payload, received)
            .await?;
        let ticket = self.admission.admit(&tenant)?;
        Ok(AdmittedBody {
            tenant,
            body,
            ticket,
        })
    }

    /// Parses a body with `read`, which gets the gateway, the body and the tenant. A large body waits for its turn.
    async fn parse<T: Send + 'static>(
        self: &Arc<Self>,
        tenant: &str,
        body: Bytes,
        received: Instant,
        read: impl FnOnce(&GatewayState, Bytes, &str) -> Result<T, ApiError> + Send + 'static,
    ) -> Result<T, ApiError> {
        let time = &self.relay.time;
        if body.len() < SEPARATE_THREAD_BYTES {
            return read(self, body, tenant);
        }
        let turn = self.tokenizing.enter(tenant, body.len());
        let entered = tokio::time::timeout(time.left(received), turn).await;
        let permit = entered.map_err(|_| time.error())??;
        let (gateway, tenant) = (self.clone(), tenant.to_owned());
        // The work goes on if the client leaves meanwhile, so the permit belongs to it.
        tokio::task::spawn_blocking(move || {
            let parsed = read(&gateway, body, &tenant);
            drop(permit);
            parsed
        })
        .await
        .map_err(ApiError::internal)?
    }

    /// Turns the head and body of a request into one that can be carried out.
    async fn accept(
        self: &Arc<Self>,
        surface: Surface,
        request: &HttpRequest,
        payload: web::Payload,
        received: Instant,
    ) -> Result<(AcceptedRequest, AdmissionTicket), ApiError> {
        let mut admitted = self.admit(request, payload, received).await?;
        let read = move |gateway: &GatewayState, body, tenant: &str| {
            surface.read(body, tenant, &gateway.surface_context())
        };
        let accepted = self
            .parse(&admitted.tenant, admitted.body, received, read)
            .await?;
        self.unknown_fields.met(&accepted.request.unknown_fields)?;
        AccessNote::of(request).note(|facts| {
            facts.model = Some(accepted.request.model.id.clone());
        });
        admitted
            .ticket
            .count_choices(accepted.request.choice_count())?;
        Ok((accepted, admitted.ticket))
    }

    async fn answer(
        &self,
        accepted: AcceptedRequest,
        ticket: AdmissionTicket,
        received: Instant,
        note: AccessNote,
    ) -> Result<HttpResponse, ApiError> {
        let request = accepted.request.clone();
        let writer = accepted.writer()?;
        let is_stream = request.is_stream;
        let mut events = self.relay.carry_out(request, ticket, received).noted(note);
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
