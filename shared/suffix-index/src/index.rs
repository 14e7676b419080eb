//! [`Index`]: documents in, cursors and searches out.

use std::sync::Arc;

use crate::live::Live;
use crate::live::automaton::Spot;
use crate::sealed::Mounted;
use crate::{
    Cursor, DocumentKey, IndexError, Search, SearchLimits, Segment, SegmentStats, Token, Work,
};

/// How an [`Index`] counts and remembers.
#[derive(Clone, Debug, PartialEq)]
pub struct IndexConfig {
    /// Counts of the live part saturate here (at least 2). It bounds the work per token on repetitive text; a
    /// distribution is only bent where several continuations of one pattern reach it.
    pub count_cap: u16,
    /// Longest pattern that a cursor keeps track of and a search looks for, tokens (at least 1).
    pub pattern_tokens_max: u32,
    /// [`Index::needs_rebuild`] once more than this share of the live part's tokens is dead.
    pub dead_share_max: f32,
    /// Segments that are put up with before they are merged (at least 1). A search takes one look into each.
    pub segments_max: usize,
    /// A segment is rewritten once more than this share of its tokens is masked.
    pub masked_share_max: f32,
}

impl Default for IndexConfig {
    fn default() -> Self {
        IndexConfig {
            count_cap: 1024,
            pattern_tokens_max: 64,
            dead_share_max: 0.25,
            segments_max: 3,
            masked_share_max: 0.25,
        }
    }
}

/// Sizes of an [`Index`], for gauges and budgets.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct IndexSizes {
    /// Documents in the live part.
    pub live_documents: usize,
    /// Tokens in the live part, left contexts included.
    pub live_tokens: u64,
    /// Tokens that were removed from the live part or cut off, and still cost memory until it is rebuilt.
    pub dead_tokens: u64,
    /// Heap memory of the live part, estimated.
    pub live_bytes: usize,
    /// Number of segments.
    pub segments: usize,
    /// Documents in segments, without masked ones.
    pub segment_documents: usize,
    /// Tokens in segments, without masked ones, left contexts included.
    pub segment_tokens: u64,
    /// Tokens of masked documents.
    pub masked_tokens: u64,
    /// Bytes of the segments and what belongs to them, in memory or mapped.
    pub segment_bytes: usize,
}

/// All documents of one scope: those that may grow in an automaton, and those that were finished and sealed in
/// segments.
///
/// A document is a left context (matched, never offered) and an output that grows. Matches never cross from
/// one document into another. Whatever is offered stands in a document that is there now: not in a removed
/// one, not in a tail that was cut off.
pub struct Index {
    pub(crate) config: IndexConfig,
    pub(crate) live: Live,
    /// No key is in two places, masked documents apart.
    pub(crate) sealed: Vec<Mounted>,
}

impl Index {
    /// An index without documents.
    pub fn new(config: IndexConfig) -> Self {
        let config = IndexConfig {
            pattern_tokens_max: config.pattern_tokens_max.max(1),
            segments_max: config.segments_max.max(1),
            ..config
        };
        Index {
            live: Live::new(&config),
            sealed: Vec::new(),
            config,
        }
    }

    /// Begins a document. Patterns may reach into `left_context`, but none of its tokens is ever offered.
    pub fn open(&mut self, key: DocumentKey, left_context: &[Token]) -> Result<(), IndexError> {
        if self.sealed_place(key).is_some() {
            return Err(IndexError::DuplicateDocument(key));
        }
        self.live.open(key, left_context.iter().copied())
    }

    /// Appends to the output of a document. The tokens can be drafted from at once. Amortised O(1) a token.
    ///
    /// A sealed document is taken back into the live part first, at the cost of its length: what is sealed is meant
    /// to be finished.
    pub fn append(&mut self, key: DocumentKey, tokens: &[Token]) -> Result<(), IndexError> {
        if !self.live.contains(key) && self.sealed_place(key).is_some() {
            self.unseal(key, None)?;
        }
        self.live.append(key, tokens)
    }

    /// Cuts the output of a document to its first `output_len` tokens, for instance where a stop string ended
    /// it after the tokens were appended. The tail is never offered again; appends go on from the cut.
    /// Costs a walk along the rest of the document. Like [`remove`](Self::remove) it leaves something behind. A
    /// sealed document is taken back into the live part, shortened.
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

    /// Removes documents; unknown keys are ignored. Nothing of them is offered from here on.
    ///
    /// In a segment they are masked, which is exact at once; the space comes back when the segment is
    /// [merged](crate::Merge). An automaton cannot forget: until the next rebuild or seal, removed occurrences in the
    /// live part still weigh in the counts of continuations that also stand elsewhere; a continuation whose newest
    /// live occurrence was removed is not offered from there even if an older one remains; and the memory stays. See
    /// [`Rebuild`](crate::Rebuild).
    pub fn remove(&mut self, keys: &[DocumentKey]) {
        for &key in keys {
            if !self.live.remove(key) {
                for mounted in &mut self.sealed {
                    mounted.mask(key);
                }
            }
        }
    }

    /// Whether a document of this key is there.
    pub fn contains(&self, key: DocumentKey) -> bool {
        self.live.contains(key) || self.sealed_place(key).is_some()
    }

    /// Whether a document of this key is there, and sealed.
    pub fn is_sealed(&self, key: DocumentKey) -> bool {
        self.sealed_place(key).is_some()
    }

    /// Length of a document's output, left context excluded.
    pub fn len_of(&self, key: DocumentKey) -> Option<u32> {
        if let Some(document) = self.live.document(key) {
            return Some(document.output_len());
        }
        let (segment, number) = self.sealed_place(key)?;
        let document = self.sealed[segment].segment.view().document(number);
        Some(document.output.len() as u32)
    }

    /// How many of `tokens` a document's output has from `from` on, up to the first that it has not; none where there is no
    /// such document. Costs a look at each of these.
    pub fn agreeing(&self, key: DocumentKey, from: u32, tokens: &[Token]) -> usize {
        fn count(here: impl Iterator<Item = Token>, tokens: &[Token]) -> usize {
            let pairs = here.zip(tokens);
            pairs.take_while(|(here, token)| here == *token).count()
        }
        if let Some(document) = self.live.document(key) {
            return count(document.live_from(document.left_len() + from), tokens);
        }
        let Some((segment, number)) = self.sealed_place(key) else {
            return 0;
        };
        let document = self.sealed[segment].segment.view().document(number);
        let rest = document.output.get(from as usize..).unwrap_or_default();
        count(rest.iter().copied(), tokens)
    }

    /// Number of documents.
    pub fn documents(&self) -> usize {
        let sealed = |mounted: &Mounted| {
            let stats = mounted.stats();
            stats.documents - stats.masked_documents
        };
        self.live.len() + self.sealed.iter().map(sealed).sum::<usize>()
    }

    /// Tokens of all documents, left contexts included.
    pub fn tokens(&self) -> u64 {
        let sealed = |mounted: &Mounted| {
            let stats = mounted.stats();
            stats.tokens - stats.masked_tokens
        };
        self.live.tokens() + self.sealed.iter().map(sealed).sum::<u64>()
    }

    /// Tokens of the live part, left contexts included: what a budget for sealing looks at.
    pub fn live_tokens(&self) -> u64 {
        self.live.tokens()
    }

    /// Tokens of the live part that were removed or cut off since the last rebuild, and still cost memory.
    pub fn dead_tokens(&self) -> u64 {
        self.live.dead_tokens()
    }

    /// Whether enough of the live part is dead for a rebuild to be worth its while.
    pub fn needs_rebuild(&self) -> bool {
        self.live.needs_rebuild(self.config.dead_share_max)
    }

    /// Estimate of the memory held, bytes; mapped segments included.
    pub fn bytes(&self) -> usize {
        self.live.bytes() + self.sealed.iter().map(Mounted::bytes).sum::<usize>()
    }

    /// All sizes. Costs a look at every live document and every segment.
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

    /// States of the automaton, for gauges.
    pub fn states(&self) -> usize {
        self.live.automaton.len()
    }

    /// What was done in the live part so far.
    pub fn work(&self) -> Work {
        self.live.automaton.work
    }

    /// Adds a sealed segment, for instance one that was opened from a file, without its `masked` documents. Of a
    /// document that is there already the one that is there stays and the new one is masked; returns how many those
    /// were.
    pub fn mount(
        &mut self,
        segment: Arc<Segment>,
        masked: impl IntoIterator<Item = DocumentKey>,
    ) -> usize {
        let mut mounted = Mounted::without(segment, masked);
        let known: Vec<DocumentKey> = mounted
            .keys(false)
            .filter(|&key| self.contains(key))
            .collect();
        for &key in &known {
            mounted.mask(key);
        }
        self.sealed.push(mounted);
        known.len()
    }

    /// Adds many segments, no two of which have a document in common, but for masked ones. As for [`mount`](Self::mount)
    /// what is there already stays, but the cost is a look into each segment for each document that is there already,
    /// however many documents come: little for an index that is nearly empty.
    pub fn mount_all(&mut self, mut segments: Vec<Mounted>) {
        let live = self.live.present().map(|(_, document)| document.key);
        let sealed = self.sealed.iter().flat_map(|mounted| mounted.keys(false));
        for key in live.chain(sealed) {
            for mounted in &mut segments {
                mounted.mask(key);
            }
        }
        self.sealed.append(&mut segments);
    }

    /// The segments and their sizes, in the order in which they came.
    pub fn segments(&self) -> impl ExactSizeIterator<Item = (&Arc<Segment>, SegmentStats)> {
        self.sealed
            .iter()
            .map(|mounted| (&mounted.segment, mounted.stats()))
    }

    /// Documents of a segment, by its position, that are no longer there: removed, or taken back to the live part. They
    /// are not part of the segment's bytes; who opens it again has to mask them again.
    pub fn masked_in(&self, position: usize) -> impl Iterator<Item = DocumentKey> + '_ {
        self.sealed
            .get(position)
            .into_iter()
            .flat_map(|mounted| mounted.keys(true))
    }

    /// A cursor for a context, matched from scratch in the live part. Costs O(`pattern_tokens_max`).
    pub fn start(&self, context: &[Token]) -> Cursor {
        let from = context
            .len()
            .saturating_sub(self.config.pattern_tokens_max as usize);
        let mut cursor = self.live.cursor(Spot::default());
        for &token in &context[from..] {
            self.advance(&mut cursor, token);
        }
        cursor
    }

    /// The cursor of a live document, as the context that is being continued: O(1), and exact whatever was appended
    /// meanwhile. Its own tip is no match that offers anything, since nothing follows it. Prefer it to a
    /// cursor of one's own. A sealed document has none.
    pub fn tip(&self, key: DocumentKey) -> Option<Cursor> {
        self.live.tip(key)
    }

    /// The same if the document's output is so long, and no more than one look for both.
    pub fn tip_at(&self, key: DocumentKey, output_len: u32) -> Option<Cursor> {
        self.live.tip_at(key, output_len)
    }

    /// Lets a cursor follow its context by one token. Amortised O(1).
    ///
    /// A cursor holds the longest match at the time; where later appends to the index would have made it
    /// longer it stays a valid, shorter match and catches up as the context moves on. A cursor that is not
    /// [current](Self::is_current) starts over with this token.
    pub fn advance(&self, cursor: &mut Cursor, token: Token) {
        self.live.advance(cursor, token);
    }

    /// Whether the cursor was made by this index since its live part was last rebuilt or sealed. If not,
    /// [`start`](Self::start) over from the end of the context.
    pub fn is_current(&self, cursor: &Cursor) -> bool {
        self.live.is_current(cursor)
    }

    /// The places that a context leads to. `cursor` is where it stands in the live part (one that is not
    /// [current](Self::is_current) finds nothing there); `context` is its text, or as much of its end as patterns may
    /// be long, which is looked up in the segments: once here, whatever the number of matches that are asked for.
    pub fn search<'a>(
        &'a self,
        cursor: Cursor,
        context: &'a [Token],
        limits: SearchLimits,
    ) -> Search<'a> {
        Search::new(self, cursor, context, limits)
    }

    /// Segment and number of a sealed document that is there.
    fn sealed_place(&self, key: DocumentKey) -> Option<(usize, usize)> {
        self.sealed
            .iter()
            .enumerate()
            .find_map(|(segment, mounted)| Some((segment, mounted.find(key)?)))
    }

    /// Takes a document out of its segment into the live part, all of it or its beginning.
    fn unseal(&mut self, key: DocumentKey, output_len: Option<u32>) -> Result<(), IndexError> {
        let (segment, number) = self
            .sealed_place(key)
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
