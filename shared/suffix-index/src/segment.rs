//! A sealed segment: the texts of whole documents that no longer change, and their suffix array.
//!
//! The suffix array is that of the *reversed* text: positions in the order of what ends there, read backwards.
//! All occurrences of a pattern are therefore neighbours, and around the place where a context would be
//! inserted stand the occurrences with the longest left context in common with it. What followed each is read
//! from the text, forwards and contiguously.

mod build;
mod format;
mod grams;
mod look;
mod narrow;
mod probe;
mod side;
mod words;

use std::fmt;

pub use self::build::SegmentBuilder;
use self::format::Layout;
pub use self::format::SegmentError;
use self::grams::Grams;
pub(crate) use self::probe::{Probe, Probes};
pub use self::words::SegmentWords;
use self::words::Words;
use crate::{DocumentKey, Token};

/// Stands before, between and behind documents. It ends every comparison, so no match reaches beyond a
/// document. A token of this value inside a document does the same there.
pub(crate) const SEPARATOR: Token = Token::MAX;

/// Every so many entries of the suffix array, the beginning of one is repeated in a table of its own, small
/// enough to stay in a cache: most of a search takes place there.
pub(crate) const FENCE_ENTRIES: usize = 128;

/// Tokens of an entry that a fence repeats.
pub(crate) const FENCE_TOKENS: usize = 8;

/// Fences to an entry of the summary that a search of the fences begins with.
pub(crate) const SUMMARY_FENCES: usize = 16;

/// Text positions to a slot of the document directory.
const DIRECTORY_POSITIONS: usize = 256;

/// An immutable piece of an index. See [`SegmentBuilder`] for making one and [`Index::mount`](crate::Index::mount)
/// for using it.
///
/// It is one run of bytes in memory or in a mapped file, laid out as it is searched; opening one is a check, not
/// a decoding.
pub struct Segment {
    words: Words,
    layout: Layout,
    /// For each `DIRECTORY_POSITIONS` of text, the document that the first of them belongs to.
    directory: Vec<u32>,
    /// The first two tokens of every `SUMMARY_FENCES`th fence: small enough for the nearest cache.
    summary: Vec<u64>,
    /// What is known of single tokens and pairs.
    grams: Grams,
}

/// A document of a segment.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SealedDocument<'a> {
    /// Its key.
    pub key: DocumentKey,
    /// What is matched but never offered.
    pub left_context: &'a [Token],
    /// What is both.
    pub output: &'a [Token],
}

impl Segment {
    /// Opens a segment from its bytes: from memory, or from a mapped file, which must not change while it is open.
    ///
    /// Everything is checked before anything is believed, at the cost of one pass: checksum, lengths, positions. No
    /// input makes this or any later use panic.
    ///
    /// # Errors
    /// What is wrong with the bytes.
    pub fn open(bytes: impl AsRef<[u8]> + Send + Sync + 'static) -> Result<Segment, SegmentError> {
        let in_place = cfg!(target_endian = "little")
            && bytemuck::try_cast_slice::<u8, u32>(bytes.as_ref()).is_ok();
        let words = if in_place {
            Words::Shared(Box::new(bytes))
        } else {
            Words::new(format::words_of(bytes.as_ref())?)
        };
        let layout = Layout::check(words.get())?;
        Ok(Segment::new(words, layout))
    }

    /// Opens a segment from its words, as [`open`](Self::open) does from its bytes.
    ///
    /// # Errors
    /// What is wrong with the words.
    pub fn open_words(words: SegmentWords) -> Result<Segment, SegmentError> {
        let words = Words::Owned(words.0);
        let layout = Layout::check(words.get())?;
        Ok(Segment::new(words, layout))
    }

    /// The bytes that [`open`](Self::open) takes, little-endian whatever the machine.
    pub fn to_bytes(&self) -> Vec<u8> {
        format::bytes_of(self.words.get())
    }

    /// Number of documents.
    pub fn documents(&self) -> usize {
        self.layout.documents
    }

    /// Tokens of all documents, left contexts included.
    pub fn tokens(&self) -> u64 {
        // One separator to a document, and one before the first.
        (self.layout.text - 1 - self.layout.documents) as u64
    }

    /// Size in bytes: of the file, and of the memory when it is not mapped.
    pub fn len_bytes(&self) -> u64 {
        self.layout.words() as u64 * size_of::<u32>() as u64
    }

    /// What it costs beside those bytes.
    pub fn overhead_bytes(&self) -> usize {
        self.directory.capacity() * size_of::<u32>()
            + self.summary.capacity() * size_of::<u64>()
            + self.grams.bytes()
            + size_of::<Segment>()
    }

    /// All documents, by key.
    pub fn iter(&self) -> impl Iterator<Item = SealedDocument<'_>> {
        let view = self.view();
        (0..view.documents()).map(move |number| view.document(number))
    }

    /// The document with this number, in the order of [`Segment::iter`].
    pub fn document(&self, number: usize) -> Option<SealedDocument<'_>> {
        let view = self.view();
        (number < view.documents()).then(|| view.document(number))
    }

    /// The document of this key.
    pub fn get(&self, key: DocumentKey) -> Option<SealedDocument<'_>> {
        let view = self.view();
        Some(view.document(view.find(key)?))
    }

    pub(crate) fn view(&self) -> View<'_> {
        View {
            directory: &self.directory,
            summary: &self.summary,
            grams: Some(&self.grams),
            ..View::new(self.words.get(), &self.layout)
        }
    }

    fn new(words: Words, layout: Layout) -> Self {
        let view = View::new(words.get(), &layout);
        let directory = view.directory();
        let summarised = view.fences.iter().step_by(SUMMARY_FENCES);
        let summary = summarised
            .map(|fence| summary(fence[0], fence[1]))
            .collect();
        let grams = Grams::new(&view);
        Segment {
            words,
            layout,
            directory,
            summary,
            grams,
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

/// A segment's sections, each as a slice.
#[derive(Clone, Copy)]
pub(crate) struct View<'a> {
    /// Separator, document, separator, document, ..., separator.
    pub(crate) text: &'a [Token],
    /// The suffix array: positions whose next token is output, sorted by the text that ends there, read
    /// backwards.
    pub(crate) ends: &'a [u32],
    /// The first `FENCE_TOKENS`, read backwards, of every `FENCE_ENTRIES`th of `ends`.
    pub(crate) fences: &'a [[Token; FENCE_TOKENS]],
    /// Keys, ascending, each in four words, highest first.
    keys: &'a [[u32; 4]],
    /// Where each document starts in the text.
    starts: &'a [u32],
    /// Length of each left context.
    lefts: &'a [u32],
    directory: &'a [u32],
    pub(crate) summary: &'a [u64],
    grams: Option<&'a Grams>,
}

/// Two tokens, ordered as they are one after the other.
pub(crate) fn summary(last: Token, last_but_one: Token) -> u64 {
    u64::from(last) << 32 | u64::from(last_but_one)
}

impl<'a> View<'a> {
    fn new(words: &'a [u32], layout: &Layout) -> Self {
        let [text, ends, fences, keys, starts, lefts] = layout.sections(words);
        View {
            text,
            ends,
            fences: fences.as_chunks().0,
            keys: keys.as_chunks().0,
            starts,
            lefts,
            directory: &[],
            summary: &[],
            grams: None,
        }
    }

    pub(crate) fn documents(&self) -> usize {
        self.starts.len()
    }

    pub(crate) fn key(&self, number: usize) -> DocumentKey {
        let key = self.keys[number];
        DocumentKey(
            key.iter()
                .fold(0, |key, &word| key << 32 | u128::from(word)),
        )
    }

    /// Number of the document of this key.
    pub(crate) fn find(&self, key: DocumentKey) -> Option<usize> {
        let mut low = 0;
        let mut high = self.documents();
        while low < high {
            let middle = low.midpoint(high);
            match self.key(middle).cmp(&key) {
                std::cmp::Ordering::Less => low = middle + 1,
                std::cmp::Ordering::Equal => return Some(middle),
                std::cmp::Ordering::Greater => high = middle,
            }
        }
        None
    }

    pub(crate) fn document(&self, number: usize) -> SealedDocument<'a> {
        let start = self.starts[number] as usize;
        let (left_context, output) =
            self.text[start..self.end(number)].split_at(self.lefts[number] as usize);
        SealedDocument {
            key: self.key(number),
            left_context,
            output,
        }
    }

    /// Tokens of a document, left context included.
    pub(crate) fn tokens_of(&self, number: usize) -> u64 {
        (self.end(number) - self.starts[number] as usize) as u64
    }

    /// The document that a text position belongs to.
    pub(crate) fn document_at(&self, position: u32) -> usize {
        let slot = position as usize / DIRECTORY_POSITIONS;
        let first = self.directory.get(slot).map_or(0, |&first| first as usize);
        let last = self
            .directory
            .get(slot + 1)
            .map_or(self.documents(), |&last| last as usize + 1);
        let within = self.starts[first..last.min(self.documents())]
            .partition_point(|&start| start <= position);
        (first + within).saturating_sub(1)
    }

    /// Text positions in a document that its own output follows.
    fn output_ends(&self, number: usize) -> std::ops::Range<usize> {
        let (start, end) = (self.starts[number] as usize, self.end(number));
        let first = (start + self.lefts[number] as usize).max(start + 1) - 1;
        first..end.max(1) - 1
    }

    /// The entries that end with a token, if that is known without a search.
    pub(crate) fn interval(&self, token: Token) -> Option<std::ops::Range<usize>> {
        let interval = self.grams?.interval(token)?;
        let all = self.ends.len();
        Some(interval.start.min(all)..interval.end.min(all))
    }

    /// Asks for what is known of the last tokens of a context without a search.
    pub(crate) fn fetch_grams(&self, context: &[Token]) {
        if let (&[.., last_but_one, last], Some(grams)) = (context, self.grams) {
            grams.fetch(last_but_one, last);
        }
    }

    /// Whether an entry may end with the last two tokens of a context.
    pub(crate) fn may_have_pair(&self, context: &[Token]) -> bool {
        match (context, self.grams) {
            (&[.., last_but_one, last], Some(grams)) => grams.may_have(last_but_one, last),
            _ => true,
        }
    }

    /// The token that follows an entry, if it is at hand.
    pub(crate) fn next(&self, entry: usize) -> Option<Token> {
        Some(self.grams?.next(entry))
    }

    /// Text position of the token after an entry.
    pub(crate) fn after(&self, entry: u32) -> Option<u32> {
        self.ends.get(entry as usize).map(|end| end + 1)
    }

    /// How many output tokens of the document stand before `position`.
    pub(crate) fn output_offset(&self, number: usize, position: u32) -> u32 {
        position.saturating_sub(self.starts[number] + self.lefts[number])
    }

    /// Position of the separator behind a document.
    fn end(&self, number: usize) -> usize {
        self.starts
            .get(number + 1)
            .map_or(self.text.len(), |&next| next as usize)
            - 1
    }

    fn directory(&self) -> Vec<u32> {
        let mut number = 0;
        (0..self.text.len().div_ceil(DIRECTORY_POSITIONS))
            .map(|slot| {
                let position = (slot * DIRECTORY_POSITIONS) as u32;
                while self
                    .starts
                    .get(number + 1)
                    .is_some_and(|&next| next <= position)
                {
                    number += 1;
                }
                number as u32
            })
            .collect()
    }
}
