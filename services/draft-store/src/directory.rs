//! The data directory: opening it, and what to do when it cannot be believed.
//!
//! ```text
//! <data_dir>/lock              held by the process that uses the directory
//! <data_dir>/log/, log-<n>/    sled; the manifest names the one that counts
//! <data_dir>/segments/         sealed documents; the log names the files that count
//! <data_dir>/manifest.json     also tells when sled came up empty or went back in time
//! <data_dir>/quarantine-<ms>/  a log or segments that were not believed; kept for people, until something is
//!                              erased
//! ```
//!
//! sled 0.34 may answer damage with an error, with a panic, or with an empty database. The first two move
//! the log to quarantine; so does a log without the record that is made durable before the manifest is
//! first written. What still decodes is copied into the new log, under a new generation, so that followers
//! start over; segments are taken in as they lie. A segment that is missing or damaged costs itself alone.
//! One of a format version that this program does not read is refused with the whole directory, before
//! anything is moved: it is neither damaged nor an orphan to delete.

mod manifest;
mod quarantine;
mod rewrite;
mod room;

use std::fs::File;
use std::path::{Path, PathBuf};
use std::sync::Arc;

pub(crate) use manifest::Manifest;
pub(crate) use quarantine::delete_all as delete_quarantines;
pub(crate) use rewrite::{Host, LogSizes, Plan, Rewritten, is_due, rewrite};
pub(crate) use room::Room;

use crate::catalog::{Loaded, load};
use crate::codec;
use crate::log::sled::{SledLog, sync_directory};
use crate::log::{Batch, LogError, RecordLog};
use crate::record::{SegmentId, StoreRecord, store_key};
use crate::segments::{self, Sealed, find};
use quarantine::{quarantine, quarantine_files, salvage};

/// An open store.
pub(crate) struct Opened {
    pub(crate) log: Arc<dyn RecordLog>,
    /// The log's number.
    pub(crate) number: u64,
    pub(crate) store: StoreRecord,
    pub(crate) loaded: Loaded,
    /// Where the log before this one was moved, if it was not believed.
    pub(crate) quarantined: Option<PathBuf>,
}

/// The file that is held.
const LOCK: &str = "lock";

/// Keeps other processes away. sled's own lock is not enough: it is on one log, and which one counts changes.
pub(crate) struct Hold {
    _file: File,
}

impl Hold {
    /// Creates the directory if need be, and takes it.
    pub(crate) fn take(dir: &Path) -> Result<Self, LogError> {
        std::fs::create_dir_all(dir).map_err(|error| refused("create", dir, &error))?;
        if let Some(parent) = dir.parent().filter(|parent| !parent.as_os_str().is_empty()) {
            sync_directory(parent).map_err(|error| refused("sync", parent, &error))?;
        }
        let path = dir.join(LOCK);
        let file = File::create(&path).map_err(|error| refused("create", &path, &error))?;
        file.try_lock().map_err(|_| {
            LogError::Refused(format!(
                "{} is locked: another process uses this directory",
                path.display()
            ))
        })?;
        Ok(Hold { _file: file })
    }

    /// Whether somebody holds the directory, or did.
    pub(crate) fn was_taken(dir: &Path) -> bool {
        dir.join(LOCK).exists()
    }
}

fn refused(what: &str, path: &Path, error: &std::io::Error) -> LogError {
    LogError::Refused(format!("cannot {what} {}: {error}", path.display()))
}

fn random() -> Result<u64, LogError> {
    getrandom::u64().map_err(|error| LogError::Refused(format!("no random numbers: {error}")))
}

/// Where the log with a number lives.
fn log_path(dir: &Path, number: u64) -> PathBuf {
    match number {
        0 => dir.join("log"),
        _ => dir.join(format!("log-{number}")),
    }
}

/// The numbers of the logs there are, in order.
fn log_numbers(dir: &Path) -> Result<Vec<u64>, LogError> {
    let failed = |error: std::io::Error| refused("list", dir, &error);
    let mut numbers = Vec::new();
    for entry in std::fs::read_dir(dir).map_err(failed)? {
        let name = entry.map_err(failed)?.file_name();
        let name = name.to_string_lossy();
        if name == "log" {
            numbers.push(0);
        } else if let Some(number) = name.strip_prefix("log-").and_then(|text| text.parse().ok()) {
            numbers.push(number);
        }
    }
    numbers.sort_unstable();
    Ok(numbers)
}

/// All bytes of files under a directory.
pub(crate) fn disk_bytes(dir: &Path) -> u64 {
    let Ok(entries) = std::fs::read_dir(dir) else {
        return 0;
    };
    entries
        .flatten()
        .map(|entry| match entry.metadata() {
            Ok(metadata) if metadata.is_dir() => disk_bytes(&entry.path()),
            Ok(metadata) => metadata.len(),
            // Deleted since it was listed.
            Err(_) => 0,
        })
        .sum()
}

/// Opens the store in `dir`, whatever state it is in. The caller holds the directory.
///
/// # Errors
/// [`LogError::Refused`] when the disk refuses, or a segment is of another version: nothing was changed.
pub(crate) fn open(dir: &Path, cache_bytes: u64, now_ms: u64) -> Result<Opened, LogError> {
    std::fs::create_dir_all(dir).map_err(|error| refused("create", dir, &error))?;
    segments::check_versions(dir)?;
    let manifest = Manifest::read(dir);
    let number = current(dir, manifest.as_ref(), cache_bytes)?;
    let opened = match open_believed(dir, number, manifest.as_ref(), cache_bytes) {
        Err(LogError::Corrupt(why)) => {
            let path = log_path(dir, number);
            let moved = quarantine(dir, &path, now_ms)?;
            tracing::error!(why, moved_to = %moved.display(), "draft store log quarantined");
            let log = SledLog::open(&path, cache_bytes)?;
            let store = create(&log)?;
            let salvaged = salvage(&moved, &log, cache_bytes)?;
            tracing::warn!(records = salvaged, "draft store records salvaged");
            let found = find(dir, &log, true)?;
            let loaded = load(&log, store, found, random()? as u32)?;
            Opened {
                log: Arc::new(log),
                number,
                store,
                loaded,
                quarantined: Some(moved),
            }
        }
        other => other?,
    };
    Manifest::new(number, opened.store, &opened.loaded.catalog, false).write(dir)?;
    rewrite::clear_leftovers(dir, number)?;
    clear_segments(dir, &opened, now_ms)?;
    Ok(opened)
}

/// Makes the log name the segments that are there, and takes away the files of all others: what could not be
/// believed goes to quarantine, orphans are deleted.
fn clear_segments(dir: &Path, opened: &Opened, now_ms: u64) -> Result<(), LogError> {
    let segments = opened.loaded.catalog.segments();
    let mut unbelieved = Vec::new();
    for segment in segments::list(dir)?.0 {
        if segments.get(segment).is_none() && is_unbelieved(dir, segment) {
            unbelieved.push(segments::path(dir, segment));
        }
    }
    if !unbelieved.is_empty() {
        let to = quarantine_files(dir, &unbelieved, now_ms)?;
        tracing::error!(files = unbelieved.len(), moved_to = %to.display(), "draft store segments quarantined");
    }
    segments::clear_orphans(dir, |segment| segments.get(segment).is_some())
}

/// Whether a file that does not count is one that should.
fn is_unbelieved(dir: &Path, segment: SegmentId) -> bool {
    matches!(Sealed::open(dir, segment), Err(LogError::Corrupt(_)))
}

/// Opens the store in `dir` for reading only: nothing is repaired, moved or cleared. The caller holds the
/// directory. `was_begun` says that somebody held it before: then a store that is not there yet is an empty one,
/// whose process ended while it was created.
///
/// # Errors
/// There is no store, a segment is of another version, or the store is not readable as a whole.
pub(crate) fn inspect(dir: &Path, cache_bytes: u64, was_begun: bool) -> Result<Opened, LogError> {
    segments::check_versions(dir)?;
    let manifest = Manifest::read(dir);
    let number = current(dir, manifest.as_ref(), cache_bytes)?;
    let path = log_path(dir, number);
    if !path.join("db").exists() && !was_begun {
        return Err(LogError::Refused(format!("no store in {}", dir.display())));
    }
    let log = SledLog::open(&path, cache_bytes)?;
    let lost = || LogError::Corrupt(format!("{} has lost its identity", path.display()));
    let store = match log.get(&store_key())? {
        Some(value) => codec::open::<StoreRecord>(&store_key(), &value).map_err(|_| lost())?,
        None if manifest.is_none() && log.is_empty()? => StoreRecord {
            generation: 0,
            sequence_reserved: 0,
        },
        None => return Err(lost()),
    };
    let found = find(dir, &log, false)?;
    let loaded = load(&log, store, found, 0)?;
    if manifest.is_some_and(|manifest| manifest.disagrees(store, &loaded)) {
        return Err(LogError::Corrupt(format!(
            "{} lacks what manifest.json says it held",
            path.display()
        )));
    }
    Ok(Opened {
        log: Arc::new(log),
        number,
        store,
        loaded,
        quarantined: None,
    })
}

/// Which log counts: the one that the manifest names, and without a manifest the newest that is complete. A
/// rewritten log gets its identity last of all, so one without is not.
fn current(dir: &Path, manifest: Option<&Manifest>, cache_bytes: u64) -> Result<u64, LogError> {
    let numbers = log_numbers(dir)?;
    if let Some(manifest) = manifest
        && (numbers.contains(&manifest.log()) || numbers.is_empty())
    {
        return Ok(manifest.log());
    }
    if let [_, _, ..] = numbers[..] {
        for number in numbers.iter().rev() {
            match SledLog::open(&log_path(dir, *number), cache_bytes) {
                Ok(log) if log.get(&store_key())?.is_some() => return Ok(*number),
                Err(LogError::Refused(why)) => return Err(LogError::Refused(why)),
                Ok(_) | Err(LogError::Corrupt(_)) => {}
            }
        }
    }
    Ok(numbers.first().copied().unwrap_or(0))
}

fn open_believed(
    dir: &Path,
    number: u64,
    manifest: Option<&Manifest>,
    cache_bytes: u64,
) -> Result<Opened, LogError> {
    let log = SledLog::open(&log_path(dir, number), cache_bytes)?;
    let mut store = match log.get(&store_key())? {
        Some(value) => match codec::open::<StoreRecord>(&store_key(), &value) {
            Ok(store) => store,
            Err(damage) => {
                tracing::error!(%damage, "draft store identity is damaged");
                create(&log)?
            }
        },
        None if manifest.is_none() && log.is_empty()? => create(&log)?,
        None => return Err(LogError::Corrupt("the log has lost its identity".into())),
    };
    let found = find(dir, &log, false)?;
    let mut loaded = load(&log, store, found, random()? as u32)?;
    if manifest.is_some_and(|manifest| manifest.disagrees(store, &loaded)) {
        // What followers hold may be gone here; a new generation makes them start over.
        tracing::error!("draft store log went back in time");
        store = create(&log)?;
        let found = find(dir, &log, true)?;
        loaded = load(&log, store, found, random()? as u32)?;
    }
    Ok(Opened {
        log: Arc::new(log),
        number,
        store,
        loaded,
        quarantined: None,
    })
}

/// A new identity.
fn create(log: &SledLog) -> Result<StoreRecord, LogError> {
    let store = StoreRecord {
        generation: random()?,
        sequence_reserved: 0,
    };
    let mut batch = Batch::default();
    batch.put(store_key(), codec::seal(&store_key(), &store));
    log.commit(&batch)?;
    Ok(store)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::catalog::Catalog;
    use crate::record::{Kind, NamespaceRecord, namespace_key};
    use refrain_protocol::NamespaceId;

    const CACHE_BYTES: u64 = 4 << 20;

    /// A closed store with `count` records.
    fn filled(dir: &Path, count: u128) -> StoreRecord {
        let opened = open(dir, CACHE_BYTES, 1).unwrap();
        let mut batch = Batch::default();
        for id in 0..count {
            let key = namespace_key(Kind::Namespace, NamespaceId(id));
            let [tenant, model, tokenizer] = ["a", "m", "t"].map(str::to_owned);
            let value = codec::seal(
                &key,
                &NamespaceRecord {
                    tenant,
                    model,
                    tokenizer,
                },
            );
            batch.put(key, value);
        }
        opened.log.commit(&batch).unwrap();
        opened.store
    }

    #[test]
    fn of_several_logs_the_manifest_names_the_one_that_counts() {
        let dir = tempfile::tempdir().unwrap();
        let store = filled(dir.path(), 10);
        let copied = |from: u64, to: u64| {
            std::fs::create_dir(log_path(dir.path(), to)).unwrap();
            for file in std::fs::read_dir(log_path(dir.path(), from)).unwrap() {
                let file = file.unwrap();
                if file.file_type().unwrap().is_file() {
                    let target = log_path(dir.path(), to).join(file.file_name());
                    std::fs::copy(file.path(), target).unwrap();
                }
            }
        };
        // A rewrite that broke off before it was named.
        std::fs::create_dir(log_path(dir.path(), 1)).unwrap();
        let opened = open(dir.path(), CACHE_BYTES, 2).unwrap();
        assert_eq!((opened.store, opened.number), (store, 0));
        assert_eq!(log_numbers(dir.path()).unwrap(), [0]);
        drop(opened);
        // One that was complete; the manifest is gone. A third has no identity yet.
        copied(0, 2);
        std::fs::create_dir(log_path(dir.path(), 3)).unwrap();
        std::fs::remove_file(dir.path().join("manifest.json")).unwrap();
        let opened = open(dir.path(), CACHE_BYTES, 2).unwrap();
        assert_eq!((opened.store, opened.number), (store, 2));
        assert_eq!(opened.quarantined, None);
        assert_eq!(log_numbers(dir.path()).unwrap(), [2]);
    }

    #[test]
    fn a_store_cut_off_while_it_was_created_is_an_empty_one() {
        let dir = tempfile::tempdir().unwrap();
        let inspected = |was_begun| inspect(dir.path(), CACHE_BYTES, was_begun);
        assert!(matches!(inspected(false), Err(LogError::Refused(_))));
        let empty = inspected(true).unwrap();
        assert_eq!(empty.loaded.catalog.totals().documents, 0);
        drop(empty);
        // sled was opened, and no identity written.
        assert!(inspected(false).is_ok());
        let store = filled(dir.path(), 1);
        assert_eq!(inspected(false).unwrap().store, store);
    }

    #[test]
    fn a_directory_is_held_once() {
        let dir = tempfile::tempdir().unwrap();
        let held = Hold::take(dir.path()).unwrap();
        assert!(matches!(Hold::take(dir.path()), Err(LogError::Refused(_))));
        drop(held);
        assert!(Hold::take(dir.path()).is_ok());
    }

    #[test]
    fn a_log_behind_its_manifest_gets_a_new_generation() {
        let dir = tempfile::tempdir().unwrap();
        let store = filled(dir.path(), 1);
        let catalog = Catalog::new(store.generation, 5);
        Manifest::new(0, store, &catalog, false)
            .write(dir.path())
            .unwrap();
        let opened = open(dir.path(), CACHE_BYTES, 2).unwrap();
        assert_ne!(opened.store.generation, store.generation);
        assert_eq!(opened.quarantined, None);
        let again = opened.store;
        drop(opened);
        assert_eq!(open(dir.path(), CACHE_BYTES, 3).unwrap().store, again);
    }
}
