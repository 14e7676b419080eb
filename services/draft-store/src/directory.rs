//! The data directory: opening it, and what to do when it cannot be believed.
//!
//! ```text
//! <data_dir>/lock              held by the process that uses the directory
//! <data_dir>/log/, log-<n>/    a journal, and sled as its index; the manifest names the one that counts
//! <data_dir>/segments/         sealed documents; the log names the files that count
//! <data_dir>/manifest.json     what the store must hold at least, and the time that it last knew
//! <data_dir>/quarantine-<ms>/  a log or segments that could not be read as a whole; kept for people
//! ```
//!
//! The journal is the truth. An index that does not open, or in which a record is damaged, is built anew from it.
//! Only where the journal itself has lost something does the log move to quarantine. Then all that still decodes is
//! copied into a new log, under a new generation, so that followers start over; segments are taken in as they lie. A
//! segment that is missing or damaged costs itself alone. One of a format version that this program does not read is
//! refused with the whole directory, before anything is moved: it is neither damaged nor an orphan to delete.
//!
//! A store that comes up with far fewer documents than its manifest says is open, and not ready until an operator has
//! confirmed the loss ([`Loss`]).

mod manifest;
mod quarantine;
mod rewrite;
mod room;

use std::fs::File;
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::sync::Arc;

pub(crate) use manifest::{Loss, Manifest};
pub(crate) use quarantine::{clear_quarantines, count_quarantines};
pub(crate) use rewrite::{Host, LogSizes, Plan, Rewritten, is_due, rewrite};
pub(crate) use room::Room;

use crate::catalog::{Loaded, load};
use crate::codec;
use crate::log::journal;
use crate::log::journaled::{Index, JournaledLog};
use crate::log::memory::MemoryLog;
use crate::log::sled::{SledLog, sync_directory};
use crate::log::{Batch, LogError, RecordLog, random, refused};
use crate::record::{SegmentId, StoreRecord, store_key};
use crate::segments::{self, Sealed, find};
use quarantine::{Salvaged, quarantine, quarantine_files, salvage, without_doubtful};

/// An open store.
pub(crate) struct Opened {
    pub(crate) log: Arc<dyn RecordLog>,
    /// The log's number.
    pub(crate) number: u64,
    pub(crate) store: StoreRecord,
    pub(crate) loaded: Loaded,
    /// Where the log before this one was moved, if it could not be read as a whole.
    pub(crate) quarantined: Option<PathBuf>,
    /// Far fewer documents are here than there were.
    pub(crate) loss: Option<Loss>,
    /// The last time that the store knew, in Unix milliseconds; 0 where nobody noted one.
    pub(crate) known_ms: u64,
    /// Unreadable parts of the journal, as text; filled by [`inspect`] only.
    pub(crate) damage: Vec<String>,
}

/// The file that is held.
const LOCK: &str = "lock";

/// Keeps other processes away. sled's own lock is not enough: it is on one log, and which one counts changes.
pub(crate) struct Hold {
    file: File,
    path: PathBuf,
}

impl Hold {
    /// Creates the directory if need be, for its owner alone, and takes it.
    pub(crate) fn take(dir: &Path) -> Result<Self, LogError> {
        std::fs::create_dir_all(dir).map_err(|error| refused("create", dir, &error))?;
        restrict(dir)?;
        if let Some(parent) = dir.parent().filter(|parent| !parent.as_os_str().is_empty()) {
            sync_directory(parent).map_err(|error| refused("sync", parent, &error))?;
        }
        let path = dir.join(LOCK);
        let file = File::create(&path).map_err(|error| refused("create", &path, &error))?;
        Self::lock(file, path)
    }

    /// Takes a directory that is only looked at, and may be read-only. `None`: nobody ever held it.
    pub(crate) fn look(dir: &Path) -> Result<Option<Self>, LogError> {
        let path = dir.join(LOCK);
        match File::open(&path) {
            Ok(file) => Self::lock(file, path).map(Some),
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => Ok(None),
            Err(error) => Err(refused("open", &path, &error)),
        }
    }

    fn lock(file: File, path: PathBuf) -> Result<Self, LogError> {
        file.try_lock().map_err(|_| {
            LogError::Refused(format!(
                "{} is locked: another process uses this directory",
                path.display()
            ))
        })?;
        Ok(Hold { file, path })
    }

    /// Whether the directory is still the one that was taken. One that was removed under a running store is not to be
    /// created anew: what was stored in it would seem never to have been there.
    pub(crate) fn check(&self) -> Result<(), LogError> {
        let identity = |told: std::fs::Metadata| (told.dev(), told.ino());
        let held = self.file.metadata().map(identity).ok();
        let there = std::fs::metadata(&self.path).map(identity).ok();
        if held.is_some() && held == there {
            return Ok(());
        }
        Err(LogError::Refused(format!(
            "{} was removed or replaced while the store ran; put the directory back, or start the store again",
            self.path.display()
        )))
    }
}

/// Outputs of models are nobody else's to read.
fn restrict(dir: &Path) -> Result<(), LogError> {
    let failed = |error: std::io::Error| refused("restrict", dir, &error);
    let mode = std::fs::metadata(dir).map_err(failed)?.permissions().mode();
    if mode & 0o077 == 0 {
        return Ok(());
    }
    match std::fs::set_permissions(dir, std::fs::Permissions::from_mode(mode & 0o700)) {
        Ok(()) => Ok(()),
        // A mounted volume may belong to somebody else, with a group that this process is in.
        Err(error) if error.kind() == std::io::ErrorKind::PermissionDenied => {
            tracing::warn!(%error, "data_dir can be read by others, and its mode cannot be changed");
            Ok(())
        }
        Err(error) => Err(failed(error)),
    }
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
pub(crate) fn open(
    dir: &Path,
    cache_bytes: u64,
    now_ms: u64,
    index: Index,
) -> Result<Opened, LogError> {
    std::fs::create_dir_all(dir).map_err(|error| refused("create", dir, &error))?;
    segments::check_versions(dir)?;
    let manifest = Manifest::read(dir);
    let number = current(dir, manifest.as_ref(), cache_bytes)?;
    let mut opened = match open_or_repair(dir, number, manifest.as_ref(), cache_bytes, index) {
        Err(LogError::Corrupt(why)) => {
            // The new log is made beside the old one, which is moved last: a start that breaks off begins anew.
            let (old, next) = (log_path(dir, number), number + 1);
            rewrite::clear_leftovers(dir, number)?;
            let log = JournaledLog::open(&log_path(dir, next), cache_bytes, Index::Believed)?;
            let Salvaged { records, is_whole } = salvage(&old, &log, cache_bytes)?;
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
            Opened {
                quarantined: Some(moved),
                ..Opened::new(log, next, store, loaded)
            }
        }
        other => other?,
    };
    if let Some(manifest) = manifest {
        opened.known_ms = manifest.known_ms();
        let is_in_doubt = opened.quarantined.is_some()
            || opened.loaded.lost_segments > 0
            || manifest.disagrees(opened.store, &opened.loaded)
            || manifest.is_of_another_generation(opened.store);
        let documents = opened.loaded.catalog.totals().documents;
        opened.loss = manifest.loss(documents, is_in_doubt);
    }
    let number = opened.number;
    Manifest::new(number, opened.store, &opened.loaded.catalog, false)
        .with(opened.loss, opened.known_ms)
        .write(dir)?;
    rewrite::clear_leftovers(dir, number)?;
    clear_segments(dir, &opened, now_ms)?;
    Ok(opened)
}

impl Opened {
    fn new(log: impl RecordLog + 'static, number: u64, store: StoreRecord, loaded: Loaded) -> Self {
        Opened {
            log: Arc::new(log),
            number,
            store,
            loaded,
            quarantined: None,
            loss: None,
            known_ms: 0,
            damage: Vec::new(),
        }
    }
}

/// Opens the log, and where its index lacks or misreads something, once more with an index built anew.
fn open_or_repair(
    dir: &Path,
    number: u64,
    manifest: Option<&Manifest>,
    cache_bytes: u64,
    index: Index,
) -> Result<Opened, LogError> {
    let can_repair = index == Index::Believed && journal::is_in(&log_path(dir, number))?;
    match open_believed(dir, number, manifest, cache_bytes, index, can_repair) {
        Err(LogError::Corrupt(why)) if can_repair => {
            tracing::warn!(why, "draft store index cannot be read");
            open_believed(dir, number, manifest, cache_bytes, Index::Rebuilt, false)
        }
        other => other,
    }
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

/// Opens the store in `dir` for reading only: nothing is repaired, moved, cleared or written, so the directory may be
/// read-only. The caller holds the directory. `was_begun` says that somebody held it before: then a store that is not
/// there yet is an empty one, whose process ended while it was created.
///
/// # Errors
/// There is no store, a segment is of another version, or the store has lost its identity.
pub(crate) fn inspect(dir: &Path, cache_bytes: u64, was_begun: bool) -> Result<Opened, LogError> {
    segments::check_versions(dir)?;
    let manifest = Manifest::read(dir);
    let number = current(dir, manifest.as_ref(), cache_bytes)?;
    let path = log_path(dir, number);
    let has_journal = journal::is_in(&path)?;
    if !has_journal && path.join("db").exists() {
        return Err(LogError::Refused(format!(
            "{} was written by an earlier version, which kept no journal: start the store once, then look at it",
            path.display()
        )));
    }
    if !has_journal && !was_begun {
        return Err(LogError::Refused(format!("no store in {}", dir.display())));
    }
    let log = MemoryLog::default();
    let mut damage = Vec::new();
    if has_journal {
        let found = journal::scan(&path, 0, &mut |scanned| {
            log.write(&without_doubtful(scanned))
        })?;
        damage.extend(found.damage.iter().map(|range| {
            format!(
                "bytes {} to {} of {}",
                range.start,
                range.end,
                journal::path_in(&path).display()
            )
        }));
    }
    let lost = || LogError::Corrupt(format!("{} has lost its identity", path.display()));
    let store = match log.get(&store_key())? {
        Some(value) => codec::open::<StoreRecord>(&store_key(), &value).map_err(|_| lost())?,
        None if manifest.is_none() && log.is_empty() => StoreRecord {
            generation: 0,
            sequence_reserved: 0,
        },
        None => return Err(lost()),
    };
    let found = find(dir, &log, false)?;
    let loaded = load(&log, store, found, 0)?;
    if damage.is_empty() && manifest.is_some_and(|manifest| manifest.disagrees(store, &loaded)) {
        return Err(LogError::Corrupt(format!(
            "{} lacks what manifest.json says it held",
            path.display()
        )));
    }
    Ok(Opened {
        damage,
        ..Opened::new(log, number, store, loaded)
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
            if is_complete(&log_path(dir, *number), cache_bytes)? {
                return Ok(*number);
            }
        }
    }
    Ok(numbers.first().copied().unwrap_or(0))
}

/// Whether a log has its identity, which it gets last.
fn is_complete(path: &Path, cache_bytes: u64) -> Result<bool, LogError> {
    if journal::is_in(path)? {
        let mut is_named = false;
        journal::scan(path, 0, &mut |scanned| {
            is_named |= scanned.batch.writes().any(|(key, _)| *key == store_key());
            Ok(())
        })?;
        return Ok(is_named);
    }
    match SledLog::open(path, cache_bytes).and_then(|log| log.get(&store_key())) {
        Ok(identity) => Ok(identity.is_some()),
        Err(LogError::Corrupt(_)) => Ok(false),
        Err(refused) => Err(refused),
    }
}

/// Opens the log as it is. `is_strict`: a single record that cannot be read is an error.
fn open_believed(
    dir: &Path,
    number: u64,
    manifest: Option<&Manifest>,
    cache_bytes: u64,
    index: Index,
    is_strict: bool,
) -> Result<Opened, LogError> {
    let log = JournaledLog::open(&log_path(dir, number), cache_bytes, index)?;
    let mut store = match log.get(&store_key())? {
        Some(value) => match codec::open::<StoreRecord>(&store_key(), &value) {
            Ok(store) => store,
            Err(damage) if is_strict => return Err(LogError::Corrupt(damage.to_string())),
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
    if is_strict && loaded.damaged_records > 0 {
        let records = loaded.damaged_records;
        return Err(LogError::Corrupt(format!("{records} records are damaged")));
    }
    if manifest.is_some_and(|manifest| manifest.disagrees(store, &loaded)) {
        if is_strict {
            return Err(LogError::Corrupt("less is there than there was".into()));
        }
        // What followers hold may be gone here; a new generation makes them start over.
        tracing::error!("draft store log went back in time");
        store = create(&log)?;
        let found = find(dir, &log, true)?;
        loaded = load(&log, store, found, random()? as u32)?;
    }
    Ok(Opened::new(log, number, store, loaded))
}

/// A new identity.
fn create(log: &JournaledLog) -> Result<StoreRecord, LogError> {
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
        let opened = open(dir, CACHE_BYTES, 1, Index::Believed).unwrap();
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
        let opened = open(dir.path(), CACHE_BYTES, 2, Index::Believed).unwrap();
        assert_eq!((opened.store, opened.number), (store, 0));
        assert_eq!(log_numbers(dir.path()).unwrap(), [0]);
        drop(opened);
        // One that was complete; the manifest is gone. A third has no identity yet.
        copied(0, 2);
        std::fs::create_dir(log_path(dir.path(), 3)).unwrap();
        std::fs::remove_file(dir.path().join("manifest.json")).unwrap();
        let opened = open(dir.path(), CACHE_BYTES, 2, Index::Believed).unwrap();
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
        // To look at it writes nothing.
        assert!(matches!(inspected(false), Err(LogError::Refused(_))));
        // The log was created, and no identity written.
        drop(JournaledLog::open(&log_path(dir.path(), 0), CACHE_BYTES, Index::Believed).unwrap());
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
        let opened = open(dir.path(), CACHE_BYTES, 2, Index::Believed).unwrap();
        assert_ne!(opened.store.generation, store.generation);
        assert_eq!(opened.quarantined, None);
        let again = opened.store;
        drop(opened);
        assert_eq!(
            open(dir.path(), CACHE_BYTES, 3, Index::Believed)
                .unwrap()
                .store,
            again
        );
    }
}
