//! The routes of acts on the mesh: workers drain, tenants' documents are erased, and the draft store is compacted.

use actix_web::web::{self, Data, Json, Path};
use actix_web::{HttpResponse, Resource};
use refrain_protocol::admin::EraseRequest;
use refrain_protocol::scheduling::WorkerDrain;
use refrain_protocol::{ApiError, ErrorKind};
use refrain_service_kit::http::{HttpResult, post};
use serde_json::json;

use super::acts::audited;
use super::operators::Operator;
use super::state::AdminState;

/// `/admin/workers/{id}/drain`.
pub(super) fn drain() -> Resource {
    web::resource("/workers/{id}/drain")
        .route(web::post().to(begin_drain))
        .route(web::delete().to(end_drain))
}

/// `/admin/erasures`.
pub(super) fn erasures() -> Resource {
    post("/erasures", erase)
}

/// `/admin/compactions`.
pub(super) fn compactions() -> Resource {
    post("/compactions", compact)
}

async fn begin_drain(
    state: Data<AdminState>,
    operator: Operator,
    id: Path<String>,
) -> HttpResult<HttpResponse> {
    order(state, operator, id.into_inner(), true).await
}

async fn end_drain(
    state: Data<AdminState>,
    operator: Operator,
    id: Path<String>,
) -> HttpResult<HttpResponse> {
    order(state, operator, id.into_inner(), false).await
}

async fn order(
    state: Data<AdminState>,
    operator: Operator,
    id: String,
    drains: bool,
) -> HttpResult<HttpResponse> {
    let workers = state.figures.workers().await?;
    let found = workers.into_iter().find(|worker| worker.worker.0 == id);
    let found = found.ok_or_else(|| {
        let message = format!("no worker {id} reports to the scheduler");
        ApiError::new(ErrorKind::NotFound, message)
    })?;
    let worker = state.mesh.workers.at(&found.url);
    let what = match drains {
        true => format!("worker {id} drained"),
        false => format!("worker {id} put back to work"),
    };
    let act = async move { worker.drain(WorkerDrain { drains }).await };
    audited(state, operator, what, act).await?;
    Ok(HttpResponse::Ok().json(json!({"worker": id, "drains": drains})))
}

async fn erase(
    state: Data<AdminState>,
    operator: Operator,
    request: Json<EraseRequest>,
) -> HttpResult<HttpResponse> {
    let request = request.into_inner();
    let Some(tenant) = request.tenant.clone().filter(|name| !name.is_empty()) else {
        let message = "tenant: must be named; `refrain store erase` erases by other conditions";
        return Err(ApiError::invalid("tenant", message).into());
    };
    let part = match (&request.session, &request.model) {
        (None, None) if request.from_ms.or(request.until_ms).is_none() => "all documents",
        _ => "some documents",
    };
    let what = format!("{part} of tenant {tenant} erased");
    let store = state.mesh.store.clone();
    let act = async move { store.erase(request).await };
    Ok(HttpResponse::Ok().json(audited(state, operator, what, act).await?))
}

async fn compact(state: Data<AdminState>, operator: Operator) -> HttpResult<HttpResponse> {
    let store = state.mesh.store.clone();
    let act = async move { store.compact().await };
    let what = "draft store compacted".to_owned();
    Ok(HttpResponse::Ok().json(audited(state, operator, what, act).await?))
}
