//! The writer's gauges and statistics.

use std::sync::atomic::Ordering;
use std::time::Instant;

use refrain_protocol::document::StoreStats;

use crate::catalog::ExportLimits;
use crate::directory::{DiskSpace, count_quarantines, disk_bytes};
use crate::writer::actor::WriterActor;

impl WriterActor {
    /// Updates the gauges that are cheap enough for every commit.
    pub(super) fn observe(&self) {
        let before = self.shared.stats();
        let Some((totals, marks, erased, segments, unsealed_tokens)) =
            self.shared.read().as_ref().map(|open| {
                let erasures = open.catalog.erasures();
                (
                    open.catalog.totals(),
                    erasures.marks(),
                    erasures.documents(),
                    open.catalog.segments().len(),
                    open.catalog.segments().unsealed_tokens(),
                )
            })
        else {
            return;
        };
        self.metrics.segments.set(segments as i64);
        self.metrics.unsealed_tokens.set(unsealed_tokens as i64);
        self.metrics.erasures.set(marks as i64);
        self.metrics.erased_documents.set(erased as i64);
        self.shared.set_stats(StoreStats {
            documents: totals.documents,
            tokens: totals.tokens,
            logical_bytes: totals.bytes,
            namespaces: totals.namespaces,
            evicted_documents: self.evicted_documents,
            ..before
        });
        self.metrics.documents.set(totals.documents as i64);
        self.metrics.tokens.set(totals.tokens as i64);
        self.metrics.logical_bytes.set(totals.bytes as i64);
        self.metrics
            .pending_tokens
            .set(self.pending_tokens.load(Ordering::Relaxed) as i64);
    }

    /// Drops look-up views that keep files of removed segments, or that nobody uses.
    pub(super) fn drop_views(&self) {
        let open = self.shared.read();
        let segments = open.as_ref().map(|open| open.catalog.segments());
        let is_mounted = |segment| segments.is_some_and(|segments| segments.get(segment).is_some());
        let left = self.lookup_views.retain(is_mounted, Instant::now());
        self.metrics.lookup_views.set(left as i64);
    }

    /// Updates the gauges that need a look at the disk.
    pub(super) fn observe_disk(&self) {
        let Some((log_bytes, blob_files, segment_bytes)) =
            self.shared.read().as_ref().map(|open| {
                let segment_bytes = open.catalog.segments().bytes();
                (open.log.disk_bytes(), open.log.blob_files(), segment_bytes)
            })
        else {
            return;
        };
        let disk_bytes = disk_bytes(&self.config.data_dir);
        self.shared.set_stats(StoreStats {
            log_bytes,
            segment_bytes,
            disk_bytes,
            ..self.shared.stats()
        });
        if let Some(open) = self.shared.read().as_ref() {
            let exports = open.catalog.exports();
            exports.expire(ExportLimits::from(&self.config).idle);
            let (count, held_bytes, export_disk_bytes) = exports.sizes();
            self.metrics.exports.set(count as i64);
            self.metrics.export_held_bytes.set(held_bytes as i64);
            self.metrics.export_disk_bytes.set(export_disk_bytes as i64);
        }
        self.metrics.disk_bytes.set(disk_bytes as i64);
        if let Some(room) = DiskSpace::of(&self.config.data_dir) {
            self.metrics.disk_free_bytes.set(room.free_bytes as i64);
        }
        self.metrics.segment_bytes.set(segment_bytes as i64);
        let offset_ms = self.shared.clock_offset_ms().unwrap_or(0);
        self.metrics.clock_offset_seconds.set(offset_ms / 1_000);
        let missing = self
            .shared
            .loss()
            .map_or(0, |loss| loss.expected.saturating_sub(loss.found));
        self.metrics.missing_documents.set(missing as i64);
        self.metrics
            .quarantines_held
            .set(count_quarantines(&self.config.data_dir) as i64);
        self.metrics.blob_files.set(blob_files as i64);
        if blob_files > 0 {
            tracing::error!(
                blob_files,
                "the index of the draft store log has values in blob files, which sled never syncs"
            );
        }
    }
}
