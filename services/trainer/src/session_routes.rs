//! The calls by which a trainer makes, reads and erases sessions.

use actix_web::http::header::{ACCEPT, CONTENT_TYPE};
use actix_web::web::{self, Data};
use actix_web::{HttpRequest, HttpResponse};
use futures_util::stream;
use refrain_service_kit::http::{HttpResult, RawBody};
use serde_json::json;

use super::pauses::read;
use super::state::TrainerState;
use super::trajectory_body::{BodyForm, trajectory_parts};

/// The content type of MessagePack, and its older name.
const MSGPACK: [&str; 2] = ["application/msgpack", "application/x-msgpack"];

/// `POST /sessions`: makes a session, with the id that the body names or with a new one.
pub(super) async fn create(trainer: Data<TrainerState>, body: RawBody) -> HttpResult<HttpResponse> {
    let id = match body.0.is_empty() {
        true => None,
        false => read(&body.0)?.take::<String>("session_id", "a text")?,
    };
    let id = trainer.sessions.create(id)?;
    Ok(HttpResponse::Ok().json(json!({ "session_id": id })))
}

/// `GET /sessions`: the ids of all sessions.
pub(super) async fn list(trainer: Data<TrainerState>) -> HttpResponse {
    let sessions = trainer.sessions.list().into_iter();
    let sessions = sessions.map(|(id, turns)| json!({ "session_id": id, "turns": turns }));
    HttpResponse::Ok().json(json!({ "sessions": sessions.collect::<Vec<_>>() }))
}

/// `GET /sessions/{id}`: what there is of a session.
pub(super) async fn show(
    trainer: Data<TrainerState>,
    id: web::Path<String>,
) -> HttpResult<HttpResponse> {
    let turns = trainer.sessions.turns(&id)?;
    let ends = turns.ends();
    let tokens = ends
        .iter()
        .map(|end| turns.trajectory(*end).tokens() - end.1);
    Ok(HttpResponse::Ok().json(json!({
        "session_id": *id,
        "turns": turns.len(),
        "trajectories": ends.len(),
        "tokens": tokens.sum::<usize>(),
    })))
}

/// `GET /sessions/{id}/trajectories`: the tokens of a session, as JSON, or as MessagePack where that is accepted.
pub(super) async fn trajectories(
    trainer: Data<TrainerState>,
    request: HttpRequest,
    id: web::Path<String>,
) -> HttpResult<HttpResponse> {
    let accepted = request.headers().get(ACCEPT);
    let accepted = accepted.and_then(|accepted| accepted.to_str().ok());
    let wanted = MSGPACK
        .into_iter()
        .find(|kind| accepted.is_some_and(|all| all.contains(kind)));
    let hides_figures = trainer
        .gateway
        .caller(&trainer.tenant)?
        .policy
        .hides_metrics;
    let turns = trainer.sessions.turns(&id)?;
    let form = match wanted {
        Some(_) => BodyForm::MessagePack,
        None => BodyForm::Json,
    };
    let parts = trajectory_parts(id.into_inner(), turns, form, hides_figures);
    let kind = wanted.unwrap_or("application/json");
    Ok(HttpResponse::Ok()
        .insert_header((CONTENT_TYPE, kind))
        .streaming(stream::iter(parts)))
}

/// `DELETE /sessions/{id}`: erases a session.
pub(super) async fn erase(
    trainer: Data<TrainerState>,
    id: web::Path<String>,
) -> HttpResult<HttpResponse> {
    trainer.sessions.erase(&id)?;
    Ok(HttpResponse::NoContent().finish())
}
