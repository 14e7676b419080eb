//! The HTTP routes for other processes: JSON, for callers that hold the mesh secret or a credential of their role.
//!
//! A `lease` call stays open until its turn comes. Meanwhile the scheduler sends a line feed every second, so that
//! the caller can tell a long queue from a dead scheduler. When the caller hangs up, the listener drops the handler
//! or the body, which drops the pending call and so withdraws the request.

use std::convert::Infallible;

use actix_web::web::{self, Bytes, Data, Json};
use actix_web::{HttpRequest, HttpResponse};
use futures_util::stream::{self, Stream};
use refrain_protocol::ApiError;
use refrain_protocol::scheduling::{
    Heartbeat, HeartbeatReply, Lease, LeaseFinish, LeaseRequest, ServedModel, WorkerReport,
};
use refrain_rpc::{LEASE_ALIVE_EVERY, LeaseAnswer, Scheduler as _};
use refrain_service_kit::http::{HttpResult, RouteRoles, get, mesh_only, post};
use refrain_service_kit::mesh::{MeshAuth, MeshCaller, MeshRole};

use crate::dispatch::DispatchState;
use crate::handle::SchedulerHandle;

/// The roles that may call each route. A worker reports for itself only.
const ROLES: &RouteRoles = &[
    ("/internal/v1/lease", &[MeshRole::Gateway]),
    ("/internal/v1/finish", &[MeshRole::Gateway]),
    ("/internal/v1/heartbeat", &[MeshRole::Worker]),
    (
        "/internal/v1/models",
        &[MeshRole::Gateway, MeshRole::Operator],
    ),
    (
        "/internal/v1/workers",
        &[MeshRole::Gateway, MeshRole::Operator],
    ),
    ("/debug/state", &[MeshRole::Operator]),
];

/// Adds the routes to the listener's application.
pub(crate) fn routes(app: &mut web::ServiceConfig, handle: SchedulerHandle, mesh: MeshAuth) {
    app.app_data(Data::new(handle));
    app.service(
        web::scope("/internal/v1")
            .wrap(mesh_only(mesh.clone(), ROLES))
            .service(post("/lease", lease))
            .service(post("/finish", finish))
            .service(post("/heartbeat", heartbeat))
            .service(get("/models", models))
            .service(get("/workers", workers)),
    );
    // The state names tenants, so this route is for the mesh as well.
    app.service(
        web::resource("/debug/state")
            .wrap(mesh_only(mesh, ROLES))
            .route(web::get().to(observe)),
    );
}

async fn lease(
    handle: Data<SchedulerHandle>,
    request: Json<LeaseRequest>,
) -> HttpResult<HttpResponse> {
    let call = async move { handle.lease(request.into_inner()).await };
    let mut call = Box::pin(call);
    // An answer within this time can still set the HTTP status.
    if let Ok(answer) = tokio::time::timeout(LEASE_ALIVE_EVERY, &mut call).await {
        return Ok(HttpResponse::Ok().json(answer?));
    }
    Ok(HttpResponse::Ok()
        .content_type("application/json")
        .streaming(line_feeds_then_answer(call)))
}

/// Sends a line feed at regular intervals, and then the answer.
fn line_feeds_then_answer<C>(call: C) -> impl Stream<Item = Result<Bytes, Infallible>>
where
    C: Future<Output = Result<Lease, ApiError>> + Unpin,
{
    let line_feed = Bytes::from_static(b"\n");
    stream::unfold((Some(call), line_feed), |(call, line_feed)| async move {
        let mut call = call?;
        match tokio::time::timeout(LEASE_ALIVE_EVERY, &mut call).await {
            Err(_) => Some((Ok(line_feed.clone()), (Some(call), line_feed))),
            Ok(answer) => {
                let answer = match answer {
                    Ok(lease) => LeaseAnswer::Granted(lease),
                    Err(error) => LeaseAnswer::Refused { error },
                };
                // These types always serialize. An empty body would fail at the caller as a truncated answer.
                let bytes = serde_json::to_vec(&answer).unwrap_or_default();
                Some((Ok(Bytes::from(bytes)), (None, line_feed)))
            }
        }
    })
}

async fn finish(handle: Data<SchedulerHandle>, finish: Json<LeaseFinish>) -> HttpResult<Json<()>> {
    Ok(Json(handle.finish(finish.into_inner()).await?))
}

async fn heartbeat(
    handle: Data<SchedulerHandle>,
    heartbeat: Json<Heartbeat>,
    request: HttpRequest,
) -> HttpResult<Json<HeartbeatReply>> {
    MeshCaller::of(&request)?.check_name(MeshRole::Worker, &heartbeat.worker.0)?;
    Ok(Json(handle.heartbeat(heartbeat.into_inner()).await?))
}

async fn models(handle: Data<SchedulerHandle>) -> HttpResult<Json<Vec<ServedModel>>> {
    Ok(Json(handle.models().await?))
}

async fn workers(handle: Data<SchedulerHandle>) -> HttpResult<Json<Vec<WorkerReport>>> {
    Ok(Json(handle.workers().await?))
}

async fn observe(handle: Data<SchedulerHandle>) -> HttpResult<Json<DispatchState>> {
    Ok(Json(handle.observe().await?))
}
