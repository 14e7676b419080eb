//! The interface of the scheduler.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use async_trait::async_trait;
use refrain_protocol::error::code;
use refrain_protocol::scheduling::{
    Heartbeat, HeartbeatReply, Lease, LeaseFinish, LeaseRequest, ServedModel, WorkerReport,
};
use refrain_protocol::{ApiError, ErrorKind};
use refrain_service_kit::deadline::Deadline;
use refrain_service_kit::http::MeshClient;
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use tokio::task::JoinSet;
use tokio::time::Instant;

/// Grants leases and knows the workers.
#[async_trait]
pub trait Scheduler: Send + Sync {
    /// Waits for a lease until it is the request's turn. Dropping the future removes the request from the queue.
    ///
    /// # Errors
    /// `Overloaded` with a retry hint if the queue is full, `Unavailable` if no worker serves the model or the
    /// scheduler drains, `Unauthorized` if the signature of the namespace is invalid.
    async fn lease(&self, request: LeaseRequest) -> Result<Lease, ApiError>;

    /// Gives a lease back. Repeats are harmless.
    async fn finish(&self, finish: LeaseFinish) -> Result<(), ApiError>;

    /// Gives a lease back on the thread of the caller, which a scheduler in the same process can do without waiting.
    /// Returns whether it did; otherwise the caller has to call [`finish`](Scheduler::finish).
    fn finish_now(&self, finish: &LeaseFinish) -> bool {
        let _ = finish;
        false
    }

    /// Registers a worker, or renews it and its leases.
    async fn heartbeat(&self, heartbeat: Heartbeat) -> Result<HeartbeatReply, ApiError>;

    /// Lists the models that live workers serve.
    async fn models(&self) -> Result<Vec<ServedModel>, ApiError>;

    /// Lists the live workers, for operators.
    ///
    /// # Errors
    /// `NotFound` from a scheduler that does not offer it.
    async fn workers(&self) -> Result<Vec<WorkerReport>, ApiError> {
        let message = "this scheduler does not list its workers";
        Err(ApiError::new(ErrorKind::NotFound, message))
    }
}

/// Time between two line feeds that the scheduler sends while a call for a lease waits. A call that ends sooner gets
/// an ordinary response.
pub const LEASE_ALIVE_EVERY: Duration = Duration::from_secs(1);

/// Silence after which the scheduler counts as lost. A call may wait in the queue for long, but never without line
/// feeds.
const LEASE_SILENCE_MAX: Duration = Duration::from_secs(4);

/// Time after which a worker gives up a heartbeat that is not answered.
pub const HEARTBEAT_TIMEOUT: Duration = Duration::from_secs(1);

/// Pause of a worker after a heartbeat that failed.
pub const HEARTBEAT_RETRY_PAUSE: Duration = Duration::from_millis(250);

/// Longest timeout of the other calls, each of which is one message to an actor and its answer.
const CALL_TIMEOUT: Duration = Duration::from_secs(3);

/// Longest answer to a call for a lease, bytes.
const LEASE_BYTES_MAX: usize = 64 << 10;

/// [`Scheduler`] over HTTP: `POST /internal/v1/{lease,finish,heartbeat}`, `GET /internal/v1/{models,workers}`, JSON.
///
/// A call for a lease waits in a queue, so it has no deadline. Instead the scheduler must not fall silent: it sends a
/// line feed, which JSON skips, every [`LEASE_ALIVE_EVERY`], and then a [`LeaseAnswer`]. Short calls that are
/// repeated would do as well, but then the scheduler would have to keep places in the queue for callers that may be
/// gone.
///
/// One of several schedulers leads. It is found by asking: the others answer that they stand by. Heartbeats go to all
/// of them, so that each knows the workers when it has to take over.
pub struct HttpScheduler {
    clients: Vec<MeshClient>,
    /// The one that answered last.
    answered: AtomicUsize,
}

impl HttpScheduler {
    /// Creates a client of the scheduler that `client` calls.
    pub fn new(client: MeshClient) -> Self {
        HttpScheduler::of(vec![client])
    }

    /// Creates a client of several schedulers, of which one leads. There has to be at least one.
    pub fn of(clients: Vec<MeshClient>) -> Self {
        HttpScheduler {
            clients,
            answered: AtomicUsize::new(0),
        }
    }

    /// Asks the leader. Where the one that answered last leads no more, the others are asked, each once.
    async fn ask<T, F>(&self, call: impl Fn(MeshClient) -> F) -> Result<T, ApiError>
    where
        F: Future<Output = Result<T, ApiError>>,
    {
        let (first, count) = (self.answered.load(Ordering::Relaxed), self.clients.len());
        let mut refusals = Vec::new();
        for at in (first..count).chain(0..first) {
            match call(self.clients[at].clone()).await {
                Err(error) if count > 1 && !is_of_leader(&error) => refusals.push(error),
                answer => {
                    self.answered.store(at, Ordering::Relaxed);
                    return answer;
                }
            }
        }
        Err(most_telling(refusals))
    }
}

/// Whether only a scheduler that leads answers like this.
fn is_of_leader(error: &ApiError) -> bool {
    matches!(
        error.kind,
        ErrorKind::Overloaded | ErrorKind::InvalidRequest | ErrorKind::Conflict
    )
}

/// The error that says most: that a scheduler stands by says less than any other.
fn most_telling(mut errors: Vec<ApiError>) -> ApiError {
    let tells = |error: &ApiError| !error.has_code(code::SCHEDULER_UNAVAILABLE);
    match errors
        .iter()
        .position(tells)
        .or(errors.len().checked_sub(1))
    {
        Some(at) => errors.swap_remove(at),
        None => ApiError::new(ErrorKind::Unavailable, "no scheduler is named"),
    }
}

fn call_timeout(client: &MeshClient) -> Option<Duration> {
    Some(client.timeout().min(CALL_TIMEOUT))
}

/// Reads within the time of short calls.
async fn get<T: DeserializeOwned>(client: &MeshClient, path: &str) -> Result<T, ApiError> {
    let wait = client.timeout().min(CALL_TIMEOUT);
    let answer = tokio::time::timeout(wait, client.get_json(path)).await;
    let late = |_| ApiError::new(ErrorKind::Timeout, "the scheduler did not answer in time");
    answer.map_err(late)?
}

/// The body of the response to a call for a lease that has waited.
#[derive(Serialize, Deserialize)]
#[serde(untagged)]
pub enum LeaseAnswer {
    /// The lease is granted.
    Granted(Lease),
    /// The lease is refused. The status of the response had been sent by then.
    Refused {
        /// The reason.
        error: ApiError,
    },
}

fn broken(detail: impl std::fmt::Display) -> ApiError {
    let message = "the connection to the scheduler broke off";
    ApiError::new(ErrorKind::Upstream, message).with_detail(detail)
}

#[async_trait]
impl Scheduler for HttpScheduler {
    async fn lease(&self, request: LeaseRequest) -> Result<Lease, ApiError> {
        self.ask(|client| lease(client, &request)).await
    }

    async fn finish(&self, finish: LeaseFinish) -> Result<(), ApiError> {
        self.ask(|client| {
            let finish = &finish;
            async move {
                let timeout = call_timeout(&client);
                client
                    .post_json("/internal/v1/finish", finish, timeout)
                    .await
            }
        })
        .await
    }

    async fn heartbeat(&self, heartbeat: Heartbeat) -> Result<HeartbeatReply, ApiError> {
        let path = "/internal/v1/heartbeat";
        if let [client] = &self.clients[..] {
            return client
                .post_json(path, &heartbeat, call_timeout(client))
                .await;
        }
        // The reply of the leader must not wait for a scheduler that hangs. One that is slow still gets its report.
        let heartbeat = Arc::new(heartbeat);
        let mut calls = JoinSet::new();
        for client in self.clients.clone() {
            let heartbeat = heartbeat.clone();
            let timeout = Some(HEARTBEAT_TIMEOUT);
            calls.spawn(async move { client.post_json(path, &*heartbeat, timeout).await });
        }
        let mut errors = Vec::new();
        while let Some(called) = calls.join_next().await {
            match called {
                Ok(Ok(reply)) => {
                    calls.detach_all();
                    return Ok(reply);
                }
                Ok(Err(error)) => errors.push(error),
                Err(error) => errors.push(ApiError::internal(error)),
            }
        }
        Err(most_telling(errors))
    }

    async fn models(&self) -> Result<Vec<ServedModel>, ApiError> {
        self.ask(|client| async move { get(&client, "/internal/v1/models").await })
            .await
    }

    async fn workers(&self) -> Result<Vec<WorkerReport>, ApiError> {
        self.ask(|client| async move { get(&client, "/internal/v1/workers").await })
            .await
    }
}

async fn lease(client: MeshClient, request: &LeaseRequest) -> Result<Lease, ApiError> {
    let mut response = client
        .post_stream("/internal/v1/lease", request, LEASE_SILENCE_MAX)
        .await?;
    let mut silence = Deadline::after(LEASE_SILENCE_MAX);
    let mut answer = Vec::new();
    loop {
        match silence.bound(response.chunk()).await {
            None => {
                let message = "the scheduler fell silent";
                return Err(ApiError::new(ErrorKind::Timeout, message));
            }
            Some(Err(error)) => return Err(broken(error)),
            Some(Ok(None)) => break,
            Some(Ok(Some(bytes))) if answer.len() + bytes.len() > LEASE_BYTES_MAX => {
                return Err(broken("its answer is too long"));
            }
            // Line feeds before the answer only show that the scheduler is alive.
            Some(Ok(Some(bytes))) if answer.is_empty() => {
                answer.extend_from_slice(bytes.trim_ascii_start());
            }
            Some(Ok(Some(bytes))) => answer.extend_from_slice(&bytes),
        }
        silence.set(Instant::now() + LEASE_SILENCE_MAX);
    }
    match serde_json::from_slice(&answer) {
        Ok(LeaseAnswer::Granted(lease)) => Ok(lease),
        Ok(LeaseAnswer::Refused { error }) => Err(error),
        Err(error) => Err(broken(error)),
    }
}
