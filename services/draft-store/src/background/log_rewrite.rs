//! Copies the log into a fresh one, which then replaces it, while the store serves. sled never shrinks, so this is
//! how space comes back.
//!
//! The naive way stops the writer for the copy. Here the writer goes on, and writes to both logs from the start
//! (*mirrors*), while the copy goes through the old log in small steps. Each step holds the store's lock for reading,
//! so no commit happens during it. A key that the copy has not reached yet will be read as the last commit left it. A
//! key that it has passed is kept up to date by the mirror. So there is nothing to catch up with at the end, and no
//! commit waits longer than a step.
//!
//! Recording changed keys and copying them again in rounds was rejected. It needs a bound on the record, and it ends
//! only if the copy is faster than the appends.
//!
//! The new log replaces the old one when a new manifest is written. Before that the new log is a leftover, afterwards
//! the old one is. Leftovers are deleted when the directory is opened.

#[cfg(test)]
mod tests;

use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use crate::directory::{Manifest, clear_leftovers, delete_log, log_path};
use crate::log::journaled::{IndexMode, JournaledLog};
use crate::log::{Batch, LogError, RecordLog};
use crate::record::{RecordKind, document_of};
use crate::shared_store::{OpenStore, SharedStore};

/// Most records, and bytes, that are copied between two looks at the clock.
const BATCH_RECORDS: usize = 64;
const BATCH_BYTES: usize = 64 << 10;

/// The copy is synced after this many bytes, outside the lock, so that no commit meets a disk busy with its writes.
const SYNC_BYTES: usize = 1 << 20;

/// At most one part in this many of what the store holds may be waste in the log.
const WASTE_SHARE: u64 = 8;

/// The sizes that decide whether a log is rewritten.
#[derive(Clone, Copy, Debug)]
pub(crate) struct LogSizes {
    /// Bytes of the log on disk.
    pub(crate) log_bytes: u64,
    /// Bytes of its live records.
    pub(crate) live_bytes: u64,
    /// Bytes of an empty log on disk.
    pub(crate) empty_bytes: u64,
    /// Bytes on disk per byte of records in a fresh log, beyond those of an empty one.
    pub(crate) overhead: f64,
    /// Bytes that the store holds, in segments and in the log.
    pub(crate) held_bytes: u64,
}

/// Whether a log is to be rewritten: when it has `factor` times the size of a fresh one, or before that when its
/// waste is large beside all that the store holds. The second rule leaves room for the old log and the copy. A
/// rewrite must give back at least half of what it copies.
pub(crate) fn is_due(sizes: LogSizes, factor: u64, bytes_min: u64) -> bool {
    let fresh = sizes.live_bytes as f64 * sizes.overhead;
    let waste = sizes.log_bytes as f64 - sizes.empty_bytes as f64 - fresh;
    let outgrown = fresh * (factor - 1) as f64;
    let much = bytes_min.max(sizes.held_bytes / WASTE_SHARE) as f64;
    sizes.log_bytes > bytes_min && waste > outgrown.min(much.max(fresh / 2.0))
}

/// The owner of the log that is rewritten.
pub(crate) trait RewriteHost {
    /// Writes every commit to `to` as well from now on. Returns the log to copy.
    fn mirror(&self, to: Arc<dyn RecordLog>) -> Result<Arc<dyn RecordLog>, LogError>;

    /// Replaces the log with the mirror for good: the manifest names it. Returns the bytes that were mirrored.
    fn swap(&self, number: u64) -> Result<u64, LogError>;
}

/// A rewrite to be done.
pub(crate) struct RewriteJob {
    pub(crate) dir: PathBuf,
    /// The log's number. The fresh log gets the next one.
    pub(crate) from: u64,
    pub(crate) cache_bytes: u64,
    /// How long the copy may hold the lock at a time.
    pub(crate) step: Duration,
    /// Ends the copy early.
    pub(crate) stop: Arc<AtomicBool>,
}

/// The steps of a rewrite. Tests interrupt it at each.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum RewriteStep {
    /// The fresh log exists.
    Created,
    /// Commits go to both logs.
    Mirrored,
    /// Some records are copied.
    Copying,
    /// All records are copied, and durable.
    Copied,
    /// The fresh log is in use.
    Swapped,
    /// The old log is deleted.
    Deleted,
}

/// The result of a rewrite.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct RewriteReport {
    pub(crate) before_bytes: u64,
    pub(crate) after_bytes: u64,
    /// Bytes of the records written to the fresh log.
    pub(crate) written_bytes: u64,
}

/// Rewrites the log, and removes the leftovers if that fails.
pub(crate) fn rewrite(
    job: &RewriteJob,
    shared: &SharedStore,
    host: &dyn RewriteHost,
) -> Result<RewriteReport, LogError> {
    let outcome = run(job, shared, host, &|_| Ok(()));
    if outcome.is_err()
        && let Some(manifest) = Manifest::read(&job.dir)
    {
        clear_leftovers(&job.dir, manifest.log)?;
    }
    outcome
}

/// Rewrites the log. It blocks, so it needs a thread of its own. `at` runs at each step, and interrupts the rewrite
/// by an error.
pub(super) fn run(
    job: &RewriteJob,
    shared: &SharedStore,
    host: &dyn RewriteHost,
    at: &dyn Fn(RewriteStep) -> Result<(), LogError>,
) -> Result<RewriteReport, LogError> {
    let number = job.from + 1;
    let path = log_path(&job.dir, number);
    // A failed rewrite of this process may have left something.
    delete_log(&job.dir, &path)?;
    let to: Arc<dyn RecordLog> = Arc::new(JournaledLog::open(
        &path,
        job.cache_bytes,
        IndexMode::Trust,
    )?);
    at(RewriteStep::Created)?;
    let from = host.mirror(to.clone())?;
    at(RewriteStep::Mirrored)?;
    let copied_bytes = copy(shared, job, &from, &*to, at)?;
    at(RewriteStep::Copied)?;
    let before_bytes = from.disk_bytes();
    let mirrored_bytes = host.swap(number)?;
    at(RewriteStep::Swapped)?;
    // A log may write when it is closed, so the old one is dropped before its files are deleted.
    from.retire();
    drop(from);
    delete_log(&job.dir, &log_path(&job.dir, job.from))?;
    at(RewriteStep::Deleted)?;
    Ok(RewriteReport {
        before_bytes,
        after_bytes: to.disk_bytes(),
        written_bytes: copied_bytes + mirrored_bytes,
    })
}

fn copy(
    shared: &SharedStore,
    job: &RewriteJob,
    from: &Arc<dyn RecordLog>,
    to: &dyn RecordLog,
    at: &dyn Fn(RewriteStep) -> Result<(), LogError>,
) -> Result<u64, LogError> {
    // The identity comes last, with the swap.
    let mut next = Some(vec![0]);
    let (mut copied, mut unsynced) = (0, 0);
    while let Some(key) = next {
        if job.stop.load(Ordering::Relaxed) {
            return Err(LogError::Refused("the store is closing".into()));
        }
        {
            let open = shared.read().ok();
            let open = open.filter(|open| Arc::ptr_eq(&open.log, from));
            let open = open.ok_or_else(|| {
                LogError::Refused("the log was opened again during the rewrite".into())
            })?;
            let started = Instant::now();
            let mut reached = Some(key);
            while let Some(key) = reached.take() {
                let (bytes, following) = copy_batch(&open, to, &key)?;
                copied += bytes as u64;
                unsynced += bytes;
                reached = following;
                if started.elapsed() >= job.step {
                    break;
                }
            }
            next = reached;
        }
        to.await_room()?;
        if unsynced >= SYNC_BYTES || next.is_none() {
            to.sync()?;
            unsynced = 0;
        }
        at(RewriteStep::Copying)?;
    }
    Ok(copied)
}

/// Copies a batch of records from `key` on. Returns its bytes, and where to continue.
fn copy_batch(
    open: &OpenStore,
    to: &dyn RecordLog,
    key: &[u8],
) -> Result<(usize, Option<Vec<u8>>), LogError> {
    let (mut seen, mut bytes) = (0, 0);
    let mut batch = Batch::default();
    let mut last = None;
    open.log.scan(key, &[u8::MAX], &mut |key, value| {
        seen += 1;
        if is_wanted(open, key) {
            bytes += key.len() + value.len();
            batch.put(key.to_vec(), value.to_vec());
        }
        let more = seen < BATCH_RECORDS && bytes < BATCH_BYTES;
        if !more {
            // The lowest key above this one.
            last = Some([key, &[0]].concat());
        }
        more
    })?;
    if !batch.is_empty() {
        to.write(&batch)?;
    }
    Ok((bytes, last))
}

/// Whether a record is copied. The identity is not, since it says that a log is complete. Records of documents that
/// do not exist or are sealed are not, either: a salvaged log has such.
fn is_wanted(open: &OpenStore, key: &[u8]) -> bool {
    let of_document = [RecordKind::Head, RecordKind::Piece, RecordKind::State]
        .iter()
        .any(|kind| key.first() == Some(&kind.byte()));
    if of_document {
        let known = document_of(key).and_then(|key| open.catalog.document(key));
        return known.is_some_and(|known| known.slot.is_none());
    }
    key.first() != Some(&RecordKind::Store.byte())
}
