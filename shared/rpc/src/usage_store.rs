//! The interface of a store that keeps usage: a replica of the draft store.

use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use refrain_protocol::ApiError;
use refrain_protocol::usage::{
    EraseUsageReply, EraseUsageRequest, RecordUsageReply, RecordUsageRequest, UsageRowsReply,
    UsageRowsRequest,
};
use refrain_service_kit::http::MeshClient;

use crate::codec::post;

/// A store of usage. Each replica is one of its own: gateways send to all of them, and readers merge what they have.
#[async_trait]
pub trait UsageStore: Send + Sync {
    /// Stores rows, which are durable once this returns, and answers what the gateway asks about others.
    ///
    /// # Errors
    /// `Overloaded` when there would be too many rows, `Unavailable` when the disk refuses.
    async fn record_usage(&self, request: RecordUsageRequest)
    -> Result<RecordUsageReply, ApiError>;

    /// Reads a page of rows.
    async fn usage_rows(&self, request: UsageRowsRequest) -> Result<UsageRowsReply, ApiError>;

    /// Erases the usage of a tenant, and returns when nothing of it is on disk any more. Repeats are harmless.
    async fn erase_usage(&self, request: EraseUsageRequest) -> Result<EraseUsageReply, ApiError>;
}

/// A replica that keeps usage.
#[derive(Clone)]
pub struct UsageReplica {
    /// Its URL, or another name in messages.
    pub name: String,
    /// Its calls.
    pub store: Arc<dyn UsageStore>,
}

/// Timeout of an erasure, which rewrites the whole log.
const ERASE_TIMEOUT: Duration = Duration::from_secs(3_600);

/// [`UsageStore`] over HTTP: `POST /internal/v1/usage/{record,rows}` in bincode, and `POST /admin/v1/usage/erase` in
/// JSON.
pub struct HttpUsageStore {
    client: MeshClient,
    rows_path: &'static str,
}

impl HttpUsageStore {
    /// Creates a client of the store that `client` calls.
    pub fn new(client: MeshClient) -> Self {
        HttpUsageStore {
            client,
            rows_path: "/internal/v1/usage/rows",
        }
    }

    /// Creates a client of an operator, whose calls a gateway passes on. It reads and erases, and records nothing.
    pub fn of_operator(client: MeshClient) -> Self {
        HttpUsageStore {
            client,
            rows_path: "/admin/v1/usage/rows",
        }
    }
}

#[async_trait]
impl UsageStore for HttpUsageStore {
    async fn record_usage(
        &self,
        request: RecordUsageRequest,
    ) -> Result<RecordUsageReply, ApiError> {
        let timeout = self.client.timeout();
        post(&self.client, "/internal/v1/usage/record", &request, timeout).await
    }

    async fn usage_rows(&self, request: UsageRowsRequest) -> Result<UsageRowsReply, ApiError> {
        let timeout = self.client.timeout();
        post(&self.client, self.rows_path, &request, timeout).await
    }

    async fn erase_usage(&self, request: EraseUsageRequest) -> Result<EraseUsageReply, ApiError> {
        let path = "/admin/v1/usage/erase";
        self.client
            .post_json(path, &request, Some(ERASE_TIMEOUT))
            .await
    }
}
