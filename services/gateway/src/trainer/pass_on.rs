//! Calls in an engine's own words, which go to the engines of all workers as they are.

use actix_web::http::Method;
use actix_web::web::Data;
use actix_web::{HttpRequest, HttpResponse};
use refrain_protocol::engine_order::{EngineCall, EngineOrder};
use refrain_protocol::{ApiError, ErrorKind};
use refrain_service_kit::http::{HttpResult, RawBody};
use serde_json::{Value, json};

use super::pauses::read;
use super::state::TrainerState;
use super::version::read_version;
use super::weights;

/// Calls that give an engine its ranks in a group of processes. The same ranks cannot be those of two engines.
const WITH_RANKS: [&str; 4] = [
    "/init_weights_update_group",
    "/init_weight_transfer_engine",
    "/init_broadcaster",
    "/areal_init_weights_update_group",
];

/// Passes a call on.
pub(super) async fn pass_on(
    trainer: Data<TrainerState>,
    request: HttpRequest,
    body: RawBody,
) -> HttpResult<HttpResponse> {
    Ok(trainer.pass_on(&request, &body.0).await?)
}

/// `POST /update_weights`: prime-rl names a directory, vLLM passes on what its own weight transfer needs.
pub(super) async fn update_weights(
    trainer: Data<TrainerState>,
    request: HttpRequest,
    body: RawBody,
) -> HttpResult<HttpResponse> {
    let mut fields = read(&body.0)?;
    let version = read_version("weight_version", fields.fields.remove("weight_version"))?;
    match fields.take::<String>("weight_dir", "a text")? {
        Some(directory) => {
            let directory = weights::named(Some(directory), "weight_dir")?;
            Ok(weights::load(&trainer, directory, version).await?)
        }
        None => Ok(trainer.pass_on(&request, &body.0).await?),
    }
}

/// `POST /areal_update_weights` of AReaL's server for vLLM.
pub(super) async fn areal_update_weights(
    trainer: Data<TrainerState>,
    body: RawBody,
) -> HttpResult<HttpResponse> {
    let directory = read(&body.0)?.take::<String>("model_path", "a text")?;
    let directory = weights::named(directory, "model_path")?;
    Ok(weights::load(&trainer, directory, None).await?)
}

impl TrainerState {
    /// Passes a call on to the engines of all workers. If its body names a version of the weights, that is theirs
    /// once all engines have answered.
    async fn pass_on(&self, request: &HttpRequest, body: &[u8]) -> Result<HttpResponse, ApiError> {
        let mut fields = read(body)?;
        let version = read_version("weight_version", fields.fields.remove("weight_version"))?;
        let workers = self.fleet.members().await?.len();
        if workers > 1 && WITH_RANKS.contains(&request.path()) {
            let message = format!(
                "{}: the ranks in this call are those of one engine, and the model {} has {workers} workers; use one \
                 worker, or weights from a directory",
                request.path(),
                self.model
            );
            let error = ApiError::new(ErrorKind::InvalidRequest, message);
            return Err(error.with_code("unsupported_by_engine"));
        }
        let aborts = fields.take::<bool>("abort_all_requests", "true or false")?;
        if aborts == Some(true) {
            self.in_flight.abort_all();
        }
        let path = request.uri().path_and_query();
        let path = path.map_or_else(|| request.path().to_owned(), ToString::to_string);
        let body = String::from_utf8(body.to_vec())
            .map_err(|_| ApiError::new(ErrorKind::InvalidRequest, "the body is not UTF-8"))?;
        let call = EngineCall {
            is_post: request.method() == Method::POST,
            path,
            body,
        };
        let passed = self.fleet.order(EngineOrder::PassOn(call)).await?;
        if !passed.all_done() {
            return Ok(passed.response(json!({})));
        }
        let mut answers = passed.replies().filter_map(|reply| reply.answer.as_ref());
        let fields = answers.next().map_or(Value::Null, |answer| {
            let read = serde_json::from_str(&answer.body);
            read.unwrap_or_else(|_| json!(answer.body))
        });
        match version {
            None => Ok(passed.response(fields)),
            Some(version) => {
                let set = self
                    .fleet
                    .order(EngineOrder::SetVersion { version })
                    .await?;
                Ok(set.response(fields))
            }
        }
    }
}
