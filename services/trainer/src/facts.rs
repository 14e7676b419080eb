//! Control routes that tell what there is: load, server and model.

use actix_web::http::header::HOST;
use actix_web::web::Data;
use actix_web::{HttpRequest, HttpResponse};
use futures_util::future::join_all;
use refrain_protocol::ApiError;
use refrain_service_kit::http::HttpResult;
use serde_json::{Value, json};

use super::fleet::Member;
use super::state::TrainerState;
use super::version::version_name;

/// `GET /v1/models`: the model that is trained, as vLLM shows it.
pub(super) async fn models(trainer: Data<TrainerState>) -> HttpResult<HttpResponse> {
    Ok(HttpResponse::Ok().json(trainer.gateway.models(&trainer.tenant)))
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
    match trainer.gateway.readiness()() {
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
    // slime compares it with its own setting before it takes an engine that it did not start.
    facts["enable_memory_saver"] = trainer.all_save_memory().await.into();
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

    /// Whether each engine can give its memory away, as an SGLang that was started so.
    async fn all_save_memory(&self) -> bool {
        let members = self.fleet.members().await.unwrap_or_default();
        let saves = async |member: &Member| {
            let answer = self.fleet.ask(member, "/server_info").await;
            let facts = answer.and_then(|answer| serde_json::from_str::<Value>(&answer).ok());
            facts.is_some_and(|facts| facts["enable_memory_saver"] == true)
        };
        let told = join_all(members.iter().map(saves)).await;
        !told.is_empty() && told.into_iter().all(|saves| saves)
    }

    fn model_facts(&self) -> Result<Value, ApiError> {
        let context = self.gateway.max_context(&self.tenant, &self.model)?;
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
