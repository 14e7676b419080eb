//! Giving space back while the store serves: sled never shrinks, so a log that has outgrown what is in it is
//! copied into a fresh one, which then takes its place.
//!
//! Naively one stops the writer, copies, and goes on. Here the writer goes on from the start and writes to
//! both logs (*mirrors*), while the copy goes through the old one in small steps. Each step holds the store's
//! lock for reading, so no commit falls into it: whatever key the copy has not reached yet it will read as
//! the last commit left it, and whatever it has passed the mirror keeps up to date. There is nothing left to
//! catch up with at the end, and no commit waits longer than a step. (Noting changed keys and copying them
//! again in rounds was left: it needs a bound on the notes, and ends only if the copy is faster than the
//! appends.)
//!
//! The swap is a new manifest. Before it the new log is a leftover, after it the old one is, and leftovers
//! are deleted when the directory is opened.

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

/// What is copied between two looks at the clock.
const BATCH_RECORDS: usize = 64;
const BATCH_BYTES: usize = 64 << 10;

/// The copy is synced after this much, outside the lock, so that no commit meets a disk full of its writes.
const SYNC_BYTES: usize = 1 << 20;

/// So much of what the store holds may be waste in the log: one part in so many.
const WASTE_SHARE: u64 = 8;

/// What is known of a log when it is asked whether to rewrite it.
#[derive(Clone, Copy, Debug)]
pub(crate) struct LogSizes {
    /// What it takes on disk.
    pub(crate) log_bytes: u64,
    /// What its records take.
    pub(crate) live_bytes: u64,
    /// What a log takes on disk that has nothing in it.
    pub(crate) empty_bytes: u64,
    /// What a fresh log takes on disk beyond that per byte of its records.
    pub(crate) overhead: f64,
    /// What the store holds, in segments and in the log.
    pub(crate) held_bytes: u64,
}

/// Whether a log is to be rewritten: when it is so many times (`factor`) what it would be freshly written, and before
/// that when its waste is much beside all that the store holds, so that old log and copy have room in what the store may
/// take. Half of what is copied must be given back in any case.
pub(crate) fn is_due(sizes: LogSizes, factor: u64, bytes_min: u64) -> bool {
    let fresh = sizes.live_bytes as f64 * sizes.overhead;
    let waste = sizes.log_bytes as f64 - sizes.empty_bytes as f64 - fresh;
    let outgrown = fresh * (factor - 1) as f64;
    let much = bytes_min.max(sizes.held_bytes / WASTE_SHARE) as f64;
    sizes.log_bytes > bytes_min && waste > outgrown.min(much.max(fresh / 2.0))
}

/// Who owns the log that is rewritten.
pub(crate) trait RewriteHost {
    /// Writes every commit to `to` as well from now on. Answers with the log that is to be copied.
    fn mirror(&self, to: Arc<dyn RecordLog>) -> Result<Arc<dyn RecordLog>, LogError>;

    /// Puts the mirror in the place of the log, for good: the manifest names it. Answers with the bytes that
    /// were mirrored.
    fn swap(&self, number: u64) -> Result<u64, LogError>;
}

/// What is to be done.
pub(crate) struct RewriteJob {
    pub(crate) dir: PathBuf,
    /// The log's number; the fresh one gets the next.
    pub(crate) from: u64,
    pub(crate) cache_bytes: u64,
    /// How long the copy may hold the lock at a time.
    pub(crate) step: Duration,
    /// Ends the copy early.
    pub(crate) stop: Arc<AtomicBool>,
}

/// How far a rewrite is; tests break it off at each.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum RewriteStep {
    /// The fresh log exists.
    Created,
    /// Commits go to both.
    Mirrored,
    /// Some records are copied.
    Copying,
    /// All records are there, and durable.
    Copied,
    /// The fresh log counts.
    Swapped,
    /// The old one is deleted.
    Deleted,
}

/// What came of it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct RewriteReport {
    pub(crate) before_bytes: u64,
    pub(crate) after_bytes: u64,
    /// Bytes of the records that were written to it.
    pub(crate) written_bytes: u64,
}

/// Rewrites the log, and leaves nothing behind where that fails.
pub(crate) fn rewrite(
    job: &RewriteJob,
    shared: &SharedStore,
    host: &dyn RewriteHost,
) -> Result<RewriteReport, LogError> {
    let outcome = run(job, shared, host, &|_| Ok(()));
    if outcome.is_err()
        && let Some(manifest) = Manifest::read(&job.dir)
    {
        clear_leftovers(&job.dir, manifest.log())?;
    }
    outcome
}

/// Rewrites the log. Blocks for as long as it takes: for a thread of its own. `at` hears of each step, and
/// breaks it off by an error.
pub(super) fn run(
    job: &RewriteJob,
    shared: &SharedStore,
    host: &dyn RewriteHost,
    at: &dyn Fn(RewriteStep) -> Result<(), LogError>,
) -> Result<RewriteReport, LogError> {
    let number = job.from + 1;
    let path = log_path(&job.dir, number);
    // A rewrite that failed in this process may have left something.
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
    // sled may write when it is closed, so it goes before its files do.
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
            let open = shared.read();
            let open = open
                .as_ref()
                .filter(|open| Arc::ptr_eq(&open.log, from))
                .ok_or_else(|| LogError::Refused("the log was opened again".into()))?;
            let started = Instant::now();
            let mut reached = Some(key);
            while let Some(key) = reached.take() {
                let (bytes, following) = copy_batch(open, to, &key)?;
                copied += bytes as u64;
                unsynced += bytes;
                reached = following;
                if started.elapsed() >= job.step {
                    break;
                }
            }
            next = reached;
        }
        if unsynced >= SYNC_BYTES || next.is_none() {
            to.sync()?;
            unsynced = 0;
        }
        at(RewriteStep::Copying)?;
    }
    Ok(copied)
}

/// Copies the records from `key` on. Answers how many bytes, and where to go on.
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
            // The least key above this one.
            last = Some([key, &[0]].concat());
        }
        more
    })?;
    if !batch.is_empty() {
        to.write(&batch)?;
    }
    Ok((bytes, last))
}

/// Not the identity, which says that a log is complete; and no records of documents that are not there or
/// sealed: what was salvaged from a damaged log has such.
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
