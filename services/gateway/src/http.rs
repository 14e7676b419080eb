//! The routes of OpenAI's API, and the way of a request through the modules of the gateway.

use std::sync::Arc;
use std::time::Instant;

use actix_web::http::ConnectionType;
use actix_web::http::header::{
    AUTHORIZATION, CACHE_CONTROL, CONTENT_LENGTH, CONTENT_TYPE, HeaderName, HeaderValue,
};
use actix_web::{HttpRequest, HttpResponse, ResponseError, web};
use refrain_protocol::error::code;
use refrain_protocol::{ApiError, ErrorKind};
use refrain_service_kit::clock::millis;
use refrain_service_kit::http::{HttpError, get, post};
use tracing::Instrument;

use crate::config::GatewayTuning;
use crate::intake::{
    Admission, AdmissionTicket, ApiKeys, BodyReader, TokenizingLimiter, UnknownFields,
};
use crate::metrics::GatewayMetrics;
use crate::models::Models;
use crate::relay::{RelayContext, RelayEvent};
use crate::request::{Endpoint, GenerateRequest};
use crate::response::{AnswerWriter, EventStreamBody};

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
}

/// Bodies of this size and more are parsed and tokenized on a separate thread. To encode a megabyte takes long enough
/// to delay the other requests of an HTTP thread.
const SEPARATE_THREAD_BYTES: usize = 32 << 10;

/// Time after which a client may retry an unavailable service, if the error tells no other.
const RETRY_AFTER_MS: u64 = 1_000;

/// Adds the routes.
pub(crate) fn routes(gateway: &Arc<GatewayState>, app: &mut web::ServiceConfig) {
    app.app_data(web::Data::from(gateway.clone()))
        .service(post("/v1/chat/completions", |gateway, request, payload| {
            generate(gateway, Endpoint::Chat, request, payload)
        }))
        .service(post("/v1/completions", |gateway, request, payload| {
            generate(gateway, Endpoint::Completion, request, payload)
        }))
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
    endpoint: Endpoint,
    request: HttpRequest,
    payload: web::Payload,
) -> HttpResponse {
    let received = Instant::now();
    let gateway = gateway.into_inner();
    let outcome = match gateway.accept(endpoint, &request, payload, received).await {
        Ok((accepted, ticket)) => {
            let span = tracing::info_span!(
                "generate",
                otel.name = format!("{} {}", endpoint.operation(), accepted.model.id),
                gen_ai.operation.name = endpoint.operation(),
                gen_ai.provider.name = "refrain",
                gen_ai.request.model = accepted.model.id,
                gen_ai.request.choice.count = accepted.choices_per_prompt,
                gen_ai.usage.input_tokens = tracing::field::Empty,
                gen_ai.usage.output_tokens = tracing::field::Empty,
                "error.type" = tracing::field::Empty,
            );
            gateway
                .answer(accepted, ticket, received)
                .instrument(span)
                .await
        }
        Err(error) => {
            gateway.metrics.ended(&error.kind.status().to_string());
            if error.has_code(code::CONTEXT_LENGTH_EXCEEDED) {
                gateway.metrics.rejected("context");
            }
            Err(error)
        }
    };
    let mut response = outcome.unwrap_or_else(|mut error| {
        if error.kind == ErrorKind::Unavailable {
            // It may pass, whichever service is unavailable.
            error.retry_after_ms.get_or_insert(RETRY_AFTER_MS);
        }
        // The rest of such a body is not read.
        let is_unread = matches!(error.kind, ErrorKind::RequestTimeout | ErrorKind::TooLarge);
        let mut response = HttpError(error).error_response();
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
    fn tenant(&self, request: &HttpRequest) -> Result<String, ApiError> {
        let authorization = match request.headers().get(AUTHORIZATION) {
            None => None,
            // A header that is not text matches no key.
            Some(value) => Some(value.to_str().unwrap_or("Bearer \u{fffd}")),
        };
        self.keys.tenant(authorization).map(str::to_owned)
    }

    /// Turns the head and body of a request into one that can be carried out: authenticates, admits and parses it.
    async fn accept(
        self: &Arc<Self>,
        endpoint: Endpoint,
        request: &HttpRequest,
        payload: web::Payload,
        received: Instant,
    ) -> Result<(Arc<GenerateRequest>, AdmissionTicket), ApiError> {
        // The key comes first: the body of a caller without one is not read.
        let tenant = self.tenant(request)?;
        // A full gateway refuses before it reads the body. The request is admitted only when there is something to
        // do.
        self.admission.check(&tenant)?;
        let body = self
            .bodies
            .read(&tenant, announced_bytes(request), payload, received)
            .await?;
        let mut ticket = self.admission.admit(&tenant)?;
        let time = &self.relay.time;
        let permit = match body.len() {
            ..SEPARATE_THREAD_BYTES => None,
            bytes => {
                let turn = self.tokenizing.enter(&tenant, bytes);
                let entered = tokio::time::timeout(time.left(received), turn).await;
                Some(entered.map_err(|_| time.error())??)
            }
        };
        let read = match endpoint {
            Endpoint::Chat => GenerateRequest::chat,
            Endpoint::Completion => GenerateRequest::completion,
        };
        let gateway = self.clone();
        let parse = move || read(body, &tenant, &gateway.models, &gateway.tuning);
        let accepted = match permit {
            // The work goes on if the client leaves meanwhile, so the permit belongs to it.
            Some(permit) => tokio::task::spawn_blocking(move || {
                let parsed = parse();
                drop(permit);
                parsed
            })
            .await
            .map_err(ApiError::internal)??,
            None => parse()?,
        };
        self.unknown_fields.met(&accepted.unknown_fields)?;
        ticket.count_choices(accepted.choice_count())?;
        Ok((Arc::new(accepted), ticket))
    }

    async fn answer(
        &self,
        request: Arc<GenerateRequest>,
        ticket: AdmissionTicket,
        received: Instant,
    ) -> Result<HttpResponse, ApiError> {
        let writer = AnswerWriter::new(request.clone())?;
        let is_stream = request.is_stream;
        let mut events = self.relay.carry_out(request, ticket, received);
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
