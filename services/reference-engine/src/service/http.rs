//! The engine's HTTP listener: thin handlers over [`EngineHandle`].

use std::net::SocketAddr;

use actix_web::HttpResponse;
use actix_web::web::{self, Data, Json};
use refrain_protocol::engine::{
    AbortRequest, CloseRequest, DetokenizeResponse, EngineCapabilities, EngineLoad, StepRequest,
    StepResponse, TokenizeRequest, TokensBody,
};
use refrain_protocol::engine_order::{EngineOrder, EngineOrderReply};
use refrain_protocol::forgetting::{ForgetTenant, TenantForgotten};
use refrain_protocol::scheduling::KvReport;
use refrain_protocol::token_body::decode_token_body;
use refrain_service_kit::http::{
    HttpResult, RawBody, RouteRoles, ServeOptions, Server, get, mesh_only, post, serve,
};
use refrain_service_kit::mesh::{MeshAuth, MeshRole};
use refrain_service_kit::telemetry::Metrics;

use super::handle::EngineHandle;
use super::pool::{BlocksRequest, encode_answer};
use crate::config::EngineConfig;

/// The roles that may call each route.
const ROLES: &RouteRoles = &[
    ("/engine/v1/capabilities", &[MeshRole::Worker]),
    ("/engine/v1/load", &[MeshRole::Worker]),
    ("/engine/v1/kv", &[MeshRole::Worker]),
    ("/engine/v1/kv/blocks", &[MeshRole::Engine]),
    ("/engine/v1/step", &[MeshRole::Worker]),
    ("/engine/v1/close", &[MeshRole::Worker]),
    ("/engine/v1/abort", &[MeshRole::Worker]),
    ("/engine/v1/order", &[MeshRole::Worker]),
    ("/engine/v1/forget", &[MeshRole::Worker]),
    ("/engine/v1/tokenize", &[MeshRole::Worker]),
    ("/engine/v1/detokenize", &[MeshRole::Worker]),
];

/// Starts the listener.
pub(super) fn listen(
    listen: SocketAddr,
    config: &EngineConfig,
    handle: &EngineHandle,
    mesh: MeshAuth,
    metrics: &Metrics,
) -> anyhow::Result<Server> {
    let options = ServeOptions {
        service: "reference-engine",
        listen,
        threads: config.http_threads,
        body_bytes_max: config.body_bytes_max,
        connections_max: config.connections_max,
        http: config.http.clone(),
    };
    let (ready, routed) = (handle.clone(), handle.clone());
    let readiness = std::sync::Arc::new(move || ready.ready());
    serve(options, metrics, readiness, move |app| {
        app.app_data(Data::new(routed.clone())).service(
            web::scope("/engine/v1")
                .wrap(mesh_only(mesh.clone(), ROLES))
                .service(get("/capabilities", capabilities))
                .service(get("/load", load))
                .service(get("/kv", kv))
                .service(post("/kv/blocks", kv_blocks))
                .service(post("/step", step))
                .service(post("/close", close))
                .service(post("/abort", abort))
                .service(post("/order", order))
                .service(post("/forget", forget))
                .service(post("/tokenize", tokenize))
                .service(post("/detokenize", detokenize)),
        );
    })
}

async fn capabilities(engine: Data<EngineHandle>) -> Json<EngineCapabilities> {
    Json(engine.capabilities())
}

async fn load(engine: Data<EngineHandle>) -> Json<EngineLoad> {
    Json(engine.load())
}

async fn kv(engine: Data<EngineHandle>) -> HttpResult<Json<KvReport>> {
    Ok(Json(engine.kv_report().await?))
}

/// Blocks for another engine. An engine without a pool has none.
async fn kv_blocks(
    engine: Data<EngineHandle>,
    request: Json<BlocksRequest>,
) -> HttpResult<HttpResponse> {
    let bytes = match engine.block_server() {
        Some(server) => server.answer(&request).await?,
        None => encode_answer(0, &[]),
    };
    Ok(HttpResponse::Ok()
        .content_type("application/octet-stream")
        .body(bytes))
}

/// A step, whose tokens may stand behind its JSON.
async fn step(
    engine: Data<EngineHandle>,
    RawBody(body): RawBody,
) -> HttpResult<Json<StepResponse>> {
    let request: StepRequest = decode_token_body(&body)?;
    drop(body);
    Ok(Json(engine.step(request).await?))
}

async fn close(engine: Data<EngineHandle>, request: Json<CloseRequest>) -> HttpResult<Json<()>> {
    Ok(Json(engine.close(request.into_inner()).await?))
}

async fn abort(engine: Data<EngineHandle>, request: Json<AbortRequest>) -> HttpResult<Json<()>> {
    Ok(Json(engine.abort(request.into_inner().sessions).await?))
}

async fn order(
    engine: Data<EngineHandle>,
    order: Json<EngineOrder>,
) -> HttpResult<Json<EngineOrderReply>> {
    Ok(Json(engine.order(order.into_inner()).await?))
}

async fn forget(
    engine: Data<EngineHandle>,
    order: Json<ForgetTenant>,
) -> HttpResult<Json<TenantForgotten>> {
    Ok(Json(engine.forget_tenant(order.into_inner()).await?))
}

async fn tokenize(
    engine: Data<EngineHandle>,
    request: Json<TokenizeRequest>,
) -> HttpResult<Json<TokensBody>> {
    Ok(Json(engine.tokenize(request.into_inner()).await?))
}

async fn detokenize(
    engine: Data<EngineHandle>,
    request: Json<TokensBody>,
) -> HttpResult<Json<DetokenizeResponse>> {
    Ok(Json(engine.detokenize(request.into_inner()).await?))
}
