//! The scheduler for other processes: JSON over HTTP, for holders of the mesh secret only.
//!
//! A `lease` call stays open until its turn comes, and says meanwhile that its scheduler lives: a caller could not tell
//! one that has stopped from a long queue otherwise. When its caller hangs up, the listener drops the handler or the body,
//! and with it the waiting call, which withdraws itself.

use std::convert::Infallible;

use actix_web::HttpResponse;
use actix_web::web::{self, Bytes, Data, Json};
use futures_util::stream::{self, Stream};
use refrain_protocol::ApiError;
use refrain_protocol::scheduling::{
    Heartbeat, HeartbeatReply, Lease, LeaseFinish, LeaseRequest, ServedModel,
};
use refrain_rpc::{LEASE_ALIVE_EVERY, LeaseAnswer, Scheduler as _};
use refrain_service_kit::http::{HttpResult, get, mesh_only, post};
use refrain_service_kit::mesh::MeshAuth;

use crate::dispatch::DispatchState;
use crate::handle::SchedulerHandle;

/// Adds the routes.
pub(crate) fn routes(app: &mut web::ServiceConfig, handle: SchedulerHandle, mesh: MeshAuth) {
    app.app_data(Data::new(handle));
    app.service(
        web::scope("/internal/v1")
            .wrap(mesh_only(mesh.clone()))
            .service(post("/lease", lease))
            .service(post("/finish", finish))
            .service(post("/heartbeat", heartbeat))
            .service(get("/models", models)),
    );
    // It names tenants, so it is the mesh's own as well.
    app.service(
        web::resource("/debug/state")
            .wrap(mesh_only(mesh))
            .route(web::get().to(observe)),
    );
}

async fn lease(
    handle: Data<SchedulerHandle>,
    request: Json<LeaseRequest>,
) -> HttpResult<HttpResponse> {
    let call = async move { handle.lease(request.into_inner()).await };
    let mut call = Box::pin(call);
    // What is answered soon has a status of its own.
    if let Ok(answer) = tokio::time::timeout(LEASE_ALIVE_EVERY, &mut call).await {
        return Ok(HttpResponse::Ok().json(answer?));
    }
    Ok(HttpResponse::Ok()
        .content_type("application/json")
        .streaming(answer_or_alive(call)))
}

/// A line feed every so often, and then the answer.
fn answer_or_alive<C>(call: C) -> impl Stream<Item = Result<Bytes, Infallible>>
where
    C: Future<Output = Result<Lease, ApiError>> + Unpin,
{
    let alive = Bytes::from_static(b"\n");
    stream::unfold((Some(call), alive), |(call, alive)| async move {
        let mut call = call?;
        match tokio::time::timeout(LEASE_ALIVE_EVERY, &mut call).await {
            Err(_) => Some((Ok(alive.clone()), (Some(call), alive))),
            Ok(answer) => {
                let answer = match answer {
                    Ok(lease) => LeaseAnswer::Granted(lease),
                    Err(error) => LeaseAnswer::Refused { error },
                };
                // An answer that is cut short fails there as what it is.
                let bytes = serde_json::to_vec(&answer).unwrap_or_default();
                Some((Ok(Bytes::from(bytes)), (None, alive)))
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
) -> HttpResult<Json<HeartbeatReply>> {
    Ok(Json(handle.heartbeat(heartbeat.into_inner()).await?))
}

async fn models(handle: Data<SchedulerHandle>) -> HttpResult<Json<Vec<ServedModel>>> {
    Ok(Json(handle.models().await?))
}

async fn observe(handle: Data<SchedulerHandle>) -> HttpResult<Json<DispatchState>> {
    Ok(Json(handle.observe().await?))
}
