//! The scheduler's interface.

use std::time::Duration;

use async_trait::async_trait;
use refrain_protocol::scheduling::{
    Heartbeat, HeartbeatReply, Lease, LeaseFinish, LeaseRequest, ServedModel,
};
use refrain_protocol::{ApiError, ErrorKind};
use refrain_service_kit::deadline::Deadline;
use refrain_service_kit::http::MeshClient;
use serde::{Deserialize, Serialize};
use tokio::time::Instant;

/// Grants leases and keeps the table of workers.
#[async_trait]
pub trait Scheduler: Send + Sync {
    /// Waits until it is the request's turn. Dropping the future takes the request out of the queue.
    ///
    /// # Errors
    /// `Overloaded` with a retry hint when the queue is full, `Unavailable` when no worker serves the model
    /// or the scheduler drains, `Unauthorized` when the namespace's signature does not hold.
    async fn lease(&self, request: LeaseRequest) -> Result<Lease, ApiError>;

    /// Gives a lease back. Repeats are harmless.
    async fn finish(&self, finish: LeaseFinish) -> Result<(), ApiError>;

    /// Registers a worker, or renews it and its leases.
    async fn heartbeat(&self, heartbeat: Heartbeat) -> Result<HeartbeatReply, ApiError>;

    /// The models that live workers serve.
    async fn models(&self) -> Result<Vec<ServedModel>, ApiError>;
}

/// How often the scheduler says of a call that its turn has not come yet. What is answered sooner is a plain answer.
pub const LEASE_ALIVE_EVERY: Duration = Duration::from_secs(1);

/// A scheduler from which nothing came for so long is taken for lost. A queue may last; this cannot.
const LEASE_SILENCE_MAX: Duration = Duration::from_secs(4);

/// Deadline of the other calls: each is a message to an actor and its answer.
const CALL_TIMEOUT: Duration = Duration::from_secs(3);

/// Longest answer to a call for a lease.
const LEASE_BYTES_MAX: usize = 64 << 10;

/// [`Scheduler`] over HTTP: `POST /internal/v1/{lease,finish,heartbeat}`, `GET /internal/v1/models`, JSON.
///
/// A call for a lease waits in a queue, so it has no deadline, but the scheduler is not to fall silent over it: every
/// [`LEASE_ALIVE_EVERY`] it sends a line feed, which JSON skips, and then a [`LeaseAnswer`]. (Calls that are renewed
/// after a while would do as well, but then the scheduler has to keep the places of callers that may be gone.)
pub struct HttpScheduler {
    client: MeshClient,
}

impl HttpScheduler {
    /// A client of the scheduler behind `client`.
    pub fn new(client: MeshClient) -> Self {
        HttpScheduler { client }
    }

    fn call_timeout(&self) -> Option<Duration> {
        Some(self.client.timeout().min(CALL_TIMEOUT))
    }
}

/// How a call for a lease ends that has waited.
#[derive(Serialize, Deserialize)]
#[serde(untagged)]
pub enum LeaseAnswer {
    /// Its turn came.
    Granted(Lease),
    /// It waits no longer. The status had been sent by then.
    Refused {
        /// Why.
        error: ApiError,
    },
}

fn broken(detail: impl std::fmt::Display) -> ApiError {
    let message = "the connection to the scheduler broke";
    ApiError::new(ErrorKind::Upstream, message).with_detail(detail)
}

#[async_trait]
impl Scheduler for HttpScheduler {
    async fn lease(&self, request: LeaseRequest) -> Result<Lease, ApiError> {
        let mut response = self
            .client
            .post_stream("/internal/v1/lease", &request, LEASE_SILENCE_MAX)
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
                // What only says that it lives is not gathered.
                Some(Ok(Some(bytes))) => answer.extend_from_slice(bytes.trim_ascii_start()),
            }
            silence.set(Instant::now() + LEASE_SILENCE_MAX);
        }
        match serde_json::from_slice(&answer) {
            Ok(LeaseAnswer::Granted(lease)) => Ok(lease),
            Ok(LeaseAnswer::Refused { error }) => Err(error),
            Err(error) => Err(broken(error)),
        }
    }

    async fn finish(&self, finish: LeaseFinish) -> Result<(), ApiError> {
        self.client
            .post_json("/internal/v1/finish", &finish, self.call_timeout())
            .await
    }

    async fn heartbeat(&self, heartbeat: Heartbeat) -> Result<HeartbeatReply, ApiError> {
        self.client
            .post_json("/internal/v1/heartbeat", &heartbeat, self.call_timeout())
            .await
    }

    async fn models(&self) -> Result<Vec<ServedModel>, ApiError> {
        self.client.get_json("/internal/v1/models").await
    }
}
