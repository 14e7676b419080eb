//! Control routes that tell what there is: workers, load, server and model.

use actix_web::http::header::HOST;
use actix_web::web::Data;
use actix_web::{HttpRequest, HttpResponse};
use refrain_protocol::{ApiError, ErrorKind};
use refrain_service_kit::http::HttpResult;
use serde_json::{Value, json};

use super::state::TrainerState;
use super::version::version_name;

/// The only worker that a trainer sees: this listener.
const WORKER_ID: &str = "refrain";

/// `GET /v1/models`: the model that is trained, as vLLM shows it.
pub(super) async fn models(trainer: Data<TrainerState>) -> HttpResult<HttpResponse> {
    let listed = trainer.gateway.models.list(&trainer.tenant, |_| true);
    Ok(HttpResponse::Ok().json(listed))
}

/// `GET /workers` of SGLang's gateway.
pub(super) async fn workers(trainer: Data<TrainerState>, request: HttpRequest) -> HttpResponse {
    let (url, model) = (trainer.own_url(&request), &trainer.model);
    let is_healthy = (trainer.gateway.readiness)().is_ok();
    HttpResponse::Ok().json(json!({
        "workers": [{
            "id": WORKER_ID,
            "url": url,
            "model_id": model,
            "worker_type": "regular",
            "is_healthy": is_healthy,
            "load": trainer.in_flight.len(),
        }],
        "total": 1,
    }))
}

/// `GET /list_workers`, the older form.
pub(super) async fn list_workers(
    trainer: Data<TrainerState>,
    request: HttpRequest,
) -> HttpResponse {
    HttpResponse::Ok().json(json!({"urls": [trainer.own_url(&request)]}))
}

/// `POST /workers` and `DELETE /workers/{id}`: this listener adopts no engines.
pub(super) async fn adopt() -> HttpResult<HttpResponse> {
    let message = "engines cannot be added here or removed; start a worker of Refrain for each engine, and it appears \
                   by itself";
    Err(ApiError::new(ErrorKind::NotFound, message)
        .with_code("engines_not_adopted")
        .into())
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

/// `GET /server_info` and `/get_server_info` of SGLang. All workers together pass for one engine on one device.
pub(super) async fn server_info(trainer: Data<TrainerState>) -> HttpResult<HttpResponse> {
    let mut facts = trainer.model_facts()?;
    for size in ["tp_size", "pp_size", "ep_size", "dp_size"] {
        facts[size] = 1.into();
    }
    facts["version"] = env!("CARGO_PKG_VERSION").into();
    facts["internal_states"] = json!([]);
    Ok(HttpResponse::Ok().json(facts))
}

/// `GET /get_model_info` and `/model_info` of SGLang.
pub(super) async fn model_info(trainer: Data<TrainerState>) -> HttpResult<HttpResponse> {
    Ok(HttpResponse::Ok().json(trainer.model_facts()?))
}

impl TrainerState {
    /// The URL by which the caller has reached this listener.
    fn own_url(&self, request: &HttpRequest) -> String {
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
