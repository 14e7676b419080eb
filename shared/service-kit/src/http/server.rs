//! The listener: health, readiness, metrics, request ids, trace context, limits, then the service's routes.

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::{Duration, Instant};

use actix_http::error::DispatchError;
use actix_http::{ConnectionType, HttpService};
use actix_service::{IntoServiceFactory, ServiceFactoryExt, fn_service, map_config};
use actix_web::body::MessageBody;
use actix_web::dev::{AppConfig, Handler, ServerHandle, ServiceRequest, ServiceResponse};
use actix_web::http::StatusCode;
use actix_web::http::header::{ALLOW, HeaderMap, HeaderName, HeaderValue};
use actix_web::middleware::{Next, from_fn};
use actix_web::{App, HttpMessage, HttpResponse, ResponseError, web};
use opentelemetry::propagation::{Extractor, TextMapPropagator};
use opentelemetry_sdk::propagation::TraceContextPropagator;
use prometheus::{HistogramVec, IntCounterVec};
use refrain_protocol::error::code;
use refrain_protocol::{ApiError, ErrorKind};
use tokio::net::{TcpSocket, TcpStream};
use tokio::task::AbortHandle;
use tracing::Instrument;
use tracing_opentelemetry::OpenTelemetrySpanExt;

use super::HttpError;
use super::body::{BodyBytesMax, too_large};
use super::connections::{BusyBody, Connection, Connections, Placed};
use super::places::AddressLimit;
use crate::descriptors;
use crate::random;
use crate::telemetry::Metrics;

/// How long a graceful stop may take before connections are cut.
const SHUTDOWN_TIMEOUT_S: u64 = 30;

/// How long a connection without requests stays open. Longer than any client of ours keeps it, and than the
/// usual proxy does (60 s), so that it is always the caller who closes: a request that is sent while the
/// listener closes is lost. A graceful stop does not wait for such connections.
pub(super) const KEEP_ALIVE: Duration = Duration::from_secs(120);

/// How long a new connection has to send the head of its first request.
const HEAD_TIMEOUT: Duration = Duration::from_secs(5);

/// How long a connection that is closed is given to take its last answer.
const DISCONNECT_TIMEOUT: Duration = Duration::from_secs(1);

/// Connections that the system holds until they are accepted.
const BACKLOG: u32 = 2048;

/// Connections of a thread that are told at once why they have no place. More wait until these have heard it.
const REFUSED_MAX: usize = 32;

/// Says whether the service can do its work: `Err` holds the reason why not.
pub type Readiness = Arc<dyn Fn() -> Result<(), String> + Send + Sync>;

/// How to listen.
#[derive(Clone, Debug)]
pub struct ServeOptions {
    /// The service's name in metrics and traces.
    pub service: &'static str,
    /// Where; port 0 takes a free one.
    pub listen: SocketAddr,
    /// Threads that serve requests.
    pub threads: usize,
    /// Largest request body.
    pub body_bytes_max: usize,
    /// Most connections at once, of all threads together; less where the process may not open as many files.
    pub connections_max: usize,
}

/// A running listener.
pub struct Server {
    addr: SocketAddr,
    handle: ServerHandle,
    /// The task that listens.
    running: AbortHandle,
}

/// The request's id: the caller's `x-request-id`, or one made here. In the request's extensions.
#[derive(Clone, Debug)]
pub struct RequestIdentity(pub String);

impl Server {
    /// Where it listens.
    pub fn addr(&self) -> SocketAddr {
        self.addr
    }

    /// Stops. With `graceful`, responses that are under way run to their end first.
    pub async fn stop(&self, graceful: bool) {
        self.handle.stop(graceful).await;
    }

    /// Stops: responses that are under way have `grace` to run to their end. Then nobody waits for them any more: their
    /// connections are cut with the process, or `SHUTDOWN_TIMEOUT_S` after the stop began.
    pub async fn stop_within(&self, grace: Duration) {
        if tokio::time::timeout(grace, self.stop(true)).await.is_err() {
            // It takes no other order while it waits for its threads.
            self.running.abort();
        }
    }
}

/// Starts listening, to the services of the mesh. `configure` adds the service's routes to each thread's app.
///
/// # Errors
/// The address cannot be bound.
pub fn serve<F>(
    options: ServeOptions,
    metrics: &Metrics,
    readiness: Readiness,
    configure: F,
) -> anyhow::Result<Server>
where
    F: Fn(&mut web::ServiceConfig) + Clone + Send + 'static,
{
    let as_many_as_there_are = AddressLimit::default();
    serve_public(options, as_many_as_there_are, metrics, readiness, configure)
}

/// As [`serve`], to strangers as well: none of them may hold more connections than `address` says.
///
/// # Errors
/// The address cannot be bound.
pub fn serve_public<F>(
    options: ServeOptions,
    address: AddressLimit,
    metrics: &Metrics,
    readiness: Readiness,
    configure: F,
) -> anyhow::Result<Server>
where
    F: Fn(&mut web::ServiceConfig) + Clone + Send + 'static,
{
    let observed = Observed {
        service: options.service,
        requests: metrics.http_requests().clone(),
        seconds: metrics.http_seconds().clone(),
    };
    let metrics = metrics.clone();
    let body_bytes_max = options.body_bytes_max;
    let connections_max = options.connections_max.min(descriptors::callers_max());
    if connections_max < options.connections_max {
        tracing::info!(
            service = options.service,
            connections_max,
            configured = options.connections_max,
            "fewer connections than configured: raise the limit on open files (ulimit -n)"
        );
    }
    let connections = Connections::new(options.service, connections_max, address, &metrics);
    let threads = options.threads.max(1);
    let builder = actix_server::Server::build();
    let shutdown = builder.graceful_shutdown_signal();
    let app = move || {
        let observed = observed.clone();
        let metrics = metrics.clone();
        let readiness = readiness.clone();
        App::new()
            .wrap(from_fn(move |request, next| {
                observe(observed.clone(), request, next)
            }))
            .app_data(BodyBytesMax(body_bytes_max))
            .app_data(
                web::JsonConfig::default()
                    .limit(body_bytes_max)
                    .content_type_required(false)
                    .error_handler(|error, _| HttpError(json_error(&error)).into()),
            )
            .service(shown("/healthz", async || HttpResponse::Ok().body("ok\n")))
            .service(shown("/readyz", move || {
                let readiness = readiness.clone();
                async move {
                    match readiness() {
                        Ok(()) => HttpResponse::Ok().body("ready\n"),
                        Err(reason) => {
                            HttpResponse::ServiceUnavailable().body(format!("{reason}\n"))
                        }
                    }
                }
            }))
            .service(shown("/metrics", move || {
                let metrics = metrics.clone();
                async move {
                    HttpResponse::Ok()
                        .content_type("text/plain; version=0.0.4")
                        .body(metrics.render())
                }
            }))
            .configure(configure.clone())
            .default_service(web::to(async || -> Result<HttpResponse, HttpError> {
                Err(
                    ApiError::new(ErrorKind::NotFound, "no such route or method")
                        .with_code("unknown_url")
                        .into(),
                )
            }))
    };
    // What actix-web's own server does, but with a stream of ours below.
    let service = move || {
        let connections = connections.clone();
        let shutdown = shutdown.clone();
        let app = app().into_factory();
        let http = HttpService::build()
            .graceful_shutdown_signal(move || {
                let shutdown = shutdown.clone();
                async move { shutdown.notified().await }
            })
            .keep_alive(KEEP_ALIVE)
            .client_request_timeout(HEAD_TIMEOUT)
            .client_disconnect_timeout(DISCONNECT_TIMEOUT)
            // A caller that closed its side has gone: its handler is dropped, and what it waits for with it.
            .h1_allow_half_closed(false)
            .on_connect_ext(|stream: &Placed, data| {
                data.insert(stream.connection());
            })
            .h1(map_config(
                app.map_err(|error| error.error_response()),
                |()| AppConfig::default(),
            ));
        fn_service(move |stream: TcpStream| {
            let connections = connections.clone();
            async move { connections.admit(stream).await.map_err(DispatchError::Io) }
        })
        .and_then(http)
    };
    let server = builder
        .workers(threads)
        .max_concurrent_connections(
            connections_max
                .div_ceil(threads)
                .saturating_add(REFUSED_MAX),
        )
        .disable_signals()
        .shutdown_timeout(SHUTDOWN_TIMEOUT_S);
    let addr_and_server = bind(options.listen).and_then(|listener| {
        let addr = listener.local_addr()?;
        Ok((addr, server.listen(options.service, listener, service)?))
    });
    let (addr, server) = addr_and_server.map_err(|error| {
        anyhow::anyhow!(
            "{} cannot listen on {}: {error}",
            options.service,
            options.listen
        )
    })?;
    let running = server.run();
    let handle = running.handle();
    let running = tokio::spawn(async move {
        if let Err(error) = running.await {
            tracing::error!(%error, "http server ended");
        }
    });
    Ok(Server {
        addr,
        handle,
        running: running.abort_handle(),
    })
}

fn bind(listen: SocketAddr) -> std::io::Result<std::net::TcpListener> {
    let socket = match listen {
        SocketAddr::V4(_) => TcpSocket::new_v4(),
        SocketAddr::V6(_) => TcpSocket::new_v6(),
    }?;
    socket.set_reuseaddr(true)?;
    socket.bind(listen)?;
    // The standard library's own way has room for 128.
    socket.listen(BACKLOG)?.into_std()
}

/// A route that shows something to whoever asks.
fn shown<F, A>(path: &'static str, show: F) -> actix_web::Resource
where
    F: Fn() -> A + Clone + 'static,
    F: Handler<(), Output = HttpResponse>,
    A: Future<Output = HttpResponse> + 'static,
{
    // The answer to HEAD is that to GET, of which the HTTP stack then sends no body.
    web::resource(path)
        .route(web::get().to(show.clone()))
        .route(web::head().to(show))
}

fn json_error(error: &actix_web::error::JsonPayloadError) -> ApiError {
    use actix_web::error::JsonPayloadError::{Overflow, OverflowKnownLength};
    match error {
        Overflow { limit } | OverflowKnownLength { limit, .. } => too_large(*limit),
        // serde names the place and what it expected; strings it quotes are field names or enum values of
        // the caller's own request.
        other => ApiError::new(
            ErrorKind::InvalidRequest,
            format!("the body cannot be read: {other}"),
        )
        .with_code(code::INVALID_JSON),
    }
}

#[derive(Clone)]
struct Observed {
    service: &'static str,
    requests: IntCounterVec,
    seconds: HistogramVec,
}

async fn observe(
    observed: Observed,
    request: ServiceRequest,
    next: Next<impl MessageBody + 'static>,
) -> Result<ServiceResponse<impl MessageBody>, actix_web::Error> {
    let started = Instant::now();
    let busy = request.conn_data::<Connection>().map(Connection::busy);
    let identity = request
        .headers()
        .get("x-request-id")
        .and_then(|value| value.to_str().ok())
        .filter(|text| !text.is_empty() && text.len() <= 128)
        .map(str::to_owned)
        .unwrap_or_else(random_id);
    request
        .extensions_mut()
        .insert(RequestIdentity(identity.clone()));
    let span = tracing::info_span!(
        "request",
        otel.name = format!(
            "{} {} {}",
            observed.service,
            request.method(),
            request.path()
        ),
        otel.kind = "server",
        request_id = identity,
    );
    let parent = TraceContextPropagator::new().extract(&Headers(request.headers()));
    // Fails only where no OpenTelemetry layer is installed, and then there is no trace to join.
    let _ = span.set_parent(parent);
    let outcome = next.call(request).instrument(span).await;
    if let Ok(response) = &outcome {
        let route = response
            .request()
            .match_pattern()
            .unwrap_or_else(|| "unmatched".to_owned());
        let status = response.status().as_u16().to_string();
        observed
            .requests
            .with_label_values(&[observed.service, &route, &status])
            .inc();
        observed
            .seconds
            .with_label_values(&[observed.service, &route])
            .observe(started.elapsed().as_secs_f64());
    }
    outcome.map(|response| {
        let mut response = with_words(response.map_into_boxed_body());
        if let Ok(value) = HeaderValue::from_str(&identity) {
            response
                .headers_mut()
                .insert(HeaderName::from_static("x-request-id"), value);
        }
        let closes = response.response().head().connection_type() == ConnectionType::Close;
        let busy = busy.map(|busy| busy.closing(closes));
        response.map_body(|_, body| BusyBody::new(body, busy))
    })
}

/// The framework refuses a route's other methods without a word, though it lists those that there are.
fn with_words(response: ServiceResponse) -> ServiceResponse {
    let status = response.status();
    if status != StatusCode::METHOD_NOT_ALLOWED {
        return response;
    }
    let allowed = response.headers().get(ALLOW).cloned();
    let message = match allowed.as_ref().and_then(|allowed| allowed.to_str().ok()) {
        Some(allowed) => format!("this route does not take this method; it takes {allowed}"),
        None => "this route does not take this method".to_owned(),
    };
    let error = ApiError::new(ErrorKind::MethodNotAllowed, message).with_code("method_not_allowed");
    let mut refused = HttpError(error).error_response();
    if let Some(allowed) = allowed {
        refused.headers_mut().insert(ALLOW, allowed);
    }
    response.into_response(refused)
}

fn random_id() -> String {
    match random::u128() {
        Ok(id) => format!("req_{id:032x}"),
        Err(_) => "req_unknown".to_owned(),
    }
}

struct Headers<'a>(&'a HeaderMap);

impl Extractor for Headers<'_> {
    fn get(&self, key: &str) -> Option<&str> {
        self.0.get(key).and_then(|value| value.to_str().ok())
    }

    fn keys(&self) -> Vec<&str> {
        self.0.keys().map(|name| name.as_str()).collect()
    }
}
