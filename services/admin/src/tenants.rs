//! The routes of tenants.

use actix_web::web::{self, Data, Json, Path};
use actix_web::{HttpRequest, HttpResponse, Resource};
use refrain_accounts::tenants::VersionedTenant;
use refrain_accounts::tenants::act::TenantAct;
use refrain_accounts::tenants::file::TenantEntry;
use refrain_protocol::ApiError;
use refrain_service_kit::http::HttpResult;
use serde_json::{Value, json};

use super::acts::{answer, carry_out, expected_version, shown};
use super::operators::Operator;
use super::state::AdminState;

/// `/admin/tenants`.
pub(super) fn all() -> Resource {
    web::resource("/tenants")
        .route(web::get().to(list))
        .route(web::post().to(add))
}

/// `/admin/tenants/{name}`.
pub(super) fn one() -> Resource {
    web::resource("/tenants/{name}")
        .route(web::get().to(get))
        .route(web::patch().to(change))
        .route(web::delete().to(remove))
}

async fn list(state: Data<AdminState>, _: Operator) -> HttpResult<HttpResponse> {
    let tenants = state.parts.tenants.tenants().await?;
    let data: Vec<Value> = tenants.iter().map(shown).collect::<Result<_, _>>()?;
    Ok(HttpResponse::Ok().json(json!({"object": "list", "data": data})))
}

async fn add(
    state: Data<AdminState>,
    operator: Operator,
    entry: Json<TenantEntry>,
) -> HttpResult<HttpResponse> {
    let act = TenantAct::AddTenant(entry.into_inner());
    let done = carry_out(state, operator, act, None).await?;
    respond(HttpResponse::Created(), done.tenant)
}

async fn get(state: Data<AdminState>, _: Operator, name: Path<String>) -> HttpResult<HttpResponse> {
    let tenant = state.parts.tenants.tenant(&name).await?;
    Ok(answer(HttpResponse::Ok(), &tenant, &shown(&tenant)?))
}

async fn change(
    state: Data<AdminState>,
    operator: Operator,
    request: HttpRequest,
    name: Path<String>,
    patch: Json<Value>,
) -> HttpResult<HttpResponse> {
    let expected = expected_version(&request)?;
    let act = TenantAct::ChangeTenant {
        name: name.into_inner(),
        patch: patch.into_inner(),
    };
    let done = carry_out(state, operator, act, expected).await?;
    respond(HttpResponse::Ok(), done.tenant)
}

async fn remove(
    state: Data<AdminState>,
    operator: Operator,
    request: HttpRequest,
    name: Path<String>,
) -> HttpResult<HttpResponse> {
    let expected = expected_version(&request)?;
    let name = name.into_inner();
    let act = TenantAct::RemoveTenant { name: name.clone() };
    carry_out(state, operator, act, expected).await?;
    Ok(HttpResponse::Ok().json(json!({"name": name, "deleted": true})))
}

fn respond(
    response: actix_web::HttpResponseBuilder,
    tenant: Option<VersionedTenant>,
) -> HttpResult<HttpResponse> {
    let tenant = tenant.ok_or_else(|| ApiError::internal("an act removed its tenant"))?;
    Ok(answer(response, &tenant, &shown(&tenant)?))
}
