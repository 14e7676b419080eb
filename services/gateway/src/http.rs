//! The routes.

use std::sync::Arc;
use std::time::{Duration, Instant};

use actix_web::http::ConnectionType;
use actix_web::http::header::{
    AUTHORIZATION, CACHE_CONTROL, CONTENT_LENGTH, CONTENT_TYPE, HeaderName, HeaderValue,
};
use actix_web::{HttpRequest, HttpResponse, ResponseError, web};
use refrain_protocol::error::code;
use refrain_protocol::{ApiError, ErrorKind};
use refrain_service_kit::http::HttpError;
use tracing::Instrument;

use crate::admission::{Admission, Ticket};
use crate::answer::AnswerWriter;
use crate::bodies::Bodies;
use crate::keys::Keys;
use crate::metrics::GatewayMetrics;
use crate::models::Models;
use crate::relay::{Relay, RelayEvent};
use crate::request::{Endpoint, GenerateRequest, RequestLimits};
use crate::sse;
use crate::tokenizing::Tokenizing;

/// What the handlers share.
pub(crate) struct Gateway {
    pub(crate) keys: Keys,
    pub(crate) models: Arc<Models>,
    pub(crate) admission: Admission,
    pub(crate) tokenizing: Tokenizing,
    pub(crate) relay: Arc<Relay>,
    pub(crate) metrics: Arc<GatewayMetrics>,
    pub(crate) limits: RequestLimits,
    pub(crate) bodies: Bodies,
    pub(crate) stream_head_wait: Duration,
    pub(crate) stream_keep_alive: Duration,
}

/// Bodies from here on are tokenized on a thread of their own: encoding a megabyte takes long enough to be
/// felt by the other requests of an HTTP thread.
const TOKENIZE_ELSEWHERE_BYTES: usize = 32 << 10;

/// When to try again what is unavailable, where nobody knows better.
const RETRY_AFTER_MS: u64 = 1_000;

/// Adds the routes.
pub(crate) fn routes(gateway: &Arc<Gateway>, app: &mut web::ServiceConfig) {
    // Resources, so that a route's other methods are refused as such.
    let route = |path: &str, route| web::resource(path).route(route);
    app.app_data(web::Data::from(gateway.clone()))
        .service(route("/v1/chat/completions", web::post().to(chat)))
        .service(route("/v1/completions", web::post().to(completion)))
        .service(route("/v1/models", web::get().to(list_models)))
        .service(route("/v1/models/{id:.*}", web::get().to(get_model)));
}

async fn chat(
    gateway: web::Data<Gateway>,
    request: HttpRequest,
    payload: web::Payload,
) -> HttpResponse {
    generate(gateway.into_inner(), Endpoint::Chat, request, payload).await
}

async fn completion(
    gateway: web::Data<Gateway>,
    request: HttpRequest,
    payload: web::Payload,
) -> HttpResponse {
    generate(gateway.into_inner(), Endpoint::Completion, request, payload).await
}

async fn list_models(
    gateway: web::Data<Gateway>,
    request: HttpRequest,
) -> Result<HttpResponse, HttpError> {
    let tenant = gateway.tenant(&request)?;
    Ok(HttpResponse::Ok().json(gateway.models.list(&tenant)))
}

async fn get_model(
    gateway: web::Data<Gateway>,
    request: HttpRequest,
    id: web::Path<String>,
) -> Result<HttpResponse, HttpError> {
    let tenant = gateway.tenant(&request)?;
    let model = gateway.models.get(&tenant, &id)?;
    Ok(HttpResponse::Ok().json(gateway.models.card(&model)))
}

/// The length of a body by its head.
fn announced_bytes(request: &HttpRequest) -> Option<u64> {
    let length = request.headers().get(CONTENT_LENGTH)?;
    length.to_str().ok()?.parse().ok()
}

async fn generate(
    gateway: Arc<Gateway>,
    endpoint: Endpoint,
    request: HttpRequest,
    payload: web::Payload,
) -> HttpResponse {
    let received = Instant::now();
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
            gateway.count_refused(&error);
            Err(error)
        }
    };
    let mut response = outcome.unwrap_or_else(|mut error| {
        if error.kind == ErrorKind::Unavailable {
            // Wherever it comes from: it may pass.
            error.retry_after_ms.get_or_insert(RETRY_AFTER_MS);
        }
        // The rest of such a body is not waited for.
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
        HeaderValue::from(u64::try_from(received.elapsed().as_millis()).unwrap_or(u64::MAX)),
    );
    response
}

impl Gateway {
    fn tenant(&self, request: &HttpRequest) -> Result<String, ApiError> {
        let authorization = match request.headers().get(AUTHORIZATION) {
            None => None,
            // What is no text is no key of ours.
            Some(value) => Some(value.to_str().unwrap_or("Bearer \u{fffd}")),
        };
        self.keys.tenant(authorization).map(str::to_owned)
    }

    /// From a request's head and body to something that can be carried out: who, whether there is room, what.
    async fn accept(
        self: &Arc<Self>,
        endpoint: Endpoint,
        request: &HttpRequest,
        payload: web::Payload,
        received: Instant,
    ) -> Result<(Arc<GenerateRequest>, Ticket), ApiError> {
        // The key first: strangers' bodies are not read.
        let tenant = self.tenant(request)?;
        // A full house is told of before the body is read; the place itself is taken when there is something to do.
        self.admission.check(&tenant)?;
        let body = self
            .bodies
            .read(&tenant, announced_bytes(request), payload, received)
            .await?;
        let mut ticket = self.admission.admit(&tenant)?;
        let time = &self.relay.time;
        let place = match body.len() {
            ..TOKENIZE_ELSEWHERE_BYTES => None,
            bytes => {
                let turn = self.tokenizing.enter(&tenant, bytes);
                let entered = tokio::time::timeout(time.left(received), turn).await;
                Some(entered.map_err(|_| time.error())??)
            }
        };
        let gateway = self.clone();
        let parse = move || match endpoint {
            Endpoint::Chat => GenerateRequest::chat(body, &tenant, &gateway.models, gateway.limits),
            Endpoint::Completion => {
                GenerateRequest::completion(body, &tenant, &gateway.models, gateway.limits)
            }
        };
        let accepted = match place {
            // The work goes on if the client goes away meanwhile, so it is what keeps the place.
            Some(place) => tokio::task::spawn_blocking(move || {
                let parsed = parse();
                drop(place);
                parsed
            })
            .await
            .map_err(ApiError::internal)??,
            None => parse()?,
        };
        ticket.widen(accepted.choice_count())?;
        Ok((Arc::new(accepted), ticket))
    }

    async fn answer(
        &self,
        request: Arc<GenerateRequest>,
        ticket: Ticket,
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
        // An error before the first event gets a status of its own, unless it takes its time.
        let first = match tokio::time::timeout(self.stream_head_wait, events.next()).await {
            Ok(None) => return Err(ApiError::internal("a request ended without a last event")),
            Ok(Some(RelayEvent::Failed(error))) => return Err(error),
            Ok(Some(event)) => Some(event),
            Err(_) => None,
        };
        Ok(HttpResponse::Ok()
            .insert_header((CONTENT_TYPE, "text/event-stream; charset=utf-8"))
            .insert_header((CACHE_CONTROL, "no-cache"))
            // nginx would gather the events otherwise.
            .insert_header(("x-accel-buffering", "no"))
            .streaming(sse::Body::new(
                first,
                events,
                writer,
                self.stream_keep_alive,
            )))
    }

    fn count_refused(&self, error: &ApiError) {
        let status = error.kind.status().to_string();
        self.metrics
            .requests
            .with_label_values(&[status.as_str()])
            .inc();
        if error.has_code(code::CONTEXT_LENGTH_EXCEEDED) {
            self.metrics
                .rejections
                .with_label_values(&["context"])
                .inc();
        }
    }
}
