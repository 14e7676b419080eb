//! The routes.
//!
//! Read first: `generate.rs`, the way of a request through the modules of the gateway.

mod generate;
mod probes;
mod state;
mod stored;
mod tokens;

use std::sync::Arc;

use actix_web::{HttpRequest, HttpResponse, web};
use refrain_service_kit::http::{HttpError, get, post};

use crate::surfaces::Surface;
use generate::generate;

pub(crate) use state::GatewayState;

/// Adds the routes.
pub(crate) fn routes(gateway: &Arc<GatewayState>, app: &mut web::ServiceConfig) {
    app.app_data(web::Data::from(gateway.clone()))
        .service(post("/v1/chat/completions", |gateway, request, payload| {
            generate(gateway, Surface::Chat, request, payload)
        }))
        .service(post("/v1/completions", |gateway, request, payload| {
            generate(gateway, Surface::Completion, request, payload)
        }))
        .service(post("/v1/messages", |gateway, request, payload| {
            generate(gateway, Surface::Messages, request, payload)
        }))
        .service(post("/v1/messages/count_tokens", tokens::count))
        .service(post("/v1/responses", |gateway, request, payload| {
            generate(gateway, Surface::Responses, request, payload)
        }))
        .service(stored::responses("/v1/responses/{id}"))
        .service(post("/tokenize", tokens::tokenize))
        .service(post("/detokenize", tokens::detokenize))
        .service(probes::readiness("/health"))
        .service(probes::readiness("/ping").route(web::post().to(probes::ready)))
        .service(get("/version", probes::version))
        .service(get("/v1/models", list_models))
        .service(get("/v1/models/{id:.*}", get_model));
}

async fn list_models(
    gateway: web::Data<GatewayState>,
    request: HttpRequest,
) -> Result<HttpResponse, HttpError> {
    let tenant = gateway.tenant(&request)?;
    Ok(HttpResponse::Ok().json(gateway.models.list(&tenant)))
}

async fn get_model(
    gateway: web::Data<GatewayState>,
    request: HttpRequest,
    id: web::Path<String>,
) -> Result<HttpResponse, HttpError> {
    let tenant = gateway.tenant(&request)?;
    let model = gateway.models.get(&tenant, &id)?;
    Ok(HttpResponse::Ok().json(gateway.models.card(&model)))
}
