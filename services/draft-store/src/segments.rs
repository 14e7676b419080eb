//! Sealed documents: those that are at their end leave the log for files that never change.
//!
//! A segment is one file of documents of one namespace (`segments/file.rs`): text and suffix array in the form in which
//! indexes are searched, and what else is known of each document, packed (`segments/records.rs`). What becomes a
//! segment, and which segments become one, is decided by `segments/policy.rs`; the work is done on a thread of its own by
//! `segments/job.rs`, and takes effect in one commit: the log names the file, and forgets the unsealed copies
//! (or the files that were merged). Before that commit the file is an orphan, afterwards the others are;
//! orphans are deleted when the directory is opened.
//!
//! What may still change of a sealed document is its time of use, and whether it is there: evicted, erased, or
//! gone on with, which brings it back into the log. These *marks* live in the log, 512 documents to a record
//! of at most 2 KiB, so that they become durable in the same commit as the tombstone or the text that
//! belongs to them. A file beside each segment was left: it would need a journal of its own to agree with the
//! tombstones. Ten million documents, all marked, are 40 MB in the log before compression.

mod columns;
mod file;
mod find;
mod job;
mod map;
mod names;
mod policy;
mod records;
#[cfg(test)]
mod tests;
mod write;

use std::collections::{BTreeMap, HashSet};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use refrain_protocol::{DocumentId, NamespaceId};
use refrain_suffix_index::SegmentStats;

pub(crate) use file::{Sealed, check_versions};
pub(crate) use find::{Found, find};
#[cfg(test)]
pub(crate) use job::Step;
pub(crate) use job::{Host, Made, Plan, Product, Taken, Work, clear, run};
pub(crate) use policy::{Candidates, Choice, Policy, Urgency};

use crate::log::{LogError, refused};
use crate::record::{MARKS_DOCUMENTS, Place, SegmentId};

/// Where the files lie.
pub(crate) fn directory(dir: &Path) -> PathBuf {
    dir.join("segments")
}

/// Where the file of a segment lies.
pub(crate) fn path(dir: &Path, segment: SegmentId) -> PathBuf {
    directory(dir).join(format!("{segment:016x}.segment"))
}

/// What lies there: segments by number, and all else.
pub(crate) fn list(dir: &Path) -> Result<(Vec<SegmentId>, Vec<PathBuf>), LogError> {
    let (mut segments, mut others) = (Vec::new(), Vec::new());
    let directory = directory(dir);
    let entries = match std::fs::read_dir(&directory) {
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => {
            return Ok((segments, others));
        }
        entries => entries.map_err(|error| refused("list", &directory, &error))?,
    };
    for entry in entries {
        let entry = entry.map_err(|error| refused("list", &directory, &error))?;
        let name = entry.file_name().to_string_lossy().into_owned();
        let number = name.strip_suffix(".segment");
        match number.and_then(|digits| SegmentId::from_str_radix(digits, 16).ok()) {
            Some(segment) if entry.path() == path(dir, segment) => segments.push(segment),
            _ => others.push(entry.path()),
        }
    }
    segments.sort_unstable();
    Ok((segments, others))
}

/// Deletes the files of segments that do not count any more.
pub(crate) fn delete(dir: &Path, segments: &[SegmentId]) -> Result<(), LogError> {
    let paths: Vec<PathBuf> = segments.iter().map(|segment| path(dir, *segment)).collect();
    write::delete(dir, &paths)
}

/// Deletes every file but those of segments that are wanted.
pub(crate) fn clear_orphans(
    dir: &Path,
    is_wanted: impl Fn(SegmentId) -> bool,
) -> Result<(), LogError> {
    let (segments, others) = list(dir)?;
    let orphans: Vec<PathBuf> = segments
        .into_iter()
        .filter(|segment| !is_wanted(*segment))
        .map(|segment| path(dir, segment))
        .chain(others)
        .collect();
    write::delete(dir, &orphans)
}

/// Marks by segment and chunk.
#[derive(Default)]
pub(crate) struct Marks(BTreeMap<(SegmentId, u32), Vec<u32>>);

impl Marks {
    pub(crate) fn insert(&mut self, chunk: (SegmentId, u32), marks: Vec<u32>) {
        self.0.insert(chunk, marks);
    }

    pub(crate) fn contains(&self, chunk: (SegmentId, u32)) -> bool {
        self.0.contains_key(&chunk)
    }

    /// The mark of a document, 0 for none.
    pub(crate) fn get(&self, place: Place) -> u32 {
        let (chunk, at) = chunk_of(place);
        let marks = self.0.get(&chunk);
        marks.and_then(|marks| marks.get(at)).copied().unwrap_or(0)
    }

    /// Marks a document.
    pub(crate) fn set(&mut self, place: Place, mark: u32) {
        let (chunk, at) = chunk_of(place);
        let marks = self.0.entry(chunk).or_default();
        marks.resize(marks.len().max(MARKS_DOCUMENTS as usize), 0);
        marks[at] = mark;
    }

    pub(crate) fn keys(&self) -> impl Iterator<Item = (SegmentId, u32)> {
        self.0.keys().copied()
    }

    pub(crate) fn into_chunks(self) -> BTreeMap<(SegmentId, u32), Vec<u32>> {
        self.0
    }
}

/// Which marks a document's is among, and where.
pub(crate) fn chunk_of(place: Place) -> ((SegmentId, u32), usize) {
    let Place { segment, number } = place;
    let chunk = (segment, number / MARKS_DOCUMENTS);
    (chunk, (number % MARKS_DOCUMENTS) as usize)
}

/// A segment that counts, and how much of it still does.
pub(crate) struct Mounted {
    pub(crate) sealed: Arc<Sealed>,
    /// Which of its documents still count.
    pub(crate) live: Live,
    pub(crate) live_documents: u64,
    pub(crate) live_tokens: u64,
}

/// A bit for each document of a segment.
#[derive(Clone, Debug, Default)]
pub(crate) struct Live(Vec<u64>);

impl Live {
    fn none_of(documents: u32) -> Self {
        Live(vec![0; documents.div_ceil(64) as usize])
    }

    fn set(&mut self, number: u32, is_live: bool) {
        if let Some(word) = self.0.get_mut(number as usize / 64) {
            let bit = 1 << (number % 64);
            *word = if is_live { *word | bit } else { *word & !bit };
        }
    }

    /// Whether the document with this number counts.
    pub(crate) fn has(&self, number: u32) -> bool {
        let word = self.0.get(number as usize / 64);
        word.is_some_and(|word| word >> (number % 64) & 1 == 1)
    }
}

impl Mounted {
    /// The numbers of its documents that do not count, in order.
    pub(crate) fn gone(&self) -> Vec<u32> {
        if !self.is_worn() {
            return Vec::new();
        }
        let documents = 0..self.sealed.documents();
        documents.filter(|number| !self.live.has(*number)).collect()
    }

    /// Whether something in it does not count any more.
    pub(crate) fn is_worn(&self) -> bool {
        self.live_documents < u64::from(self.sealed.documents())
    }

    /// Its sizes, in tokens of output.
    pub(crate) fn stats(&self) -> SegmentStats {
        let documents = self.sealed.documents() as usize;
        SegmentStats {
            tokens: self.sealed.tokens(),
            masked_tokens: self.sealed.tokens().saturating_sub(self.live_tokens),
            documents,
            masked_documents: documents - self.live_documents as usize,
        }
    }
}

/// The segments that count, and which documents are in none.
#[derive(Default)]
pub(crate) struct Segments {
    mounted: BTreeMap<SegmentId, Mounted>,
    unsealed: BTreeMap<NamespaceId, Unsealed>,
    unsealed_documents: u64,
    unsealed_tokens: u64,
    unsealed_bytes: u64,
}

/// A document as it is counted.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Counted {
    /// Where it is sealed.
    pub(crate) place: Option<Place>,
    pub(crate) namespace: NamespaceId,
    pub(crate) document: DocumentId,
    pub(crate) len: u32,
    pub(crate) bytes: u32,
}

/// What of a namespace is in no segment.
#[derive(Default)]
pub(crate) struct Unsealed {
    pub(crate) documents: HashSet<DocumentId>,
    pub(crate) tokens: u64,
}

impl Segments {
    pub(crate) fn get(&self, segment: SegmentId) -> Option<&Mounted> {
        self.mounted.get(&segment)
    }

    pub(crate) fn iter(&self) -> impl Iterator<Item = (SegmentId, &Mounted)> {
        self.mounted.iter().map(|(id, mounted)| (*id, mounted))
    }

    /// The segments of each namespace, with their sizes.
    pub(crate) fn by_namespace(&self) -> BTreeMap<NamespaceId, Vec<(SegmentId, SegmentStats)>> {
        let mut namespaces = BTreeMap::<_, Vec<_>>::new();
        for (segment, mounted) in self.iter() {
            let segments = namespaces.entry(mounted.sealed.namespace()).or_default();
            segments.push((segment, mounted.stats()));
        }
        namespaces
    }

    pub(crate) fn sealed(&self) -> impl Iterator<Item = &Arc<Sealed>> {
        self.mounted.values().map(|mounted| &mounted.sealed)
    }

    pub(crate) fn len(&self) -> usize {
        self.mounted.len()
    }

    /// What the files take.
    pub(crate) fn bytes(&self) -> u64 {
        self.sealed().map(|sealed| sealed.file_bytes()).sum()
    }

    pub(crate) fn unsealed(&self) -> impl Iterator<Item = (NamespaceId, &Unsealed)> {
        self.unsealed.iter().map(|(id, unsealed)| (*id, unsealed))
    }

    pub(crate) fn unsealed_of(&self, namespace: NamespaceId) -> Option<&Unsealed> {
        self.unsealed.get(&namespace)
    }

    /// Documents that are in the log, and their bytes.
    pub(crate) fn unsealed_totals(&self) -> (u64, u64) {
        (self.unsealed_documents, self.unsealed_bytes)
    }

    /// Tokens that are in the log.
    pub(crate) fn unsealed_tokens(&self) -> u64 {
        self.unsealed_tokens
    }

    pub(crate) fn mount(&mut self, sealed: Arc<Sealed>) {
        let mounted = Mounted {
            live: Live::none_of(sealed.documents()),
            live_documents: 0,
            live_tokens: 0,
            sealed,
        };
        self.mounted.insert(mounted.sealed.id(), mounted);
    }

    pub(crate) fn unmount(&mut self, segment: SegmentId) {
        self.mounted.remove(&segment);
    }

    /// Counts a document in, or out: of its segment, or among those that are in none.
    pub(crate) fn count(&mut self, counted: Counted, comes: bool) {
        let Counted {
            place,
            namespace,
            document,
            len,
            bytes,
        } = counted;
        let add = |sum: &mut u64, by: u64| *sum = if comes { *sum + by } else { *sum - by };
        if let Some(place) = place {
            if let Some(mounted) = self.mounted.get_mut(&place.segment) {
                mounted.live.set(place.number, comes);
                add(&mut mounted.live_documents, 1);
                add(&mut mounted.live_tokens, u64::from(len));
            }
            return;
        }
        let unsealed = self.unsealed.entry(namespace).or_default();
        add(&mut unsealed.tokens, u64::from(len));
        add(&mut self.unsealed_tokens, u64::from(len));
        add(&mut self.unsealed_documents, 1);
        add(&mut self.unsealed_bytes, u64::from(bytes));
        if comes {
            unsealed.documents.insert(document);
        } else {
            unsealed.documents.remove(&document);
            if unsealed.documents.is_empty() {
                self.unsealed.remove(&namespace);
            }
        }
    }
}
