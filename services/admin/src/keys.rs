//! The routes of keys.

use actix_web::web::{self, Data, Json, Path};
use actix_web::{HttpRequest, HttpResponse, Resource};
use refrain_accounts::tenants::act::TenantAct;
use refrain_accounts::tenants::file::KeyEntry;
use refrain_protocol::ApiError;
use refrain_service_kit::http::{HttpResult, RawBody};
use serde::Deserialize;
use serde_json::{Value, json};

use super::acts::{Done, answer, carry_out, expected_version, shown, without_hash};
use super::operators::Operator;
use super::state::AdminState;

/// Hours for which a rotated key goes on, unless the caller says otherwise.
const GRACE_HOURS: u32 = 24;

/// `/admin/tenants/{name}/keys`.
pub(super) fn of_tenant() -> Resource {
    web::resource("/tenants/{name}/keys")
        .route(web::get().to(list))
        .route(web::post().to(add))
}

/// `/admin/keys/{id}/rotate`.
pub(super) fn rotation() -> Resource {
    web::resource("/keys/{id}/rotate").route(web::post().to(rotate))
}

/// `/admin/keys/{id}`.
pub(super) fn one() -> Resource {
    web::resource("/keys/{id}").route(web::delete().to(revoke))
}

/// The body of a rotation. It may be missing.
#[derive(Deserialize)]
#[serde(default, deny_unknown_fields)]
struct Rotation {
    grace_hours: u32,
}

impl Default for Rotation {
    fn default() -> Self {
        Rotation {
            grace_hours: GRACE_HOURS,
        }
    }
}

async fn list(
    state: Data<AdminState>,
    _: Operator,
    name: Path<String>,
) -> HttpResult<HttpResponse> {
    let tenant = state.parts.tenants.tenant(&name).await?;
    let mut shown = shown(&tenant)?;
    let keys = shown.get_mut("keys").map_or_else(|| json!([]), Value::take);
    let body = json!({"object": "list", "data": keys});
    Ok(answer(HttpResponse::Ok(), &tenant, &body))
}

async fn add(
    state: Data<AdminState>,
    operator: Operator,
    request: HttpRequest,
    tenant: Path<String>,
    entry: Json<KeyEntry>,
) -> HttpResult<HttpResponse> {
    let expected = expected_version(&request)?;
    if !entry.id.is_empty() || !entry.sha256.is_empty() {
        let message = "id and sha256 cannot be set: Refrain makes the key, and shows it once";
        return Err(ApiError::invalid("id", message).into());
    }
    let act = TenantAct::AddKey {
        tenant: tenant.into_inner(),
        entry: entry.into_inner(),
    };
    let done = carry_out(state, operator, act, expected).await?;
    created(&done)
}

async fn rotate(
    state: Data<AdminState>,
    operator: Operator,
    request: HttpRequest,
    id: Path<String>,
    RawBody(body): RawBody,
) -> HttpResult<HttpResponse> {
    let expected = expected_version(&request)?;
    let rotation: Rotation = match body.is_empty() {
        true => Rotation::default(),
        false => serde_json::from_slice(&body)
            .map_err(|error| ApiError::invalid("grace_hours", error.to_string()))?,
    };
    let act = TenantAct::RotateKey {
        id: id.into_inner(),
        grace_hours: rotation.grace_hours,
        new: KeyEntry::default(),
    };
    let done = carry_out(state, operator, act, expected).await?;
    created(&done)
}

async fn revoke(
    state: Data<AdminState>,
    operator: Operator,
    request: HttpRequest,
    id: Path<String>,
) -> HttpResult<HttpResponse> {
    let expected = expected_version(&request)?;
    let id = id.into_inner();
    let act = TenantAct::RevokeKey { id: id.clone() };
    carry_out(state, operator, act, expected).await?;
    Ok(HttpResponse::Ok().json(json!({"id": id, "deleted": true})))
}

/// The answer that shows a key. No other one does.
fn created(done: &Done) -> HttpResult<HttpResponse> {
    let (Some(tenant), Some(key)) = (&done.tenant, &done.key) else {
        return Err(ApiError::internal("an act made no key").into());
    };
    let mut keys = tenant.entry.keys.iter();
    let entry = keys.find(|entry| entry.id == key.id);
    let mut body = serde_json::to_value(entry).map_err(ApiError::internal)?;
    body.as_object_mut().map(without_hash);
    body["tenant"] = tenant.entry.name.to_string().into();
    body["key"] = key.key.clone().into();
    Ok(answer(HttpResponse::Created(), tenant, &body))
}
