//! The erasure of all that is kept of a tenant, and its proof.

use refrain_protocol::ApiError;
use refrain_protocol::admin::{ExportCursor, ExportRequest};
use refrain_protocol::usage::{EraseUsageReply, EraseUsageRequest};
use serde::Serialize;

use crate::store_admin::StoreAdmin;
use crate::usage_store::UsageReplica;

/// Tokens of one page of the documents that are read again.
const PAGE_TOKENS: u32 = 512 << 10;

/// The erasure of a tenant's usage in one store.
#[derive(Clone, Debug, Serialize)]
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
///
/// # Errors
/// As [`StoreAdmin::export`].
pub async fn documents_before(
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
