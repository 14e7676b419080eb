//! The draft store's section of the configuration file, with defaults and checks.

mod feed;
mod tuning;

pub use feed::FeedConfig;
pub use tuning::StoreTuning;

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::path::PathBuf;

use refrain_service_kit::config::Validate;
use refrain_service_kit::http::ListenerConfig;
use serde::Deserialize;

/// The draft store's section of the configuration file.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize, schemars::JsonSchema)]
#[serde(default)]
pub struct DraftStoreConfig {
    /// Address of the HTTP listener. None if all callers live in the same process.
    pub listen: Option<SocketAddr>,
    /// The certificate and the time limits of that listener.
    pub http: ListenerConfig,
    /// Most connections of the listener. Each waiting pull holds one.
    pub connections_max: usize,
    /// The data directory. Only one process at a time can use it.
    pub data_dir: PathBuf,
    /// Bytes kept free on the disk, or a twentieth of the disk if that is less. When less is free, appends get 503;
    /// reads, evictions and erasures go on.
    pub disk_reserve_bytes: u64,
    /// Memory for pages of the catalogue in sled, in bytes. Documents that are not sealed yet are in memory besides.
    pub cache_bytes: u64,
    /// Most bytes of the log on disk. Beyond it appends get 429 while a job that makes the log smaller is running, or
    /// while unsealed documents alone have as many, since these are in memory.
    pub log_bytes_max: u64,
    /// Tokens that may wait for a commit. Beyond it appends get 429.
    pub pending_tokens_max: u64,
    /// Most tokens of one document. A longer one gets 413.
    pub document_tokens_max: u32,
    /// Most namespaces known at once. Calls for further ones get 429.
    pub namespaces_max: usize,
    /// Most tokens kept. Beyond it the least recently used documents are evicted.
    pub tokens_max: u64,
    /// Most bytes kept, as stored: two to five per token in the log, and nine per token in a segment. Beyond it the
    /// least recently used documents are evicted.
    pub bytes_max: u64,
    /// Most tokens kept per tenant. Beyond it the tenant's least recently used documents are evicted.
    pub tenant_tokens_max: u64,
    /// Most bytes kept per tenant, as stored.
    pub tenant_bytes_max: u64,
    /// Tenants with quotas of their own, by name.
    pub tenants: BTreeMap<String, TenantQuota>,
    /// Documents stored longer ago than this are evicted, in days.
    pub retention_days: u32,
    /// Rows of usage of hours longer ago than this are removed, in days.
    pub usage_retention_days: u32,
    /// Most rows of usage: one per hour, tenant, key, model and gateway. Further ones get 429, and gateways keep
    /// them.
    pub usage_rows_max: u64,
    /// Pulls that wait at once: one per worker, or engine with the plugin inside. Further ones get 429.
    pub waiters_max: usize,
    /// Memory that one export may hold, in bytes: its list of documents, and copies of documents that were in the log
    /// and have been removed or cut since. Beyond it the export ends with 409.
    pub export_held_bytes_max: u64,
    /// Bytes of replaced segment files that are kept on disk for one export. Beyond it the export ends with 409.
    pub export_disk_bytes_max: u64,
    /// A finished document is sealed once it has been stored for this long, in seconds. An unfinished one is sealed
    /// once it has been silent for this long, and for an hour at least.
    pub seal_after_s: u64,
    /// Tokens of a namespace that are enough for a segment.
    pub seal_tokens: u64,
    /// Keeps this store and others equal through a broker. Without this section the store is alone.
    pub feed: Option<FeedConfig>,
    /// Values that are not read from the file.
    #[serde(skip)]
    pub tuning: StoreTuning,
}

/// The quota of one tenant. An absent value means the common limit.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize, schemars::JsonSchema)]
#[serde(default)]
pub struct TenantQuota {
    /// Replaces `tenant_tokens_max`.
    pub tokens_max: Option<u64>,
    /// Replaces `tenant_bytes_max`.
    pub bytes_max: Option<u64>,
}

impl Default for DraftStoreConfig {
    fn default() -> Self {
        DraftStoreConfig {
            listen: None,
            http: ListenerConfig::default(),
            connections_max: 16_384,
            data_dir: PathBuf::from("refrain-data"),
            disk_reserve_bytes: 256 << 20,
            cache_bytes: 64 << 20,
            log_bytes_max: 1 << 30,
            pending_tokens_max: 4 << 20,
            document_tokens_max: 1 << 20,
            namespaces_max: 65_536,
            tokens_max: 200_000_000,
            bytes_max: 2 << 30,
            tenant_tokens_max: 100_000_000,
            tenant_bytes_max: 1 << 30,
            tenants: BTreeMap::new(),
            retention_days: 31,
            usage_retention_days: 400,
            usage_rows_max: 4_000_000,
            waiters_max: 8_192,
            export_held_bytes_max: 256 << 20,
            export_disk_bytes_max: 1 << 30,
            seal_after_s: 900,
            seal_tokens: 1 << 20,
            feed: None,
            tuning: StoreTuning::default(),
        }
    }
}

impl DraftStoreConfig {
    /// The configuration for tools that open a directory: no budget and no age evicts anything, and documents are
    /// sealed as soon as they end.
    pub fn without_budgets(data_dir: PathBuf) -> Self {
        DraftStoreConfig {
            data_dir,
            tokens_max: u64::MAX,
            bytes_max: u64::MAX,
            tenant_tokens_max: u64::MAX,
            tenant_bytes_max: u64::MAX,
            retention_days: u32::MAX,
            usage_retention_days: u32::MAX,
            usage_rows_max: u64::MAX,
            seal_after_s: 0,
            ..DraftStoreConfig::default()
        }
    }

    /// Tokens and bytes that a tenant may keep.
    pub(crate) fn quota(&self, tenant: &str) -> (u64, u64) {
        let own = self.tenants.get(tenant).copied().unwrap_or_default();
        (
            own.tokens_max.unwrap_or(self.tenant_tokens_max),
            own.bytes_max.unwrap_or(self.tenant_bytes_max),
        )
    }
}

impl Validate for DraftStoreConfig {
    fn faults(&self) -> Vec<String> {
        let mut faults = Vec::new();
        let mut at_least = |key: &str, value: u64, least: u64| {
            if value < least {
                faults.push(format!("{key}: at least {least}"));
            }
        };
        at_least("connections_max", self.connections_max as u64, 1);
        at_least("cache_bytes", self.cache_bytes, 1 << 20);
        at_least("pending_tokens_max", self.pending_tokens_max, 1_024);
        let document = u64::from(self.document_tokens_max);
        at_least("document_tokens_max", document, 1);
        at_least("namespaces_max", self.namespaces_max as u64, 1);
        at_least("retention_days", u64::from(self.retention_days), 1);
        let usage_days = u64::from(self.usage_retention_days);
        at_least("usage_retention_days", usage_days, 2);
        at_least("waiters_max", self.waiters_max as u64, 1);
        at_least("seal_tokens", self.seal_tokens, 1);
        // A smaller log is never rewritten, so nothing would ever make it smaller.
        let rewrite_bytes_min = self.tuning.rewrite_bytes_min;
        at_least("log_bytes_max", self.log_bytes_max, rewrite_bytes_min);
        // With a smaller budget a document could evict itself.
        at_least("tokens_max", self.tokens_max, document);
        at_least("tenant_tokens_max", self.tenant_tokens_max, document);
        let document_bytes = document.saturating_mul(10);
        at_least("bytes_max", self.bytes_max, document_bytes);
        at_least("tenant_bytes_max", self.tenant_bytes_max, document_bytes);
        for (tenant, quota) in &self.tenants {
            let key = |limit: &str| format!("tenants.{tenant}.{limit}");
            let tokens_max = quota.tokens_max.unwrap_or(u64::MAX);
            at_least(&key("tokens_max"), tokens_max, document);
            let bytes_max = quota.bytes_max.unwrap_or(u64::MAX);
            at_least(&key("bytes_max"), bytes_max, document_bytes);
        }
        faults.extend(self.http.faults("http"));
        if let Some(feed) = &self.feed {
            faults.extend(feed.faults());
        }
        let mut at_most = |key: &str, value: u64, most: u64| {
            if value > most {
                faults.push(format!("{key}: at most {most}"));
            }
        };
        at_most("seal_after_s", self.seal_after_s, 366 * 24 * 3_600);
        let segment_tokens_max = self.tuning.segment_tokens_max;
        at_most("seal_tokens", self.seal_tokens, segment_tokens_max);
        at_most("document_tokens_max", document, 1 << 24);
        let (connections_max, waiters_max) = (self.connections_max, self.waiters_max);
        if self.listen.is_some() && connections_max <= waiters_max {
            faults.push(format!(
                "connections_max is {connections_max}; it must be above waiters_max ({waiters_max}), since each \
                 waiting call holds a connection"
            ));
        }
        faults
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_defaults_are_valid_and_faults_name_their_keys() {
        assert_eq!(DraftStoreConfig::default().faults(), Vec::<String>::new());
        let config = DraftStoreConfig {
            tokens_max: 5,
            waiters_max: 0,
            ..DraftStoreConfig::default()
        };
        let faults = config.faults().join("\n");
        assert!(
            faults.contains("tokens_max: at least") && faults.contains("waiters_max: at least")
        );
    }

    #[test]
    fn waiting_calls_leave_connections_for_others() {
        let within_one_process = DraftStoreConfig {
            connections_max: 100,
            waiters_max: 100,
            ..DraftStoreConfig::default()
        };
        assert_eq!(within_one_process.faults(), Vec::<String>::new());
        let listening = DraftStoreConfig {
            listen: Some(([127, 0, 0, 1], 0).into()),
            ..within_one_process
        };
        let faults = listening.faults().join("\n");
        assert!(
            faults.starts_with("connections_max is 100; it must be above waiters_max (100)"),
            "{faults}"
        );
    }

    #[test]
    fn tuning_is_no_key() {
        let parse = serde_json::from_str::<DraftStoreConfig>;
        assert_eq!(parse("{}").unwrap(), DraftStoreConfig::default());
        let schema = schemars::schema_for!(DraftStoreConfig);
        let keys = &schema.as_value()["properties"];
        assert!(keys["data_dir"].is_object());
        assert!(keys["tuning"].is_null() && keys["tick_ms"].is_null());
    }
}
