//! [`Index`]: documents go in, cursors and searches come out.

use std::sync::Arc;

use crate::live_part::{LivePart, StatePoint};
use crate::{
    Cursor, DocumentKey, IndexConfig, IndexError, MountedSegment, Origin, Search, SearchLimits,
    Segment, SegmentBuilder, SegmentStats, Sighting, Token,
};

/// Sizes of an [`Index`], for gauges and budgets.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct IndexSizes {
    /// Documents in the live part.
    pub live_documents: usize,
    /// Tokens in the live part, left contexts included.
    pub live_tokens: u64,
    /// Tokens of the live part that were removed or cut off. They cost memory until the next rebuild.
    pub dead_tokens: u64,
    /// Estimate of the heap memory of the live part, bytes.
    pub live_bytes: usize,
    /// Number of segments.
    pub segments: usize,
    /// Documents in segments, masked ones excluded.
    pub segment_documents: usize,
    /// Tokens in segments, masked ones excluded, left contexts included.
    pub segment_tokens: u64,
    /// Tokens of masked documents.
    pub masked_tokens: u64,
    /// Bytes of the segments and of the tables that belong to them, in memory or mapped.
    pub segment_bytes: usize,
}

/// All documents of one scope. Those that may grow are in an automaton, and finished ones are sealed in segments.
///
/// A document is a left context, which is matched but never offered, and an output that grows. A match never crosses
/// from one document into another. Every offered token is part of a document that is there now: removed documents and
/// cut-off tails are never offered.
pub struct Index {
    pub(crate) config: IndexConfig,
    pub(crate) live: LivePart,
    /// Each key is in one place only, not counting masked documents.
    pub(crate) sealed: Vec<MountedSegment>,
}

impl Index {
    /// Creates an index without documents.
    pub fn new(config: IndexConfig) -> Self {
        let config = IndexConfig {
            pattern_tokens_max: config.pattern_tokens_max.max(1),
            ..config
        };
        Index {
            live: LivePart::new(&config),
            sealed: Vec::new(),
            config,
        }
    }

    /// Begins a document. Patterns may reach into `left_context`, but its tokens are never offered.
    ///
    /// # Errors
    /// The key is taken, or the index is full.
    pub fn open(&mut self, key: DocumentKey, left_context: &[Token]) -> Result<(), IndexError> {
        if self.find_sealed(key).is_some() {
            return Err(IndexError::DuplicateDocument(key));
        }
        self.live.open(key, left_context.iter().copied())
    }

    /// Appends to the output of a document. The tokens can be drafted from at once. The cost is amortised O(1) per
    /// token.
    ///
    /// A sealed document is taken back into the live part first, which costs its length. That is rare, since only
    /// finished documents should be sealed.
    ///
    /// # Errors
    /// The document is unknown, or the index is full.
    pub fn append(&mut self, key: DocumentKey, tokens: &[Token]) -> Result<(), IndexError> {
        if !self.live.contains(key) && self.find_sealed(key).is_some() {
            self.unseal(key, None)?;
        }
        self.live.append(key, tokens)
    }

    /// Cuts the output of a document to its first `output_len` tokens, for instance where a stop string ended it. The
    /// tail is never offered again, and later appends go on from the cut.
    ///
    /// It costs a walk along the rest of the document, and leaves dead tokens behind, as [`remove`](Self::remove)
    /// does. A sealed document is taken back into the live part, shortened.
    ///
    /// # Errors
    /// The document is unknown or shorter than `output_len`, or the index is full.
    pub fn shorten(&mut self, key: DocumentKey, output_len: u32) -> Result<(), IndexError> {
        if self.live.contains(key) {
            return self.live.shorten(key, output_len);
        }
        match self.len_of(key) {
            None => Err(IndexError::UnknownDocument(key)),
            Some(len) if output_len > len => Err(IndexError::BeyondEnd {
                key,
                wanted: output_len,
                len,
            }),
            Some(len) if output_len == len => Ok(()),
            Some(_) => self.unseal(key, Some(output_len)),
        }
    }

    /// Removes documents. Unknown keys are ignored. Removed tokens are never offered again.
    ///
    /// In a segment, the documents are masked. That is exact at once, and a [merge](crate::Merge) of the segment
    /// frees the space.
    ///
    /// An automaton cannot forget. Until the next rebuild or seal, removed occurrences in the live part have three
    /// effects. They still count for continuations that also occur elsewhere. A continuation whose newest live
    /// occurrence was removed is not offered from there, even if an older one remains. And the memory stays in use.
    /// See [`Rebuild`](crate::Rebuild).
    pub fn remove(&mut self, keys: &[DocumentKey]) {
        for &key in keys {
            if !self.live.remove(key) {
                for mounted in &mut self.sealed {
                    mounted.mask(key);
                }
            }
        }
    }

    /// Whether a document has this key and is sealed.
    pub fn is_sealed(&self, key: DocumentKey) -> bool {
        self.find_sealed(key).is_some()
    }

    /// The output of a sealed document.
    pub fn sealed_output(&self, key: DocumentKey) -> Option<&[Token]> {
        let (segment, number) = self.find_sealed(key)?;
        Some(self.sealed[segment].segment.view().document(number).output)
    }

    /// Length of a document's output, left context excluded.
    pub fn len_of(&self, key: DocumentKey) -> Option<u32> {
        if let Some(document) = self.live.document(key) {
            return Some(document.output_len());
        }
        let (segment, number) = self.find_sealed(key)?;
        let document = self.sealed[segment].segment.view().document(number);
        Some(document.output.len() as u32)
    }

    /// Length of the common prefix of `tokens` and a document's output from offset `from` on. It is 0 if the document
    /// is unknown.
    pub fn matching_prefix(&self, key: DocumentKey, from: u32, tokens: &[Token]) -> usize {
        fn count(here: impl Iterator<Item = Token>, tokens: &[Token]) -> usize {
            let pairs = here.zip(tokens);
            pairs.take_while(|(here, token)| here == *token).count()
        }
        if let Some(document) = self.live.document(key) {
            return count(document.live_from(document.left_len() + from), tokens);
        }
        let Some((segment, number)) = self.find_sealed(key) else {
            return 0;
        };
        let document = self.sealed[segment].segment.view().document(number);
        let rest = document.output.get(from as usize..).unwrap_or_default();
        count(rest.iter().copied(), tokens)
    }

    /// Number of documents.
    pub fn documents(&self) -> usize {
        let sealed = |mounted: &MountedSegment| {
            let stats = mounted.stats();
            stats.documents - stats.masked_documents
        };
        self.live.len() + self.sealed.iter().map(sealed).sum::<usize>()
    }

    /// Tokens of all documents, left contexts included.
    pub fn tokens(&self) -> u64 {
        let sealed = |mounted: &MountedSegment| {
            let stats = mounted.stats();
            stats.tokens - stats.masked_tokens
        };
        self.live.tokens() + self.sealed.iter().map(sealed).sum::<u64>()
    }

    /// Tokens of the live part, left contexts included. Callers compare it with their budget to decide when to seal.
    pub fn live_tokens(&self) -> u64 {
        self.live.tokens()
    }

    /// Whether more of the live part is dead than [`IndexConfig::dead_share_max`] allows, so that a rebuild pays.
    pub fn needs_rebuild(&self) -> bool {
        self.live.needs_rebuild(self.config.dead_share_max)
    }

    /// Estimate of the memory in use, bytes, mapped segments included.
    pub fn bytes(&self) -> usize {
        self.live.bytes() + self.sealed.iter().map(MountedSegment::bytes).sum::<usize>()
    }

    /// All sizes. The cost is a look at every live document and every segment.
    pub fn sizes(&self) -> IndexSizes {
        let mut sizes = IndexSizes {
            live_documents: self.live.len(),
            live_tokens: self.live.tokens(),
            dead_tokens: self.live.dead_tokens(),
            live_bytes: self.live.bytes(),
            segments: self.sealed.len(),
            ..IndexSizes::default()
        };
        for mounted in &self.sealed {
            let stats = mounted.stats();
            sizes.segment_documents += stats.documents - stats.masked_documents;
            sizes.segment_tokens += stats.tokens - stats.masked_tokens;
            sizes.masked_tokens += stats.masked_tokens;
            sizes.segment_bytes += mounted.bytes();
        }
        sizes
    }

    /// Adds a sealed segment without its `masked` documents, for instance one that was opened from a file. See
    /// [`mount_all`](Self::mount_all).
    pub fn mount(&mut self, segment: Arc<Segment>, masked: impl IntoIterator<Item = DocumentKey>) {
        self.mount_all(vec![MountedSegment::without(segment, masked)]);
    }

    /// Adds many segments at once. No two of them may share a document, masked ones apart.
    ///
    /// A document that the index already has stays as it is, and the segments' copy is masked. The cost is a look
    /// into each new segment for each document of the index, so it is small for an index that is nearly empty.
    pub fn mount_all(&mut self, mut segments: Vec<MountedSegment>) {
        let live = self.live.present().map(|(_, document)| document.key);
        let sealed = self.sealed.iter().flat_map(|mounted| mounted.keys(false));
        for key in live.chain(sealed) {
            for mounted in &mut segments {
                mounted.mask(key);
            }
        }
        self.sealed.append(&mut segments);
    }

    /// The segments and their sizes, in the order in which they were added.
    pub fn segments(&self) -> impl ExactSizeIterator<Item = (&Arc<Segment>, SegmentStats)> {
        self.sealed
            .iter()
            .map(|mounted| (&mounted.segment, mounted.stats()))
    }

    /// The segments with their masks, in the order in which they were added.
    pub fn mounted(&self) -> &[MountedSegment] {
        &self.sealed
    }

    /// A builder with the texts of those live documents that are `wanted`.
    pub fn copy_live(&self, mut wanted: impl FnMut(DocumentKey) -> bool) -> SegmentBuilder {
        let mut builder = SegmentBuilder::new();
        let present = self.live.present().map(|(_, document)| document);
        for document in present.filter(|document| wanted(document.key)) {
            let left = document.left_len();
            let left_context = document.live().take(left as usize);
            builder.add(document.key, left_context, document.live_from(left));
        }
        builder
    }

    /// Creates a cursor for a context, by matching its end in the live part. The cost is O(`pattern_tokens_max`).
    pub fn start(&self, context: &[Token]) -> Cursor {
        let from = context
            .len()
            .saturating_sub(self.config.pattern_tokens_max as usize);
        let mut cursor = self.live.cursor(StatePoint::default());
        for &token in &context[from..] {
            self.advance(&mut cursor, token);
        }
        cursor
    }

    /// The cursor of a live document, for a request whose context is that document. Sealed documents have none.
    ///
    /// It costs O(1) and is exact whatever was appended meanwhile, so prefer it to a cursor of your own. The
    /// document's end itself offers nothing, since nothing follows it.
    pub fn tip(&self, key: DocumentKey) -> Option<Cursor> {
        self.live.tip(key)
    }

    /// The same, but only if the document's output has this length. Both are found with one look-up.
    pub fn tip_at(&self, key: DocumentKey, output_len: u32) -> Option<Cursor> {
        self.live.tip_at(key, output_len)
    }

    /// Moves a cursor on by one token of its context. The cost is amortised O(1).
    ///
    /// A cursor holds the longest match at the time. If later appends to the index would have made the match longer,
    /// the cursor stays valid with the shorter match, and catches up as the context moves on. A cursor that a
    /// rebuild, a seal or another index made invalid starts over with this token.
    pub fn advance(&self, cursor: &mut Cursor, token: Token) {
        self.live.advance(cursor, token);
    }

    /// Whether this index made the cursor after its last rebuild or seal. If not, [`start`](Self::start) again.
    #[cfg(test)]
    pub(crate) fn is_current(&self, cursor: &Cursor) -> bool {
        self.live.is_current(cursor)
    }

    /// Searches for the suffixes of a context.
    ///
    /// `cursor` is the context's state in the live part. A cursor from before a rebuild or seal finds nothing there.
    /// `context` is the text itself, or as much of its end as patterns may be long. It is looked up in the segments
    /// once, here, whatever the number of matches that are read.
    pub fn search<'a>(
        &'a self,
        cursor: Cursor,
        context: &'a [Token],
        limits: SearchLimits,
    ) -> Search<'a> {
        Search::new(
            &self.live,
            &self.sealed,
            cursor,
            context,
            self.config.pattern_tokens_max,
            limits,
        )
    }

    /// The document and offset of a sighting, or `None` if the document was removed since.
    pub fn origin(&self, sighting: Sighting) -> Option<Origin> {
        sighting.origin(&self.live, &self.sealed)
    }

    /// The segment of a sealed document, and the document's number in it.
    fn find_sealed(&self, key: DocumentKey) -> Option<(usize, usize)> {
        self.sealed
            .iter()
            .enumerate()
            .find_map(|(segment, mounted)| Some((segment, mounted.find(key)?)))
    }

    /// Moves a document from its segment to the live part, all of it or its first `output_len` tokens of output.
    fn unseal(&mut self, key: DocumentKey, output_len: Option<u32>) -> Result<(), IndexError> {
        let (segment, number) = self
            .find_sealed(key)
            .ok_or(IndexError::UnknownDocument(key))?;
        let held = self.sealed[segment].segment.clone();
        let document = held.view().document(number);
        let output = match output_len {
            Some(len) => &document.output[..document.output.len().min(len as usize)],
            None => document.output,
        };
        self.live
            .check_room(0, document.left_context.len() + output.len())?;
        self.live.open(key, document.left_context.iter().copied())?;
        self.live.append(key, output)?;
        self.sealed[segment].mask(key);
        Ok(())
    }
}
