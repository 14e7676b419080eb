//! `/admin/v1/*`: the calls of `refrain store` and `refrain usage`, which this gateway passes on to the draft store.
//!
//! Paths and bodies are those of the store itself, so one client serves for both. Each change has its lines in the
//! audit log, and so has the beginning of an export, since that reads outputs.

use actix_web::web::{self, Data, Json};
use actix_web::{HttpResponse, Scope};
use refrain_protocol::ApiError;
use refrain_protocol::admin::{
    CompactReply, ConfirmReply, ConfirmRequest, EraseReply, EraseRequest, ExportRequest,
    ImportRequest, VerifyReply,
};
use refrain_protocol::document::StoreStats;
use refrain_protocol::usage::{EraseUsageReply, EraseUsageRequest};
use refrain_rpc::{BINCODE_CONTENT_TYPE, UsageReplica, decode_bincode, encode_bincode};
use refrain_service_kit::http::{HttpResult, RawBody, get, post};
use serde::Serialize;

use super::acts::audited;
use super::operators::Operator;
use super::state::AdminState;

/// `/admin/v1`.
pub(super) fn calls() -> Scope {
    web::scope("/v1")
        .service(get("/stats", stats))
        .service(post("/import", import))
        .service(post("/export", export))
        .service(post("/verify", verify))
        .service(post("/compact", compact))
        .service(post("/erase", erase))
        .service(post("/confirm", confirm))
        .service(post("/usage/rows", usage_rows))
        .service(post("/usage/erase", erase_usage))
}

fn answer(message: &impl Serialize) -> HttpResult<HttpResponse> {
    let body = encode_bincode(message)?;
    Ok(HttpResponse::Ok()
        .content_type(BINCODE_CONTENT_TYPE)
        .body(body))
}

async fn stats(state: Data<AdminState>, _: Operator) -> HttpResult<Json<StoreStats>> {
    Ok(Json(state.parts.mesh.store.store_stats().await?))
}

async fn verify(state: Data<AdminState>, _: Operator) -> HttpResult<Json<VerifyReply>> {
    Ok(Json(state.parts.mesh.store.verify().await?))
}

async fn import(
    state: Data<AdminState>,
    operator: Operator,
    RawBody(body): RawBody,
) -> HttpResult<HttpResponse> {
    let request: ImportRequest = decode_bincode(&body)?;
    let store = state.parts.mesh.store.clone();
    let act = async move { store.import(request).await };
    answer(&audited(state, operator, "documents imported".to_owned(), act).await?)
}

async fn export(
    state: Data<AdminState>,
    operator: Operator,
    RawBody(body): RawBody,
) -> HttpResult<HttpResponse> {
    let request: ExportRequest = decode_bincode(&body)?;
    // The store takes some pages for the first of an export, whatever their cursor is, so each page is noted.
    let store = state.parts.mesh.store.clone();
    let what = format!("documents of tenant {} exported", request.tenant);
    let act = async move { store.export(request).await };
    answer(&audited(state, operator, what, act).await?)
}

async fn compact(state: Data<AdminState>, operator: Operator) -> HttpResult<Json<CompactReply>> {
    let store = state.parts.mesh.store.clone();
    let act = async move { store.compact().await };
    let what = "draft store compacted".to_owned();
    Ok(Json(audited(state, operator, what, act).await?))
}

async fn erase(
    state: Data<AdminState>,
    operator: Operator,
    request: Json<EraseRequest>,
) -> HttpResult<Json<EraseReply>> {
    let (request, store) = (request.into_inner(), state.parts.mesh.store.clone());
    let some = match request.is_of_whole_tenant() {
        true => "all",
        false => "some",
    };
    let what = match &request.tenant {
        Some(tenant) => format!("{some} documents of tenant {tenant} erased"),
        None => "documents of all tenants erased".to_owned(),
    };
    let act = async move { store.erase(request).await };
    Ok(Json(audited(state, operator, what, act).await?))
}

async fn confirm(
    state: Data<AdminState>,
    operator: Operator,
    request: Json<ConfirmRequest>,
) -> HttpResult<Json<ConfirmReply>> {
    let (request, store) = (request.into_inner(), state.parts.mesh.store.clone());
    let what = match (request.loss, request.clock) {
        (true, true) => "a loss of documents and the clock of the draft store confirmed",
        (true, false) => "a loss of documents confirmed",
        (false, _) => "the clock of the draft store confirmed",
    };
    let act = async move { store.confirm(request).await };
    Ok(Json(audited(state, operator, what.to_owned(), act).await?))
}

async fn usage_rows(
    state: Data<AdminState>,
    _: Operator,
    RawBody(body): RawBody,
) -> HttpResult<HttpResponse> {
    let store = one_store_of_usage(&state)?.store;
    answer(&store.usage_rows(decode_bincode(&body)?).await?)
}

async fn erase_usage(
    state: Data<AdminState>,
    operator: Operator,
    request: Json<EraseUsageRequest>,
) -> HttpResult<Json<EraseUsageReply>> {
    let (request, store) = (request.into_inner(), one_store_of_usage(&state)?.store);
    let what = format!("usage of tenant {} erased", request.tenant);
    let act = async move { store.erase_usage(request).await };
    Ok(Json(audited(state, operator, what, act).await?))
}

/// The store of usage, whose rows have no others to be merged with.
fn one_store_of_usage(state: &AdminState) -> Result<UsageReplica, ApiError> {
    let mut replicas = state.parts.mesh.usage.usage_replicas();
    match (replicas.pop(), replicas.is_empty()) {
        (Some(only), true) => Ok(only),
        _ => {
            let message = "the draft store has several replicas, and each has usage of its own: name them with \
                           --cluster, or read GET /admin/usage";
            Err(ApiError::invalid("usage", message))
        }
    }
}
