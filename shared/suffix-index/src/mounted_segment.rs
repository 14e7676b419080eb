//! A segment in an index, with a mask over its removed documents.

use std::sync::Arc;

use crate::segment::SEPARATOR;
use crate::{DocumentKey, Origin, Segment};

/// A segment and a mask over its documents. The segment never changes: removing a document sets its bit in the mask.
#[derive(Clone)]
pub struct MountedSegment {
    pub(crate) segment: Arc<Segment>,
    /// One bit per document, set for masked ones. Empty while no document is masked.
    masked: Vec<u64>,
    masked_documents: usize,
    masked_tokens: u64,
}

/// Sizes of one segment of an index.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct SegmentStats {
    /// Tokens, masked ones and left contexts included.
    pub tokens: u64,
    /// Tokens of removed documents. A merge of the segment drops them.
    pub masked_tokens: u64,
    /// Documents, masked ones included.
    pub documents: usize,
    /// Documents that were removed.
    pub masked_documents: usize,
}

/// The words of a segment that a search on another device reads, in the form that `format.rs` describes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SearchWords {
    /// The text, and behind it the suffix array.
    pub words: Vec<u32>,
    /// Words of the text.
    pub text_len: usize,
}

impl MountedSegment {
    pub(crate) fn new(segment: Arc<Segment>) -> Self {
        MountedSegment {
            segment,
            masked: Vec::new(),
            masked_documents: 0,
            masked_tokens: 0,
        }
    }

    /// Creates a segment without its `masked` documents. The cost is one look-up for each of them.
    pub fn without(segment: Arc<Segment>, masked: impl IntoIterator<Item = DocumentKey>) -> Self {
        let mut mounted = MountedSegment::new(segment);
        for key in masked {
            mounted.mask(key);
        }
        mounted
    }

    /// Whether no document is masked.
    pub(crate) fn is_whole(&self) -> bool {
        self.masked_documents == 0
    }

    pub(crate) fn is_masked(&self, number: usize) -> bool {
        self.masked
            .get(number / 64)
            .is_some_and(|bits| bits >> (number % 64) & 1 == 1)
    }

    /// Whether the document that a text position belongs to is masked.
    pub(crate) fn is_masked_at(&self, position: u32) -> bool {
        self.is_masked(self.segment.view().document_at(position))
    }

    /// The number of the document with this key, if it exists and is not masked.
    pub(crate) fn find(&self, key: DocumentKey) -> Option<usize> {
        let number = self.segment.view().find(key)?;
        (!self.is_masked(number)).then_some(number)
    }

    /// Masks a document, if it is there.
    pub(crate) fn mask(&mut self, key: DocumentKey) {
        let Some(number) = self.find(key) else {
            return;
        };
        if self.masked.is_empty() {
            self.masked = vec![0; self.segment.documents().div_ceil(64)];
        }
        self.masked[number / 64] |= 1 << (number % 64);
        self.masked_documents += 1;
        self.masked_tokens += self.segment.view().tokens_of(number);
    }

    /// The keys of the masked documents, or of the other ones.
    pub(crate) fn keys(&self, masked: bool) -> impl Iterator<Item = DocumentKey> + '_ {
        let view = self.segment.view();
        (0..view.documents())
            .filter(move |&number| self.is_masked(number) == masked)
            .map(move |number| view.key(number))
    }

    /// Whether this is the same segment with the same documents.
    pub fn is_same(&self, other: &MountedSegment) -> bool {
        Arc::ptr_eq(&self.segment, &other.segment) && self.masked == other.masked
    }

    /// Most words that [`search_words`](Self::search_words) has. Masked documents make them fewer.
    pub fn search_words_max(&self) -> usize {
        let view = self.segment.view();
        view.text.len() + view.ends.len()
    }

    /// The words that a search of the segment reads: its text, and behind it its suffix array. Masked documents are
    /// left out. In the place of their texts there are separators, so no other position moves.
    pub fn search_words(&self) -> SearchWords {
        let view = self.segment.view();
        let mut text = view.text.to_vec();
        for number in (0..view.documents()).filter(|&number| self.is_masked(number)) {
            text[view.span(number)].fill(SEPARATOR);
        }
        let ends = view.ends.iter().copied();
        let text_len = text.len();
        match self.is_whole() {
            true => text.extend(ends),
            false => text.extend(ends.filter(|&end| !self.is_masked_at(end))),
        }
        SearchWords {
            words: text,
            text_len,
        }
    }

    pub(crate) fn origin(&self, position: u32) -> Option<Origin> {
        let view = self.segment.view();
        let number = view.document_at(position);
        (!self.is_masked(number)).then(|| Origin {
            document: view.key(number),
            position: view.output_offset(number, position),
        })
    }

    pub(crate) fn stats(&self) -> SegmentStats {
        SegmentStats {
            tokens: self.segment.tokens(),
            masked_tokens: self.masked_tokens,
            documents: self.segment.documents(),
            masked_documents: self.masked_documents,
        }
    }

    pub(crate) fn bytes(&self) -> usize {
        self.segment.len_bytes() as usize
            + self.segment.overhead_bytes()
            + self.masked.capacity() * size_of::<u64>()
            + size_of::<MountedSegment>()
    }
}
