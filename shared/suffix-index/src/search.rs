//! Searches: the suffixes of a context that occur, longest first, and their continuations.
//!
//! Continuations are counted over the live part and all segments together.

mod continuations;

use crate::live_part::{Cursor, DocumentPosition, LivePart, StateId, StatePoint};
use crate::memory_hints::prefetch;
use crate::mounted_segment::MountedSegment;
use crate::segment::{SEPARATOR, SegmentSearch, SegmentSearches};
use crate::{Origin, Token};

/// Limits on how much a search reads.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SearchLimits {
    /// Longest pattern, tokens. Longer matches are cut to this length.
    pub len_max: u32,
    /// Maximum number of sealed occurrences of a pattern that are read.
    ///
    /// If there are more, this many evenly spaced ones are read, and each weighs as much as the part it stands for.
    /// Totals stay exact. The count of a token is wrong by at most one such weight for each run of that token in the
    /// order of the occurrences. `usize::MAX` reads all of them, which is exact and takes longer.
    pub samples_max: usize,
    /// Maximum number of distinct continuations of a pattern that are read from the live part. If there are more,
    /// none is read.
    ///
    /// Such patterns are short, for instance a comma, and predict little. Reading everything that followed them would
    /// be most of the cost of a search. If segments know the pattern too, `samples_max` is another limit here. Beyond
    /// it, the samples of the segments represent the live part as well.
    pub fan_out_max: usize,
}

impl SearchLimits {
    /// No limits. Every count is exact, except for saturated counts of the live part.
    pub const EXACT: SearchLimits = SearchLimits {
        len_max: u32::MAX,
        samples_max: usize::MAX,
        fan_out_max: usize::MAX,
    };
}

/// A pattern that was seen before. A pattern is a suffix of the context.
#[derive(Clone, Copy, Debug)]
pub struct Match {
    /// Length of the longest pattern that occurs at exactly these places, tokens.
    pub len: u32,
    /// Length of the longest pattern that occurs at more places, or 0 if there is none. Patterns of lengths in
    /// between occur at the same places as this one.
    pub next_len: u32,
    /// The pattern itself. Its [continuations](Search::continuations) are the tokens that followed.
    pub node: Node,
}

/// A string of tokens in the index: a pattern, or a pattern and a draft that continues it. It is valid for the search
/// that made it, until the next match of that search.
#[derive(Clone, Copy, Debug)]
pub struct Node {
    live: Option<LiveNode>,
    /// The range of the sealed occurrences in `Search::hits`.
    hits: (u32, u32),
    /// Number of draft tokens after the pattern.
    depth: u32,
}

#[derive(Clone, Copy, Debug)]
enum LiveNode {
    State(StateId),
    /// The string occurs once in the live part. The continuation is then read from the text, which is contiguous
    /// memory, instead of a state per token.
    Text(DocumentPosition),
}

/// A token that followed a [`Node`].
#[derive(Clone, Copy, Debug)]
pub struct Continuation {
    /// The token.
    pub token: Token,
    /// How often it followed, at least 1. Counts of the live part saturate, and counts of sampled occurrences are
    /// estimates.
    pub count: u32,
    /// The node's string, followed by the token.
    pub node: Node,
    /// One occurrence of it.
    pub sighting: Sighting,
}

/// An occurrence of an offered token, as plain data. It is valid until the index changes.
/// [`Index::origin`](crate::Index::origin) returns the document.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Sighting(SightingPlace);

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum SightingPlace {
    Live(DocumentPosition),
    Sealed {
        segment: u32,
        position: u32,
    },
    /// The token after an entry of a suffix array.
    After {
        segment: u32,
        entry: u32,
    },
}

/// A sealed occurrence.
#[derive(Clone, Copy, Debug)]
struct SealedHit {
    /// The token that follows, as last read.
    token: Token,
    place: HitPosition,
    /// Number of occurrences that it stands for.
    weight: u32,
    segment: u32,
}

#[derive(Clone, Copy, Debug)]
enum HitPosition {
    /// The text position of the token after the pattern.
    Text(u32),
    /// An entry of the suffix array. The text position is looked up when a draft goes on from here.
    Entry(u32),
}

/// A search for one context, from the longest pattern that occurs to the shortest. See
/// [`Index::search`](crate::Index::search).
pub struct Search<'a> {
    live_part: &'a LivePart,
    sealed: &'a [MountedSegment],
    limits: SearchLimits,
    /// The automaton's state for the current pattern.
    live: Option<StateId>,
    /// The automaton's state for the next shorter pattern that has another state.
    live_next: StatePoint,
    segments: SegmentSearches<'a>,
    /// Sealed occurrences of the current pattern. Those of one node are neighbours.
    hits: Vec<SealedHit>,
    hits_read: usize,
    /// The transitions of the last live state that was read: token, target and count.
    fan: Vec<(Token, StateId, u32)>,
    /// Number of occurrences from which `hits` were sampled.
    occurrences_read: usize,
}

impl<'a> Search<'a> {
    pub(crate) fn new(
        live_part: &'a LivePart,
        sealed: &'a [MountedSegment],
        cursor: Cursor,
        context: &'a [Token],
        pattern_tokens_max: u32,
        limits: SearchLimits,
    ) -> Self {
        let point = if live_part.is_current(&cursor) {
            cursor.at_most(limits.len_max).point
        } else {
            StatePoint::default()
        };
        let automaton = &live_part.automaton;
        automaton.prefetch(point.state);
        let len_max = limits.len_max.min(pattern_tokens_max) as usize;
        let views = sealed.iter().map(|mounted| mounted.segment.view());
        let segments = SegmentSearches::new(views, context, len_max, limits.samples_max);
        let mut live_next = automaton.fit(point);
        // Skip states without continuations, such as the end of a document that ends like no other text.
        while live_next.len > 0 && automaton.fan_out(live_next.state) == 0 {
            live_next = automaton.link_of(live_next.state);
        }
        automaton.prefetch_link(live_next.state);
        Search {
            live_part,
            sealed,
            limits,
            live: None,
            live_next,
            segments,
            hits: Vec::new(),
            hits_read: 0,
            fan: Vec::new(),
            occurrences_read: 0,
        }
    }

    /// Number of entries of suffix arrays that were read so far. Tests assert this work instead of seconds.
    #[cfg(test)]
    pub(crate) fn entries_read(&self) -> usize {
        self.segments.entries_read() + self.hits_read
    }

    /// Length of the next match, or 0 if there is none.
    pub fn next_len(&self) -> u32 {
        self.live_next.len.max(self.segments.next_len() as u32)
    }

    /// The next match. Each set of occurrences is returned once, with the longest pattern that has it.
    ///
    /// Where occurrences are sampled, a set that is larger than the last one by less than a quarter is skipped, since
    /// the difference would be lost in the sampling.
    pub fn next_match(&mut self) -> Option<Match> {
        loop {
            let len = self.next_len();
            if len == 0 {
                return None;
            }
            let live = self.descend_live(len);
            self.segments.descend(len as usize);
            let occurrences = self.segments.iter().map(SegmentSearch::occurrences).sum();
            let is_sampled = occurrences > self.limits.samples_max;
            if !live && is_sampled && occurrences * 4 < self.occurrences_read * 5 {
                continue;
            }
            self.read(occurrences);
            let node = Node {
                live: self.live.map(LiveNode::State),
                hits: (0, self.hits.len() as u32),
                depth: 0,
            };
            return Some(Match {
                len,
                next_len: self.next_len(),
                node,
            });
        }
    }

    /// Shortens the pattern in the live part to `len` tokens. Returns whether that changed its state.
    fn descend_live(&mut self, len: u32) -> bool {
        if self.live_next.len < len {
            return false;
        }
        let state = self.live_next.state;
        self.live = Some(state);
        let automaton = &self.live_part.automaton;
        self.live_next = automaton.link_of(state);
        automaton.prefetch_link(self.live_next.state);
        automaton.prefetch_edges(state);
        true
    }

    /// Reads the sealed occurrences of the current pattern, or a sample of them, and prefetches the tokens that
    /// follow. `all` is their number.
    fn read(&mut self, all: usize) {
        self.hits.clear();
        self.occurrences_read = all;
        let samples_max = self.limits.samples_max;
        self.hits.reserve(all.min(samples_max));
        for (segment, search) in self.segments.iter().enumerate() {
            let occurrences = search.occurrences();
            if occurrences == 0 {
                continue;
            }
            // Samples are divided by occurrences, so that each one stands for about as many of them.
            let count_max = if all <= samples_max {
                occurrences
            } else {
                (samples_max as u64 * occurrences as u64).div_ceil(all as u64) as usize
            }
            .max(1);

            let mounted = &self.sealed[segment];
            let segment = segment as u32;
            let known = match mounted.is_whole() && all > samples_max {
                true => search.sample_known(count_max),
                false => None,
            };
            if let Some(known) = known {
                self.hits
                    .extend(known.map(|(entry, token, weight)| SealedHit {
                        token,
                        place: HitPosition::Entry(entry),
                        weight,
                        segment,
                    }));
                continue;
            }
            let read = search
                .sample(count_max)
                .map(|(end, weight)| (end + 1, weight))
                .filter(|&(position, _)| mounted.is_whole() || !mounted.is_masked_at(position));
            let text = self.segments.text(segment);
            self.hits.extend(read.map(|(position, weight)| {
                prefetch(text, position as usize);
                SealedHit {
                    token: SEPARATOR,
                    place: HitPosition::Text(position),
                    weight,
                    segment,
                }
            }));
        }
        self.hits_read += self.hits.len();
    }
}

impl Sighting {
    /// The document and offset of the occurrence, or `None` if the document was removed since.
    pub(crate) fn origin(self, live: &LivePart, sealed: &[MountedSegment]) -> Option<Origin> {
        match self.0 {
            SightingPlace::Live(place) => live.origin(place),
            SightingPlace::Sealed { segment, position } => {
                sealed.get(segment as usize)?.origin(position)
            }
            SightingPlace::After { segment, entry } => {
                let mounted = sealed.get(segment as usize)?;
                mounted.origin(mounted.segment.view().after(entry)?)
            }
        }
    }
}
