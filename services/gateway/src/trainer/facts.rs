//! Control routes that tell what there is: load, server and model.

use actix_web::http::header::HOST;
use actix_web::web::Data;
use actix_web::{HttpRequest, HttpResponse};
use refrain_protocol::ApiError;
use refrain_service_kit::http::HttpResult;
use serde_json::{Value, json};

use super::state::TrainerState;
use super::version::version_name;

/// `GET /v1/models`: the model that is trained, as vLLM shows it.
pub(super) async fn models(trainer: Data<TrainerState>) -> HttpResult<HttpResponse> {
    let listed = trainer.gateway.models.list(&trainer.tenant, |_| true);
    Ok(HttpResponse::Ok().json(listed))
}

/// `GET /v1/loads` of SGLang. It counts everything in flight here, also what is held back or waits for a worker.
pub(super) async fn loads(trainer: Data<TrainerState>) -> HttpResponse {
    let all = trainer.in_flight.len();
    let waiting = trainer.hold.len().min(all);
    let counts = json!({
        "dp_rank": 0,
        "num_reqs": all,
        "num_total_reqs": all,
        "num_running_reqs": all - waiting,
        "num_waiting_reqs": waiting,
    });
    let mut body = counts.clone();
    body["dp_rank_count"] = 1.into();
    body["total_reqs"] = all.into();
    body["loads"] = json!([counts]);
    HttpResponse::Ok().json(body)
}

/// `GET /health`, `/liveness` and `/health_generate`.
pub(super) async fn health(trainer: Data<TrainerState>) -> HttpResponse {
    match (trainer.gateway.readiness)() {
        Ok(()) => HttpResponse::Ok().finish(),
        Err(_) => HttpResponse::ServiceUnavailable().finish(),
    }
}

/// `GET /server_info` and `/get_server_info` of SGLang. All workers together pass for one engine with the devices of
/// all of them, or with one where they do not tell.
pub(super) async fn server_info(trainer: Data<TrainerState>) -> HttpResult<HttpResponse> {
    let mut facts = trainer.model_facts()?;
    for size in ["pp_size", "ep_size", "dp_size"] {
        facts[size] = 1.into();
    }
    let devices = trainer.device_counts().await;
    facts["tp_size"] = devices.map_or(1, |(_, sizes)| sizes.iter().sum()).into();
    facts["version"] = env!("CARGO_PKG_VERSION").into();
    facts["internal_states"] = json!([]);
    Ok(HttpResponse::Ok().json(facts))
}

/// `GET /get_world_size` of vLLM: the devices of all engines together.
pub(super) async fn world_size(trainer: Data<TrainerState>) -> HttpResult<HttpResponse> {
    let (_, sizes) = trainer.device_counts().await?;
    let all: u32 = sizes.iter().sum();
    Ok(HttpResponse::Ok().json(json!({ "world_size": all })))
}

/// `GET /get_model_info` and `/model_info` of SGLang.
pub(super) async fn model_info(trainer: Data<TrainerState>) -> HttpResult<HttpResponse> {
    Ok(HttpResponse::Ok().json(trainer.model_facts()?))
}

impl TrainerState {
    /// The URL by which the caller has reached this listener.
    pub(super) fn own_url(&self, request: &HttpRequest) -> String {
        let host = request.headers().get(HOST);
        let host = host.and_then(|host| host.to_str().ok());
        match host {
            Some(host) => format!("{}://{host}", self.scheme),
            None => format!("{}://{}", self.scheme, self.listen),
        }
    }

    fn model_facts(&self) -> Result<Value, ApiError> {
        let model = self.gateway.models.get(&self.tenant, &self.model)?;
        let context = self.gateway.models.max_context(&model);
        Ok(json!({
            "model_path": self.model,
            "served_model_name": self.model,
            "tokenizer_path": self.model,
            "is_generation": true,
            "weight_version": version_name(self.fleet.version()),
            "context_length": context,
            "max_model_len": context,
        }))
    }
}
