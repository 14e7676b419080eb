//! The scheduler for other processes: JSON over HTTP, for holders of the mesh secret only.
//!
//! A `lease` call stays open until its turn comes. When its caller hangs up, the listener drops the handler,
//! and with it the waiting call, which withdraws itself.

use actix_web::web::{self, Data, Json};
use refrain_clients::Scheduler as _;
use refrain_protocol::scheduling::{
    Heartbeat, HeartbeatReply, Lease, LeaseFinish, LeaseRequest, ServedModel,
};
use refrain_service_kit::http::{HttpResult, mesh_only};
use refrain_service_kit::mesh::MeshAuth;

use crate::dispatch::DispatchState;
use crate::handle::SchedulerHandle;

/// Adds the routes.
pub(crate) fn routes(app: &mut web::ServiceConfig, handle: SchedulerHandle, mesh: MeshAuth) {
    app.app_data(Data::new(handle));
    app.service(
        web::scope("/internal/v1")
            .wrap(mesh_only(mesh.clone()))
            .route("/lease", web::post().to(lease))
            .route("/finish", web::post().to(finish))
            .route("/heartbeat", web::post().to(heartbeat))
            .route("/models", web::get().to(models)),
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
) -> HttpResult<Json<Lease>> {
    Ok(Json(handle.lease(request.into_inner()).await?))
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
