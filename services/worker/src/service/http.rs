//! The worker's internal listener.

use std::net::SocketAddr;
use std::time::Duration;

use actix_web::HttpResponse;
use actix_web::web::{self, Data, Json};
use bytes::Bytes;
use futures_util::StreamExt;
use refrain_protocol::chunk::{ChunkCut, ChunkEvent, ChunkRequest};
use refrain_protocol::engine_order::{EngineOrder, EngineOrderReply};
use refrain_protocol::forgetting::{ForgetTenant, TenantForgotten};
use refrain_protocol::scheduling::WorkerDrain;
use refrain_protocol::token_body::decode_token_body;
use refrain_protocol::{ApiError, ErrorKind};
use refrain_rpc::Worker;
use refrain_service_kit::http::{
    HttpResult, ListenerConfig, RawBody, Readiness, RouteRoles, ServeOptions, Server, get,
    mesh_only, post, serve as listen_on,
};
use refrain_service_kit::mesh::{MeshAuth, MeshRole};
use refrain_service_kit::telemetry::Metrics;

use super::keep_alive::KeepAlive;
use super::late_worker::LateWorker;
use crate::engine::WorkerEngine;

/// Maximum number of connections: one per running chunk of many gateways, and some for metrics.
const CONNECTIONS_MAX: usize = 4096;
/// Number of listener threads. One is enough: it parses chunk requests and relays tokens, and drafts are proposed
/// elsewhere.
const HTTP_THREADS: usize = 1;
/// Largest request body, bytes: a context of a million tokens, also as JSON.
const BODY_BYTES_MAX: usize = 8 << 20;

/// The roles that may call each route.
const ROLES: &RouteRoles = &[
    ("/internal/v1/chunk", &[MeshRole::Gateway]),
    ("/internal/v1/cut", &[MeshRole::Gateway]),
    ("/internal/v1/drain", &[MeshRole::Operator]),
    ("/internal/v1/order", &[MeshRole::Gateway]),
    ("/internal/v1/forget", &[MeshRole::Operator]),
];

/// Starts the listener.
pub(crate) fn serve(
    listen: SocketAddr,
    http: ListenerConfig,
    worker: LateWorker,
    auth: &MeshAuth,
    readiness: Readiness,
    metrics: &Metrics,
) -> anyhow::Result<Server> {
    let options = ServeOptions {
        service: "worker",
        listen,
        threads: HTTP_THREADS,
        body_bytes_max: BODY_BYTES_MAX,
        connections_max: CONNECTIONS_MAX,
        http,
    };
    let auth = auth.clone();
    listen_on(options, metrics, readiness, move |app| {
        app.app_data(Data::new(worker.clone()))
            .service(get("/engine_metrics", engine_metrics))
            .service(
                web::scope("/internal/v1")
                    .wrap(mesh_only(auth.clone(), ROLES))
                    .service(post("/chunk", chunk))
                    .service(post("/cut", cut))
                    .service(post("/drain", drain))
                    .service(post("/order", order))
                    .service(post("/forget", forget)),
            );
    })
}

async fn chunk(worker: Data<LateWorker>, RawBody(body): RawBody) -> HttpResult<HttpResponse> {
    let request: ChunkRequest = decode_token_body(&body)?;
    drop(body);
    let alive_within = request.alive_within_ms.map(Duration::from_millis);
    let events = worker.get()?.chunk(request).await?;
    Ok(HttpResponse::Ok()
        .content_type("application/x-ndjson")
        .streaming(KeepAlive::new(events.map(line), alive_within)))
}

/// Serves the engine's own metrics, so that a scraper of this listener need not reach the engine.
async fn engine_metrics(worker: Data<LateWorker>) -> HttpResult<HttpResponse> {
    let page = match &worker.get()?.parts.engine {
        WorkerEngine::Streaming(engine) => engine.metrics().await?,
        WorkerEngine::Verifying(_) => {
            let message = "this worker's engine is a service of the mesh; scrape its own /metrics";
            return Err(ApiError::new(ErrorKind::NotFound, message).into());
        }
    };
    Ok(HttpResponse::Ok()
        .content_type("text/plain; version=0.0.4; charset=utf-8")
        .body(page))
}

async fn cut(worker: Data<LateWorker>, cut: Json<ChunkCut>) -> HttpResult<Json<()>> {
    Ok(Json(worker.get()?.cut(cut.into_inner()).await?))
}

async fn drain(worker: Data<LateWorker>, order: Json<WorkerDrain>) -> HttpResult<Json<()>> {
    Ok(Json(worker.get()?.drain(order.into_inner()).await?))
}

async fn order(
    worker: Data<LateWorker>,
    order: Json<EngineOrder>,
) -> HttpResult<Json<EngineOrderReply>> {
    Ok(Json(worker.get()?.order(order.into_inner()).await?))
}

async fn forget(
    worker: Data<LateWorker>,
    order: Json<ForgetTenant>,
) -> HttpResult<Json<TenantForgotten>> {
    Ok(Json(worker.get()?.forget_tenant(order.into_inner()).await?))
}

/// An event as a line of JSON.
fn line(event: Result<ChunkEvent, ApiError>) -> Result<Bytes, actix_web::Error> {
    let mut line = match event {
        Ok(event) => serde_json::to_vec(&event)?,
        Err(error) => serde_json::to_vec(&serde_json::json!({ "error": error }))?,
    };
    line.push(b'\n');
    Ok(line.into())
}
