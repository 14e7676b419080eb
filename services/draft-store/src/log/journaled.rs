//! The log in use: a journal that is synced before anything is acknowledged, the newest part of it in memory, and a
//! catalogue of the rest in sled.
//!
//! Every batch goes to the journal first. Its records of unsealed documents, text included, and of what is to be sent
//! are then kept in memory, and all others go to the catalogue. A document that is sealed leaves the memory, and its
//! segment has its text. So no text is ever in sled.
//!
//! The journal has every record that is alive until a rewrite replaces it by a shorter one, which has them as well.
//! So the catalogue is never the only copy of anything. Where it is behind, it is brought up to the journal. Where it
//! does not open, belongs to another journal or misreads a record, it is deleted and built again.
//!
//! ```text
//! <log>/journal                  all live records, and later ones
//! <log>/catalog-<journal name>/  sled, with the position in the journal up to which it is complete
//! ```
//!
//! Syncing sled as well was rejected: it would take a second trip to the disk and protect nothing that the journal
//! does not have.
//!
//! `files.rs` has the two in the making, `rewrite.rs` replaces them, and `earlier_version.rs` reads the logs of
//! versions that had text in sled.

mod earlier_version;
mod files;
mod rewrite;
#[cfg(test)]
mod tests;

pub(crate) use earlier_version::is_in as is_of_earlier_version;
pub(crate) use files::{catalog_beside, delete_catalogs};

use std::path::{Path, PathBuf};
use std::sync::atomic::AtomicBool;

use parking_lot::{Mutex, RwLock};

use crate::log::journal::{self, Journal};
use crate::log::journaled::files::{FilesInMaking, for_catalog, for_memory};
use crate::log::memory::MemoryLog;
use crate::log::sled::SledCatalog;
use crate::log::{Batch, LogError, RecordLog, RewriteReport, RewriteStep, refused};
use crate::record::RecordKind;

/// See the module.
pub(crate) struct JournaledLog {
    path: PathBuf,
    cache_bytes: u64,
    /// Held for a whole commit, and for one step of a rewrite. Whoever needs the catalogue as well takes this first.
    journals: Mutex<Journals>,
    memory: MemoryLog,
    catalog: RwLock<SledCatalog>,
    /// Why the catalogue can be neither read nor written any more.
    fault: Mutex<Option<LogError>>,
}

struct Journals {
    current: Journal,
    /// Files that a rewrite makes, which get every commit as well.
    fresh: Option<FilesInMaking>,
}

impl JournaledLog {
    /// Opens or creates the log in a directory.
    ///
    /// # Errors
    /// `Refused` if the disk refuses. `Corrupt` if the journal has lost something. Nothing was changed then.
    pub(crate) fn open(path: &Path, cache_bytes: u64) -> Result<Self, LogError> {
        std::fs::create_dir_all(path).map_err(|error| refused("create", path, &error))?;
        if !journal::is_in(path)? {
            let copied = earlier_version::without_journal(path, cache_bytes)?;
            return Self::copied(path, cache_bytes, copied);
        }
        let memory = MemoryLog::default();
        let found = journal::scan(path, 0, &mut |scanned| {
            memory.apply(for_memory(&scanned.batch));
            Ok(())
        })?;
        if let Some(copied) = earlier_version::with_lossy_journal(path, cache_bytes, &found)? {
            return Self::copied(path, cache_bytes, copied);
        }
        let of_journal = |what: String| {
            let journal = journal::path_in(path);
            LogError::Corrupt(format!("the journal {} {what}", journal.display()))
        };
        if let Some(first) = found.damage.first() {
            let (places, start) = (found.damage.len(), first.start);
            return Err(of_journal(format!(
                "is damaged in {places} places, first at byte {start}"
            )));
        }
        // A journal is installed with its name in it, so one without it has lost something.
        let name = found.name.ok_or_else(|| of_journal("is empty".into()))?;
        let (catalog, from) = files::open_catalog(path, name, cache_bytes)?;
        if from > found.end {
            return Err(of_journal("ends before its catalogue".into()));
        }
        files::bring_up(path, &catalog, from..found.end, name)?;
        // Since the journal is sound, nothing else is needed.
        earlier_version::delete(path)?;
        files::delete_unfinished(path, Some(name));
        let journal = Journal::open(path, name, found.end)?;
        Ok(Self::of(path, cache_bytes, journal, memory, catalog))
    }

    /// Creates a log with the records that `fill` puts there. It exists once all of them are durable.
    pub(crate) fn create<T>(
        path: &Path,
        cache_bytes: u64,
        fill: impl FnOnce(&mut dyn FnMut(&Batch) -> Result<(), LogError>) -> Result<T, LogError>,
    ) -> Result<(Self, T), LogError> {
        std::fs::create_dir_all(path).map_err(|error| refused("create", path, &error))?;
        let memory = MemoryLog::default();
        let made = FilesInMaking::create(path, cache_bytes).and_then(|mut fresh| {
            let filled = fill(&mut |batch| {
                memory.apply(for_memory(batch));
                fresh.append(batch)
            })?;
            Ok((fresh.install()?, filled))
        });
        match made {
            Ok(((journal, catalog), filled)) => {
                let log = Self::of(path, cache_bytes, journal, memory, catalog);
                Ok((log, filled))
            }
            Err(error) => {
                // Half-written files take space that the next attempt needs.
                files::delete_unfinished(path, None);
                Err(error)
            }
        }
    }

    /// Creates a log with the records of an earlier version's, whose files go afterwards.
    fn copied(
        path: &Path,
        cache_bytes: u64,
        copied: earlier_version::EarlierLog,
    ) -> Result<Self, LogError> {
        let (log, ()) = Self::create(path, cache_bytes, |put| copied.copy(put))?;
        earlier_version::delete(path)?;
        Ok(log)
    }

    fn of(
        path: &Path,
        cache_bytes: u64,
        journal: Journal,
        memory: MemoryLog,
        catalog: SledCatalog,
    ) -> Self {
        JournaledLog {
            path: path.to_owned(),
            cache_bytes,
            journals: Mutex::new(Journals {
                current: journal,
                fresh: None,
            }),
            memory,
            catalog: RwLock::new(catalog),
            fault: Mutex::default(),
        }
    }

    /// Whether there is no record at all.
    pub(crate) fn is_empty(&self) -> Result<bool, LogError> {
        let mut is_empty = true;
        self.scan(&[], &[u8::MAX], &mut |_, _| {
            is_empty = false;
            false
        })?;
        Ok(is_empty)
    }

    /// Notes that the catalogue failed. One that is damaged is deleted, so that the next opening builds it again.
    fn note<T>(&self, outcome: Result<T, LogError>) -> Result<T, LogError> {
        if let Err(error) = &outcome {
            tracing::error!(%error, "draft store catalogue failed; the journal has everything");
            self.fault.lock().get_or_insert_with(|| error.clone());
            if matches!(error, LogError::Corrupt(_))
                && let Err(error) = delete_catalogs(&self.path, None)
            {
                tracing::warn!(%error, "damaged draft store catalogue not deleted");
            }
        }
        outcome
    }

    /// Reads the catalogue.
    fn read<T>(
        &self,
        read: impl FnOnce(&SledCatalog) -> Result<T, LogError>,
    ) -> Result<T, LogError> {
        let outcome = read(&self.catalog.read());
        self.note(outcome)
    }
}

impl Drop for JournaledLog {
    fn drop(&mut self) {
        if self.fault().is_some() {
            return;
        }
        // The journal has everything, so a failure costs some time at the next start.
        let position = self.journals.get_mut().current.synced_position();
        if let Err(error) = self.catalog.get_mut().write(std::iter::empty(), position) {
            tracing::warn!(%error, "draft store catalogue not completed");
        }
    }
}

/// The parts of a range of keys, in order, and whether their records are in memory.
fn parts_of(from: &[u8], to: &[u8]) -> Vec<(bool, Vec<u8>, Vec<u8>)> {
    let (mut parts, mut at) = (Vec::new(), from.to_vec());
    for kind in RecordKind::SHORT_LIVED {
        let (first, above) = kind.range();
        parts.push((false, at.clone(), first.clone().min(to.to_vec())));
        parts.push((true, at.clone().max(first), above.clone().min(to.to_vec())));
        at = at.max(above);
    }
    parts.push((false, at, to.to_vec()));
    parts.retain(|(_, from, to)| from < to);
    parts
}

impl RecordLog for JournaledLog {
    fn commit(&self, batch: &Batch) -> Result<(), LogError> {
        if batch.is_empty() {
            return Ok(());
        }
        let mut journals = self.journals.lock();
        if let Some(fault) = self.fault() {
            return Err(fault);
        }
        let position = journals.current.append(batch)?;
        journals.current.sync()?;
        // The batch is durable, so no failure from here on is one of its caller. The next commit learns of it.
        self.memory.apply(for_memory(batch));
        if for_catalog(batch).next().is_some() {
            let _ = self.read(|catalog| catalog.write(for_catalog(batch), position));
        }
        if let Some(fresh) = &mut journals.fresh {
            fresh.follow(batch);
        }
        Ok(())
    }

    fn get(&self, key: &[u8]) -> Result<Option<Vec<u8>>, LogError> {
        match RecordKind::is_short_lived(key) {
            true => self.memory.get(key),
            false => self.read(|catalog| catalog.get(key)),
        }
    }

    fn scan(
        &self,
        from: &[u8],
        to: &[u8],
        visit: &mut dyn FnMut(&[u8], &[u8]) -> bool,
    ) -> Result<(), LogError> {
        if RecordKind::is_short_lived(from) && from.first() == to.first() {
            return self.memory.scan(from, to, visit);
        }
        let mut goes_on = true;
        for (is_in_memory, from, to) in parts_of(from, to) {
            let mut visit = |key: &[u8], value: &[u8]| {
                goes_on = visit(key, value);
                goes_on
            };
            match is_in_memory {
                true => self.memory.scan(&from, &to, &mut visit)?,
                false => self.read(|catalog| catalog.scan(&from, &to, &mut visit))?,
            }
            if !goes_on {
                break;
            }
        }
        Ok(())
    }

    fn disk_bytes(&self) -> u64 {
        let journal_bytes = self.journals.lock().current.position().end;
        self.catalog.read().disk_bytes() + journal_bytes
    }

    fn blob_files(&self) -> u64 {
        self.catalog.read().blob_files()
    }

    fn rewrite(
        &self,
        stop: &AtomicBool,
        at: &dyn Fn(RewriteStep) -> Result<(), LogError>,
    ) -> Result<RewriteReport, LogError> {
        self.replace_files(stop, at)
    }

    fn fault(&self) -> Option<LogError> {
        self.fault.lock().clone()
    }
}
