//! The routes of acts on the mesh: workers drain, tenants' documents are erased, and the draft store is compacted.

use actix_web::web::{self, Data, Json, Path};
use actix_web::{HttpResponse, Resource};
use refrain_protocol::admin::EraseRequest;
use refrain_protocol::scheduling::WorkerDrain;
use refrain_protocol::{ApiError, ErrorKind};
use refrain_rpc::{Engines, Erasure, OtherPlaces};
use refrain_service_kit::http::{HttpResult, post};
use serde::Deserialize;
use serde_json::json;

use super::acts::audited;
use super::figure_sources::workers;
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
    let reports = workers(&*state.parts.scheduler).await?;
    let found = reports.into_iter().find(|worker| worker.worker.0 == id);
    let found = found.ok_or_else(|| {
        let message = format!("no worker {id} reports to the scheduler");
        ApiError::new(ErrorKind::NotFound, message)
    })?;
    let worker = state.parts.mesh.workers.at(&found.url);
    let what = match drains {
        true => format!("worker {id} drained"),
        false => format!("worker {id} put back to work"),
    };
    let act = async move { worker.drain(WorkerDrain { drains }).await };
    audited(state, operator, what, act).await?;
    Ok(HttpResponse::Ok().json(json!({"worker": id, "drains": drains})))
}

/// The body of an erasure.
#[derive(Clone, Default, Deserialize)]
#[serde(default, deny_unknown_fields)]
struct ErasureBody {
    tenant: String,
    model: Option<String>,
    session: Option<String>,
    from_ms: Option<u64>,
    until_ms: Option<u64>,
    /// Whether its usage, the responses that gateways stored, and what engines computed are erased as well.
    everything: bool,
}

impl ErasureBody {
    fn request(&self) -> EraseRequest {
        EraseRequest {
            tenant: Some(self.tenant.clone()),
            model: self.model.clone(),
            session: self.session.clone(),
            from_ms: self.from_ms,
            until_ms: self.until_ms,
            quarantines: false,
        }
    }

    fn check(&self) -> Result<(), ApiError> {
        if self.tenant.is_empty() {
            let message = "tenant: must be named; `refrain store erase` erases by other conditions";
            return Err(ApiError::invalid("tenant", message));
        }
        if self.everything && !self.request().is_of_whole_tenant() {
            let message = "everything: not together with model, session, from_ms or until_ms";
            return Err(ApiError::invalid("everything", message));
        }
        Ok(())
    }

    /// The act, for the audit log.
    fn description(&self) -> String {
        let tenant = &self.tenant;
        match (self.everything, self.request().is_of_whole_tenant()) {
            (true, _) => format!("everything of tenant {tenant} erased"),
            (false, true) => format!("all documents of tenant {tenant} erased"),
            (false, false) => format!("some documents of tenant {tenant} erased"),
        }
    }

    async fn carry_out(self, state: &AdminState) -> Result<Erasure, ApiError> {
        let mesh = &state.parts.mesh;
        let usage = mesh.usage.usage_replicas();
        let engines = Engines {
            scheduler: &*state.parts.scheduler,
            workers: &*mesh.workers,
        };
        let others = self.everything.then_some(OtherPlaces {
            usage: &usage,
            engines: Some(engines),
        });
        Erasure::carry_out(&*mesh.store, self.request(), others).await
    }
}

async fn erase(
    state: Data<AdminState>,
    operator: Operator,
    body: Json<ErasureBody>,
) -> HttpResult<HttpResponse> {
    let body = body.into_inner();
    body.check()?;
    let (what, admin) = (body.description(), state.clone());
    let act = async move { body.carry_out(&admin).await };
    Ok(HttpResponse::Ok().json(audited(state, operator, what, act).await?))
}

async fn compact(state: Data<AdminState>, operator: Operator) -> HttpResult<HttpResponse> {
    let store = state.parts.mesh.store.clone();
    let act = async move { store.compact().await };
    let what = "draft store compacted".to_owned();
    Ok(HttpResponse::Ok().json(audited(state, operator, what, act).await?))
}
