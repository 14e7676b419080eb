//! A sealed segment: the texts of whole documents that no longer change, and their suffix array.
//!
//! The suffix array is that of the *reversed* text: its positions are sorted by the text that ends there, read
//! backwards. So all occurrences of a pattern are neighbours. Around the place where a context would be inserted are
//! the occurrences that share the longest left context with it. The continuation of each is read from the text,
//! forwards and contiguously.
//!
//! `format` has the bytes, `build` makes them, and `view` reads them. `segment_search` searches several segments at
//! once for one context. It uses `comparison`, `intervals`, `edge_search` and `interval_side`. `ngrams` spares it
//! some searches.

mod build;
mod comparison;
mod edge_search;
mod format;
mod interval_side;
mod intervals;
mod ngrams;
mod segment_search;
mod storage;
mod view;

use std::fmt;

use self::format::Layout;
use self::ngrams::NgramTables;
use self::storage::SegmentStorage;
use self::view::{SUMMARY_FENCES, SegmentView, summary};
use crate::DocumentKey;

pub use self::build::SegmentBuilder;
pub(crate) use self::format::SEPARATOR;
pub use self::format::SegmentError;
pub(crate) use self::segment_search::{SegmentSearch, SegmentSearches};
pub use self::storage::SegmentWords;
pub use self::view::SealedDocument;

/// An immutable part of an index. [`SegmentBuilder`] makes one, and [`Index::mount`](crate::Index::mount) uses it.
///
/// A segment is one run of bytes, in memory or in a mapped file, in the layout in which it is searched. So opening a
/// segment checks it and does not decode it.
pub struct Segment {
    words: SegmentStorage,
    layout: Layout,
    /// The document of every `DIRECTORY_POSITIONS`th text position.
    directory: Vec<u32>,
    /// The first two tokens of every `SUMMARY_FENCES`th fence. It is small enough for the L1 cache.
    summary: Vec<u64>,
    /// Tables of single tokens and pairs.
    ngrams: NgramTables,
}

impl Segment {
    /// Opens a segment from its bytes, in memory or in a mapped file. The file must not change while it is open.
    ///
    /// One pass checks the checksum, all lengths and all positions first. No input makes this or any later use panic.
    ///
    /// # Errors
    /// The error says what is wrong with the bytes.
    pub fn open(bytes: impl AsRef<[u8]> + Send + Sync + 'static) -> Result<Segment, SegmentError> {
        let in_place = cfg!(target_endian = "little")
            && bytemuck::try_cast_slice::<u8, u32>(bytes.as_ref()).is_ok();
        let words = if in_place {
            SegmentStorage::Shared(Box::new(bytes))
        } else {
            SegmentStorage::new(format::words_of(bytes.as_ref())?)
        };
        let layout = Layout::check(words.get())?;
        Ok(Segment::new(words, layout))
    }

    /// Opens a segment from its words, as [`open`](Self::open) does from its bytes.
    ///
    /// # Errors
    /// The error says what is wrong with the words.
    pub fn open_words(words: SegmentWords) -> Result<Segment, SegmentError> {
        let words = SegmentStorage::Owned(words.0);
        let layout = Layout::check(words.get())?;
        Ok(Segment::new(words, layout))
    }

    /// The bytes that [`open`](Self::open) takes. They are little-endian on every machine.
    pub fn to_bytes(&self) -> Vec<u8> {
        format::bytes_of(self.words.get())
    }

    /// Number of documents.
    pub fn documents(&self) -> usize {
        self.layout.documents
    }

    /// Tokens of all documents, left contexts included.
    pub fn tokens(&self) -> u64 {
        // There is one separator per document, and one before the first document.
        (self.layout.text - 1 - self.layout.documents) as u64
    }

    /// Size in bytes: of the file, and of the memory if the segment is not mapped.
    pub fn len_bytes(&self) -> u64 {
        self.layout.words() as u64 * size_of::<u32>() as u64
    }

    /// Memory of the tables that are not part of those bytes.
    pub fn overhead_bytes(&self) -> usize {
        self.directory.capacity() * size_of::<u32>()
            + self.summary.capacity() * size_of::<u64>()
            + self.ngrams.bytes()
            + size_of::<Segment>()
    }

    /// All documents, ordered by key.
    pub fn iter(&self) -> impl Iterator<Item = SealedDocument<'_>> {
        let view = self.view();
        (0..view.documents()).map(move |number| view.document(number))
    }

    /// The document with this number in the order of [`Segment::iter`].
    pub fn document(&self, number: usize) -> Option<SealedDocument<'_>> {
        let view = self.view();
        (number < view.documents()).then(|| view.document(number))
    }

    /// The document with this key.
    pub fn get(&self, key: DocumentKey) -> Option<SealedDocument<'_>> {
        let view = self.view();
        Some(view.document(view.find(key)?))
    }

    pub(crate) fn view(&self) -> SegmentView<'_> {
        SegmentView {
            directory: &self.directory,
            summary: &self.summary,
            ngrams: Some(&self.ngrams),
            ..SegmentView::new(self.words.get(), &self.layout)
        }
    }

    fn new(words: SegmentStorage, layout: Layout) -> Self {
        let view = SegmentView::new(words.get(), &layout);
        let directory = view.build_directory();
        let summarised = view.fences.iter().step_by(SUMMARY_FENCES);
        let summary = summarised
            .map(|fence| summary(fence[0], fence[1]))
            .collect();
        let outputs = (0..view.documents()).map(|number| view.output_ends(number));
        let ngrams = NgramTables::new(view.text, view.ends, outputs);
        Segment {
            words,
            layout,
            directory,
            summary,
            ngrams,
        }
    }
}

impl fmt::Debug for Segment {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Segment")
            .field("documents", &self.documents())
            .field("tokens", &self.tokens())
            .finish_non_exhaustive()
    }
}
