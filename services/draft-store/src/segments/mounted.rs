//! The segments in use, and the documents that are in none.

use std::collections::{BTreeMap, HashSet};
use std::sync::Arc;

use refrain_protocol::{DocumentId, NamespaceId};
use refrain_suffix_index::SegmentStats;

use crate::record::{DocumentKey, SegmentId, SegmentSlot};
use crate::segments::file::SegmentFile;

/// A segment in use, and how much of it is live.
pub(crate) struct ActiveSegment {
    pub(crate) file: Arc<SegmentFile>,
    /// Its documents that are live: neither removed nor moved back to the log.
    pub(crate) live: LiveDocuments,
    pub(crate) live_documents: u64,
    pub(crate) live_tokens: u64,
}

/// A bit for each document of a segment.
#[derive(Clone, Debug, Default)]
pub(crate) struct LiveDocuments(Vec<u64>);

impl LiveDocuments {
    fn none_of(documents: u32) -> Self {
        LiveDocuments(vec![0; documents.div_ceil(64) as usize])
    }

    fn set(&mut self, number: u32, is_live: bool) {
        if let Some(word) = self.0.get_mut(number as usize / 64) {
            let bit = 1 << (number % 64);
            *word = if is_live { *word | bit } else { *word & !bit };
        }
    }

    /// Whether the document with this number is live.
    pub(crate) fn has(&self, number: u32) -> bool {
        let word = self.0.get(number as usize / 64);
        word.is_some_and(|word| word >> (number % 64) & 1 == 1)
    }
}

impl ActiveSegment {
    /// The numbers of its documents that are not live, in order.
    pub(crate) fn gone(&self) -> Vec<u32> {
        if !self.is_worn() {
            return Vec::new();
        }
        let documents = 0..self.file.documents();
        documents.filter(|number| !self.live.has(*number)).collect()
    }

    /// Whether some of its documents are not live.
    pub(crate) fn is_worn(&self) -> bool {
        self.live_documents < u64::from(self.file.documents())
    }

    /// Its sizes, in tokens of output.
    pub(crate) fn stats(&self) -> SegmentStats {
        let documents = self.file.documents() as usize;
        SegmentStats {
            tokens: self.file.tokens,
            masked_tokens: self.file.tokens.saturating_sub(self.live_tokens),
            documents,
            masked_documents: documents - self.live_documents as usize,
        }
    }
}

/// All segments in use, and the documents that are in none.
#[derive(Default)]
pub(crate) struct Segments {
    mounted: BTreeMap<SegmentId, ActiveSegment>,
    unsealed: BTreeMap<NamespaceId, Unsealed>,
    unsealed_documents: u64,
    unsealed_tokens: u64,
    unsealed_bytes: u64,
}

/// The sizes of a document, for the sums kept here.
#[derive(Clone, Copy, Debug)]
pub(crate) struct CountedDocument {
    /// The document's position if it is sealed.
    pub(crate) slot: Option<SegmentSlot>,
    pub(crate) key: DocumentKey,
    pub(crate) len: u32,
    pub(crate) bytes: u32,
}

/// The documents of a namespace that are in no segment.
#[derive(Default)]
pub(crate) struct Unsealed {
    pub(crate) documents: HashSet<DocumentId>,
    pub(crate) tokens: u64,
}

impl Segments {
    pub(crate) fn get(&self, segment: SegmentId) -> Option<&ActiveSegment> {
        self.mounted.get(&segment)
    }

    pub(crate) fn iter(&self) -> impl Iterator<Item = (SegmentId, &ActiveSegment)> {
        self.mounted.iter().map(|(id, mounted)| (*id, mounted))
    }

    /// The segments of each namespace, with their sizes.
    pub(crate) fn by_namespace(&self) -> BTreeMap<NamespaceId, Vec<(SegmentId, SegmentStats)>> {
        let mut namespaces = BTreeMap::<_, Vec<_>>::new();
        for (segment, mounted) in self.iter() {
            let segments = namespaces.entry(mounted.file.namespace).or_default();
            segments.push((segment, mounted.stats()));
        }
        namespaces
    }

    pub(crate) fn files(&self) -> impl Iterator<Item = &Arc<SegmentFile>> {
        self.mounted.values().map(|mounted| &mounted.file)
    }

    pub(crate) fn len(&self) -> usize {
        self.mounted.len()
    }

    /// Bytes of all files.
    pub(crate) fn bytes(&self) -> u64 {
        self.files().map(|file| file.file_bytes()).sum()
    }

    pub(crate) fn unsealed(&self) -> impl Iterator<Item = (NamespaceId, &Unsealed)> {
        self.unsealed.iter().map(|(id, unsealed)| (*id, unsealed))
    }

    pub(crate) fn unsealed_of(&self, namespace: NamespaceId) -> Option<&Unsealed> {
        self.unsealed.get(&namespace)
    }

    /// Number of documents in the log, and their bytes.
    pub(crate) fn unsealed_totals(&self) -> (u64, u64) {
        (self.unsealed_documents, self.unsealed_bytes)
    }

    /// Tokens in the log.
    pub(crate) fn unsealed_tokens(&self) -> u64 {
        self.unsealed_tokens
    }

    pub(crate) fn mount(&mut self, file: Arc<SegmentFile>) {
        let mounted = ActiveSegment {
            live: LiveDocuments::none_of(file.documents()),
            live_documents: 0,
            live_tokens: 0,
            file,
        };
        self.mounted.insert(mounted.file.id, mounted);
    }

    pub(crate) fn unmount(&mut self, segment: SegmentId) {
        self.mounted.remove(&segment);
    }

    /// Adds or removes a document, in the sums of its segment or of the unsealed documents.
    pub(crate) fn count(&mut self, counted: CountedDocument, comes: bool) {
        let CountedDocument {
            slot,
            key,
            len,
            bytes,
        } = counted;
        let add = |sum: &mut u64, by: u64| *sum = if comes { *sum + by } else { *sum - by };
        if let Some(slot) = slot {
            if let Some(mounted) = self.mounted.get_mut(&slot.segment) {
                mounted.live.set(slot.number, comes);
                add(&mut mounted.live_documents, 1);
                add(&mut mounted.live_tokens, u64::from(len));
            }
            return;
        }
        let unsealed = self.unsealed.entry(key.namespace).or_default();
        add(&mut unsealed.tokens, u64::from(len));
        add(&mut self.unsealed_tokens, u64::from(len));
        add(&mut self.unsealed_documents, 1);
        add(&mut self.unsealed_bytes, u64::from(bytes));
        if comes {
            unsealed.documents.insert(key.document);
        } else {
            unsealed.documents.remove(&key.document);
            if unsealed.documents.is_empty() {
                self.unsealed.remove(&key.namespace);
            }
        }
    }
}
