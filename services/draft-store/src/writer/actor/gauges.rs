//! The writer's gauges and statistics.

use std::sync::atomic::Ordering;

use refrain_protocol::document::StoreStats;
use refrain_service_kit::clock;

use crate::catalog::ExportLimits;
use crate::config::DraftStoreConfig;
use crate::directory::{DiskSpace, count_quarantines, disk_bytes};
use crate::metrics::StoreMetrics;
use crate::shared_store::SharedStore;

/// Updates the gauges that are cheap enough for every commit.
pub(super) fn observe(metrics: &StoreMetrics, shared: &SharedStore, evicted_documents: u64) {
    let Ok(open) = shared.read() else {
        return;
    };
    let (totals, segments) = (open.catalog.totals(), open.catalog.segments());
    let erasures = &open.catalog.erasures;
    let outbox = &open.catalog.replication.outbox;
    metrics.outbox_entries.set(outbox.len() as i64);
    metrics.segments.set(segments.len() as i64);
    let unsealed_tokens = segments.unsealed_tokens();
    metrics.unsealed_tokens.set(unsealed_tokens as i64);
    metrics.usage_rows.set(open.catalog.usage.rows() as i64);
    metrics.erasures.set(erasures.marks() as i64);
    metrics.erased_documents.set(erasures.documents() as i64);
    metrics
        .tenant_records
        .set(open.catalog.tenants.len() as i64);
    metrics.groups.set(open.catalog.groups.len() as i64);
    let group_documents = open.catalog.groups.documents();
    metrics.group_documents.set(group_documents as i64);
    metrics.documents.set(totals.documents as i64);
    metrics.tokens.set(totals.tokens as i64);
    metrics.logical_bytes.set(totals.bytes as i64);
    let pending_tokens = shared.pending_tokens.load(Ordering::Relaxed);
    metrics.pending_tokens.set(pending_tokens as i64);
    shared.set_stats(StoreStats {
        documents: totals.documents,
        tokens: totals.tokens,
        logical_bytes: totals.bytes,
        namespaces: totals.namespaces,
        evicted_documents,
        ..shared.stats()
    });
}

/// Updates the gauges that need a look at the disk.
pub(super) fn observe_disk(
    metrics: &StoreMetrics,
    shared: &SharedStore,
    config: &DraftStoreConfig,
) {
    let disk_bytes = disk_bytes(&config.data_dir);
    let (log_bytes, blob_files, segment_bytes) = {
        let Ok(open) = shared.read() else {
            return;
        };
        let exports = &open.catalog.exports;
        exports.expire(ExportLimits::from(config).idle);
        let (count, held_bytes, export_disk_bytes) = exports.sizes();
        metrics.exports.set(count as i64);
        metrics.export_held_bytes.set(held_bytes as i64);
        metrics.export_disk_bytes.set(export_disk_bytes as i64);
        let segment_bytes = open.catalog.segments().bytes();
        (open.log.disk_bytes(), open.log.blob_files(), segment_bytes)
    };
    shared.set_stats(StoreStats {
        log_bytes,
        segment_bytes,
        disk_bytes,
        ..shared.stats()
    });
    metrics.disk_bytes.set(disk_bytes as i64);
    metrics.log_bytes.set(log_bytes as i64);
    if let Some(room) = DiskSpace::of(&config.data_dir) {
        metrics.disk_free_bytes.set(room.free_bytes as i64);
    }
    metrics.segment_bytes.set(segment_bytes as i64);
    if let Ok(open) = shared.read() {
        let open = open.catalog.replication.open_erasures();
        let oldest_ms = open.iter().map(|erasure| erasure.applied_ms).min();
        let age_ms = oldest_ms.map_or(0, |applied_ms| clock::unix_ms().saturating_sub(applied_ms));
        metrics.feed_erasures_open.set(open.len() as i64);
        metrics
            .feed_erasure_age_seconds
            .set((age_ms / 1_000) as i64);
    }
    let offset_ms = shared.clock_offset_ms().unwrap_or(0);
    metrics.clock_offset_seconds.set(offset_ms / 1_000);
    let loss = shared.loss();
    let missing = loss.map_or(0, |loss| loss.expected.saturating_sub(loss.found));
    metrics.missing_documents.set(missing as i64);
    let quarantines = count_quarantines(&config.data_dir);
    metrics.quarantines_held.set(quarantines as i64);
    metrics.blob_files.set(blob_files as i64);
    if blob_files > 0 {
        tracing::error!(
            blob_files,
            "the catalogue of the draft store log has values in blob files, which sled never syncs"
        );
    }
}
