//! Routes by which load balancers and tools learn whether the gateway works, under the names that vLLM has for them.

use actix_web::{HttpResponse, Resource, web};
use refrain_service_kit::build_info;
use serde_json::json;

use crate::http::state::GatewayState;

/// A route that says with its status alone whether requests can be served.
pub(super) fn readiness(path: &str) -> Resource {
    web::resource(path)
        .route(web::get().to(ready))
        .route(web::head().to(ready))
}

/// 200 or 503 without a body.
pub(super) async fn ready(gateway: web::Data<GatewayState>) -> HttpResponse {
    match (gateway.readiness)() {
        Ok(()) => HttpResponse::Ok().finish(),
        Err(_) => HttpResponse::ServiceUnavailable().finish(),
    }
}

/// The version of this gateway, and its commit.
pub(super) async fn version() -> HttpResponse {
    let version = json!({"version": build_info::VERSION, "commit": build_info::commit()});
    HttpResponse::Ok().json(version)
}
