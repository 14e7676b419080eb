//! The log in use: a journal that is synced before anything is acknowledged, and sled as its index.
//!
//! Every batch goes to the journal first. It then goes to sled in one atomic batch, together with the position in the
//! journal up to which sled is complete. Nobody waits for sled to sync. After a crash sled may be behind, and the
//! journal is replayed from that position. If sled does not open, has lost something or cannot read a page, its files
//! are deleted and rebuilt from the journal.
//!
//! Syncing sled as well was rejected: it would take a second trip to the disk and protect nothing that the journal
//! does not have.

#[cfg(test)]
mod tests;

use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};

use crate::log::journal::{self, Journal, JournalPosition, ScanReport};
use crate::log::sled::SledLog;
use crate::log::{Batch, LogError, RecordLog, random};

/// Bytes of records that are applied or copied at once.
const STEP_BYTES: u64 = 1 << 20;

/// How sled's files are treated when a log is opened.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum IndexMode {
    /// Use them as the index, as far as they say they are complete.
    Trust,
    /// Delete them, and rebuild them from the journal.
    Rebuild,
}

/// A journal and its index; see the module.
pub(crate) struct JournaledLog {
    index: SledLog,
    journal: Mutex<Journal>,
    /// The index failed to read something, so it is to be reopened and repaired.
    is_suspect: AtomicBool,
}

impl JournaledLog {
    /// Opens or creates the log in a directory.
    ///
    /// # Errors
    /// `Refused` if the disk refuses. `Corrupt` if something is lost: the journal is damaged, and the index does not
    /// have what was there. Nothing was changed then.
    pub(crate) fn open(path: &Path, cache_bytes: u64, index: IndexMode) -> Result<Self, LogError> {
        if !journal::is_in(path)? {
            // Without a journal sled is all there is: logs of earlier versions have none.
            let index = SledLog::open(path, cache_bytes)?;
            if index.position()?.is_some() {
                return Err(LogError::Corrupt(format!(
                    "the journal {} is missing",
                    journal::path_in(path).display()
                )));
            }
            return Self::with_new_journal(path, index);
        }
        let found = journal::scan(path, 0, &mut |_| Ok(()))?;
        let trusted = match index {
            IndexMode::Trust => open_index(path, cache_bytes, &found)?,
            IndexMode::Rebuild => None,
        };
        let (index, from) = match trusted {
            Some((index, end)) if found.damage_end().is_none_or(|damage| damage <= end) => {
                if !found.damage.is_empty() || end > found.end {
                    tracing::warn!(
                        damaged_ranges = found.damage.len(),
                        "draft store journal is damaged; rewriting it from its index, which is complete"
                    );
                    if end < found.end {
                        replay(path, &index, end)?;
                    }
                    return Self::with_new_journal(path, index);
                }
                (index, end)
            }
            _ if !found.damage.is_empty() => {
                let first = &found.damage[0];
                return Err(LogError::Corrupt(format!(
                    "the journal {} is damaged in {} places, first at byte {}",
                    journal::path_in(path).display(),
                    found.damage.len(),
                    first.start
                )));
            }
            None if found.name.is_none() => {
                // A journal is installed with its name in it, so this one has lost something.
                return Err(LogError::Corrupt(format!(
                    "the journal {} is empty",
                    journal::path_in(path).display()
                )));
            }
            trusted => {
                tracing::warn!("draft store index is being rebuilt from the journal");
                drop(trusted);
                SledLog::delete(path)?;
                (SledLog::open(path, cache_bytes)?, 0)
            }
        };
        let Some(name) = found.name else {
            // The journal was emptied, and the index has everything.
            return Self::with_new_journal(path, index);
        };
        if from < found.end {
            replay(path, &index, from)?;
        }
        let journal = Journal::open(path, name, found.end)?;
        Ok(Self::of(index, journal))
    }

    fn of(index: SledLog, journal: Journal) -> Self {
        JournaledLog {
            index,
            journal: Mutex::new(journal),
            is_suspect: AtomicBool::new(false),
        }
    }

    /// Copies an index into a new journal, which then replaces the existing one.
    fn with_new_journal(path: &Path, index: SledLog) -> Result<Self, LogError> {
        match Self::new_journal(path, &index) {
            Ok(journal) => Ok(Self::of(index, journal)),
            Err(error) => {
                // A half-written journal takes space that the next attempt needs.
                journal::remove_unfinished(path);
                Err(error)
            }
        }
    }

    fn new_journal(path: &Path, index: &SledLog) -> Result<Journal, LogError> {
        let mut journal = Journal::create(path, random()?)?;
        let mut next = Some(Vec::new());
        while let Some(from) = next.take() {
            let mut batch = Batch::default();
            let mut bytes = 0;
            index.scan(&from, &[u8::MAX], &mut |key, value| {
                bytes += (key.len() + value.len()) as u64;
                batch.put(key.to_vec(), value.to_vec());
                if bytes >= STEP_BYTES {
                    next = Some([key, &[0]].concat());
                }
                next.is_none()
            })?;
            if !batch.is_empty() {
                journal.append(&batch)?;
            }
        }
        journal.install()?;
        index.write(&Batch::default(), journal.position())?;
        Ok(journal)
    }

    fn journal(&self) -> MutexGuard<'_, Journal> {
        // A panic during an append leaves a batch that was not acknowledged.
        self.journal.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn note_damage<T>(&self, outcome: Result<T, LogError>) -> Result<T, LogError> {
        if let Err(LogError::Corrupt(_)) = &outcome {
            self.is_suspect.store(true, Ordering::Relaxed);
        }
        outcome
    }

    /// Whether there is no record at all.
    pub(crate) fn is_empty(&self) -> Result<bool, LogError> {
        self.note_damage(self.index.is_empty())
    }
}

/// The index, and the position in the journal up to which it is complete. `None` if it does not belong to this
/// journal.
fn open_index(
    path: &Path,
    cache_bytes: u64,
    found: &ScanReport,
) -> Result<Option<(SledLog, u64)>, LogError> {
    let opened = SledLog::open(path, cache_bytes).and_then(|index| {
        let position = index.position()?;
        Ok((index, position))
    });
    match opened {
        Ok((index, Some(JournalPosition { journal, end })))
            if found.name.is_none_or(|name| name == journal) =>
        {
            Ok(Some((index, end)))
        }
        Ok(_) | Err(LogError::Corrupt(_)) => Ok(None),
        Err(refused) => Err(refused),
    }
}

/// Applies the journal to the index from the beginning of a batch on.
fn replay(path: &Path, index: &SledLog, from: u64) -> Result<(), LogError> {
    let mut gathered = Batch::default();
    let (mut bytes, mut end) = (0, from);
    let mut name = None;
    // A scan that starts in the middle does not meet the record with the name.
    if from > 0 {
        name = index.position()?.map(|position| position.journal);
    }
    let apply = |batch: &mut Batch, name: Option<u64>, end: u64| {
        let batch = std::mem::take(batch);
        index.write(
            &batch,
            JournalPosition {
                journal: name.unwrap_or_default(),
                end,
            },
        )
    };
    let found = journal::scan(path, from, &mut |scanned| {
        bytes += scanned.batch.bytes();
        end = scanned.end;
        gathered.merge(scanned.batch);
        if bytes < STEP_BYTES {
            return Ok(());
        }
        bytes = 0;
        // Without a name the position is not trusted after an interruption, and the whole journal is applied again.
        apply(&mut gathered, name, end)
    })?;
    apply(&mut gathered, name.or(found.name), end)
}

impl RecordLog for JournaledLog {
    fn write(&self, batch: &Batch) -> Result<(), LogError> {
        let mut journal = self.journal();
        let position = journal.append(batch)?;
        self.note_damage(self.index.write(batch, position))
    }

    fn sync(&self) -> Result<(), LogError> {
        // A rewrite syncs its copy while commits go on in it. No commit waits for that here.
        let (file, end) = self.journal().begin_sync()?;
        let outcome = file.sync_data();
        self.journal().end_sync(end, outcome)
    }

    fn commit(&self, batch: &Batch) -> Result<(), LogError> {
        if batch.is_empty() {
            return Ok(());
        }
        let mut journal = self.journal();
        let position = journal.append(batch)?;
        // The index must not be ahead of what is durable.
        journal.sync()?;
        self.note_damage(self.index.write(batch, position))
    }

    fn get(&self, key: &[u8]) -> Result<Option<Vec<u8>>, LogError> {
        self.note_damage(self.index.get(key))
    }

    fn scan(
        &self,
        from: &[u8],
        to: &[u8],
        visit: &mut dyn FnMut(&[u8], &[u8]) -> bool,
    ) -> Result<(), LogError> {
        self.note_damage(self.index.scan(from, to, visit))
    }

    fn disk_bytes(&self) -> u64 {
        self.index.disk_bytes() + self.journal().position().end
    }

    fn blob_files(&self) -> u64 {
        self.index.blob_files()
    }

    fn is_suspect(&self) -> bool {
        self.is_suspect.load(Ordering::Relaxed)
    }

    fn can_be_rebuilt(&self) -> bool {
        true
    }
}
