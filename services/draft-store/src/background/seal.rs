//! Makes a segment from documents in the log, or from other segments.
//!
//! The thread reads a few documents at a time under the store's lock for reading. It holds no lock while it sorts and
//! writes. The commit that installs the segment finds what changed meanwhile: such a document stays where it is, and
//! is marked as gone in the new segment.

#[cfg(test)]
mod tests;

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use refrain_protocol::{DocumentId, Namespace, NamespaceId};

use crate::log::LogError;
use crate::reading::document_text::{self, TextError};
use crate::record::{DocumentKey, SegmentId, SegmentSlot, StateRecord};
use crate::segments::{
    SegmentEntry, SegmentFile, SegmentSource, delete, delete_files, path, write as write_segment,
};
use crate::shared_store::{OpenGuard, OpenStore, SharedStore};

/// How long the lock is held while documents are read from the log. A busy store commits between any two reads, so
/// with a much shorter time it would store faster than it seals.
const LOCK_HELD_MAX: Duration = Duration::from_millis(20);

/// Documents of a segment that are looked up under one lock.
const LOOKS_PER_LOCK: usize = 4_096;

/// A segment to be made.
pub(crate) struct SealJob {
    pub(crate) dir: PathBuf,
    /// The number of the new segment.
    pub(crate) id: SegmentId,
    pub(crate) namespace: NamespaceId,
    pub(crate) names: Option<Namespace>,
    pub(crate) source: SegmentSource,
    /// Ends the job early.
    pub(crate) stop: Arc<AtomicBool>,
}

/// A document as it was included in the segment.
pub(crate) struct IncludedDocument {
    pub(crate) document: DocumentId,
    pub(crate) state: StateRecord,
    /// Start positions of its pieces in the log.
    pub(crate) pieces: Vec<u32>,
}

/// A segment that is durable, and not yet in use.
pub(crate) struct NewSegment {
    /// `None` if nothing was left of the sources.
    pub(crate) file: Option<Arc<SegmentFile>>,
    /// Its documents, in order of their numbers.
    pub(crate) documents: Vec<IncludedDocument>,
    /// The segments that it replaces.
    pub(crate) sources: Vec<SegmentId>,
    pub(crate) namespace: NamespaceId,
    /// Documents that cannot be read.
    pub(crate) damaged: Vec<DocumentKey>,
}

/// The owner of the store.
pub(crate) trait SealHost {
    /// Puts the new segment into use in place of its sources, durably.
    fn install(&self, segment: NewSegment) -> Result<(), LogError>;
}

/// The steps of a job. Tests interrupt it at each.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum SealStep {
    /// Everything is read.
    Read,
    /// The file is written under a temporary name.
    Written,
    /// The file has its final name.
    Renamed,
    /// The segment is in use.
    Installed,
    /// The segments that it replaces are deleted.
    Deleted,
}

/// The result of a job.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct SealReport {
    pub(crate) documents: u64,
    pub(crate) tokens: u64,
    pub(crate) bytes: u64,
}

/// Makes a segment. It blocks, so it needs a thread of its own. `at` runs at each step, and interrupts the job by an
/// error. After a failure, call [`clear`].
pub(crate) fn run(
    job: &SealJob,
    shared: &SharedStore,
    host: &dyn SealHost,
    at: &dyn Fn(SealStep) -> Result<(), LogError>,
) -> Result<SealReport, LogError> {
    let segment = make(job, shared, at)?;
    let replaced = segment.sources.clone();
    at(SealStep::Renamed)?;
    let made = segment
        .file
        .as_ref()
        .map_or(SealReport::default(), |sealed| SealReport {
            documents: u64::from(sealed.documents()),
            tokens: sealed.tokens,
            bytes: sealed.file_bytes(),
        });
    host.install(segment)?;
    at(SealStep::Installed)?;
    delete(&job.dir, &replaced)?;
    at(SealStep::Deleted)?;
    Ok(made)
}

/// Deletes the files that a failed job may have left.
pub(crate) fn clear(dir: &Path, segment: SegmentId) -> Result<(), LogError> {
    let target = path(dir, segment);
    let mut leftovers = vec![target.with_extension("new"), target];
    leftovers.retain(|path| path.exists());
    delete_files(dir, &leftovers)
}

fn make(
    job: &SealJob,
    shared: &SharedStore,
    at: &dyn Fn(SealStep) -> Result<(), LogError>,
) -> Result<NewSegment, LogError> {
    let mut input = JobInput::default();
    let sources = match &job.source {
        SegmentSource::Log(documents) => {
            input.unsealed(job, shared, documents)?;
            Vec::new()
        }
        SegmentSource::Segments(segments) => {
            for segment in segments {
                input.sealed(job, shared, *segment)?;
            }
            segments.clone()
        }
    };
    job.go_on()?;
    at(SealStep::Read)?;
    let JobInput {
        entries,
        mut documents,
        damaged,
    } = input;
    documents.sort_unstable_by_key(|documents| documents.document);
    let sealed = if entries.is_empty() {
        at(SealStep::Written)?;
        None
    } else {
        let (id, names) = (job.id, job.names.as_ref());
        let mut at_rename = || at(SealStep::Written);
        let written = write_segment(&job.dir, id, job.namespace, names, entries, &mut at_rename)?;
        Some(Arc::new(written))
    };
    Ok(NewSegment {
        file: sealed,
        documents,
        sources,
        namespace: job.namespace,
        damaged,
    })
}

impl SealJob {
    fn go_on(&self) -> Result<(), LogError> {
        if self.stop.load(Ordering::Relaxed) {
            return Err(LogError::Refused("the store is closing".into()));
        }
        Ok(())
    }

    fn key(&self, document: DocumentId) -> DocumentKey {
        DocumentKey::new(self.namespace, document)
    }
}

fn locked(shared: &SharedStore) -> Result<OpenGuard<'_>, LogError> {
    let open = shared.read();
    open.map_err(|_| LogError::Refused("the store is closed".into()))
}

/// The documents that go into the segment.
#[derive(Default)]
struct JobInput {
    entries: Vec<SegmentEntry>,
    documents: Vec<IncludedDocument>,
    damaged: Vec<DocumentKey>,
}

impl JobInput {
    fn unsealed(
        &mut self,
        job: &SealJob,
        shared: &SharedStore,
        documents: &[DocumentId],
    ) -> Result<(), LogError> {
        let mut left = documents.iter().peekable();
        while left.peek().is_some() {
            job.go_on()?;
            let open = locked(shared)?;
            let started = Instant::now();
            for document in left.by_ref() {
                match self.document(&open, job.key(*document)) {
                    Err(TextError::Log(error)) => return Err(error),
                    Err(TextError::Damaged(_)) => self.damaged.push(job.key(*document)),
                    Ok(()) => {}
                }
                if started.elapsed() >= LOCK_HELD_MAX {
                    break;
                }
            }
        }
        Ok(())
    }

    fn document(&mut self, open: &OpenStore, key: DocumentKey) -> Result<(), TextError> {
        let Some(known) = open.catalog.document(key) else {
            return Ok(());
        };
        if known.slot.is_some() {
            return Ok(());
        }
        let state = known.state;
        let (tokens, pieces) = document_text::pieces(&*open.log, key, state.len)?;
        let head = document_text::head(&open.catalog, &*open.log, key)?;
        let document = key.document;
        self.documents.push(IncludedDocument {
            document,
            state,
            pieces,
        });
        self.entries.push(SegmentEntry {
            document,
            state,
            head,
            tokens,
        });
        Ok(())
    }

    fn sealed(
        &mut self,
        job: &SealJob,
        shared: &SharedStore,
        segment: SegmentId,
    ) -> Result<(), LogError> {
        let sealed = {
            let open = locked(shared)?;
            let mounted = open.catalog.segments().get(segment);
            mounted.map(|mounted| mounted.file.clone())
        };
        // Its last document was removed since it was chosen.
        let Some(sealed) = sealed else { return Ok(()) };
        let documents: Vec<(u32, DocumentId)> = sealed
            .states()
            .map(|(number, document, _)| (number, document))
            .collect();
        let mut used = Vec::new();
        for documents in documents.chunks(LOOKS_PER_LOCK) {
            job.go_on()?;
            let open = locked(shared)?;
            for &(number, document) in documents {
                let slot = SegmentSlot { segment, number };
                let known = open.catalog.document(job.key(document));
                if let Some(known) = known.filter(|known| known.slot == Some(slot)) {
                    used.push((number, known.state.used_ms));
                }
            }
        }
        for (number, used_ms) in used {
            // All of them were read when the file was opened.
            let Ok(mut entry) = sealed.entry(number) else {
                continue;
            };
            entry.state.used_ms = used_ms;
            self.documents.push(IncludedDocument {
                document: entry.document,
                state: entry.state,
                pieces: Vec::new(),
            });
            self.entries.push(entry);
        }
        Ok(())
    }
}
