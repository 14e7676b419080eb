//! Engines that register: the calls of SGLang's gateway by which they join, leave and are listed.

use std::collections::HashMap;

use actix_web::http::StatusCode;
use actix_web::http::header::LOCATION;
use actix_web::web::{Data, Path, Query};
use actix_web::{HttpRequest, HttpResponse};
use refrain_protocol::adoption::{AdoptRequest, AdoptedEngine, ReleaseRequest};
use refrain_protocol::engine_order::EngineOrder;
use refrain_protocol::{ApiError, ErrorKind};
use refrain_rpc::EngineAddress;
use refrain_service_kit::http::{HttpResult, RawBody};
use serde_json::{Value, json};

use super::adopters::choose;
use super::pauses::read;
use super::state::TrainerState;
use super::version::version_name;

/// The worker that stands for this listener and all that it has in flight.
const OWN_ID: &str = "refrain";

/// `POST /workers`.
pub(super) async fn register(
    trainer: Data<TrainerState>,
    request: HttpRequest,
    body: RawBody,
) -> HttpResult<HttpResponse> {
    let mut body = read(&body.0)?;
    let url = body.take::<String>("url", "a text")?.unwrap_or_default();
    let kind = body.take::<String>("worker_type", "a text")?;
    if kind.as_deref().is_some_and(|kind| kind != "regular") {
        let message = "worker_type: only regular engines can register; prefill and decode are not divided here";
        return Err(ApiError::invalid("worker_type", message).into());
    }
    if body.take::<String>("api_key", "a text")?.is_some() {
        let message = "api_key: set the key of the engines as worker.engine.api_key of the worker process instead";
        return Err(ApiError::invalid("api_key", message).into());
    }
    if trainer.is_own_url(&request, &url) {
        let version = trainer.fleet.version();
        let message = "This listener is its own first worker.";
        return Ok(accepted(accepted_row(OWN_ID, &url, message, version)));
    }
    let engine = trainer.register(&url).await?;
    let message = "The engine was checked, and its worker runs.";
    let mut answer = accepted_row(&engine.id, &engine.url, message, engine.weight_version);
    if let Some(newest) = trainer.newest_of_others(&engine).await {
        answer["has_newest_weights"] = (engine.weight_version == newest).into();
    }
    Ok(accepted(answer))
}

/// The answer about an engine that has registered.
fn accepted_row(id: &str, url: &str, message: &str, version: u64) -> Value {
    json!({
        "status": "accepted",
        "worker_id": id,
        "url": url,
        "location": format!("/workers/{id}"),
        "message": message,
        "weight_version": version_name(version),
    })
}

fn accepted(row: Value) -> HttpResponse {
    let location = row["location"].as_str().unwrap_or_default().to_owned();
    HttpResponse::build(StatusCode::ACCEPTED)
        .insert_header((LOCATION, location))
        .json(row)
}

/// `POST /add_worker?url=` of older versions.
pub(super) async fn add_worker(
    trainer: Data<TrainerState>,
    query: Query<HashMap<String, String>>,
) -> HttpResult<HttpResponse> {
    let engine = trainer.register(url_of(&query)?).await?;
    Ok(success("added", &engine))
}

/// `DELETE /workers/{id}`. Older trainers give the URL as the id.
pub(super) async fn remove(
    trainer: Data<TrainerState>,
    id: Path<String>,
) -> HttpResult<HttpResponse> {
    let engine = trainer.remove(&id).await?;
    Ok(HttpResponse::build(StatusCode::ACCEPTED).json(json!({
        "status": "accepted",
        "worker_id": engine.id,
        "message": "Nothing runs on the engine any more, and its worker has ended.",
    })))
}

/// `POST /remove_worker?url=` of older versions.
pub(super) async fn remove_worker(
    trainer: Data<TrainerState>,
    query: Query<HashMap<String, String>>,
) -> HttpResult<HttpResponse> {
    let engine = trainer.remove(url_of(&query)?).await?;
    Ok(success("removed", &engine))
}

/// The answer of older versions.
fn success(done: &str, engine: &AdoptedEngine) -> HttpResponse {
    HttpResponse::Ok().json(json!({
        "status": "success",
        "worker_id": engine.id,
        "message": format!("Successfully {done} worker: {}", engine.url),
    }))
}

fn url_of(query: &HashMap<String, String>) -> Result<&str, ApiError> {
    let url = query.get("url").map(String::as_str);
    url.ok_or_else(|| ApiError::invalid("url", "url: name the engine by its base URL"))
}

/// `GET /workers`: this listener, and the engines that registered.
///
/// The listener comes first: a trainer aborts what runs at each worker of this list, and only the listener knows of
/// the requests that wait.
pub(super) async fn workers(trainer: Data<TrainerState>, request: HttpRequest) -> HttpResponse {
    let engines = trainer.engines().await;
    let engines = engines.iter().map(|engine| trainer.engine_row(engine));
    let rows: Vec<Value> = std::iter::once(trainer.own_row(&request))
        .chain(engines)
        .collect();
    let total = rows.len();
    HttpResponse::Ok().json(json!({
        "workers": rows,
        "total": total,
        "stats": {"prefill_count": 0, "decode_count": 0, "regular_count": total},
    }))
}

/// `GET /workers/{id}`.
pub(super) async fn worker(
    trainer: Data<TrainerState>,
    request: HttpRequest,
    id: Path<String>,
) -> HttpResult<HttpResponse> {
    if *id == OWN_ID {
        return Ok(HttpResponse::Ok().json(trainer.own_row(&request)));
    }
    let engines = trainer.engines().await;
    let found = engines.iter().find(|engine| is_named(engine, &id));
    let engine = found.ok_or_else(|| unknown(&id))?;
    Ok(HttpResponse::Ok().json(trainer.engine_row(engine)))
}

/// `GET /list_workers`, the older form.
pub(super) async fn list_workers(
    trainer: Data<TrainerState>,
    request: HttpRequest,
) -> HttpResponse {
    let engines = trainer.engines().await;
    let urls = engines.into_iter().map(|engine| engine.url);
    let urls: Vec<String> = std::iter::once(trainer.own_url(&request))
        .chain(urls)
        .collect();
    HttpResponse::Ok().json(json!({ "urls": urls }))
}

/// Whether a trainer means an engine by this id or URL.
fn is_named(engine: &AdoptedEngine, name: &str) -> bool {
    let is_same = |address: EngineAddress| address.id == engine.id;
    engine.id == name || EngineAddress::read(name).is_ok_and(is_same)
}

fn unknown(id: &str) -> ApiError {
    let shown: String = id.chars().take(100).collect();
    let message =
        format!("no engine with the id or URL {shown} has registered; GET /workers lists them");
    ApiError::new(ErrorKind::NotFound, message).with_code("engine_not_found")
}

impl TrainerState {
    /// Has an engine adopted. It starts in the pause that the other workers are in.
    async fn register(&self, url: &str) -> Result<AdoptedEngine, ApiError> {
        let adopters = self.adopters.any()?;
        let address = EngineAddress::read(url)?;
        let _turn = adopters.turn.lock().await;
        let at = choose(&adopters.reports().await, &self.model, &address.id)?;
        let before = self.fleet.order(EngineOrder::Report).await.ok();
        let pause = before.as_ref().and_then(|answers| answers.pause());
        let request = AdoptRequest {
            url: address.url,
            pause,
        };
        let engine = adopters.adopters[at].adopt(request).await?;
        self.align(&engine).await;
        // The gateway would learn of the model only with its next poll.
        if let Ok(served) = self.fleet.models().await {
            self.gateway.learn_served(served);
        }
        Ok(engine)
    }

    /// Gives a new worker the pause that the others are in, or ends its own: a pause may have begun or ended while it
    /// joined.
    async fn align(&self, engine: &AdoptedEngine) {
        let Ok(now) = self.fleet.order(EngineOrder::Report).await else {
            return;
        };
        let others = now.pause_of_others(&engine.worker);
        let order = match (others, now.pause_of(&engine.worker)) {
            (Some(Some(mode)), None) => EngineOrder::Pause {
                mode,
                clears_cache: false,
            },
            (Some(None), Some(_)) => EngineOrder::Resume,
            _ => return,
        };
        if let Err(error) = self.fleet.order_one(&engine.worker, order).await {
            tracing::warn!(worker = %engine.worker, %error, "a new worker did not follow the pause of the others");
        }
    }

    /// The newest version of the weights of the other workers. It warns if the engine has another one.
    async fn newest_of_others(&self, engine: &AdoptedEngine) -> Option<u64> {
        let now = self.fleet.order(EngineOrder::Report).await.ok()?;
        let newest = now.newest_version_of_others(&engine.worker)?;
        if newest != engine.weight_version {
            tracing::warn!(
                worker = %engine.worker,
                version = engine.weight_version,
                newest,
                "an engine registered that has other weights than the other workers"
            );
        }
        Some(newest)
    }

    /// Has an engine given up that a trainer names by its id or its URL.
    async fn remove(&self, name: &str) -> Result<AdoptedEngine, ApiError> {
        let reports = self.adopters.any()?.reports().await;
        for (adopter, report) in self.adopters.adopters.iter().zip(&reports) {
            let engines = report.iter().flat_map(|report| &report.engines);
            for engine in engines {
                if is_named(engine, name) {
                    let engine = engine.id.clone();
                    return adopter.release(ReleaseRequest { engine }).await;
                }
            }
        }
        // An engine of a process that does not answer may still be there.
        match reports.into_iter().find_map(Result::err) {
            Some(error) => Err(error),
            None => Err(unknown(name)),
        }
    }

    /// The engines that registered. Those of a process that does not answer are missing.
    async fn engines(&self) -> Vec<AdoptedEngine> {
        let mut engines = Vec::new();
        for report in self.adopters.reports().await {
            match report {
                Ok(report) if report.model == self.model => engines.extend(report.engines),
                Ok(_) => {}
                Err(error) => {
                    tracing::warn!(%error, "a process that adopts engines does not answer");
                }
            }
        }
        engines
    }

    /// Whether a trainer that takes this listener for one engine registers it with itself, the router.
    fn is_own_url(&self, request: &HttpRequest, url: &str) -> bool {
        let own = EngineAddress::read(&self.own_url(request));
        matches!((own, EngineAddress::read(url)), (Ok(own), Ok(told)) if own.id == told.id)
    }

    fn own_row(&self, request: &HttpRequest) -> Value {
        let is_healthy = self.gateway.readiness()().is_ok();
        json!({
            "id": OWN_ID,
            "url": self.own_url(request),
            "model_id": self.model,
            "worker_type": "regular",
            "connection_mode": "http",
            "is_healthy": is_healthy,
            "load": self.in_flight.len(),
        })
    }

    fn engine_row(&self, engine: &AdoptedEngine) -> Value {
        json!({
            "id": engine.id,
            "url": engine.url,
            "model_id": self.model,
            "worker_type": "regular",
            "connection_mode": "http",
            "is_healthy": engine.fault.is_none(),
            "load": engine.running,
            "worker": engine.worker,
            "weight_version": version_name(engine.weight_version),
            "fault": engine.fault,
        })
    }
}

#[cfg(test)]
mod tests {
    use refrain_protocol::WorkerId;

    use super::*;

    #[test]
    fn an_engine_is_named_by_its_id_or_its_url() {
        let engine = AdoptedEngine {
            id: "10.0.0.5:30000".into(),
            url: "http://10.0.0.5:30000".into(),
            worker: WorkerId("w".into()),
            running: 0,
            weight_version: 0,
            fault: None,
        };
        for name in [
            "10.0.0.5:30000",
            "http://10.0.0.5:30000",
            "http://10.0.0.5:30000/",
        ] {
            assert!(is_named(&engine, name), "{name}");
        }
        for name in ["", "10.0.0.5", "10.0.0.5:3000", "http://10.0.0.6:30000"] {
            assert!(!is_named(&engine, name), "{name}");
        }
    }
}
