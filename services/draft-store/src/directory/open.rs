//! Opening a data directory, whatever state it is in.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use crate::catalog::{LoadedCatalog, load};
use crate::codec;
use crate::directory::manifest::{Loss, Manifest};
use crate::directory::paths::{clear_leftovers, log_numbers, log_path};
use crate::directory::quarantine::{Salvaged, quarantine, quarantine_files, salvage};
use crate::log::journaled::{JournaledLog, delete_catalogs};
use crate::log::sled::SledCatalog;
use crate::log::{Batch, LogError, RecordLog, journal, random, refused};
use crate::record::{SegmentId, StoreRecord, store_key};
use crate::segments::{self, SegmentFile, find};

/// A data directory that was opened.
pub(crate) struct OpenedDirectory {
    pub(crate) log: Arc<dyn RecordLog>,
    /// The log's number.
    pub(crate) number: u64,
    pub(crate) store: StoreRecord,
    pub(crate) loaded: LoadedCatalog,
    /// Where the previous log was moved, if it could not be read in full.
    pub(crate) quarantined: Option<PathBuf>,
    /// Far fewer documents were found than there were before.
    pub(crate) loss: Option<Loss>,
    /// The last time that the store knew, in Unix milliseconds, or 0 if it is unknown.
    pub(crate) known_ms: u64,
    /// Whether the log was created, so that nothing was ever in it.
    pub(crate) is_new: bool,
    /// Unreadable parts of the journal, as text. Only [`super::inspect()`] fills it.
    pub(crate) damage: Vec<String>,
}

impl OpenedDirectory {
    pub(super) fn new(
        log: impl RecordLog + 'static,
        number: u64,
        store: StoreRecord,
        loaded: LoadedCatalog,
    ) -> Self {
        OpenedDirectory {
            log: Arc::new(log),
            number,
            store,
            loaded,
            quarantined: None,
            loss: None,
            known_ms: 0,
            is_new: false,
            damage: Vec::new(),
        }
    }
}

/// Opens the store in `dir`, whatever state it is in. The caller holds the lock.
///
/// # Errors
/// [`LogError::Refused`] if the disk refuses or a segment has another version. Nothing was changed then.
pub(crate) fn open(dir: &Path, cache_bytes: u64, now_ms: u64) -> Result<OpenedDirectory, LogError> {
    std::fs::create_dir_all(dir).map_err(|error| refused("create", dir, &error))?;
    segments::check_versions(dir)?;
    let manifest = Manifest::read(dir);
    let number = current(dir, manifest.as_ref(), cache_bytes)?;
    let mut opened = match open_or_repair(dir, number, manifest.as_ref(), cache_bytes) {
        Err(LogError::Corrupt(why)) => {
            // The new log is made beside the old one, which is moved last. A start that is interrupted begins again.
            let (old, next) = (log_path(dir, number), number + 1);
            clear_leftovers(dir, number)?;
            let (log, Salvaged { records, is_whole }) =
                JournaledLog::create(&log_path(dir, next), cache_bytes, |put| {
                    salvage(&old, put, cache_bytes)
                })?;
            let store = create(&log)?;
            let moved = quarantine(dir, &old, now_ms)?;
            tracing::error!(
                why,
                moved_to = %moved.display(),
                salvaged_records = records,
                is_whole,
                "draft store log quarantined"
            );
            let found = find(dir, &log, true)?;
            let loaded = load(&log, store, found, random()? as u32)?;
            OpenedDirectory {
                quarantined: Some(moved),
                ..OpenedDirectory::new(log, next, store, loaded)
            }
        }
        other => other?,
    };
    if let Some(manifest) = manifest {
        opened.known_ms = manifest.known_ms;
        let is_in_doubt = opened.quarantined.is_some()
            || opened.loaded.lost_segments > 0
            || manifest.disagrees(opened.store, &opened.loaded)
            || manifest.generation != opened.store.generation;
        let documents = opened.loaded.catalog.totals().documents;
        opened.loss = manifest.loss(documents, is_in_doubt);
    }
    let number = opened.number;
    Manifest::new(number, opened.store, &opened.loaded.catalog, false)
        .with(opened.loss, opened.known_ms)
        .write(dir)?;
    clear_leftovers(dir, number)?;
    clear_segments(dir, &opened, now_ms)?;
    Ok(opened)
}

/// Opens the log. If its catalogue lacks or misreads something, opens it again with one that is built anew.
fn open_or_repair(
    dir: &Path,
    number: u64,
    manifest: Option<&Manifest>,
    cache_bytes: u64,
) -> Result<OpenedDirectory, LogError> {
    let path = log_path(dir, number);
    let log = JournaledLog::open(&path, cache_bytes)?;
    match load_log(dir, log, number, manifest, true) {
        Err(LogError::Corrupt(why)) => {
            tracing::warn!(
                why,
                "draft store catalogue cannot be read; it is built again"
            );
            delete_catalogs(&path, None)?;
            let log = JournaledLog::open(&path, cache_bytes)?;
            load_log(dir, log, number, manifest, false)
        }
        other => other,
    }
}

/// Moves damaged segment files that are not in use to quarantine, and deletes all orphans.
fn clear_segments(dir: &Path, opened: &OpenedDirectory, now_ms: u64) -> Result<(), LogError> {
    let segments = opened.loaded.catalog.segments();
    let mut damaged = Vec::new();
    for segment in segments::list(dir)?.0 {
        if segments.get(segment).is_none() && is_damaged(dir, segment) {
            damaged.push(segments::path(dir, segment));
        }
    }
    if !damaged.is_empty() {
        let to = quarantine_files(dir, &damaged, now_ms)?;
        tracing::error!(files = damaged.len(), moved_to = %to.display(), "draft store segments quarantined");
    }
    segments::clear_orphans(dir, |segment| segments.get(segment).is_some())
}

/// Whether a file that is not in use is damaged, so that it may have been in use before.
fn is_damaged(dir: &Path, segment: SegmentId) -> bool {
    matches!(SegmentFile::open(dir, segment), Err(LogError::Corrupt(_)))
}

/// The number of the log in use: the one that the manifest names, or without a manifest the newest complete one.
pub(super) fn current(
    dir: &Path,
    manifest: Option<&Manifest>,
    cache_bytes: u64,
) -> Result<u64, LogError> {
    let numbers = log_numbers(dir)?;
    if let Some(manifest) = manifest
        && (numbers.contains(&manifest.log) || numbers.is_empty())
    {
        return Ok(manifest.log);
    }
    if let [_, _, ..] = numbers[..] {
        for number in numbers.iter().rev() {
            if is_complete(&log_path(dir, *number), cache_bytes)? {
                return Ok(*number);
            }
        }
    }
    Ok(numbers.first().copied().unwrap_or(0))
}

/// Whether a log has its identity. A rewritten log gets it last, so one without it is incomplete.
fn is_complete(path: &Path, cache_bytes: u64) -> Result<bool, LogError> {
    if journal::is_in(path)? {
        let mut is_named = false;
        journal::scan(path, 0, &mut |scanned| {
            is_named |= scanned.batch.writes().any(|(key, _)| *key == store_key());
            Ok(())
        })?;
        return Ok(is_named);
    }
    match SledCatalog::open(path, cache_bytes).and_then(|log| log.get(&store_key())) {
        Ok(identity) => Ok(identity.is_some()),
        Err(LogError::Corrupt(_)) => Ok(false),
        Err(refused) => Err(refused),
    }
}

/// Reads what an open log has. With `is_strict`, a single unreadable record is an error.
fn load_log(
    dir: &Path,
    log: JournaledLog,
    number: u64,
    manifest: Option<&Manifest>,
    is_strict: bool,
) -> Result<OpenedDirectory, LogError> {
    let mut is_new = false;
    let mut store = match log.get(&store_key())? {
        Some(value) => match codec::open::<StoreRecord>(&store_key(), &value) {
            Ok(store) => store,
            Err(damage) if is_strict => return Err(LogError::Corrupt(damage.to_string())),
            Err(damage) => {
                tracing::error!(%damage, "draft store identity is damaged");
                create(&log)?
            }
        },
        None if manifest.is_none() && log.is_empty()? => {
            is_new = true;
            create(&log)?
        }
        None => return Err(LogError::Corrupt("the log has lost its identity".into())),
    };
    let found = find(dir, &log, false)?;
    let mut loaded = load(&log, store, found, random()? as u32)?;
    if is_strict && loaded.damaged_records > 0 {
        let records = loaded.damaged_records;
        return Err(LogError::Corrupt(format!("{records} records are damaged")));
    }
    if manifest.is_some_and(|manifest| manifest.disagrees(store, &loaded)) {
        if is_strict {
            return Err(LogError::Corrupt(
                "the log holds less than its manifest says".into(),
            ));
        }
        // Followers may hold what is gone here. A new generation makes them start over.
        tracing::error!("draft store log is older than its manifest; all followers start over");
        store = create(&log)?;
        let found = find(dir, &log, true)?;
        loaded = load(&log, store, found, random()? as u32)?;
    }
    Ok(OpenedDirectory {
        is_new,
        ..OpenedDirectory::new(log, number, store, loaded)
    })
}

/// Creates a new identity.
fn create(log: &JournaledLog) -> Result<StoreRecord, LogError> {
    let store = StoreRecord {
        generation: random()?,
        sequence_reserved: 0,
    };
    let mut batch = Batch::default();
    batch.put_record(store_key(), &store);
    log.commit(&batch)?;
    Ok(store)
}
