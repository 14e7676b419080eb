//! The files of a log: a journal, and the catalogue that belongs to it.

use std::ops::Range;
use std::path::{Path, PathBuf};

use crate::log::journal::{self, Journal, JournalPosition};
use crate::log::sled::SledCatalog;
use crate::log::{Batch, LogError, random, refused};
use crate::record::RecordKind;

/// Bytes of records that are copied at once where nobody waits.
pub(super) const STEP_BYTES: u64 = 1 << 20;

/// The writes of a batch to the catalogue.
pub(super) fn for_catalog(batch: &Batch) -> impl Iterator<Item = (&Vec<u8>, Option<&Vec<u8>>)> {
    let writes = batch.writes();
    writes.filter(|(key, _)| !RecordKind::is_short_lived(key))
}

/// The writes of a batch to memory.
pub(super) fn for_memory(batch: &Batch) -> impl Iterator<Item = (&Vec<u8>, Option<&Vec<u8>>)> {
    let writes = batch.writes();
    writes.filter(|(key, _)| RecordKind::is_short_lived(key))
}

/// Prefix of the names of catalogues. The name of a journal follows.
const CATALOG: &str = "catalog-";

/// The directory of the catalogue that belongs to a journal.
pub(super) fn catalog_path(log: &Path, journal: u64) -> PathBuf {
    log.join(format!("{CATALOG}{journal:016x}"))
}

/// All catalogues of a log, with the names of their journals.
fn catalogs(log: &Path) -> Result<Vec<(u64, PathBuf)>, LogError> {
    let failed = |error: std::io::Error| refused("list", log, &error);
    let mut found = Vec::new();
    for entry in std::fs::read_dir(log).map_err(failed)? {
        let entry = entry.map_err(failed)?;
        let name = entry.file_name();
        let name = name.to_str().and_then(|name| name.strip_prefix(CATALOG));
        if let Some(name) = name.and_then(|name| u64::from_str_radix(name, 16).ok()) {
            found.push((name, entry.path()));
        }
    }
    Ok(found)
}

/// Whether a log has a catalogue of any journal.
pub(super) fn has_catalogs(log: &Path) -> Result<bool, LogError> {
    Ok(!catalogs(log)?.is_empty())
}

/// Deletes the catalogues of all journals but one. They are leftovers, or no longer trusted.
pub(crate) fn delete_catalogs(log: &Path, kept: Option<u64>) -> Result<(), LogError> {
    for (journal, path) in catalogs(log)? {
        if Some(journal) != kept {
            std::fs::remove_dir_all(&path).map_err(|error| refused("delete", &path, &error))?;
        }
    }
    Ok(())
}

/// The catalogue that belongs to a journal. If nobody can tell the journal's name, it is the only one that there is.
pub(crate) fn catalog_beside(
    log: &Path,
    journal: Option<u64>,
) -> Result<Option<PathBuf>, LogError> {
    let found = catalogs(log)?;
    let mut of_journal = found
        .iter()
        .filter(|(name, _)| journal.map_or(found.len() == 1, |journal| *name == journal));
    Ok(of_journal.next().map(|(_, path)| path.clone()))
}

/// Opens the catalogue of a journal, and tells how far it is complete. One that cannot be read is begun anew.
pub(super) fn open_catalog(
    log: &Path,
    journal: u64,
    cache_bytes: u64,
) -> Result<(SledCatalog, u64), LogError> {
    let path = catalog_path(log, journal);
    let is_new = !path.exists();
    let opened = SledCatalog::open(&path, cache_bytes).and_then(|catalog| {
        let position = catalog.position()?;
        Ok((catalog, position))
    });
    match opened {
        Ok((catalog, Some(position))) if position.journal == journal => {
            return Ok((catalog, position.end));
        }
        Ok((catalog, None)) if is_new => return Ok((catalog, 0)),
        // It is closed before its files go: sled may write until then.
        Ok(foreign) => drop(foreign),
        Err(LogError::Corrupt(_)) => {}
        Err(refused) => return Err(refused),
    }
    tracing::warn!("draft store catalogue cannot be read; it is built again from the journal");
    std::fs::remove_dir_all(&path).map_err(|error| refused("delete", &path, &error))?;
    Ok((SledCatalog::open(&path, cache_bytes)?, 0))
}

/// Writes a range of the journal to its catalogue.
pub(super) fn bring_up(
    log: &Path,
    catalog: &SledCatalog,
    range: Range<u64>,
    journal: u64,
) -> Result<(), LogError> {
    if range.is_empty() {
        return Ok(());
    }
    let write = |batch: &Batch, end| {
        let position = JournalPosition { journal, end };
        catalog.write(for_catalog(batch), position)
    };
    let mut gathered = Batch::default();
    journal::scan(log, range.start, &mut |scanned| {
        gathered.merge(scanned.batch);
        if gathered.bytes() < STEP_BYTES {
            return Ok(());
        }
        write(&std::mem::take(&mut gathered), scanned.end)
    })?;
    write(&gathered, range.end)
}

/// A journal and its catalogue, which take the place of the log's files once they are complete.
pub(super) struct FilesInMaking {
    pub(super) journal: Journal,
    catalog: SledCatalog,
    /// Bytes of all keys and values.
    pub(super) written_bytes: u64,
    /// They lack a commit.
    has_failed: bool,
}

impl FilesInMaking {
    pub(super) fn create(log: &Path, cache_bytes: u64) -> Result<Self, LogError> {
        let name = random()?;
        Ok(FilesInMaking {
            journal: Journal::create(log, name)?,
            catalog: SledCatalog::open(&catalog_path(log, name), cache_bytes)?,
            written_bytes: 0,
            has_failed: false,
        })
    }

    /// Adds records. They need not be durable yet.
    pub(super) fn append(&mut self, batch: &Batch) -> Result<(), LogError> {
        if batch.is_empty() {
            return Ok(());
        }
        let position = self.journal.append(batch)?;
        self.written_bytes += batch.bytes();
        self.catalog.write(for_catalog(batch), position)
    }

    /// Adds a commit. A failure costs the files, not the commit.
    pub(super) fn follow(&mut self, commit: &Batch) {
        if let Err(error) = self.append(commit) {
            tracing::warn!(%error, "draft store log rewrite aborted");
            self.has_failed = true;
        }
    }

    /// Whether they have everything that was added.
    pub(super) fn is_whole(&self) -> bool {
        !self.has_failed
    }

    /// Makes everything durable, and puts it into use: the next opening finds it.
    pub(super) fn install(mut self) -> Result<(Journal, SledCatalog), LogError> {
        self.journal.install()?;
        Ok((self.journal, self.catalog))
    }
}

/// Deletes what a failed attempt has left beside the files of a journal.
pub(super) fn delete_unfinished(log: &Path, kept: Option<u64>) {
    match delete_catalogs(log, kept) {
        // It goes last, since it tells that the catalogue beside it is unfinished.
        Ok(()) => journal::remove_unfinished(log),
        Err(error) => tracing::warn!(%error, "unfinished draft store catalogue not deleted"),
    }
}
