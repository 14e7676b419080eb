//! The scheduler's interface.

use async_trait::async_trait;
use refrain_protocol::ApiError;
use refrain_protocol::scheduling::{
    Heartbeat, HeartbeatReply, Lease, LeaseFinish, LeaseRequest, ServedModel,
};
use refrain_service_kit::http::MeshClient;

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

/// [`Scheduler`] over HTTP: `POST /internal/v1/{lease,finish,heartbeat}`, `GET /internal/v1/models`, JSON.
pub struct HttpScheduler {
    client: MeshClient,
}

impl HttpScheduler {
    /// A client of the scheduler behind `client`.
    pub fn new(client: MeshClient) -> Self {
        HttpScheduler { client }
    }
}

#[async_trait]
impl Scheduler for HttpScheduler {
    async fn lease(&self, request: LeaseRequest) -> Result<Lease, ApiError> {
        // Waiting for a turn has no deadline of its own: the caller's does, and the queue is bounded.
        self.client
            .post_json("/internal/v1/lease", &request, None)
            .await
    }

    async fn finish(&self, finish: LeaseFinish) -> Result<(), ApiError> {
        self.client
            .post_json("/internal/v1/finish", &finish, Some(self.client.timeout()))
            .await
    }

    async fn heartbeat(&self, heartbeat: Heartbeat) -> Result<HeartbeatReply, ApiError> {
        self.client
            .post_json(
                "/internal/v1/heartbeat",
                &heartbeat,
                Some(self.client.timeout()),
            )
            .await
    }

    async fn models(&self) -> Result<Vec<ServedModel>, ApiError> {
        self.client.get_json("/internal/v1/models").await
    }
}
