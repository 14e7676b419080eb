//! The log in use: a journal that is synced before anything is acknowledged, and sled as its index.
//!
//! Every batch goes to the journal first. It is then kept in memory (`recent.rs`) until there are many writes, or the
//! log is closed. A thread of its own writes them to sled, and at last the position in the journal up to which sled
//! is complete. After a crash sled is behind, and the journal is read into memory from that position. If sled does
//! not open, has lost something or cannot read a page, its files are deleted and rebuilt from the journal.
//!
//! The records of a document go to sled in one atomic batch. So sled has each document as it was after some commit,
//! even if a crash interrupts the thread, and what is salvaged from sled alone is never a mixture.
//!
//! Syncing sled as well was rejected: it would take a second trip to the disk and protect nothing that the journal
//! does not have.

#[cfg(test)]
mod tests;

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::Path;
use std::sync::Arc;
#[cfg(test)]
use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, Ordering};

use parking_lot::{Condvar, Mutex, RwLock};

use crate::log::journal::{self, Journal, JournalPosition, ScanReport};
use crate::log::recent::{Generation, RecentWrites};
use crate::log::sled::SledLog;
use crate::log::{Batch, LogError, RecordLog, random};

/// Bytes of records that are copied at once.
const STEP_BYTES: u64 = 1 << 20;

/// Writes that sled applies at once, unless a document has more. Readers of sled wait meanwhile.
const WRITES_AT_ONCE: usize = 256;

/// The first parts of a key, after the kind: the namespace and the document. Records that share them belong to one
/// document.
const DOCUMENT_PART: std::ops::Range<usize> = 1..33;

/// The part of the cache that sled gets; what is new is not read from it. Each of two generations of recent writes
/// may take as much as the whole cache.
const SLED_SHARE: u64 = 2;

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
    inner: Arc<Inner>,
    indexing: Arc<Indexing>,
}

/// Whether a thread writes the frozen generation to the index.
#[derive(Default)]
struct Indexing {
    runs: Mutex<bool>,
    ended: Condvar,
}

struct Inner {
    index: SledLog,
    /// A panic during an append leaves a batch in it that was not acknowledged.
    journal: Mutex<Journal>,
    recent: RwLock<RecentWrites>,
    /// Memory of a generation of recent writes.
    generation_bytes: usize,
    /// Why the index takes nothing any more until it is opened again.
    fault: Mutex<Option<LogError>>,
    /// A place that the index misread. It still takes writes, so commits go on until it is repaired.
    damage: Mutex<Option<LogError>>,
    /// The log is about to be deleted.
    is_retired: AtomicBool,
    /// A test has the index do this before it is written.
    #[cfg(test)]
    before_indexing: OnceLock<Box<dyn Fn() -> Result<(), LogError> + Send + Sync>>,
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
            let index = SledLog::open(path, cache_bytes / SLED_SHARE)?;
            if index.position()?.is_some() {
                return Err(LogError::Corrupt(format!(
                    "the journal {} is missing",
                    journal::path_in(path).display()
                )));
            }
            return Self::with_new_journal(path, index, cache_bytes);
        }
        let found = journal::scan(path, 0, &mut |_| Ok(()))?;
        let trusted = match index {
            IndexMode::Trust => open_index(path, cache_bytes, &found)?,
            IndexMode::Rebuild => None,
        };
        let (index, from) = match trusted {
            Some((index, position))
                if found
                    .damage_end()
                    .is_none_or(|damage| damage <= position.end) =>
            {
                if !found.damage.is_empty() || position.end > found.end {
                    tracing::warn!(
                        damaged_ranges = found.damage.len(),
                        "draft store journal is damaged; rewriting it from its index, which is complete"
                    );
                    if position.end < found.end {
                        let mut recent = replay(path, &index, position, cache_bytes)?;
                        write_to(&index, &recent.freeze())?;
                    }
                    return Self::with_new_journal(path, index, cache_bytes);
                }
                (index, position.end)
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
                (SledLog::open(path, cache_bytes / SLED_SHARE)?, 0)
            }
        };
        let Some(name) = found.name else {
            // The journal was emptied, and the index has everything.
            return Self::with_new_journal(path, index, cache_bytes);
        };
        let from = JournalPosition {
            journal: name,
            end: from,
        };
        if from.end == 0 {
            // Without a position the index would be deleted once more after a crash.
            index.write(&Batch::default(), from)?;
        }
        let recent = replay(path, &index, from, cache_bytes)?;
        let journal = Journal::open(path, name, found.end)?;
        Ok(Self::of(index, journal, recent, cache_bytes))
    }

    fn of(index: SledLog, journal: Journal, recent: RecentWrites, cache_bytes: u64) -> Self {
        JournaledLog {
            inner: Arc::new(Inner {
                index,
                journal: Mutex::new(journal),
                recent: RwLock::new(recent),
                generation_bytes: generation_bytes(cache_bytes),
                fault: Mutex::default(),
                damage: Mutex::default(),
                is_retired: AtomicBool::new(false),
                #[cfg(test)]
                before_indexing: OnceLock::new(),
            }),
            indexing: Arc::default(),
        }
    }

    /// Copies an index into a new journal, which then replaces the existing one.
    fn with_new_journal(path: &Path, index: SledLog, cache_bytes: u64) -> Result<Self, LogError> {
        match Self::new_journal(path, &index) {
            Ok(journal) => {
                let recent = RecentWrites::new(journal.position());
                Ok(Self::of(index, journal, recent, cache_bytes))
            }
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

    /// Whether there is no record at all.
    pub(crate) fn is_empty(&self) -> Result<bool, LogError> {
        let mut is_empty = true;
        self.scan(&[], &[u8::MAX], &mut |_, _| {
            is_empty = false;
            false
        })?;
        Ok(is_empty)
    }

    /// Keeps a batch that the journal has. If there is much in memory, a thread begins to write it to the index. The
    /// batch is durable already, so neither a slow nor a failed index concerns its caller, who holds a lock.
    fn keep(&self, batch: &Batch, position: JournalPosition) {
        self.inner.recent.write().add(batch, position);
        if self.is_full() {
            self.begin_indexing();
        }
    }

    fn is_full(&self) -> bool {
        self.inner.recent.read().active_bytes() >= self.inner.generation_bytes
    }

    /// Begins to write a generation to the index, unless that is going on or has failed. Damage that readers met does
    /// not stop it: a rebuild may be minutes away, and the memory would be full before.
    fn begin_indexing(&self) {
        let mut runs = self.indexing.runs.lock();
        if *runs || self.inner.fault.lock().is_some() {
            return;
        }
        let frozen = self.inner.recent.write().freeze();
        let (inner, indexing) = (self.inner.clone(), self.indexing.clone());
        let thread = std::thread::Builder::new().name("draft-store-index".to_owned());
        let spawned = thread.spawn(move || {
            let write = AssertUnwindSafe(|| inner.index_generation(&frozen));
            if catch_unwind(write).is_err() {
                let why = "the thread of the log's index panicked";
                inner.note_fault(LogError::Corrupt(why.into()));
            }
            // Whoever waits for the end may open the index once more.
            drop(inner);
            *indexing.runs.lock() = false;
            indexing.ended.notify_all();
        });
        match spawned {
            Ok(_) => *runs = true,
            Err(error) => self.inner.note_fault(LogError::Refused(format!(
                "the thread of the log's index does not start: {error}"
            ))),
        }
    }

    /// Waits until the frozen generation is written, or has failed to be.
    fn end_indexing(&self) {
        let mut runs = self.indexing.runs.lock();
        while *runs {
            self.indexing.ended.wait(&mut runs);
        }
    }

    /// Writes everything to the index that it does not have.
    fn index_all(&self) -> Result<(), LogError> {
        // A generation that could not be written, and then the active one.
        for _ in 0..2 {
            if self.inner.recent.read().bytes() > 0 {
                let frozen = self.inner.recent.write().freeze();
                self.inner.index_generation(&frozen)?;
            }
        }
        Ok(())
    }
}

impl Drop for JournaledLog {
    fn drop(&mut self) {
        self.end_indexing();
        let is_retired = self.inner.is_retired.load(Ordering::Relaxed);
        if is_retired || self.inner.fault().is_some() {
            return;
        }
        // The journal has everything, so a failure costs the second copy and some time at the next start.
        if let Err(error) = self.index_all() {
            tracing::warn!(%error, "draft store index not completed");
        }
    }
}

impl Inner {
    /// Notes damage that a reader found.
    fn note_damage<T>(&self, outcome: Result<T, LogError>) -> Result<T, LogError> {
        if let Err(error @ LogError::Corrupt(_)) = &outcome {
            *self.damage.lock() = Some(error.clone());
        }
        outcome
    }

    /// Why the log should be opened again. Damage is repaired then, so no other reason hides it.
    fn fault(&self) -> Option<LogError> {
        let damage = self.damage.lock().clone();
        damage.or_else(|| self.fault.lock().clone())
    }

    /// Notes why the index cannot be written. No other reason hides damage, which is repaired.
    fn note_fault(&self, fault: LogError) {
        let mut noted = self.fault.lock();
        if !matches!(*noted, Some(LogError::Corrupt(_))) {
            *noted = Some(fault);
        }
    }

    fn sync(&self) -> Result<(), LogError> {
        // A rewrite syncs its copy while commits go on in it. No commit waits for that here.
        let (file, end) = self.journal.lock().begin_sync()?;
        let outcome = file.sync_data();
        self.journal.lock().end_sync(end, outcome)
    }

    /// Writes the frozen generation to the index, and drops it. A failure is noted: sled takes nothing any more until
    /// it is opened again.
    fn index_generation(&self, frozen: &Generation) -> Result<(), LogError> {
        let written = self.write_generation(frozen);
        match &written {
            Ok(()) => self.recent.write().drop_frozen(),
            Err(error) => self.note_fault(error.clone()),
        }
        written
    }

    fn write_generation(&self, frozen: &Generation) -> Result<(), LogError> {
        #[cfg(test)]
        if let Some(before) = self.before_indexing.get() {
            before()?;
        }
        // The index must not be ahead of what is durable.
        self.sync()?;
        write_to(&self.index, frozen)
    }
}

/// Memory of a generation of recent writes.
fn generation_bytes(cache_bytes: u64) -> usize {
    usize::try_from(cache_bytes).unwrap_or(usize::MAX)
}

/// Writes a generation to the index, a few documents at a time.
fn write_to(index: &SledLog, generation: &Generation) -> Result<(), LogError> {
    let document = |key: &[u8]| -> Vec<u8> {
        let part = DOCUMENT_PART.start.min(key.len())..DOCUMENT_PART.end.min(key.len());
        key[part].to_vec()
    };
    let mut writes: Vec<_> = generation.writes.iter().collect();
    writes.sort_by_cached_key(|(key, _)| document(key));
    let same = |a: &(&Vec<u8>, _), b: &(&Vec<u8>, _)| document(a.0) == document(b.0);
    let mut step = Vec::new();
    for of_document in writes.chunk_by(same) {
        step.extend_from_slice(of_document);
        if step.len() >= WRITES_AT_ONCE {
            index.write_step(&step)?;
            step.clear();
        }
    }
    index.write_step(&step)?;
    index.write(&Batch::default(), generation.position)
}

/// The index, and the position in the journal up to which it is complete. `None` if it does not belong to this
/// journal.
fn open_index(
    path: &Path,
    cache_bytes: u64,
    found: &ScanReport,
) -> Result<Option<(SledLog, JournalPosition)>, LogError> {
    let opened = SledLog::open(path, cache_bytes / SLED_SHARE).and_then(|index| {
        let position = index.position()?;
        Ok((index, position))
    });
    match opened {
        Ok((index, Some(position))) if found.name.is_none_or(|name| name == position.journal) => {
            Ok(Some((index, position)))
        }
        Ok(_) | Err(LogError::Corrupt(_)) => Ok(None),
        Err(refused) => Err(refused),
    }
}

/// Reads the journal into memory, from the beginning of a batch on. If that is too much, the index gets the earlier
/// part of it.
fn replay(
    path: &Path,
    index: &SledLog,
    from: JournalPosition,
    cache_bytes: u64,
) -> Result<RecentWrites, LogError> {
    let mut recent = RecentWrites::new(from);
    journal::scan(path, from.end, &mut |scanned| {
        let position = JournalPosition {
            end: scanned.end,
            ..from
        };
        recent.add(&scanned.batch, position);
        if recent.active_bytes() >= generation_bytes(cache_bytes) {
            write_to(index, &recent.freeze())?;
            recent.drop_frozen();
        }
        Ok(())
    })?;
    Ok(recent)
}

impl RecordLog for JournaledLog {
    fn write(&self, batch: &Batch) -> Result<(), LogError> {
        let position = self.inner.journal.lock().append(batch)?;
        self.keep(batch, position);
        Ok(())
    }

    fn sync(&self) -> Result<(), LogError> {
        self.inner.sync()
    }

    fn commit(&self, batch: &Batch) -> Result<(), LogError> {
        if batch.is_empty() {
            return Ok(());
        }
        let position = {
            let mut journal = self.inner.journal.lock();
            let position = journal.append(batch)?;
            journal.sync()?;
            position
        };
        self.keep(batch, position);
        Ok(())
    }

    fn await_room(&self) -> Result<(), LogError> {
        if !self.is_full() {
            return Ok(());
        }
        self.end_indexing();
        self.begin_indexing();
        match self.is_full() {
            true => self.inner.fault.lock().clone().map_or(Ok(()), Err),
            false => Ok(()),
        }
    }

    fn get(&self, key: &[u8]) -> Result<Option<Vec<u8>>, LogError> {
        match self.inner.recent.read().get(key) {
            Some(written) => Ok(written.cloned()),
            None => self.inner.note_damage(self.inner.index.get(key)),
        }
    }

    fn scan(
        &self,
        from: &[u8],
        to: &[u8],
        visit: &mut dyn FnMut(&[u8], &[u8]) -> bool,
    ) -> Result<(), LogError> {
        let recent = self.inner.recent.read();
        let mut recent = recent.range(from, to).peekable();
        let mut goes_on = true;
        let scanned = self.inner.index.scan(from, to, &mut |key, value| {
            while let Some((newer, written)) = recent.next_if(|(newer, _)| &newer[..] < key) {
                goes_on = written.is_none_or(|written| visit(newer, written));
                if !goes_on {
                    return false;
                }
            }
            let newer = recent.next_if(|(newer, _)| &newer[..] == key);
            goes_on = match newer {
                Some((_, written)) => written.is_none_or(|written| visit(key, written)),
                None => visit(key, value),
            };
            goes_on
        });
        self.inner.note_damage(scanned)?;
        while goes_on && let Some((newer, written)) = recent.next() {
            goes_on = written.is_none_or(|written| visit(newer, written));
        }
        Ok(())
    }

    fn disk_bytes(&self) -> u64 {
        self.inner.index.disk_bytes() + self.inner.journal.lock().position().end
    }

    fn unindexed_bytes(&self) -> u64 {
        self.inner.recent.read().bytes() as u64
    }

    fn blob_files(&self) -> u64 {
        self.inner.index.blob_files()
    }

    fn fault(&self) -> Option<LogError> {
        self.inner.fault()
    }

    fn can_be_rebuilt(&self) -> bool {
        true
    }

    fn retire(&self) {
        self.inner.is_retired.store(true, Ordering::Relaxed);
    }
}
