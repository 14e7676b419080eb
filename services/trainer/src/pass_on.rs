//! Calls in an engine's own words, which go to the engines of all workers as they are.

use actix_web::web::Data;
use actix_web::{HttpRequest, HttpResponse};
use futures_util::future::join_all;
use refrain_protocol::engine_order::{EngineCall, EngineOrder};
use refrain_protocol::error::code;
use refrain_protocol::{ApiError, ErrorKind};
use refrain_service_kit::http::{HttpResult, RawBody};
use serde_json::{Value, json};

use super::fleet::Member;
use super::pauses::read;
use super::ranks::{SIZE_CALLS, divided, has_ranks, read_size};
use super::state::TrainerState;
use super::version::read_version;
use super::weights;

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

/// Whether a call that names no version makes the weights new ones. The drafts of a group are those of one version.
fn ends_update(path: &str, body: &[u8]) -> bool {
    match path {
        "/finish_weight_update" | "/areal_update_weights_xccl" => true,
        "/collective_rpc" => {
            let method = read(body)
                .ok()
                .and_then(|body| body.fields.get("method").cloned());
            method.is_some_and(|method| method == "skyrl_finish_weight_update")
        }
        _ => false,
    }
}

impl TrainerState {
    /// The workers of the model, in the order in which they get ranks, and the number of devices of each engine.
    ///
    /// # Errors
    /// There is no worker, or an engine does not tell its number.
    pub(super) async fn device_counts(&self) -> Result<(Vec<Member>, Vec<u32>), ApiError> {
        let members = self.fleet.members().await?;
        let size = async |member: &Member| {
            for path in SIZE_CALLS {
                let answer = self.fleet.ask(member, path).await;
                if let Some(size) = answer.as_deref().and_then(read_size) {
                    return Ok(size);
                }
            }
            let message = format!(
                "the engine of the worker {} does not tell how many devices it has; it needs SGLang's /server_info, or \
                 vLLM's /get_world_size",
                member.0
            );
            let error = ApiError::new(ErrorKind::InvalidRequest, message);
            Err(error.with_code(code::UNSUPPORTED_BY_ENGINE))
        };
        let sizes = join_all(members.iter().map(size)).await;
        let sizes = sizes.into_iter().collect::<Result<_, _>>()?;
        Ok((members, sizes))
    }

    /// Passes a call on to the engines of all workers. If its body names a version of the weights, that is theirs
    /// once all engines have answered.
    async fn pass_on(&self, request: &HttpRequest, body: &[u8]) -> Result<HttpResponse, ApiError> {
        let mut fields = read(body)?;
        let version = read_version("weight_version", fields.fields.remove("weight_version"))?;
        let members = self.fleet.members().await?;
        let aborts = fields.take::<bool>("abort_all_requests", "true or false")?;
        if aborts == Some(true) {
            self.in_flight.abort_all();
        }
        let path = request.uri().path_and_query();
        let path = path.map_or_else(|| request.path().to_owned(), ToString::to_string);
        let passed = if members.len() > 1 && has_ranks(request.path()) {
            let (members, sizes) = self.device_counts().await?;
            let fields = read(body)?.fields;
            let bodies = divided(request.path(), &fields, &sizes)?;
            let calls = bodies.into_iter().map(|fields| EngineCall {
                is_post: true,
                path: path.clone(),
                body: Value::from(fields).to_string(),
            });
            let orders = members.into_iter().zip(calls.map(EngineOrder::PassOn));
            self.fleet.order_each(orders.collect()).await?
        } else {
            let body = String::from_utf8(body.to_vec())
                .map_err(|_| ApiError::new(ErrorKind::InvalidRequest, "the body is not UTF-8"))?;
            let call = EngineCall {
                is_post: true,
                path,
                body,
            };
            self.fleet.order(EngineOrder::PassOn(call)).await?
        };
        if !passed.all_done() {
            return Ok(passed.response(json!({})));
        }
        let mut answers = passed.replies().filter_map(|reply| reply.answer.as_ref());
        let fields = answers.next().map_or(Value::Null, |answer| {
            let read = serde_json::from_str(&answer.body);
            read.unwrap_or_else(|_| json!(answer.body))
        });
        let next = || Some(self.fleet.version() + 1);
        let version = version.or_else(|| ends_update(request.path(), body).then(next)?);
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
