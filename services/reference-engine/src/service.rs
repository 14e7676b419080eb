//! The engine behind HTTP: thin handlers over [`EngineHandle`].

use std::net::SocketAddr;

use actix_web::web::{self, Data, Json};
use refrain_protocol::engine::{
    AbortRequest, CloseRequest, DetokenizeResponse, EngineCapabilities, EngineLoad, StepRequest,
    StepResponse, TokenizeRequest, TokensBody,
};
use refrain_service_kit::http::{HttpResult, ServeOptions, Server, get, mesh_only, post, serve};
use refrain_service_kit::mesh::MeshAuth;
use refrain_service_kit::telemetry::Metrics;

use crate::config::EngineConfig;
use crate::handle::EngineHandle;

/// A running engine, with its listener if it has one.
pub struct Running {
    handle: EngineHandle,
    server: Option<Server>,
}

/// Loads the model, starts its thread and, if `config.listen` says so, the listener. Routes want the mesh's
/// secret; `/healthz`, `/readyz` and `/metrics` do not.
///
/// # Errors
/// A model that cannot be loaded, an address that cannot be bound, metrics that are registered already.
pub async fn start(
    config: EngineConfig,
    mesh: MeshAuth,
    metrics: Metrics,
) -> anyhow::Result<Running> {
    let handle = {
        let (config, metrics) = (config.clone(), metrics.clone());
        // Reading and packing weights takes seconds for a large model.
        tokio::task::spawn_blocking(move || EngineHandle::start(&config, &metrics)).await??
    };
    let server = match config.listen {
        None => None,
        Some(listen) => Some(listen_on(listen, &config, &handle, mesh, &metrics)?),
    };
    Ok(Running { handle, server })
}

impl Running {
    /// The engine, for callers in this process.
    pub fn handle(&self) -> &EngineHandle {
        &self.handle
    }

    /// Where it listens, if it does.
    pub fn addr(&self) -> Option<SocketAddr> {
        self.server.as_ref().map(Server::addr)
    }

    /// Lets requests that are under way finish, then ends the model's thread.
    pub async fn stop(self) {
        if let Some(server) = &self.server {
            server.stop(true).await;
        }
        let handle = self.handle;
        if let Err(error) = tokio::task::spawn_blocking(move || handle.shutdown()).await {
            tracing::error!(%error, "engine did not shut down");
        }
    }
}

fn listen_on(
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
    };
    let (ready, routed) = (handle.clone(), handle.clone());
    let readiness = std::sync::Arc::new(move || ready.ready());
    serve(options, metrics, readiness, move |app| {
        app.app_data(Data::new(routed.clone())).service(
            web::scope("/engine/v1")
                .wrap(mesh_only(mesh.clone()))
                .service(get("/capabilities", capabilities))
                .service(get("/load", load))
                .service(post("/step", step))
                .service(post("/close", close))
                .service(post("/abort", abort))
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

async fn step(
    engine: Data<EngineHandle>,
    request: Json<StepRequest>,
) -> HttpResult<Json<StepResponse>> {
    Ok(Json(engine.step(request.into_inner()).await?))
}

async fn close(engine: Data<EngineHandle>, request: Json<CloseRequest>) -> HttpResult<Json<()>> {
    Ok(Json(engine.close(request.into_inner()).await?))
}

async fn abort(engine: Data<EngineHandle>, request: Json<AbortRequest>) -> HttpResult<Json<()>> {
    Ok(Json(engine.abort(request.into_inner().sessions).await?))
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
