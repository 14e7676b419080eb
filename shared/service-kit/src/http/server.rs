//! The listener: health, readiness, metrics, request ids, trace context, limits, then the service's routes.

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::{Duration, Instant};

use actix_cors::Cors;
use actix_http::error::DispatchError;
use actix_http::{ConnectionType, HttpService};
use actix_service::{IntoServiceFactory, ServiceFactoryExt, fn_service, map_config};
use actix_web::body::MessageBody;
use actix_web::dev::{AppConfig, Handler, ServerHandle, ServiceRequest, ServiceResponse};
use actix_web::http::StatusCode;
use actix_web::http::header::{ALLOW, HeaderMap, HeaderName, HeaderValue};
use actix_web::middleware::{Condition, Next, from_fn};
use actix_web::{
    App, FromRequest, HttpMessage as _, HttpRequest, HttpResponse, Resource, Responder,
    ResponseError, web,
};
use opentelemetry::propagation::{Extractor, TextMapPropagator};
use opentelemetry_sdk::propagation::TraceContextPropagator;
use refrain_protocol::error::code;
use refrain_protocol::{ApiError, ErrorKind};
use tokio::net::{TcpSocket, TcpStream};
use tokio::task::AbortHandle;
use tracing::Instrument;
use tracing_opentelemetry::OpenTelemetrySpanExt;

use super::HttpError;
use super::access::{AccessLine, AccessNote, ErrorNames};
use super::body::{BodyBytesMax, BodyDeadline, late, too_large};
use super::connection_table::AddressLimit;
use super::connections::{ConnectionGuard, ConnectionLimits, Connections, TrackedBody};
use super::listener::ListenerConfig;
use super::pages::{PageGuard, refuse_pages};
use super::stream::ListenerStream;
use crate::actors::{self, Sentinel};
use crate::descriptors;
use crate::random;
use crate::telemetry::{HttpMetrics, Metrics};
use crate::tls::ServerTls;

/// Seconds that a graceful stop may take before connections are cut.
const SHUTDOWN_TIMEOUT_S: u64 = 30;

/// How long a connection without requests stays open. The clients of this project, and most proxies (60 s), keep it
/// for a shorter time, so it is always the caller who closes. A request that is sent while the listener closes would
/// be lost. A graceful stop does not wait for such connections.
pub(super) const KEEP_ALIVE: Duration = Duration::from_secs(120);

/// How long a connection that is being closed may take to read its last response.
const DISCONNECT_TIMEOUT: Duration = Duration::from_secs(1);

/// Connections that wait in the system to be accepted.
const BACKLOG: u32 = 2048;

/// Connections that a thread refuses with a reason at the same time. Further ones wait.
const REFUSED_MAX: usize = 32;

/// Whether the service can do its work; `Err` holds the reason why it cannot.
pub type Readiness = Arc<dyn Fn() -> Result<(), String> + Send + Sync>;

/// Settings of a listener.
#[derive(Clone, Debug)]
pub struct ServeOptions {
    /// The service's name in metrics and traces.
    pub service: &'static str,
    /// Address to listen on; port 0 takes a free one.
    pub listen: SocketAddr,
    /// Threads that serve requests.
    pub threads: usize,
    /// Largest request body, bytes.
    pub body_bytes_max: usize,
    /// Maximum number of connections at once, of all threads together. The limit is lower if the process may not open
    /// as many files.
    pub connections_max: usize,
    /// The certificate and the time limits.
    pub http: ListenerConfig,
}

/// Settings of a listener for clients outside the mesh.
#[derive(Clone, Debug, Default)]
pub struct PublicOptions {
    /// The limit on the connections of one address.
    pub address: AddressLimit,
    /// Origins whose web pages may call, or `*` for all. Empty: browsers let no page of another origin read answers.
    pub cors_origins: Vec<String>,
    /// Whether each request leaves a line in the log.
    pub logs_access: bool,
    /// Whether there is no `/metrics`: the names of tenants, and how much they ask, are not for strangers.
    pub hides_metrics: bool,
    /// The guard against web pages of others, on all routes. It is for listeners whose callers are no pages.
    pub page_guard: Option<PageGuard>,
}

/// The handle of a running listener.
pub struct Server {
    addr: SocketAddr,
    handle: ServerHandle,
    /// The task that runs the listener.
    task: AbortHandle,
}

impl Server {
    /// The address that it listens on.
    pub fn addr(&self) -> SocketAddr {
        self.addr
    }

    /// Stops the listener. With `graceful`, responses in flight run to their end first.
    pub async fn stop(&self, graceful: bool) {
        self.handle.stop(graceful).await;
    }

    /// Stops the listener and waits at most `grace` for responses in flight. The connections of the others are cut
    /// when the process ends, or `SHUTDOWN_TIMEOUT_S` after the stop began.
    pub async fn stop_within(&self, grace: Duration) {
        if tokio::time::timeout(grace, self.stop(true)).await.is_err() {
            // While the listener waits for its threads, it takes no other command.
            self.task.abort();
        }
    }
}

/// Starts a listener for the services of the mesh. `configure` adds the routes of the service to the app of each
/// thread.
///
/// # Errors
/// The address cannot be bound, or the files of the certificate cannot be used.
pub fn serve<F>(
    options: ServeOptions,
    metrics: &Metrics,
    readiness: Readiness,
    configure: F,
) -> anyhow::Result<Server>
where
    F: Fn(&mut web::ServiceConfig) + Clone + Send + 'static,
{
    let internal = PublicOptions::default();
    serve_public(options, internal, metrics, readiness, configure)
}

/// Starts a listener for clients outside the mesh: as [`serve`], but with limits and headers for strangers.
///
/// # Errors
/// As [`serve`].
pub fn serve_public<F>(
    options: ServeOptions,
    public: PublicOptions,
    metrics: &Metrics,
    readiness: Readiness,
    configure: F,
) -> anyhow::Result<Server>
where
    F: Fn(&mut web::ServiceConfig) + Clone + Send + 'static,
{
    let observed = Observed {
        service: options.service,
        metrics: metrics.http().clone(),
        logs_access: public.logs_access,
        body_time_max: options.http.body_time_max(),
    };
    let cors_origins = public.cors_origins;
    let hides_metrics = public.hides_metrics;
    let page_guard = public.page_guard;
    let readiness: Readiness = Arc::new(move || actors::all_run().and_then(|()| readiness()));
    metrics.watch(options.service, &readiness);
    let metrics = metrics.clone();
    let body_bytes_max = options.body_bytes_max;
    let connections_max = options.connections_max.min(descriptors::callers_max());
    if connections_max < options.connections_max {
        tracing::info!(
            service = options.service,
            connections_max,
            configured = options.connections_max,
            "the limit on open files allows fewer connections than configured; raise it (ulimit -n)"
        );
    }
    let http = options.http;
    let tls = http.tls.as_ref();
    let tls = tls
        .map(|tls| ServerTls::open(options.service, tls, &metrics))
        .transpose()?;
    let connections = Connections::new(
        options.service,
        ConnectionLimits {
            all_max: connections_max,
            address: public.address,
            head_time_max: http.head_time_max(),
            is_tls: tls.is_some(),
        },
        &metrics,
    );
    let head_time_max = http.head_time_max();
    let threads = options.threads.max(1);
    let builder = actix_server::Server::build();
    let shutdown = builder.graceful_shutdown_signal();
    let app = move || {
        let observed = observed.clone();
        let shown = (!hides_metrics).then(|| metrics.clone());
        let readiness = readiness.clone();
        let has_guard = page_guard.is_some();
        let page_guard = page_guard.clone().unwrap_or_default();
        App::new()
            .wrap(Condition::new(
                !cors_origins.is_empty(),
                cors(&cors_origins),
            ))
            .wrap(Condition::new(
                has_guard,
                from_fn(move |request, next| refuse_pages(page_guard.clone(), request, next)),
            ))
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
            .service(get_or_head("/healthz", || HttpResponse::Ok().body("ok\n")))
            .service(get_or_head("/readyz", move || match readiness() {
                Ok(()) => HttpResponse::Ok().body("ready\n"),
                Err(reason) => HttpResponse::ServiceUnavailable().body(format!("{reason}\n")),
            }))
            .configure(move |app| {
                if let Some(metrics) = shown {
                    app.service(get_or_head("/metrics", move || {
                        HttpResponse::Ok()
                            .content_type("text/plain; version=0.0.4")
                            .body(metrics.render())
                    }));
                }
            })
            .configure(configure.clone())
            .default_service(web::to(unknown_route))
    };
    // This is what the server of actix-web does, except for the stream below HTTP.
    let service = move || {
        let (connections, tls) = (connections.clone(), tls.clone());
        let shutdown = shutdown.clone();
        let app = app().into_factory();
        let http = HttpService::build()
            .graceful_shutdown_signal(move || {
                let shutdown = shutdown.clone();
                async move { shutdown.notified().await }
            })
            .keep_alive(KEEP_ALIVE)
            .client_request_timeout(head_time_max)
            .client_disconnect_timeout(DISCONNECT_TIMEOUT)
            // A caller that closed its side is gone, so its handler is dropped with all that it waits for.
            .h1_allow_half_closed(false)
            .on_connect_ext(|stream: &ListenerStream, data| {
                data.insert(stream.connection());
            })
            .h1(map_config(
                app.map_err(|error| error.error_response()),
                |()| AppConfig::default(),
            ));
        fn_service(move |stream: TcpStream| {
            let (connections, tls) = (connections.clone(), tls.clone());
            async move {
                let stream = connect(stream, &connections, tls, head_time_max).await;
                stream.map_err(DispatchError::Io)
            }
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
            "the {} cannot listen on {}: {error}",
            options.service,
            options.listen
        )
    })?;
    let running = server.run();
    let handle = running.handle();
    // Its threads outlive it, and hold the address, so it cannot begin anew.
    let sentinel = Sentinel::new("listener");
    let listener = async move {
        let _sentinel = sentinel;
        if let Err(error) = running.await {
            tracing::error!(%error, "the HTTP listener failed");
        }
    };
    let task = tokio::spawn(listener);
    Ok(Server {
        addr,
        handle,
        task: task.abort_handle(),
    })
}

/// Admits a connection, and makes it a TLS connection if the listener has a certificate.
async fn connect(
    stream: TcpStream,
    connections: &Arc<Connections>,
    tls: Option<ServerTls>,
    handshake_time_max: Duration,
) -> std::io::Result<(ListenerStream, Option<SocketAddr>)> {
    let (stream, peer) = connections.admit(stream).await?;
    let stream = match tls {
        None => ListenerStream::Plain(stream),
        Some(tls) => {
            let accepted = tls.accept(stream, handshake_time_max).await?;
            ListenerStream::Tls(Box::new(accepted))
        }
    };
    Ok((stream, peer))
}

fn bind(listen: SocketAddr) -> std::io::Result<std::net::TcpListener> {
    let socket = match listen {
        SocketAddr::V4(_) => TcpSocket::new_v4(),
        SocketAddr::V6(_) => TcpSocket::new_v6(),
    }?;
    socket.set_reuseaddr(true)?;
    socket.bind(listen)?;
    // The standard library would ask for a backlog of 128.
    socket.listen(BACKLOG)?.into_std()
}

/// Longest path that the error of an unknown route repeats, characters.
const SHOWN_PATH_MAX: usize = 200;

async fn unknown_route(request: HttpRequest) -> Result<HttpResponse, HttpError> {
    let path: String = request.path().chars().take(SHOWN_PATH_MAX).collect();
    let message = format!("no such route: {} {path}", request.method());
    let error = ApiError::new(ErrorKind::NotFound, message);
    Err(error.with_code("unknown_url").into())
}

/// Seconds for which a browser remembers the answer to a preflight.
const PREFLIGHT_AGE_S: usize = 3_600;

/// Lets the web pages of these origins call. Keys come in headers, so browsers need send no cookies.
fn cors(origins: &[String]) -> Cors {
    let any = origins.iter().any(|origin| origin == "*");
    let cors = origins
        .iter()
        .filter(|origin| *origin != "*")
        .fold(Cors::default(), |cors, origin| cors.allowed_origin(origin));
    let cors = if any { cors.allow_any_origin() } else { cors };
    cors.allowed_methods(["GET", "POST", "DELETE", "OPTIONS"])
        .allow_any_header()
        .expose_any_header()
        .max_age(PREFLIGHT_AGE_S)
}

/// A route for GET. Unlike `Scope::route`, it answers other methods of the path with 405 instead of 404.
pub fn get<F, Args>(path: &str, handler: F) -> Resource
where
    F: Handler<Args>,
    Args: FromRequest + 'static,
    F::Output: Responder + 'static,
{
    web::resource(path).route(web::get().to(handler))
}

/// A route for POST. Unlike `Scope::route`, it answers other methods of the path with 405 instead of 404.
pub fn post<F, Args>(path: &str, handler: F) -> Resource
where
    F: Handler<Args>,
    Args: FromRequest + 'static,
    F::Output: Responder + 'static,
{
    web::resource(path).route(web::post().to(handler))
}

/// A route for GET and HEAD that needs no authentication.
fn get_or_head(path: &str, show: impl Fn() -> HttpResponse + Clone + 'static) -> Resource {
    let show = move || std::future::ready(show());
    // HEAD has the response of GET, whose body the HTTP stack then leaves out.
    web::resource(path)
        .route(web::get().to(show.clone()))
        .route(web::head().to(show))
}

fn json_error(error: &actix_web::error::JsonPayloadError) -> ApiError {
    use actix_web::error::JsonPayloadError::{Overflow, OverflowKnownLength, Payload};
    use actix_web::error::PayloadError;
    match error {
        Overflow { limit } | OverflowKnownLength { limit, .. } => too_large(*limit),
        // serde names the place and what it expected there. The strings that it quotes are field names or enum values
        // of the caller's own request.
        Payload(PayloadError::Io(error)) if error.kind() == std::io::ErrorKind::TimedOut => late(),
        other => ApiError::new(
            ErrorKind::InvalidRequest,
            format!("the body is not valid JSON for this call: {other}"),
        )
        .with_code(code::INVALID_JSON),
    }
}

/// The service and the metrics by which each thread observes requests.
#[derive(Clone)]
struct Observed {
    service: &'static str,
    metrics: Arc<HttpMetrics>,
    logs_access: bool,
    body_time_max: Duration,
}

async fn observe(
    observed: Observed,
    mut request: ServiceRequest,
    next: Next<impl MessageBody + 'static>,
) -> Result<ServiceResponse<impl MessageBody>, actix_web::Error> {
    let started = Instant::now();
    let busy = request
        .conn_data::<Arc<ConnectionGuard>>()
        .map(ConnectionGuard::busy);
    // The caller's id of the request, or a random one.
    let identity = request
        .headers()
        .get("x-request-id")
        .and_then(|value| value.to_str().ok())
        .filter(|text| !text.is_empty() && text.len() <= 128)
        .map_or_else(random_id, str::to_owned);
    let span = tracing::info_span!(
        "request",
        otel.name = format!(
            "{} {} {}",
            observed.service,
            request.method(),
            request.path()
        ),
        otel.kind = "server",
        otel.status_code = tracing::field::Empty,
        http.response.status_code = tracing::field::Empty,
        request_id = identity,
    );
    if request.headers().contains_key(TRACE_PARENT) {
        let parent = TraceContextPropagator::new().extract(&TraceHeaders(request.headers()));
        // This fails only if no OpenTelemetry layer is installed, and then there is no trace to join.
        let _ = span.set_parent(parent);
    }
    let mut access = observed.logs_access.then(|| {
        let note = AccessNote::read_at_end();
        request.extensions_mut().insert(note.clone());
        AccessLine::new(request.request(), identity.clone(), note, started)
    });
    let deadline = BodyDeadline::set(&mut request, started + observed.body_time_max);
    let outcome = next.call(request).instrument(span.clone()).await;
    let is_late = deadline.is_some_and(|deadline| deadline.has_passed());
    if is_late {
        observed
            .metrics
            .rejections
            .with_label_values(&[observed.service, "body_ms_max"])
            .inc();
    }
    if let Ok(response) = &outcome {
        let route = response
            .request()
            .match_pattern()
            .unwrap_or_else(|| "unmatched".to_owned());
        let status = response.status().as_u16();
        let error = response
            .response()
            .extensions()
            .get::<ErrorNames>()
            .cloned();
        if let Some(access) = &mut access {
            access.answered(route.clone(), status, error);
        }
        span.record("http.response.status_code", status);
        if status >= 500 {
            span.record("otel.status_code", "ERROR");
        }
        let status = status.to_string();
        observed
            .metrics
            .requests
            .with_label_values(&[observed.service, &route, &status])
            .inc();
        observed
            .metrics
            .seconds
            .with_label_values(&[observed.service, &route])
            .observe(started.elapsed().as_secs_f64());
    }
    outcome.map(|response| {
        let mut response = explain_method_not_allowed(response.map_into_boxed_body());
        if let Ok(value) = HeaderValue::from_str(&identity) {
            response
                .headers_mut()
                .insert(HeaderName::from_static("x-request-id"), value);
        }
        if is_late {
            // The rest of the body is not waited for.
            response
                .response_mut()
                .head_mut()
                .set_connection_type(ConnectionType::Close);
        }
        let closes = response.response().head().connection_type() == ConnectionType::Close;
        let busy = busy.map(|busy| busy.closing(closes));
        response.map_body(|_, body| TrackedBody::new(body, busy, access))
    })
}

/// Adds an error body to the framework's refusal of a method, which has only the list of allowed methods.
fn explain_method_not_allowed(response: ServiceResponse) -> ServiceResponse {
    let is_explained = !response.response().body().size().is_eof();
    if response.status() != StatusCode::METHOD_NOT_ALLOWED || is_explained {
        return response;
    }
    let allowed = response.headers().get(ALLOW).cloned();
    let message = match allowed.as_ref().and_then(|allowed| allowed.to_str().ok()) {
        Some(allowed) => format!("this route does not accept this method, only {allowed}"),
        None => "this route does not accept this method".to_owned(),
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

/// The header that names the trace of the caller.
const TRACE_PARENT: &str = "traceparent";

/// Headers that a trace context is read from.
struct TraceHeaders<'a>(&'a HeaderMap);

impl Extractor for TraceHeaders<'_> {
    fn get(&self, key: &str) -> Option<&str> {
        self.0.get(key).and_then(|value| value.to_str().ok())
    }

    fn keys(&self) -> Vec<&str> {
        self.0.keys().map(|name| name.as_str()).collect()
    }
}
