//! Control routes for what runs: pauses, aborts and caches, in the words of vLLM and SGLang.

use std::collections::HashMap;

use actix_web::HttpResponse;
use actix_web::web::{Data, Query};
use refrain_protocol::engine_order::{EngineOrder, PauseMode};
use refrain_protocol::{ApiError, ErrorKind};
use refrain_service_kit::http::{HttpResult, RawBody};
use serde_json::json;

use super::body::TrainerBody;
use super::fleet::FleetAnswers;
use super::state::TrainerState;

/// Reads the body of a control call, which may be missing.
///
/// # Errors
/// It is no JSON object.
pub(super) fn read(body: &[u8]) -> Result<TrainerBody, ApiError> {
    match body.trim_ascii().is_empty() {
        true => Ok(TrainerBody::default()),
        false => TrainerBody::read(body),
    }
}

fn flag(query: &HashMap<String, String>, name: &str, default: bool) -> Result<bool, ApiError> {
    match query.get(name).map(String::as_str) {
        None | Some("") => Ok(default),
        Some("true" | "True" | "1") => Ok(true),
        Some("false" | "False" | "0") => Ok(false),
        Some(_) => Err(ApiError::invalid(
            name,
            format!("{name}: must be true or false"),
        )),
    }
}

/// `POST /pause` of vLLM.
pub(super) async fn pause(
    trainer: Data<TrainerState>,
    query: Query<HashMap<String, String>>,
) -> HttpResult<HttpResponse> {
    let waits = flag(&query, "wait_for_inflight_requests", false)?;
    let mode = match query.get("mode").map(String::as_str) {
        None if waits => PauseMode::Wait,
        None | Some("abort") => PauseMode::Abort,
        Some("wait") => PauseMode::Wait,
        Some("keep") => PauseMode::Keep,
        Some(_) => {
            return Err(ApiError::invalid("mode", "mode: must be abort, wait or keep").into());
        }
    };
    let clears_cache = flag(&query, "clear_cache", true)?;
    Ok(trainer
        .pause(mode, clears_cache, json!({"status": "paused"}))
        .await?)
}

/// `POST /resume` of vLLM.
pub(super) async fn resume(trainer: Data<TrainerState>) -> HttpResult<HttpResponse> {
    Ok(trainer.resume(json!({"status": "resumed"})).await?)
}

/// `GET /is_paused` of vLLM. It is true once every worker has paused.
pub(super) async fn is_paused(trainer: Data<TrainerState>) -> HttpResult<HttpResponse> {
    let answers = trainer.report().await?;
    let is_paused = answers.replies().all(|reply| reply.state.pause.is_some());
    Ok(answers.response(json!({ "is_paused": is_paused })))
}

/// `POST /pause_generation` of SGLang.
pub(super) async fn pause_generation(
    trainer: Data<TrainerState>,
    body: RawBody,
) -> HttpResult<HttpResponse> {
    let mode = read(&body.0)?.take::<String>("mode", "a text")?;
    let (mode, clears_cache) = match mode.as_deref() {
        None | Some("abort") => (PauseMode::Abort, false),
        // The requests go back to the queue of the engine, and leave no cache behind.
        Some("retract") => (PauseMode::Keep, true),
        Some("in_place") => (PauseMode::Keep, false),
        Some(_) => {
            let message = "mode: must be abort, retract or in_place";
            return Err(ApiError::invalid("mode", message).into());
        }
    };
    let done = json!({"status": "ok", "message": "Generation paused successfully."});
    Ok(trainer.pause(mode, clears_cache, done).await?)
}

/// `POST /continue_generation` of SGLang.
pub(super) async fn continue_generation(trainer: Data<TrainerState>) -> HttpResult<HttpResponse> {
    let done = json!({"status": "ok", "message": "Generation continued successfully."});
    Ok(trainer.resume(done).await?)
}

/// `POST /abort_request` of SGLang.
pub(super) async fn abort_request(
    trainer: Data<TrainerState>,
    body: RawBody,
) -> HttpResult<HttpResponse> {
    let mut body = read(&body.0)?;
    let all = body.take::<bool>("abort_all", "true or false")?;
    let names = body.take_names("rid")?;
    let aborted = match all {
        Some(true) => trainer.in_flight.abort_all(),
        _ => trainer.in_flight.abort(&names),
    };
    Ok(HttpResponse::Ok().json(json!({ "aborted": aborted })))
}

/// `POST /abort_requests` of vLLM. Without names it aborts all.
pub(super) async fn abort_requests(
    trainer: Data<TrainerState>,
    body: RawBody,
) -> HttpResult<HttpResponse> {
    let names = read(&body.0)?.take_names("request_ids")?;
    let aborted = match names.is_empty() {
        true => trainer.in_flight.abort_all(),
        false => trainer.in_flight.abort(&names),
    };
    Ok(HttpResponse::Ok().json(json!({"status": "aborted", "aborted": aborted})))
}

/// `POST /flush_cache` of SGLang, which succeeds only while no worker decodes anything.
pub(super) async fn flush_cache(trainer: Data<TrainerState>) -> HttpResult<HttpResponse> {
    let states = trainer.report().await?;
    if !states.all_done() {
        return Ok(states.response(json!({})));
    }
    let running: u64 = states
        .replies()
        .map(|reply| u64::from(reply.state.running))
        .sum();
    if running > 0 {
        let message =
            format!("the cache is in use by {running} requests; abort them or wait, and try again");
        let error = ApiError::new(ErrorKind::InvalidRequest, message);
        return Err(error.with_code("cache_in_use").into());
    }
    let answers = trainer.fleet.order(EngineOrder::FlushCache).await?;
    Ok(answers.response(json!({"success": true, "message": "Cache flushed."})))
}

impl TrainerState {
    /// Asks all workers for their state. If all answer, the time of requests follows it: a worker may have been
    /// started anew, and so may this gateway.
    ///
    /// # Errors
    /// As [`Fleet::order`](super::fleet::Fleet::order).
    pub(super) async fn report(&self) -> Result<FleetAnswers, ApiError> {
        let answers = self.fleet.order(EngineOrder::Report).await?;
        let is_paused = answers.replies().any(|reply| reply.state.pause.is_some());
        match is_paused {
            true => self.gateway.begin_pause(),
            false if answers.all_done() => self.gateway.end_pause(),
            false => {}
        }
        Ok(answers)
    }

    /// Pauses all workers. Nothing of this listener's requests is left to run if they are to be aborted.
    async fn pause(
        &self,
        mode: PauseMode,
        clears_cache: bool,
        done: serde_json::Value,
    ) -> Result<HttpResponse, ApiError> {
        if mode == PauseMode::Abort {
            self.in_flight.abort_all();
        }
        self.gateway.begin_pause();
        let order = EngineOrder::Pause { mode, clears_cache };
        let answers = self.fleet.order(order).await;
        let is_paused = answers.as_ref().is_ok_and(|answers| answers.any_done());
        if !is_paused {
            self.gateway.end_pause();
        }
        Ok(answers?.response(done))
    }

    /// Lets all workers go on. Until each of them does, the time of requests stands still.
    async fn resume(&self, done: serde_json::Value) -> Result<HttpResponse, ApiError> {
        let answers = self.fleet.order(EngineOrder::Resume).await?;
        if answers.all_done() {
            self.gateway.end_pause();
        }
        Ok(answers.response(done))
    }
}
