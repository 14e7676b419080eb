//! The routes.
//!
//! Read first: `generate.rs`, the way of a request through the modules of the gateway.

mod generate;
mod passed;
mod probes;
mod state;
mod stored;
mod tokens;

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Instant;

use actix_web::http::header::{ALLOW, HeaderValue};
use actix_web::{HttpRequest, HttpResponse, Resource, web};
use refrain_protocol::{ApiError, ErrorKind};
use refrain_service_kit::http::{HttpError, get, post};

use crate::models::unknown_model;
use crate::surfaces::Surface;
pub use generate::EnteredRequest;
pub(crate) use generate::generate;
pub use state::announced_bytes;
pub(crate) use state::{GatewayState, finish};

/// Adds the routes.
pub(crate) fn routes(gateway: &Arc<GatewayState>, app: &mut web::ServiceConfig) {
    app.app_data(web::Data::from(gateway.clone()))
        .service(generation("/v1/chat/completions", Surface::Chat))
        .service(generation("/v1/completions", Surface::Completion))
        .service(
            generation("/v1/messages", Surface::Messages).default_service(web::to(refuse_method)),
        )
        .service(
            token_count("/v1/messages/count_tokens", Surface::MessagesCount)
                .default_service(web::to(refuse_method)),
        )
        .service(generation("/v1/responses", Surface::Responses))
        .service(token_count(
            "/v1/responses/input_tokens",
            Surface::ResponsesCount,
        ))
        .service(stored::responses("/v1/responses/{id}"))
        .service(stored::inputs("/v1/responses/{id}/input_items"))
        .service(stored::cancel("/v1/responses/{id}/cancel"))
        .service(post("/tokenize", tokens::tokenize))
        .service(post("/detokenize", tokens::detokenize))
        .service(probes::readiness("/health"))
        .service(probes::readiness("/ping").route(web::post().to(probes::ready)))
        .service(get("/version", probes::version))
        .service(get("/v1/models", list_models))
        .service(get("/v1/models/{id:.*}", get_model));
    let passed: BTreeSet<&str> = gateway.passthrough.routes().collect();
    for route in passed {
        let paths = [route.to_owned(), format!("{route}/{{rest:.*}}")];
        app.service(web::resource(paths).to(passed::pass));
    }
}

fn generation(path: &str, surface: Surface) -> Resource {
    post(path, move |gateway, request, payload| {
        generate(gateway, surface, request, payload)
    })
}

fn token_count(path: &str, surface: Surface) -> Resource {
    post(path, move |gateway, request, payload| {
        tokens::count(gateway, surface, request, payload)
    })
}

/// Adds the routes of the operations listener, beside those that every listener has.
pub(crate) fn operations_routes(app: &mut web::ServiceConfig) {
    app.service(get("/version", probes::version));
}

/// Refuses a method of Anthropic's routes in its shape.
async fn refuse_method() -> HttpResponse {
    let error = ApiError::new(
        ErrorKind::MethodNotAllowed,
        "this route does not accept this method, only POST",
    );
    let mut refused = finish(Surface::Messages, Instant::now(), Err(error));
    let post = HeaderValue::from_static("POST");
    refused.headers_mut().insert(ALLOW, post);
    refused
}

async fn list_models(
    gateway: web::Data<GatewayState>,
    request: HttpRequest,
) -> Result<HttpResponse, HttpError> {
    let caller = gateway.caller(&request).await?;
    let is_listed = |model: &str| caller.may_use(model);
    let mut list = gateway.models.list(&caller.tenant, is_listed);
    let passed = gateway.passthrough.models(&caller.tenant);
    let passed = passed.filter(|model| is_listed(model));
    list.data
        .extend(passed.map(|model| gateway.models.passed_card(model)));
    Ok(HttpResponse::Ok().json(list))
}

async fn get_model(
    gateway: web::Data<GatewayState>,
    request: HttpRequest,
    id: web::Path<String>,
) -> Result<HttpResponse, HttpError> {
    let caller = gateway.caller(&request).await?;
    let mut passed = gateway.passthrough.models(&caller.tenant);
    if caller.may_use(&id) && passed.any(|model| model == *id) {
        return Ok(HttpResponse::Ok().json(gateway.models.passed_card(&id)));
    }
    let model = gateway.models.get(&caller.tenant, &id)?;
    if !caller.may_use(&model.id) {
        return Err(unknown_model().into());
    }
    Ok(HttpResponse::Ok().json(gateway.models.card(&model, &id)))
}
