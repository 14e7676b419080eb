//! Orders to all workers of the model, and what each of them answered.

use std::sync::Arc;
use std::time::Duration;

use actix_web::HttpResponse;
use actix_web::http::StatusCode;
use futures_util::future::join_all;
use refrain_gateway::KnownWeights;
use refrain_protocol::engine_order::{
    EngineCall, EngineOrder, EngineOrderReply, EngineState, PauseMode,
};
use refrain_protocol::openai::ErrorBody;
use refrain_protocol::scheduling::ServedModel;
use refrain_protocol::{ApiError, ErrorKind, WorkerId};
use refrain_rpc::{Scheduler, Workers};
use serde_json::{Value, json};

use super::metrics::TrainerFamilies;
use super::version::version_name;

/// Longest wait for the state of a worker. Other orders may take as long as weights need.
const REPORT_WAIT: Duration = Duration::from_secs(10);

/// The workers of the model.
pub(super) struct Fleet {
    model: String,
    scheduler: Arc<dyn Scheduler>,
    workers: Arc<dyn Workers>,
    families: Arc<TrainerFamilies>,
    weights: Arc<KnownWeights>,
}

/// The name of a worker, and its address.
pub(super) type Member = (WorkerId, String);

/// The answer of a worker to an order.
pub(super) struct WorkerAnswer {
    worker: WorkerId,
    pub(super) reply: Result<EngineOrderReply, ApiError>,
}

/// The answers of all workers to an order, at least one.
pub(super) struct FleetAnswers {
    pub(super) workers: Vec<WorkerAnswer>,
}

/// The `order` label of metrics.
fn label(order: &EngineOrder) -> &'static str {
    match order {
        EngineOrder::Report => "report",
        EngineOrder::Pause { .. } => "pause",
        EngineOrder::Resume => "resume",
        EngineOrder::FlushCache => "flush_cache",
        EngineOrder::LoadWeights { .. } => "load_weights",
        EngineOrder::SetVersion { .. } => "set_version",
        EngineOrder::PassOn(_) => "pass_on",
    }
}

/// All values of that label.
pub(super) const ORDERS: [&str; 7] = [
    "report",
    "pause",
    "resume",
    "flush_cache",
    "load_weights",
    "set_version",
    "pass_on",
];

impl Fleet {
    /// Creates the fleet of a model.
    pub(super) fn new(
        model: String,
        scheduler: Arc<dyn Scheduler>,
        workers: Arc<dyn Workers>,
        families: Arc<TrainerFamilies>,
        weights: Arc<KnownWeights>,
    ) -> Self {
        Fleet {
            model,
            scheduler,
            workers,
            families,
            weights,
        }
    }

    /// The version of the weights, as far as it is known; 0 before a worker has named one.
    pub(super) fn version(&self) -> u64 {
        self.weights.version()
    }

    /// The workers of the model, in the order of their names.
    ///
    /// # Errors
    /// The error of the scheduler, or `Unavailable` if there is no worker.
    pub(super) async fn members(&self) -> Result<Vec<Member>, ApiError> {
        let all = self.scheduler.workers().await?;
        let ours = all.into_iter().filter(|worker| worker.model == self.model);
        let mut members: Vec<Member> = ours.map(|worker| (worker.worker, worker.url)).collect();
        members.sort();
        match members.is_empty() {
            false => Ok(members),
            true => {
                let message = format!("no worker serves the model {}; start one", self.model);
                Err(ApiError::new(ErrorKind::Unavailable, message).with_code("no_worker"))
            }
        }
    }

    /// Gives all workers an order, and waits until each has answered. It is carried out to its end, also if the
    /// caller hangs up.
    ///
    /// # Errors
    /// As [`Fleet::members`]: nothing was ordered then.
    pub(super) async fn order(
        self: &Arc<Self>,
        order: EngineOrder,
    ) -> Result<FleetAnswers, ApiError> {
        let fleet = self.clone();
        let orders = tokio::spawn(async move { fleet.order_here(order).await });
        orders.await.map_err(ApiError::internal)?
    }

    /// As [`Fleet::order`], with an order of its own for each worker.
    ///
    /// # Errors
    /// This task was cancelled.
    pub(super) async fn order_each(
        self: &Arc<Self>,
        orders: Vec<(Member, EngineOrder)>,
    ) -> Result<FleetAnswers, ApiError> {
        let fleet = self.clone();
        let orders = tokio::spawn(async move { fleet.order_each_here(orders).await });
        orders.await.map_err(ApiError::internal)
    }

    /// Gives one worker an order.
    ///
    /// # Errors
    /// There is no such worker, or it did not carry the order out.
    pub(super) async fn order_one(
        &self,
        worker: &WorkerId,
        order: EngineOrder,
    ) -> Result<(), ApiError> {
        let members = self.members().await?;
        let member = members.into_iter().find(|(id, _)| id == worker);
        let (id, url) = member.ok_or_else(|| {
            let message = format!("the worker {worker} does not report to the scheduler");
            ApiError::new(ErrorKind::NotFound, message)
        })?;
        let answer = self.give((id, url), order).await;
        answer.reply.map(drop)
    }

    /// The models that are served now.
    ///
    /// # Errors
    /// The error of the scheduler.
    pub(super) async fn models(&self) -> Result<Vec<ServedModel>, ApiError> {
        self.scheduler.models().await
    }

    /// The answer of a worker's engine to a call. `None` where it has no such call.
    pub(super) async fn ask(&self, (_, url): &Member, path: &str) -> Option<String> {
        let call = EngineOrder::PassOn(EngineCall {
            is_post: false,
            path: path.to_owned(),
            body: String::new(),
        });
        let worker = self.workers.at(url);
        let asked = tokio::time::timeout(REPORT_WAIT, worker.order(call));
        let answer = asked.await.ok()?.ok()?.answer?;
        (answer.status == 200).then_some(answer.body)
    }

    async fn order_here(&self, order: EngineOrder) -> Result<FleetAnswers, ApiError> {
        let members = self.members().await?.into_iter();
        let orders = members.map(|member| (member, order.clone())).collect();
        Ok(self.order_each_here(orders).await)
    }

    async fn order_each_here(&self, orders: Vec<(Member, EngineOrder)>) -> FleetAnswers {
        let orders = orders.into_iter();
        let answers = orders.map(|(member, order)| self.give(member, order));
        FleetAnswers {
            workers: join_all(answers).await,
        }
    }

    async fn give(&self, (id, url): Member, order: EngineOrder) -> WorkerAnswer {
        let worker = self.workers.at(&url);
        let ordered = worker.order(order.clone());
        let reply = match order {
            EngineOrder::Report => match tokio::time::timeout(REPORT_WAIT, ordered).await {
                Ok(reply) => reply,
                Err(_) => Err(ApiError::new(ErrorKind::Timeout, "it does not answer")),
            },
            _ => ordered.await,
        };
        let reply = reply.and_then(engine_refused);
        self.note(&order, &id, &reply);
        WorkerAnswer { worker: id, reply }
    }

    fn note(&self, order: &EngineOrder, id: &WorkerId, reply: &Result<EngineOrderReply, ApiError>) {
        let renews = matches!(
            order,
            EngineOrder::LoadWeights { .. } | EngineOrder::SetVersion { .. }
        );
        let order = label(order);
        let outcome = match reply {
            Ok(reply) => {
                match renews {
                    true => self.weights.replaced(reply.state.weight_version),
                    false => self.weights.seen(reply.state.weight_version),
                }
                "done"
            }
            Err(error) => {
                tracing::warn!(order, worker = %id, kind = ?error.kind, "a worker did not carry out an order");
                "failed"
            }
        };
        let orders = &self.families.orders;
        orders.with_label_values(&[order, outcome]).inc();
    }
}

/// Longest part of an engine's answer that an error repeats, characters.
const SHOWN_MAX: usize = 500;

/// Makes an error of what an engine refused.
fn engine_refused(reply: EngineOrderReply) -> Result<EngineOrderReply, ApiError> {
    let Some(answer) = reply
        .answer
        .as_ref()
        .filter(|it| !(200..300).contains(&it.status))
    else {
        return Ok(reply);
    };
    let kind = match answer.status {
        404 => ErrorKind::NotFound,
        400..500 => ErrorKind::InvalidRequest,
        _ => ErrorKind::Upstream,
    };
    let shown: String = answer.body.chars().take(SHOWN_MAX).collect();
    let message = format!("its engine answered {}: {shown}", answer.status);
    Err(ApiError::new(kind, message).with_code(refrain_protocol::error::code::ENGINE_ERROR))
}

impl FleetAnswers {
    /// Whether every worker has carried the order out.
    pub(super) fn all_done(&self) -> bool {
        self.workers.iter().all(|worker| worker.reply.is_ok())
    }

    /// Whether at least one worker has carried the order out.
    pub(super) fn any_done(&self) -> bool {
        self.workers.iter().any(|worker| worker.reply.is_ok())
    }

    /// The replies of the workers that have carried the order out.
    pub(super) fn replies(&self) -> impl Iterator<Item = &EngineOrderReply> {
        let replies = self.workers.iter();
        replies.filter_map(|worker| worker.reply.as_ref().ok())
    }

    /// The oldest version of the weights on any worker.
    pub(super) fn oldest_version(&self) -> u64 {
        let versions = self.replies().map(|reply| reply.state.weight_version);
        versions.min().unwrap_or(0)
    }

    /// The states of all workers that answered, by their names.
    fn states(&self) -> impl Iterator<Item = (&WorkerId, &EngineState)> {
        let answers = self.workers.iter();
        answers.filter_map(|answer| Some((&answer.worker, &answer.reply.as_ref().ok()?.state)))
    }

    /// The pause that some worker is in.
    pub(super) fn pause(&self) -> Option<PauseMode> {
        self.states().find_map(|(_, state)| state.pause)
    }

    /// The pause that this worker is in.
    pub(super) fn pause_of(&self, worker: &WorkerId) -> Option<PauseMode> {
        let (_, state) = self.states().find(|(name, _)| *name == worker)?;
        state.pause
    }

    /// The pause that some other worker is in. `None`: there are no others.
    pub(super) fn pause_of_others(&self, worker: &WorkerId) -> Option<Option<PauseMode>> {
        let mut others = self.states().filter(|(name, _)| *name != worker);
        let (_, first) = others.next()?;
        Some(
            first
                .pause
                .or_else(|| others.find_map(|(_, state)| state.pause)),
        )
    }

    /// The newest version of the weights on other workers.
    pub(super) fn newest_version_of_others(&self, worker: &WorkerId) -> Option<u64> {
        let others = self.states().filter(|(name, _)| *name != worker);
        others.map(|(_, state)| state.weight_version).max()
    }

    /// The response: these fields if all workers have carried the order out, otherwise an error. Both have `workers`.
    pub(super) fn response(&self, fields: Value) -> HttpResponse {
        let (status, mut body) = match self.error() {
            None => (StatusCode::OK, fields),
            Some(error) => {
                let status = StatusCode::from_u16(error.kind.status());
                let mut body = json!(ErrorBody::from(&error));
                // Trainers that know SGLang look at this.
                body["success"] = false.into();
                body["message"] = error.message.into();
                (status.unwrap_or(StatusCode::BAD_GATEWAY), body)
            }
        };
        if !body.is_object() {
            body = json!({ "answer": body });
        }
        body["workers"] = self.workers.iter().map(shown).collect();
        HttpResponse::build(status).json(body)
    }

    /// The error that names each worker that did not carry the order out, and each that did.
    fn error(&self) -> Option<ApiError> {
        let failed = self.workers.iter();
        let mut failed = failed.filter_map(|it| Some((&it.worker, it.reply.as_ref().err()?)));
        let (_, first) = failed.clone().next()?;
        let are_alike = failed.clone().all(|(_, error)| error.kind == first.kind);
        // A worker that did it shows that the order itself was right.
        let kind = match are_alike && !self.any_done() {
            true => first.kind,
            false => ErrorKind::Upstream,
        };
        let reasons: Vec<String> = failed
            .by_ref()
            .map(|(worker, error)| format!("{worker}: {}", error.message))
            .collect();
        let done = self.workers.iter().filter(|it| it.reply.is_ok());
        let done: Vec<&str> = done.map(|it| it.worker.0.as_str()).collect();
        let others = match done.is_empty() {
            true => "No worker has carried it out.".to_owned(),
            false => format!("These have carried it out: {}.", done.join(", ")),
        };
        let message = format!(
            "{} of {} workers did not carry out the order ({}). {others}",
            reasons.len(),
            self.workers.len(),
            reasons.join("; ")
        );
        Some(ApiError::new(kind, message).with_code("order_failed"))
    }
}

fn shown(answer: &WorkerAnswer) -> Value {
    let worker = &answer.worker.0;
    match &answer.reply {
        Ok(reply) => {
            let state = &reply.state;
            let mut row = json!({
                "worker": worker,
                "done": true,
                "weight_version": version_name(state.weight_version),
                "is_paused": state.pause.is_some(),
                "pause": state.pause.map(pause_name),
                "running": state.running,
                "held": state.held,
            });
            if let Some(engine) = &reply.answer {
                row["status"] = engine.status.into();
            }
            row
        }
        Err(error) => json!({
            "worker": worker,
            "done": false,
            "error": {"message": error.message, "type": error.kind.openai_type(), "code": error.code},
        }),
    }
}

fn pause_name(mode: PauseMode) -> &'static str {
    match mode {
        PauseMode::Abort => "abort",
        PauseMode::Wait => "wait",
        PauseMode::Keep => "keep",
    }
}
