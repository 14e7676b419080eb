//! Replaces the files of a log by fresh ones with what is alive, while commits go on. A journal only grows and sled
//! never shrinks, so this is how space comes back.
//!
//! The naive way stops commits for the copy. Here every commit goes to both pairs of files from the start, while the
//! copy goes through the records in small steps, between two commits. A key that the copy has not reached yet will
//! be read as the last commit left it. A key that it has passed is kept up to date by the commits. So there is
//! nothing to catch up with at the end, and no commit waits longer than a step.
//!
//! Recording changed keys and copying them again in rounds was rejected. It needs a bound on the record, and it ends
//! only if the copy is faster than the appends.
//!
//! The fresh journal is in use once it has the name of the earlier one. The name that is written in it tells its
//! catalogue from others, so everything else is a leftover.

#[cfg(test)]
mod tests;

use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use crate::log::journaled::JournaledLog;
use crate::log::journaled::files::{FilesInMaking, delete_catalogs, delete_unfinished};
use crate::log::{Batch, LogError, RecordLog as _, RewriteReport, RewriteStep};

/// How long a commit may wait for the copy. A busy store commits between any two steps. With a much shorter step it
/// would grow faster than it is copied.
const STEP: Duration = Duration::from_millis(20);

/// Most records, and bytes, that are copied between two looks at the clock.
const BATCH_RECORDS: usize = 64;
const BATCH_BYTES: usize = 64 << 10;

/// The copy is synced after this many bytes, between two steps, so that no commit meets a disk busy with its writes.
const SYNC_BYTES: usize = 1 << 20;

fn aborted() -> LogError {
    LogError::Refused("the rewrite was aborted".into())
}

impl JournaledLog {
    /// See [`crate::log::RecordLog::rewrite`].
    pub(super) fn replace_files(
        &self,
        stop: &AtomicBool,
        at: &dyn Fn(RewriteStep) -> Result<(), LogError>,
    ) -> Result<RewriteReport, LogError> {
        let outcome = self.try_replace(stop, at);
        if outcome.is_err() {
            let (fresh, name) = {
                let mut journals = self.journals.lock();
                (journals.fresh.take(), journals.current.position().journal)
            };
            // sled writes when it is closed, so its files go afterwards.
            drop(fresh);
            delete_unfinished(&self.path, Some(name));
        }
        outcome
    }

    fn try_replace(
        &self,
        stop: &AtomicBool,
        at: &dyn Fn(RewriteStep) -> Result<(), LogError>,
    ) -> Result<RewriteReport, LogError> {
        let before_bytes = self.disk_bytes();
        let fresh = FilesInMaking::create(&self.path, self.cache_bytes)?;
        self.journals.lock().fresh = Some(fresh);
        at(RewriteStep::Created)?;
        self.copy(stop, at)?;
        at(RewriteStep::Copied)?;
        let written_bytes = self.swap()?;
        at(RewriteStep::Swapped)?;
        let name = self.journals.lock().current.position().journal;
        delete_catalogs(&self.path, Some(name))?;
        at(RewriteStep::Deleted)?;
        Ok(RewriteReport {
            before_bytes,
            after_bytes: self.disk_bytes(),
            written_bytes,
        })
    }

    /// Does something with the fresh files between two commits.
    ///
    /// # Errors
    /// They lack a commit, or the log has failed.
    fn with_fresh<T>(
        &self,
        action: impl FnOnce(&mut FilesInMaking) -> Result<T, LogError>,
    ) -> Result<T, LogError> {
        let mut journals = self.journals.lock();
        let fresh = journals.fresh.as_mut().filter(|fresh| fresh.is_whole());
        action(
            fresh
                .filter(|_| self.fault().is_none())
                .ok_or_else(aborted)?,
        )
    }

    fn copy(
        &self,
        stop: &AtomicBool,
        at: &dyn Fn(RewriteStep) -> Result<(), LogError>,
    ) -> Result<(), LogError> {
        let (mut next, mut unsynced) = (Some(vec![0]), 0);
        while let Some(from) = next {
            if stop.load(Ordering::Relaxed) {
                return Err(LogError::Refused("the store is closing".into()));
            }
            next = self.with_fresh(|fresh| {
                let started = Instant::now();
                let mut reached = Some(from);
                while let Some(key) = reached.take() {
                    let (batch, following) = records_from(self, &key)?;
                    unsynced += batch.bytes() as usize;
                    fresh.append(&batch)?;
                    reached = following;
                    if started.elapsed() >= STEP {
                        break;
                    }
                }
                Ok(reached)
            })?;
            if unsynced >= SYNC_BYTES || next.is_none() {
                let (file, end) = self.with_fresh(|fresh| fresh.journal.begin_sync())?;
                let outcome = file.sync_data();
                self.with_fresh(|fresh| fresh.journal.end_sync(end, outcome))?;
                unsynced = 0;
            }
            at(RewriteStep::Copying)?;
        }
        Ok(())
    }

    /// Puts the fresh files into use. Returns the bytes of the records in them.
    fn swap(&self) -> Result<u64, LogError> {
        let mut journals = self.journals.lock();
        let is_sound = self.fault().is_none();
        let fresh = journals
            .fresh
            .take_if(|fresh| is_sound && fresh.is_whole())
            .ok_or_else(aborted)?;
        let written_bytes = fresh.written_bytes;
        let (journal, catalog) = fresh.install()?;
        journals.current = journal;
        let earlier = std::mem::replace(&mut *self.catalog.write(), catalog);
        drop(journals);
        // sled writes when it is closed, which no commit waits for.
        drop(earlier);
        Ok(written_bytes)
    }
}

/// Some records from a key on, and where to continue.
fn records_from(log: &JournaledLog, from: &[u8]) -> Result<(Batch, Option<Vec<u8>>), LogError> {
    let (mut batch, mut bytes, mut last) = (Batch::default(), 0, None);
    log.scan(from, &[u8::MAX], &mut |key, value| {
        bytes += key.len() + value.len();
        batch.put(key.to_vec(), value.to_vec());
        let more = batch.len() < BATCH_RECORDS && bytes < BATCH_BYTES;
        if !more {
            // The lowest key above this one.
            last = Some([key, &[0]].concat());
        }
        more
    })?;
    Ok((batch, last))
}
