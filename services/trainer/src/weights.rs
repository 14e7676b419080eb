//! Control routes for weights that workers load from a directory, and for their version.

use actix_web::HttpResponse;
use actix_web::web::Data;
use refrain_protocol::ApiError;
use refrain_protocol::engine_order::EngineOrder;
use refrain_service_kit::http::{HttpResult, RawBody};
use serde_json::json;

use super::fleet::FleetAnswers;
use super::pauses::read;
use super::state::TrainerState;
use super::version::{read_version, version_name};

/// `POST /update_weights_from_disk` of SGLang.
pub(super) async fn from_disk(
    trainer: Data<TrainerState>,
    body: RawBody,
) -> HttpResult<HttpResponse> {
    let mut body = read(&body.0)?;
    let directory = body.take::<String>("model_path", "a text")?;
    let version = read_version("weight_version", body.fields.remove("weight_version"))?;
    let flag = "true or false";
    // Older trainers leave out the last letter.
    let aborts = body.take::<bool>("abort_all_requests", flag)? == Some(true)
        || body.take::<bool>("abort_all_request", flag)? == Some(true);
    let directory = named(directory, "model_path")?;
    if aborts {
        trainer.in_flight.abort_all();
    }
    let order = EngineOrder::LoadWeights { directory, version };
    let answers = trainer.fleet.order(order).await?;
    Ok(answers.response(json!({
        "success": true,
        "message": "Succeeded to update model weights.",
        "num_paused_requests": 0,
    })))
}

/// A directory of weights that was named.
///
/// # Errors
/// It was not.
pub(super) fn named(directory: Option<String>, field: &str) -> Result<String, ApiError> {
    match directory {
        Some(directory) if !directory.is_empty() => Ok(directory),
        _ => {
            let message =
                format!("{field}: name the directory of the weights, as the engines see it");
            Err(ApiError::invalid(field, message))
        }
    }
}

/// Replaces the weights of all workers by those of a directory, for `POST /update_weights`.
pub(super) async fn load(
    trainer: &TrainerState,
    directory: String,
    version: Option<u64>,
) -> Result<HttpResponse, ApiError> {
    let order = EngineOrder::LoadWeights { directory, version };
    let answers = trainer.fleet.order(order).await?;
    Ok(answers.response(json!({"status": "ok", "message": "Weights updated"})))
}

/// `POST /update_weight_version`.
pub(super) async fn set_version(
    trainer: Data<TrainerState>,
    body: RawBody,
) -> HttpResult<HttpResponse> {
    let mut body = read(&body.0)?;
    let Some(version) = read_version("new_version", body.fields.remove("new_version"))? else {
        let message = "new_version: name the version of the weights";
        return Err(ApiError::invalid("new_version", message).into());
    };
    if body.take::<bool>("abort_all_requests", "true or false")? == Some(true) {
        trainer.in_flight.abort_all();
    }
    let answers = trainer
        .fleet
        .order(EngineOrder::SetVersion { version })
        .await?;
    let name = version_name(version);
    Ok(answers.response(json!({
        "success": true,
        "message": format!("Weight version updated to {name}"),
        "new_version": name,
    })))
}

/// `GET /get_weight_version` and `/weight_info`: the oldest version on any worker, since a trainer that waits for a
/// new one waits for all of them.
pub(super) async fn get_version(trainer: Data<TrainerState>) -> HttpResult<HttpResponse> {
    let answers = trainer.report().await?;
    let oldest = answers.oldest_version();
    Ok(answers.response(json!({
        "weight_version": version_name(oldest),
        "is_everywhere": has_one_version(&answers),
    })))
}

fn has_one_version(answers: &FleetAnswers) -> bool {
    let oldest = answers.oldest_version();
    answers
        .replies()
        .all(|reply| reply.state.weight_version == oldest)
}
