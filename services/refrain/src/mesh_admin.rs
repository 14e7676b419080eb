//! The services of a mesh as the operators of a gateway reach them.

use std::sync::Arc;
use std::time::Duration;

use anyhow::Context as _;
use async_trait::async_trait;
use refrain_protocol::admin::{
    CompactReply, ConfirmReply, ConfirmRequest, EraseReply, EraseRequest, ExportReply,
    ExportRequest, ImportRequest, VerifyReply,
};
use refrain_protocol::document::{AppendReply, StoreStats};
use refrain_protocol::{ApiError, ErrorKind};
use refrain_rpc::{
    HttpStoreAdmin, HttpWorkers, MeshAdmin, MeshPart, MetricsPages, StoreAdmin, draft_store,
};
use refrain_service_kit::http::MeshClient;
use refrain_service_kit::mesh::{MeshConfig, MeshCredentials, MeshRole, RoleCredential};
use refrain_service_kit::telemetry::Metrics;

use crate::config::MeshFile;
use crate::store::Replicas;

/// The services that a gateway in a process of its own reaches for its operators. `own` are its credentials, which
/// serve where the configuration names none of an operator.
///
/// # Errors
/// The file of the operator's credential cannot be used.
pub(crate) fn of_gateway(
    file: &MeshFile,
    own: &MeshCredentials,
    metrics: &Metrics,
) -> anyhow::Result<MeshAdmin> {
    let credentials = match &file.gateway.operator_credential_file {
        None => own.clone(),
        Some(path) => {
            let operator = MeshConfig {
                credential_file: Some(path.clone()),
                ..file.mesh.clone()
            };
            let is_operators = |own: &RoleCredential| {
                let is_right = own.role == MeshRole::Operator;
                anyhow::ensure!(
                    is_right,
                    "the credential is of the role {}, not operator",
                    own.role
                );
                Ok(())
            };
            MeshCredentials::open_own(&operator, metrics, is_operators)
                .context("gateway.operator_credential_file")?
        }
    };
    let timeout = Duration::from_millis(file.urls.timeout_ms);
    let client = MeshClient::with_credentials("", credentials, timeout)?;
    let urls = &file.urls;
    let named = match urls.draft_stores.is_empty() {
        true => std::slice::from_ref(&urls.draft_store),
        false => &urls.draft_stores[..],
    };
    let stores = named.iter().filter(|url| !url.is_empty());
    let schedulers = urls.schedulers().iter().map(|url| ("scheduler", url));
    let parts = schedulers
        .chain(stores.map(|url| ("draft-store", url)))
        .map(|(role, url)| MeshPart {
            role,
            url: url.clone(),
        });
    let store: Arc<dyn StoreAdmin> = match urls.draft_stores.is_empty() {
        true => Arc::new(HttpStoreAdmin::new(client.at(&urls.draft_store))),
        false => Arc::new(FoundReplicas {
            client: client.clone(),
            urls: urls.draft_stores.clone(),
        }),
    };
    Ok(MeshAdmin {
        store,
        usage: draft_store(&client, &urls.draft_store, &urls.draft_stores)?,
        workers: Arc::new(HttpWorkers::new(client.clone())),
        metrics: Some(MetricsPages::new(client, parts.collect())),
    })
}

/// A draft store of several replicas, which are looked for at each call: they come and go while a gateway runs.
struct FoundReplicas {
    client: MeshClient,
    urls: Vec<String>,
}

impl FoundReplicas {
    async fn find(&self) -> Result<Replicas, ApiError> {
        let found = Replicas::find(&self.client, &self.urls).await;
        found.map_err(|error| {
            let message = "the replicas of the draft store cannot be found";
            ApiError::new(ErrorKind::Unavailable, message).with_detail(format!("{error:#}"))
        })
    }
}

#[async_trait]
impl StoreAdmin for FoundReplicas {
    async fn store_stats(&self) -> Result<StoreStats, ApiError> {
        self.find().await?.store_stats().await
    }

    async fn import(&self, request: ImportRequest) -> Result<AppendReply, ApiError> {
        self.find().await?.import(request).await
    }

    async fn export(&self, request: ExportRequest) -> Result<ExportReply, ApiError> {
        self.find().await?.export(request).await
    }

    async fn verify(&self) -> Result<VerifyReply, ApiError> {
        self.find().await?.verify().await
    }

    async fn compact(&self) -> Result<CompactReply, ApiError> {
        self.find().await?.compact().await
    }

    async fn erase(&self, request: EraseRequest) -> Result<EraseReply, ApiError> {
        self.find().await?.erase(request).await
    }

    async fn confirm(&self, request: ConfirmRequest) -> Result<ConfirmReply, ApiError> {
        self.find().await?.confirm(request).await
    }
}
