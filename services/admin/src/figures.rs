//! `GET /admin/figures`: the state of the mesh for the console.

use actix_web::HttpResponse;
use actix_web::web::Data;
use refrain_service_kit::http::HttpResult;
use serde::Serialize;

use super::figure_sources::Figures;
use super::operators::Operator;
use super::state::AdminState;

/// The answer to one operator.
#[derive(Serialize)]
struct Answer<'a> {
    operator: &'a str,
    is_read_only: bool,
    #[serde(flatten)]
    figures: &'a Figures,
}

/// Answers with the state of the mesh.
pub(super) async fn show(state: Data<AdminState>, operator: Operator) -> HttpResult<HttpResponse> {
    let figures = state.figures.figures(&state.parts).await;
    Ok(HttpResponse::Ok().json(Answer {
        operator: &operator.name,
        is_read_only: operator.is_read_only,
        figures: &figures,
    }))
}
