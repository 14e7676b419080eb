//! Logs of earlier versions: sled had all records there, text included, and its files were beside the journal. The
//! first version had no journal.
//!
//! Their journal is the same. So where it is sound, their sled is deleted, and the log goes on with a catalogue. Only
//! where it is not, sled may have what it has lost.

use std::path::{Path, PathBuf};

use crate::log::journal::{self, ScanReport};
use crate::log::journaled::files::{STEP_BYTES, has_catalogs};
use crate::log::sled::SledCatalog;
use crate::log::{Batch, LogError};

/// A log that is to be copied.
pub(super) struct EarlierLog {
    path: PathBuf,
    /// sled with everything up to `from`. `None` for a log that does not exist.
    sled: Option<SledCatalog>,
    /// Where the journal goes on, if it does.
    from: Option<u64>,
}

/// Whether sled's files are in the directory of a log.
pub(crate) fn is_in(log: &Path) -> bool {
    log.join("db").exists()
}

/// Deletes sled's files of an earlier version.
pub(super) fn delete(log: &Path) -> Result<(), LogError> {
    match is_in(log) {
        true => SledCatalog::delete(log),
        false => Ok(()),
    }
}

/// The log in a directory without a journal, which may be empty.
///
/// # Errors
/// `Corrupt` if there was a journal.
pub(super) fn without_journal(log: &Path, cache_bytes: u64) -> Result<EarlierLog, LogError> {
    let sled = match is_in(log) {
        true => Some(SledCatalog::open(log, cache_bytes)?),
        false => None,
    };
    let position = sled.as_ref().map(SledCatalog::position).transpose()?;
    // A log that was being created has a catalogue before it has a journal.
    let had_catalog = !journal::is_begun(log)? && has_catalogs(log)?;
    if position.flatten().is_some() || had_catalog {
        let journal = journal::path_in(log);
        return Err(LogError::Corrupt(format!(
            "the journal {} is missing",
            journal.display()
        )));
    }
    Ok(EarlierLog {
        path: log.to_owned(),
        sled,
        from: None,
    })
}

/// A log whose journal has lost something, if its sled has all of it.
pub(super) fn with_lossy_journal(
    log: &Path,
    cache_bytes: u64,
    found: &ScanReport,
) -> Result<Option<EarlierLog>, LogError> {
    if !is_in(log) {
        return Ok(None);
    }
    let opened = SledCatalog::open(log, cache_bytes).and_then(|sled| {
        let position = sled.position()?;
        Ok((sled, position))
    });
    let (sled, position) = match opened {
        Ok((sled, Some(position))) if found.name.is_none_or(|name| name == position.journal) => {
            (sled, position)
        }
        Ok(_) | Err(LogError::Corrupt(_)) => return Ok(None),
        Err(refused) => return Err(refused),
    };
    let is_beyond = found.damage_end().is_none_or(|end| end <= position.end);
    let has_lost = !found.damage.is_empty() || position.end > found.end;
    if !(is_beyond && has_lost) {
        return Ok(None);
    }
    tracing::warn!(
        damaged_ranges = found.damage.len(),
        "draft store journal is damaged; rewriting it from its index, which is complete"
    );
    Ok(Some(EarlierLog {
        path: log.to_owned(),
        sled: Some(sled),
        from: (position.end < found.end).then_some(position.end),
    }))
}

impl EarlierLog {
    /// Passes all records on, a few at a time.
    pub(super) fn copy(
        self,
        put: &mut dyn FnMut(&Batch) -> Result<(), LogError>,
    ) -> Result<(), LogError> {
        let Some(sled) = self.sled else {
            return Ok(());
        };
        let mut next = Some(Vec::new());
        while let Some(from) = next.take() {
            let mut batch = Batch::default();
            let mut bytes = 0;
            sled.scan(&from, &[u8::MAX], &mut |key, value| {
                bytes += (key.len() + value.len()) as u64;
                batch.put(key.to_vec(), value.to_vec());
                if bytes >= STEP_BYTES {
                    next = Some([key, &[0]].concat());
                }
                next.is_none()
            })?;
            put(&batch)?;
        }
        if let Some(from) = self.from {
            journal::scan(&self.path, from, &mut |scanned| put(&scanned.batch))?;
        }
        Ok(())
    }
}
