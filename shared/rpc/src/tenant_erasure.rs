//! Erasures of documents, or of all that is kept of a tenant, and their proof.

use refrain_protocol::ApiError;
use refrain_protocol::admin::{EraseReply, EraseRequest, ExportCursor, ExportRequest};
use refrain_protocol::usage::{EraseUsageReply, EraseUsageRequest};
use serde::{Deserialize, Serialize};

use crate::engine_forgetting::{Engines, EnginesForgotten};
use crate::store_admin::StoreAdmin;
use crate::usage_store::UsageReplica;

/// Tokens of one page of the documents that are read again.
const PAGE_TOKENS: u32 = 512 << 10;

/// An erasure, with its proof.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Erasure {
    /// The tenant, if the erasure was of one tenant.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub tenant: Option<String>,
    /// The outcome in the draft store.
    #[serde(flatten)]
    pub documents: EraseReply,
    /// Documents of the tenant that began before the erasure and can still be read after it. `None` unless all
    /// were to be erased.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub documents_left: Option<u64>,
    /// The usage that was erased, for each store, if it was to be.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub usage: Option<Vec<UsageErased>>,
    /// The answers of workers whose engines forgot the tenant, if they were to and the scheduler was named.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub engines: Option<EnginesForgotten>,
}

/// The places that have more of a tenant than its documents.
#[derive(Clone, Copy)]
pub struct OtherPlaces<'a> {
    /// The stores of usage. With its usage, gateways erase the responses that they stored for the tenant.
    pub usage: &'a [UsageReplica],
    /// The engines, whose KV caches and pools have its texts. `None`: nobody knows them.
    pub engines: Option<Engines<'a>>,
}

impl Erasure {
    /// Erases documents, and then reads all of the tenant again if all were to be erased. The
    /// `others` erase the tenant as well.
    ///
    /// # Errors
    /// As [`StoreAdmin::erase`] and [`StoreAdmin::export`]. A store that refuses to erase usage is in the outcome,
    /// and so is an engine.
    pub async fn carry_out(
        store: &dyn StoreAdmin,
        request: EraseRequest,
        others: Option<OtherPlaces<'_>>,
    ) -> Result<Self, ApiError> {
        let (tenant, is_of_all) = (request.tenant.clone(), request.is_of_whole_tenant());
        let documents = store.erase(request).await?;
        let before_ms = documents.erased_at_ms;
        let documents_left = match &tenant {
            Some(tenant) if is_of_all => Some(documents_before(store, tenant, before_ms).await?),
            _ => None,
        };
        let (mut usage, mut engines) = (None, None);
        if let (Some(tenant), Some(others)) = (&tenant, others) {
            usage = Some(erase_usage(others.usage, tenant).await);
            if let Some(known) = others.engines {
                engines = Some(known.forget(tenant).await);
            }
        }
        Ok(Erasure {
            tenant,
            documents,
            documents_left,
            usage,
            engines,
        })
    }
}

/// The erasure of a tenant's usage in one store.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct UsageErased {
    /// The store.
    pub store: String,
    /// The outcome; nothing if there is a `trouble`.
    #[serde(flatten)]
    pub erased: EraseUsageReply,
    /// Why it is not done.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub trouble: Option<String>,
}

/// Erases the usage of a tenant in each store, and the responses that gateways stored for it.
pub async fn erase_usage(replicas: &[UsageReplica], tenant: &str) -> Vec<UsageErased> {
    let mut outcomes = Vec::new();
    for UsageReplica { name, store } in replicas {
        let request = EraseUsageRequest {
            tenant: tenant.to_owned(),
        };
        let outcome = store.erase_usage(request).await;
        outcomes.push(UsageErased {
            store: name.clone(),
            trouble: outcome.as_ref().err().map(ToString::to_string),
            erased: outcome.unwrap_or_default(),
        });
    }
    outcomes
}

/// Counts the documents of a tenant that began before a time, by reading all that there are.
async fn documents_before(
    store: &dyn StoreAdmin,
    tenant: &str,
    before_ms: u64,
) -> Result<u64, ApiError> {
    let (mut count, mut next) = (0, Some(ExportCursor::default()));
    while let Some(after) = next {
        let request = ExportRequest {
            tenant: tenant.to_owned(),
            model: None,
            after,
            max_tokens: PAGE_TOKENS,
        };
        let page = store.export(request).await?;
        let began = page.documents.iter();
        count += began
            .filter(|document| document.update.head.created_ms < before_ms)
            .count() as u64;
        next = page.next;
    }
    Ok(count)
}
