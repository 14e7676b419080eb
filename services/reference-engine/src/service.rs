//! The engine behind HTTP: thin handlers over [`EngineHandle`].

use std::net::SocketAddr;

use actix_web::{HttpRequest, HttpResponse, web};
use refrain_protocol::ApiError;
use refrain_protocol::engine::{
    AbortRequest, CloseRequest, DetokenizeResponse, EngineCapabilities, EngineLoad, StepRequest,
    StepResponse, TokenizeRequest, TokensBody,
};
use refrain_service_kit::http::{self, HttpResult, ServeOptions, Server};
use refrain_service_kit::mesh::MeshAuth;
use refrain_service_kit::telemetry::Metrics;
use serde::Serialize;

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

/// What handlers share.
#[derive(Clone)]
struct Shared {
    engine: EngineHandle,
    mesh: MeshAuth,
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
    let ready = handle.clone();
    let shared = web::Data::new(Shared {
        engine: handle.clone(),
        mesh,
    });
    let readiness = std::sync::Arc::new(move || ready.ready());
    http::serve(options, metrics, readiness, move |service| {
        service.app_data(shared.clone()).service(
            web::scope("/engine/v1")
                .route("/capabilities", web::get().to(capabilities))
                .route("/load", web::get().to(load))
                .route("/step", web::post().to(step))
                .route("/close", web::post().to(close))
                .route("/abort", web::post().to(abort))
                .route("/tokenize", web::post().to(tokenize))
                .route("/detokenize", web::post().to(detokenize)),
        );
    })
}

type State = web::Data<Shared>;

/// Reads the body only after the caller has shown the secret: nobody else can make the engine parse
/// megabytes.
async fn trusted<T: serde::de::DeserializeOwned + 'static>(
    state: &State,
    request: &HttpRequest,
    payload: web::Payload,
) -> Result<T, actix_web::Error> {
    use actix_web::FromRequest;
    checked(state, request)?;
    let body = web::Json::<T>::from_request(request, &mut payload.into_inner()).await?;
    Ok(body.into_inner())
}

fn checked(state: &State, request: &HttpRequest) -> HttpResult<()> {
    Ok(state.mesh.check(request)?)
}

/// The answer, or the error in the shape that all services use.
fn answer<T: Serialize>(result: Result<T, ApiError>) -> Result<HttpResponse, actix_web::Error> {
    Ok(HttpResponse::Ok().json(result.map_err(http::HttpError)?))
}

async fn capabilities(
    state: State,
    request: HttpRequest,
) -> HttpResult<web::Json<EngineCapabilities>> {
    checked(&state, &request)?;
    Ok(web::Json(state.engine.capabilities()))
}

async fn load(state: State, request: HttpRequest) -> HttpResult<web::Json<EngineLoad>> {
    checked(&state, &request)?;
    Ok(web::Json(state.engine.load()))
}

async fn step(
    state: State,
    request: HttpRequest,
    payload: web::Payload,
) -> Result<HttpResponse, actix_web::Error> {
    let body: StepRequest = trusted(&state, &request, payload).await?;
    let response: Result<StepResponse, ApiError> = state.engine.step(body).await;
    answer(response)
}

async fn close(
    state: State,
    request: HttpRequest,
    payload: web::Payload,
) -> Result<HttpResponse, actix_web::Error> {
    let body: CloseRequest = trusted(&state, &request, payload).await?;
    answer(state.engine.close(body).await)
}

async fn abort(
    state: State,
    request: HttpRequest,
    payload: web::Payload,
) -> Result<HttpResponse, actix_web::Error> {
    let body: AbortRequest = trusted(&state, &request, payload).await?;
    answer(state.engine.abort(body.sessions).await)
}

async fn tokenize(
    state: State,
    request: HttpRequest,
    payload: web::Payload,
) -> Result<HttpResponse, actix_web::Error> {
    let body: TokenizeRequest = trusted(&state, &request, payload).await?;
    let response: Result<TokensBody, ApiError> = state.engine.tokenize(body).await;
    answer(response)
}

async fn detokenize(
    state: State,
    request: HttpRequest,
    payload: web::Payload,
) -> Result<HttpResponse, actix_web::Error> {
    let body: TokensBody = trusted(&state, &request, payload).await?;
    let response: Result<DetokenizeResponse, ApiError> = state.engine.detokenize(body).await;
    answer(response)
}
