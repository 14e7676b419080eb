//! Opening a data directory for reading only.

use std::path::Path;

use crate::catalog::load;
use crate::codec;
use crate::directory::manifest::Manifest;
use crate::directory::open::{OpenedDirectory, current};
use crate::directory::paths::log_path;
use crate::directory::quarantine::without_uncertain;
use crate::log::journaled::is_of_earlier_version;
use crate::log::memory::MemoryLog;
use crate::log::{LogError, RecordLog as _, journal};
use crate::record::{StoreRecord, store_key};
use crate::segments::{self, find};

/// Opens the store in `dir` for reading only. Nothing is repaired, moved, deleted or written, so the directory may be
/// read-only. The caller holds the lock, if there is one.
///
/// `was_begun` says that a process held the lock before. A store without a log then counts as empty: its process
/// ended while it created the log.
///
/// # Errors
/// There is no store, a segment has another version, or the store has lost its identity.
pub(crate) fn inspect(
    dir: &Path,
    cache_bytes: u64,
    was_begun: bool,
) -> Result<OpenedDirectory, LogError> {
    segments::check_versions(dir)?;
    let manifest = Manifest::read(dir);
    let number = current(dir, manifest.as_ref(), cache_bytes)?;
    let path = log_path(dir, number);
    let has_journal = journal::is_in(&path)?;
    if !has_journal && is_of_earlier_version(&path) {
        return Err(LogError::Refused(format!(
            "{} was written by an earlier version, which kept no journal: start the store on it once, then retry",
            path.display()
        )));
    }
    if !has_journal && !was_begun {
        return Err(LogError::Refused(format!(
            "there is no draft store in {}",
            dir.display()
        )));
    }
    let log = MemoryLog::default();
    let mut damage = Vec::new();
    if has_journal {
        let found = journal::scan(&path, 0, &mut |scanned| {
            log.apply(without_uncertain(scanned).writes());
            Ok(())
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
            "{} holds less than manifest.json says",
            path.display()
        )));
    }
    Ok(OpenedDirectory {
        damage,
        ..OpenedDirectory::new(log, number, store, loaded)
    })
}
