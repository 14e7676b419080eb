//! Control routes of vLLM and its relatives beside those for weights: caches, calls by name, and load.

use actix_web::web::Data;
use actix_web::{HttpRequest, HttpResponse};
use refrain_protocol::ApiError;
use refrain_protocol::engine_order::EngineOrder;
use refrain_protocol::error::code;
use refrain_service_kit::http::{HttpResult, RawBody};
use serde_json::json;

use super::pass_on::pass_on;
use super::pauses::read;
use super::state::TrainerState;

/// Methods that `/collective_rpc` may call. Any other could run whatever the engine's process can.
const METHODS: [&str; 3] = [
    "skyrl_start_weight_update",
    "update_weights_nccl",
    "skyrl_finish_weight_update",
];

/// `POST /reset_prefix_cache`: forgets all KV caches. Requests that are paused compute theirs again.
pub(super) async fn reset_prefix_cache(trainer: Data<TrainerState>) -> HttpResult<HttpResponse> {
    let answers = trainer.fleet.order(EngineOrder::FlushCache).await?;
    Ok(answers.response(json!({ "success": true })))
}

/// `POST /collective_rpc`: passes on the calls by which SkyRL changes weights.
pub(super) async fn collective_rpc(
    trainer: Data<TrainerState>,
    request: HttpRequest,
    body: RawBody,
) -> HttpResult<HttpResponse> {
    let method = read(&body.0)?.take::<String>("method", "a text")?;
    let method = method.unwrap_or_default();
    if !METHODS.contains(&method.as_str()) {
        let message = format!("method: must be one of {}", METHODS.join(", "));
        let error = ApiError::invalid("method", message);
        return Err(error.with_code(code::UNSUPPORTED_BY_ENGINE).into());
    }
    pass_on(trainer, request, body).await
}

/// `POST /finish_session` of SkyRL's router: nothing is kept by that name.
pub(super) async fn finish_session() -> HttpResponse {
    HttpResponse::Ok().json(json!({ "success": true }))
}

/// `GET /metrics`: the load as vLLM tells it, all workers as one engine. prime-rl sets its concurrency by it.
pub(super) async fn metrics(trainer: Data<TrainerState>) -> HttpResult<HttpResponse> {
    let answers = trainer.report().await?;
    let running = answers
        .replies()
        .map(|reply| u64::from(reply.state.running));
    let running = running.sum::<u64>();
    let waiting = (trainer.in_flight.len() as u64).saturating_sub(running);
    let page = format!(
        "# HELP vllm:num_requests_running Requests that the workers decode.\n\
         # TYPE vllm:num_requests_running gauge\n\
         vllm:num_requests_running{{engine=\"0\"}} {running}\n\
         # HELP vllm:num_requests_waiting Requests that wait here or in the queue of the scheduler.\n\
         # TYPE vllm:num_requests_waiting gauge\n\
         vllm:num_requests_waiting{{engine=\"0\"}} {waiting}\n\
         # HELP vllm:num_preemptions_total Always 0: no worker takes a request more than its engine has room for.\n\
         # TYPE vllm:num_preemptions_total counter\n\
         vllm:num_preemptions_total{{engine=\"0\"}} 0\n"
    );
    Ok(HttpResponse::Ok()
        .content_type("text/plain; version=0.0.4")
        .body(page))
}
