//! Every limit of the draft store, with its default.

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::time::Duration;

use refrain_service_kit::config::Validate;
use serde::Deserialize;

use crate::catalog::ExportLimits;

/// The draft store's section of the configuration.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize, schemars::JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct DraftStoreConfig {
    /// Address of the HTTP listener; none when the callers live in the same process.
    pub listen: Option<SocketAddr>,
    /// Threads of the listener.
    pub threads: usize,
    /// Connections of the listener.
    pub connections_max: usize,
    /// Largest request body.
    pub body_bytes_max: usize,
    /// Where the data lives. One process at a time.
    pub data_dir: PathBuf,
    /// Room that is kept free on the disk, or a twentieth of it if that is less. Past it appends get 503, while what is
    /// there is read, evicted and erased.
    pub disk_reserve_bytes: u64,
    /// sled's page cache. Resident memory grows to about twice this.
    pub cache_bytes: u64,
    /// Updates that are gathered for one commit at most.
    pub commit_updates: usize,
    /// How long updates are gathered for one commit.
    pub commit_interval_ms: u64,
    /// Messages that the writer's mailbox holds. Past it: 429.
    pub mailbox_max: usize,
    /// Tokens that may wait for a commit. Past it: 429.
    pub pending_tokens_max: u64,
    /// How long a caller waits for its commit. Past it: 504; the commit may still happen.
    pub commit_wait_ms_max: u64,
    /// Updates of one call. Past it: 413.
    pub updates_max: usize,
    /// Tokens of one document. Past it: 413.
    pub document_tokens_max: u32,
    /// Namespaces known at once. Past it calls for new ones get 429.
    pub namespaces_max: usize,
    /// Tokens kept. Past it the least recently used documents go.
    pub tokens_max: u64,
    /// Bytes kept, as stored: two to three for a token in the log, without the database's overhead, which may be ten
    /// times that, and nine for one in a segment. Past it the least recently used documents go.
    pub bytes_max: u64,
    /// Tokens kept of one tenant. Past it its least recently used documents go.
    pub tenant_tokens_max: u64,
    /// The same in bytes, as stored.
    pub tenant_bytes_max: u64,
    /// Tenants with limits of their own, by name.
    pub tenants: BTreeMap<String, TenantQuota>,
    /// Documents older than this go.
    pub retention_days: u32,
    /// Documents that one commit removes at most.
    pub eviction_step: usize,
    /// Removals remembered per namespace. A follower that is further behind starts over.
    pub tombstones_max: usize,
    /// Groups of samples registered at once. Past it further ones get 429.
    pub groups_max: usize,
    /// Tokens in the log of one group. Past it further text of its documents is in the namespace alone.
    pub group_tokens_max: u64,
    /// How long a group may live without being registered again, whatever was asked for.
    pub group_ttl_s_max: u64,
    /// Erasures remembered at once. Past it further ones get 429.
    pub erasures_max: usize,
    /// Erased documents remembered, so that no worker brings them back. Past it the earliest are forgotten.
    pub erased_documents_max: usize,
    /// How long both are remembered: longer than any request runs.
    pub erasure_memory_h: u64,
    /// Calls of `follow` that wait at once. Past it: 429.
    pub waiters_max: usize,
    /// Calls of `follow` that read from disk at once; the others queue.
    pub reads_max: usize,
    /// Tokens of one answer of `follow`, whatever was asked for.
    pub follow_tokens_max: u32,
    /// Words of a segment, of four bytes, that one answer has at most. The answers under way at once, which hold so much
    /// memory each, are those that read from disk and those that travel.
    pub segment_words_max: u32,
    /// Calls for drafts at once. Past it: 429, since who asks does not wait.
    pub lookups_max: usize,
    /// Contexts of one such call. Past it: 413.
    pub lookup_contexts_max: usize,
    /// Exports under way at once. Past it: 429.
    pub exports_max: usize,
    /// Memory that one export may take: its list of documents, and those put aside that were in the log and are removed
    /// or cut meanwhile. Past it the export ends with 409.
    pub export_held_bytes_max: u64,
    /// Bytes of segments that do not count any more, whose files are kept for one export. Past it the export ends with
    /// 409.
    pub export_disk_bytes_max: u64,
    /// An export that nobody asks for this long is forgotten.
    pub export_idle_s: u64,
    /// Longest wait of `follow`, whatever was asked for.
    pub follow_wait_ms_max: u32,
    /// A document that was touched has its time of use written again when the stored one is older than this.
    pub use_interval_s: u64,
    /// A document at rest for this long is told to new followers in one piece.
    pub settle_s: u64,
    /// A document that ended is sealed when it has been stored for this long, one that was broken off when it was not
    /// heard of for as long, and for an hour at least.
    pub seal_after_s: u64,
    /// A namespace is sealed when this many tokens of it may be; they become one segment.
    pub seal_tokens: u64,
    /// The same in documents: a commit forgets the unsealed copies of at most so many.
    pub seal_documents: usize,
    /// What was stored this long ago is sealed, however little of its namespace is at rest.
    pub seal_age_s: u64,
    /// Tokens in the log, of all namespaces. Past it what is at rest is sealed, however little of a namespace it is.
    pub unsealed_tokens_max: u64,
    /// Segments of a namespace that are put up with, those too large to be merged not counted.
    pub segments_max: usize,
    /// Tokens of a segment that is made by merging. Building one takes some 35 bytes of memory per token.
    pub segment_tokens_max: u64,
    /// The log is rewritten when it takes this many times what it would take freshly written. The disk needs
    /// room for one more time that.
    pub rewrite_factor: u64,
    /// A log smaller than this is left alone.
    pub rewrite_bytes_min: u64,
    /// What the log may take on disk. Past it appends get 429 for as long as something is under way that makes it smaller.
    pub log_bytes_max: u64,
    /// How often budgets, ages and times of use are looked at.
    pub tick_ms: u64,
}

/// What one tenant may keep; the common limit where nothing is said.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize, schemars::JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct TenantQuota {
    /// In place of `tenant_tokens_max`.
    pub tokens_max: Option<u64>,
    /// In place of `tenant_bytes_max`.
    pub bytes_max: Option<u64>,
}

impl DraftStoreConfig {
    /// Tokens and bytes that a tenant may keep.
    pub(crate) fn quota(&self, tenant: &str) -> (u64, u64) {
        let own = self.tenants.get(tenant).copied().unwrap_or_default();
        (
            own.tokens_max.unwrap_or(self.tenant_tokens_max),
            own.bytes_max.unwrap_or(self.tenant_bytes_max),
        )
    }
}

impl DraftStoreConfig {
    /// What an export may take.
    pub(crate) fn export_limits(&self) -> ExportLimits {
        ExportLimits {
            exports_max: self.exports_max,
            held_bytes_max: self.export_held_bytes_max,
            disk_bytes_max: self.export_disk_bytes_max,
            idle: Duration::from_secs(self.export_idle_s),
        }
    }
}

impl Default for DraftStoreConfig {
    fn default() -> Self {
        DraftStoreConfig {
            listen: None,
            threads: 2,
            connections_max: 4_096,
            body_bytes_max: 16 << 20,
            data_dir: PathBuf::from("refrain-data"),
            disk_reserve_bytes: 256 << 20,
            cache_bytes: 64 << 20,
            commit_updates: 512,
            commit_interval_ms: 5,
            mailbox_max: 1_024,
            pending_tokens_max: 4 << 20,
            commit_wait_ms_max: 10_000,
            updates_max: 4_096,
            document_tokens_max: 1 << 20,
            namespaces_max: 65_536,
            tokens_max: 200_000_000,
            bytes_max: 2 << 30,
            tenant_tokens_max: 100_000_000,
            tenant_bytes_max: 1 << 30,
            tenants: BTreeMap::new(),
            retention_days: 31,
            eviction_step: 256,
            tombstones_max: 65_536,
            groups_max: 65_536,
            group_tokens_max: 4 << 20,
            group_ttl_s_max: 24 * 3600,
            erasures_max: 1_024,
            erased_documents_max: 1_000_000,
            erasure_memory_h: 48,
            waiters_max: 1_024,
            reads_max: 4,
            follow_tokens_max: 1 << 20,
            segment_words_max: 1 << 20,
            lookups_max: 16,
            lookup_contexts_max: 256,
            exports_max: 4,
            export_held_bytes_max: 256 << 20,
            export_disk_bytes_max: 1 << 30,
            export_idle_s: 300,
            follow_wait_ms_max: 30_000,
            use_interval_s: 300,
            settle_s: 60,
            seal_after_s: 900,
            seal_tokens: 1 << 20,
            seal_documents: 4_096,
            seal_age_s: 24 * 3600,
            unsealed_tokens_max: 16 << 20,
            segments_max: 8,
            segment_tokens_max: 16 << 20,
            rewrite_factor: 2,
            rewrite_bytes_min: 64 << 20,
            log_bytes_max: 1 << 30,
            tick_ms: 1_000,
        }
    }
}

impl DraftStoreConfig {
    /// For tools that open a directory: no budget and no age that would have them remove something, and what is stored
    /// has come to rest.
    pub fn without_budgets(data_dir: PathBuf) -> Self {
        DraftStoreConfig {
            data_dir,
            tokens_max: u64::MAX,
            bytes_max: u64::MAX,
            tenant_tokens_max: u64::MAX,
            tenant_bytes_max: u64::MAX,
            retention_days: u32::MAX,
            seal_after_s: 0,
            ..DraftStoreConfig::default()
        }
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
        at_least("threads", self.threads as u64, 1);
        at_least("connections_max", self.connections_max as u64, 1);
        at_least("body_bytes_max", self.body_bytes_max as u64, 64 << 10);
        at_least("cache_bytes", self.cache_bytes, 1 << 20);
        at_least("commit_updates", self.commit_updates as u64, 1);
        at_least("mailbox_max", self.mailbox_max as u64, 1);
        at_least("pending_tokens_max", self.pending_tokens_max, 1_024);
        at_least("commit_wait_ms_max", self.commit_wait_ms_max, 1);
        at_least("updates_max", self.updates_max as u64, 1);
        at_least(
            "document_tokens_max",
            u64::from(self.document_tokens_max),
            1,
        );
        at_least("namespaces_max", self.namespaces_max as u64, 1);
        at_least("retention_days", u64::from(self.retention_days), 1);
        at_least("eviction_step", self.eviction_step as u64, 1);
        at_least("tombstones_max", self.tombstones_max as u64, 2);
        at_least("groups_max", self.groups_max as u64, 1);
        at_least("group_tokens_max", self.group_tokens_max, 1);
        at_least("group_ttl_s_max", self.group_ttl_s_max, 1);
        at_least("erasures_max", self.erasures_max as u64, 1);
        at_least("erasure_memory_h", self.erasure_memory_h, 1);
        at_least("waiters_max", self.waiters_max as u64, 1);
        at_least("reads_max", self.reads_max as u64, 1);
        at_least("follow_tokens_max", u64::from(self.follow_tokens_max), 1);
        at_least("segment_words_max", u64::from(self.segment_words_max), 1);
        at_least("lookups_max", self.lookups_max as u64, 1);
        at_least("lookup_contexts_max", self.lookup_contexts_max as u64, 1);
        at_least("exports_max", self.exports_max as u64, 1);
        at_least("export_idle_s", self.export_idle_s, 1);
        at_least("seal_tokens", self.seal_tokens, 1);
        at_least("seal_documents", self.seal_documents as u64, 1);
        at_least("segments_max", self.segments_max as u64, 1);
        at_least("segment_tokens_max", self.segment_tokens_max, 1);
        at_least("rewrite_factor", self.rewrite_factor, 2);
        at_least("tick_ms", self.tick_ms, 10);
        // Otherwise nothing would ever make it smaller.
        at_least("log_bytes_max", self.log_bytes_max, self.rewrite_bytes_min);
        // Otherwise a document could push itself out.
        let document = u64::from(self.document_tokens_max);
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
        let mut at_most = |key: &str, value: u64, most: u64| {
            if value > most {
                faults.push(format!("{key}: at most {most}"));
            }
        };
        at_most("erasure_memory_h", self.erasure_memory_h, 24 * 366);
        at_most("commit_interval_ms", self.commit_interval_ms, 1_000);
        at_most("seal_after_s", self.seal_after_s, 366 * 24 * 3600);
        at_most("seal_documents", self.seal_documents as u64, 65_536);
        at_most("segment_tokens_max", self.segment_tokens_max, 1 << 30);
        at_most("seal_tokens", self.seal_tokens, self.segment_tokens_max);
        at_most("document_tokens_max", document, 1 << 24);
        at_most(
            "segment_words_max",
            u64::from(self.segment_words_max),
            8 << 20,
        );
        at_most(
            "follow_tokens_max",
            u64::from(self.follow_tokens_max),
            8 << 20,
        );
        faults
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_defaults_hold_and_faults_name_their_keys() {
        assert_eq!(DraftStoreConfig::default().faults(), Vec::<String>::new());
        let config = DraftStoreConfig {
            tokens_max: 5,
            threads: 0,
            ..DraftStoreConfig::default()
        };
        let faults = config.faults().join("\n");
        assert!(faults.contains("tokens_max: at least") && faults.contains("threads: at least"));
    }
}
