//! Routes for responses that are stored.

use std::time::Instant;

use actix_web::{HttpRequest, HttpResponse, Resource, web};
use refrain_accounts::tenants::file::KeyEndpoint;
use refrain_protocol::{ApiError, TenantName};
use refrain_service_kit::http::{HttpError, get, post};
use serde::Deserialize;
use serde_json::json;

use crate::http::state::GatewayState;
use crate::surfaces::{PageQuery, input_items, unknown_response};

/// A route that reads and deletes a response.
pub(super) fn responses(path: &str) -> Resource {
    get(path, read).route(web::delete().to(delete))
}

/// A route that lists the input of a response.
pub(super) fn inputs(path: &str) -> Resource {
    get(path, list_inputs)
}

/// A route that would cancel a response that runs in the background, which none does.
pub(super) fn cancel(path: &str) -> Resource {
    post(path, refuse_cancel)
}

/// The query of a response that is read.
#[derive(Deserialize)]
struct ReadQuery {
    stream: Option<bool>,
}

/// The tenant of a caller that may use responses.
async fn tenant_of(gateway: &GatewayState, request: &HttpRequest) -> Result<TenantName, ApiError> {
    let caller = gateway.caller_at(request, KeyEndpoint::Responses).await?;
    Ok(caller.tenant)
}

async fn read(
    gateway: web::Data<GatewayState>,
    request: HttpRequest,
    id: web::Path<String>,
) -> Result<HttpResponse, HttpError> {
    let tenant = tenant_of(&gateway, &request).await?;
    let asked: ReadQuery = query(&request)?;
    if asked.stream == Some(true) {
        let message =
            "stream: only responses in the background can be streamed again; leave it out";
        return Err(ApiError::invalid("stream", message).into());
    }
    let body = gateway.stored.body(&tenant, &id, Instant::now());
    let body = body.ok_or_else(unknown_response)?;
    Ok(HttpResponse::Ok()
        .content_type("application/json")
        .body(body))
}

async fn list_inputs(
    gateway: web::Data<GatewayState>,
    request: HttpRequest,
    id: web::Path<String>,
) -> Result<HttpResponse, HttpError> {
    let tenant = tenant_of(&gateway, &request).await?;
    let page: PageQuery = query(&request)?;
    let page = input_items(&gateway.stored, &tenant, &id, &page, Instant::now())?;
    Ok(HttpResponse::Ok().json(page))
}

async fn refuse_cancel(
    gateway: web::Data<GatewayState>,
    request: HttpRequest,
    id: web::Path<String>,
) -> Result<HttpResponse, HttpError> {
    let tenant = tenant_of(&gateway, &request).await?;
    let stored = gateway.stored.body(&tenant, &id, Instant::now());
    stored.ok_or_else(unknown_response)?;
    let message = "only responses in the background can be cancelled; this one has ended";
    Err(ApiError::invalid("id", message).into())
}

async fn delete(
    gateway: web::Data<GatewayState>,
    request: HttpRequest,
    id: web::Path<String>,
) -> Result<HttpResponse, HttpError> {
    let tenant = tenant_of(&gateway, &request).await?;
    if !gateway.stored.remove(&tenant, &id) {
        return Err(unknown_response().into());
    }
    let id = id.into_inner();
    let deleted = json!({"id": id, "object": "response", "deleted": true});
    Ok(HttpResponse::Ok().json(deleted))
}

/// Reads the query of a URL.
fn query<T: serde::de::DeserializeOwned>(request: &HttpRequest) -> Result<T, ApiError> {
    let read = web::Query::<T>::from_query(request.query_string());
    read.map(web::Query::into_inner)
        .map_err(|error| ApiError::invalid("query", format!("the query of the URL: {error}")))
}
