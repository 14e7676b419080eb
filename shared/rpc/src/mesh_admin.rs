//! The services of a mesh as operators reach them, through a gateway or by commands.

use std::sync::Arc;
use std::time::Duration;

use refrain_protocol::{ApiError, ErrorKind};
use refrain_service_kit::http::MeshClient;

use crate::draft_store::DraftStore;
use crate::store_admin::StoreAdmin;
use crate::worker::Workers;

/// The services of a mesh as operators reach them.
#[derive(Clone)]
pub struct MeshAdmin {
    /// The draft store. Its replicas and shards are one.
    pub store: Arc<dyn StoreAdmin>,
    /// The same store with its usage, which operators may erase.
    pub usage: Arc<dyn DraftStore>,
    /// The workers, which take the orders of operators.
    pub workers: Arc<dyn Workers>,
    /// The metrics of the services in other processes. `None`: all services are in this process.
    pub metrics: Option<MetricsPages>,
}

/// A service in another process whose metrics can be read.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MeshPart {
    /// Its role, such as `scheduler`.
    pub role: &'static str,
    /// Its base URL.
    pub url: String,
}

/// Reads the metrics of services in other processes.
#[derive(Clone)]
pub struct MetricsPages {
    client: MeshClient,
    parts: Vec<MeshPart>,
}

impl MetricsPages {
    /// Creates it with the settings of `client`. `parts` are the services that the configuration names.
    pub fn new(client: MeshClient, parts: Vec<MeshPart>) -> Self {
        MetricsPages { client, parts }
    }

    /// The services that the configuration names.
    pub fn parts(&self) -> &[MeshPart] {
        &self.parts
    }

    /// Reads the page of the service at `url`, in the text format of Prometheus.
    ///
    /// # Errors
    /// The service does not answer within `timeout`, or its answer is no text.
    pub async fn read(&self, url: &str, timeout: Duration) -> Result<String, ApiError> {
        let page = self.client.at(url).get_bytes("/metrics", timeout).await?;
        String::from_utf8(page.to_vec()).map_err(|error| {
            ApiError::new(ErrorKind::Upstream, "the metrics are not text").with_detail(error)
        })
    }
}
