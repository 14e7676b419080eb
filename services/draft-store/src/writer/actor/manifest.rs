//! Keeping the manifest up to date.

use std::time::{Duration, Instant};

use crate::directory::Manifest;
use crate::log::LogError;
use crate::writer::actor::WriterActor;

/// The manifest is written at most this long after a change.
const MANIFEST_INTERVAL: Duration = Duration::from_secs(10);

/// The manifest is written this often without changes, since a start continues from its time.
const MANIFEST_AGE_MAX: Duration = Duration::from_secs(600);

impl WriterActor {
    /// Writes the manifest. While the store is closed there is nothing to write.
    pub(super) fn write_manifest(&mut self, closed: bool) -> Result<(), LogError> {
        let (Some(core), Ok(open)) = (&self.core, self.shared.read()) else {
            return Ok(());
        };
        let manifest = Manifest::new(self.log_number, core.store, &open.catalog, closed)
            .with(self.shared.loss(), self.shared.now_ms());
        self.manifest_head = open.catalog.head();
        self.manifest_written = Instant::now();
        // Without a fresh manifest a rollback of sled is noticed later or not at all. That is no reason to stop.
        manifest
            .write(&self.config.data_dir)
            .inspect_err(|error| tracing::warn!(%error, "draft store manifest not written"))
    }

    /// Writes the manifest if it has been out of date for a while.
    pub(super) fn refresh_manifest(&mut self) {
        let open = self.shared.read();
        let is_behind = open.is_ok_and(|open| open.catalog.head() != self.manifest_head);
        let age = self.manifest_written.elapsed();
        if age >= MANIFEST_INTERVAL && is_behind || age >= MANIFEST_AGE_MAX {
            let _ = self.write_manifest(false);
        }
    }
}
