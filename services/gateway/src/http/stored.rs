//! Routes for responses that are stored.

use std::time::Instant;

use actix_web::{HttpRequest, HttpResponse, Resource, web};
use refrain_protocol::{ApiError, ErrorKind};
use refrain_service_kit::http::{HttpError, get};
use serde_json::json;

use crate::http::state::GatewayState;

/// A route that reads and deletes a response.
pub(super) fn responses(path: &str) -> Resource {
    get(path, read).route(web::delete().to(delete))
}

async fn read(
    gateway: web::Data<GatewayState>,
    request: HttpRequest,
    id: web::Path<String>,
) -> Result<HttpResponse, HttpError> {
    let tenant = gateway.tenant(&request)?;
    let body = gateway.stored.body(&tenant, &id, Instant::now());
    let body = body.ok_or_else(unknown)?;
    Ok(HttpResponse::Ok()
        .content_type("application/json")
        .body(body))
}

async fn delete(
    gateway: web::Data<GatewayState>,
    request: HttpRequest,
    id: web::Path<String>,
) -> Result<HttpResponse, HttpError> {
    let tenant = gateway.tenant(&request)?;
    if !gateway.stored.remove(&tenant, &id) {
        return Err(unknown().into());
    }
    let id = id.into_inner();
    let deleted = json!({"id": id, "object": "response", "deleted": true});
    Ok(HttpResponse::Ok().json(deleted))
}

fn unknown() -> ApiError {
    let message = "there is no such response here; it was not stored, is forgotten, or belongs to another key";
    ApiError {
        kind: ErrorKind::NotFound,
        ..ApiError::invalid("id", message)
    }
}
