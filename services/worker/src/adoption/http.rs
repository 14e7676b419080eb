//! The listener for gateways that pass engines on.

use std::net::SocketAddr;
use std::sync::Arc;

use actix_web::web::{self, Data, Json};
use refrain_protocol::adoption::{AdoptRequest, AdoptedEngine, AdopterReport, ReleaseRequest};
use refrain_rpc::EngineAdopter;
use refrain_service_kit::http::{
    HttpResult, ListenerConfig, RouteRoles, ServeOptions, Server, get, mesh_only, post,
    serve as listen_on,
};
use refrain_service_kit::mesh::{MeshAuth, MeshRole};
use refrain_service_kit::telemetry::Metrics;

use super::adopter::Adopter;

/// Maximum number of connections: some gateways, and a scraper of metrics.
const CONNECTIONS_MAX: usize = 256;
/// Largest request body, bytes.
const BODY_BYTES_MAX: usize = 1 << 16;

/// The roles that may call each route.
const ROLES: &RouteRoles = &[
    (
        "/internal/v1/engines",
        &[MeshRole::Gateway, MeshRole::Operator],
    ),
    ("/internal/v1/engines/adopt", &[MeshRole::Gateway]),
    ("/internal/v1/engines/release", &[MeshRole::Gateway]),
];

/// Starts the listener.
pub(super) fn serve(
    listen: SocketAddr,
    http: ListenerConfig,
    adopter: Adopter,
    auth: MeshAuth,
    metrics: &Metrics,
) -> anyhow::Result<Server> {
    let options = ServeOptions {
        service: "worker",
        listen,
        threads: 1,
        body_bytes_max: BODY_BYTES_MAX,
        connections_max: CONNECTIONS_MAX,
        http,
    };
    let ready = adopter.clone();
    let readiness = Arc::new(move || ready.readiness());
    listen_on(options, metrics, readiness, move |app| {
        app.app_data(Data::new(adopter.clone())).service(
            web::scope("/internal/v1")
                .wrap(mesh_only(auth.clone(), ROLES))
                .service(get("/engines", report))
                .service(post("/engines/adopt", adopt))
                .service(post("/engines/release", release)),
        );
    })
}

async fn adopt(
    adopter: Data<Adopter>,
    request: Json<AdoptRequest>,
) -> HttpResult<Json<AdoptedEngine>> {
    Ok(Json(adopter.adopt(request.into_inner()).await?))
}

async fn release(
    adopter: Data<Adopter>,
    request: Json<ReleaseRequest>,
) -> HttpResult<Json<AdoptedEngine>> {
    Ok(Json(adopter.release(request.into_inner()).await?))
}

async fn report(adopter: Data<Adopter>) -> HttpResult<Json<AdopterReport>> {
    Ok(Json(adopter.report().await?))
}
