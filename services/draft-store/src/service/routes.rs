//! The HTTP routes: bincode for calls with tokens, JSON for statistics and administration. All of them require the
//! mesh secret.

use actix_web::HttpResponse;
use actix_web::web::{self, Data, Json};
use refrain_protocol::admin::{
    CompactReply, ConfirmReply, ConfirmRequest, EraseReply, EraseRequest, VerifyReply,
};
use refrain_protocol::document::StoreStats;
use refrain_protocol::join::ReplicaState;
use refrain_protocol::shard::StoreDirectory;
use refrain_protocol::usage::{EraseUsageReply, EraseUsageRequest};
use refrain_rpc::{
    BINCODE_CONTENT_TYPE, DraftStore as _, ReplicaPeer as _, StoreAdmin as _, UsageStore as _,
    decode_bincode, encode_bincode,
};
use refrain_service_kit::http::{HttpResult, RawBody, get, mesh_only, post};
use refrain_service_kit::mesh::MeshAuth;
use serde::Serialize;

use crate::service::handle::{DraftStoreHandle, StoreState};

/// Adds the routes.
pub(crate) fn routes(app: &mut web::ServiceConfig, handle: DraftStoreHandle, mesh: MeshAuth) {
    app.app_data(Data::new(handle));
    app.service(
        web::scope("/internal/v1")
            .wrap(mesh_only(mesh.clone()))
            .service(post("/append", append))
            .service(post("/follow", follow))
            .service(post("/touch", touch))
            .service(post("/groups/register", register_group))
            .service(post("/groups/fetch", fetch_groups))
            .service(post("/output-lengths", output_lengths))
            .service(post("/segments", segments))
            .service(post("/segments/piece", segment_piece))
            .service(post("/documents", documents))
            .service(post("/documents/unknown", unknown_documents))
            .service(post("/lookup", lookup))
            .service(post("/acceptance-stats", acceptance_stats))
            .service(post("/usage/record", record_usage))
            .service(post("/usage/rows", usage_rows))
            .service(post("/tenants", tenants))
            .service(post("/tenants/change", change_tenant))
            .service(get("/replica", replica_state))
            .service(get("/directory", directory))
            .service(post("/join/offer", join_offer))
            .service(post("/join/list", join_list))
            .service(post("/join/piece", join_piece))
            .service(post("/join/documents", join_documents))
            .service(get("/stats", stats)),
    );
    app.service(
        web::scope("/admin/v1")
            .wrap(mesh_only(mesh.clone()))
            .service(get("/stats", store_stats))
            .service(post("/import", import))
            .service(post("/export", export))
            .service(post("/verify", verify))
            .service(post("/compact", compact))
            .service(post("/erase", erase))
            .service(post("/confirm", confirm))
            .service(post("/usage/erase", erase_usage)),
    );
    app.service(
        web::resource("/debug/state")
            .wrap(mesh_only(mesh))
            .route(web::get().to(observe)),
    );
}

fn answer(message: &impl Serialize) -> HttpResult<HttpResponse> {
    let body = encode_bincode(message)?;
    Ok(HttpResponse::Ok()
        .content_type(BINCODE_CONTENT_TYPE)
        .body(body))
}

/// Defines handlers that decode a request, make the call of their name, and encode its answer.
macro_rules! bincode_calls {
    ($($call:ident)+) => {$(
        async fn $call(
            handle: Data<DraftStoreHandle>,
            RawBody(body): RawBody,
        ) -> HttpResult<HttpResponse> {
            answer(&handle.$call(decode_bincode(&body)?).await?)
        }
    )+};
}

bincode_calls! {
    append follow touch register_group fetch_groups output_lengths segments segment_piece documents
    unknown_documents lookup acceptance_stats tenants change_tenant record_usage usage_rows import export join_offer join_list join_piece join_documents
}

async fn stats(handle: Data<DraftStoreHandle>) -> HttpResult<Json<StoreStats>> {
    Ok(Json(handle.stats().await?))
}

async fn replica_state(handle: Data<DraftStoreHandle>) -> HttpResult<Json<ReplicaState>> {
    Ok(Json(handle.replica_state().await?))
}

async fn directory(handle: Data<DraftStoreHandle>) -> HttpResult<Json<StoreDirectory>> {
    Ok(Json(handle.directory().await?))
}

async fn store_stats(handle: Data<DraftStoreHandle>) -> HttpResult<Json<StoreStats>> {
    Ok(Json(handle.store_stats().await?))
}

async fn verify(handle: Data<DraftStoreHandle>) -> HttpResult<Json<VerifyReply>> {
    Ok(Json(handle.verify().await?))
}

async fn compact(handle: Data<DraftStoreHandle>) -> HttpResult<Json<CompactReply>> {
    Ok(Json(handle.compact().await?))
}

async fn erase(
    handle: Data<DraftStoreHandle>,
    request: Json<EraseRequest>,
) -> HttpResult<Json<EraseReply>> {
    Ok(Json(handle.erase(request.into_inner()).await?))
}

async fn erase_usage(
    handle: Data<DraftStoreHandle>,
    request: Json<EraseUsageRequest>,
) -> HttpResult<Json<EraseUsageReply>> {
    Ok(Json(handle.erase_usage(request.into_inner()).await?))
}

async fn confirm(
    handle: Data<DraftStoreHandle>,
    request: Json<ConfirmRequest>,
) -> HttpResult<Json<ConfirmReply>> {
    Ok(Json(handle.confirm(request.into_inner()).await?))
}

async fn observe(handle: Data<DraftStoreHandle>) -> Json<StoreState> {
    Json(handle.observe())
}
