//! The HTTP routes: bincode for calls with tokens, JSON for statistics and administration. All of them are for
//! the mesh: each names the roles that may call it.

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
use refrain_service_kit::http::{HttpResult, RawBody, RouteRoles, get, mesh_only, post};
use refrain_service_kit::mesh::{MeshAuth, MeshRole};
use serde::Serialize;

use crate::handle::{DraftStoreHandle, StoreState};

/// Those who draft: they store outputs of the namespaces that gateways have signed for them, and read them.
const DRAFTERS: &[MeshRole] = &[MeshRole::Worker, MeshRole::Engine];

/// Those who serve the API for tenants, and follow what it has changed.
const GATEWAYS: &[MeshRole] = &[MeshRole::Gateway, MeshRole::Operator];

/// Replicas of the store.
const PEERS: &[MeshRole] = &[MeshRole::DraftStore];

/// Those who may read and erase the outputs of every tenant.
const OPERATORS: &[MeshRole] = &[MeshRole::Operator];

/// All who look for a replica that serves them.
const ALL_CALLERS: &[MeshRole] = &[
    MeshRole::Gateway,
    MeshRole::Worker,
    MeshRole::Engine,
    MeshRole::DraftStore,
    MeshRole::Operator,
];

/// The roles that may call each route.
const ROLES: &RouteRoles = &[
    ("/internal/v1/append", DRAFTERS),
    ("/internal/v1/pull", DRAFTERS),
    ("/internal/v1/touch", DRAFTERS),
    (
        "/internal/v1/groups/register",
        &[MeshRole::Gateway, MeshRole::Worker, MeshRole::Engine],
    ),
    ("/internal/v1/output-lengths", &[MeshRole::Gateway]),
    ("/internal/v1/segments", DRAFTERS),
    ("/internal/v1/segments/piece", DRAFTERS),
    ("/internal/v1/documents", DRAFTERS),
    ("/internal/v1/documents/unknown", DRAFTERS),
    ("/internal/v1/acceptance-stats", DRAFTERS),
    ("/internal/v1/tenants", GATEWAYS),
    ("/internal/v1/tenants/change", GATEWAYS),
    ("/internal/v1/usage/record", &[MeshRole::Gateway]),
    (
        "/internal/v1/usage/rows",
        &[MeshRole::Gateway, MeshRole::Operator],
    ),
    (
        "/internal/v1/replica",
        &[MeshRole::DraftStore, MeshRole::Operator],
    ),
    ("/internal/v1/directory", ALL_CALLERS),
    ("/internal/v1/join/offer", PEERS),
    ("/internal/v1/join/list", PEERS),
    ("/internal/v1/join/piece", PEERS),
    ("/internal/v1/join/documents", PEERS),
    ("/internal/v1/stats", OPERATORS),
    ("/admin/v1/stats", OPERATORS),
    ("/admin/v1/import", OPERATORS),
    ("/admin/v1/export", OPERATORS),
    ("/admin/v1/verify", OPERATORS),
    ("/admin/v1/compact", OPERATORS),
    ("/admin/v1/erase", OPERATORS),
    ("/admin/v1/confirm", OPERATORS),
    ("/admin/v1/usage/erase", OPERATORS),
    ("/debug/state", OPERATORS),
];

/// Adds the routes.
pub(crate) fn routes(app: &mut web::ServiceConfig, handle: DraftStoreHandle, mesh: MeshAuth) {
    app.app_data(Data::new(handle));
    app.service(
        web::scope("/internal/v1")
            .wrap(mesh_only(mesh.clone(), ROLES))
            .service(post("/append", append))
            .service(post("/pull", pull))
            .service(post("/touch", touch))
            .service(post("/groups/register", register_group))
            .service(post("/output-lengths", output_lengths))
            .service(post("/segments", segments))
            .service(post("/segments/piece", segment_piece))
            .service(post("/documents", documents))
            .service(post("/documents/unknown", unknown_documents))
            .service(post("/acceptance-stats", acceptance_stats))
            .service(post("/tenants", tenants))
            .service(post("/tenants/change", change_tenant))
            .service(post("/usage/record", record_usage))
            .service(post("/usage/rows", usage_rows))
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
            .wrap(mesh_only(mesh.clone(), ROLES))
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
            .wrap(mesh_only(mesh, ROLES))
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
    append pull touch register_group output_lengths segments segment_piece
    documents unknown_documents acceptance_stats tenants change_tenant record_usage usage_rows import export
    join_offer join_list join_piece join_documents
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
