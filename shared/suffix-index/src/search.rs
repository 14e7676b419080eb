//! What an index answers: the patterns that a context ends with, longest first, and what followed each, counted
//! over the live part and all segments together.

mod continuations;

use crate::live::automaton::{Place, Spot};
use crate::live::edges::StateId;
use crate::memory::fetch;
use crate::segment::{Probe, Probes, SEPARATOR};
use crate::{DocumentKey, Index, Token};

/// Where a context stands in the live part of an index: its longest suffix that occurs there. Plain data; see
/// [`Index::start`], [`Index::tip`] and [`Index::advance`].
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Cursor {
    pub(crate) generation: u64,
    pub(crate) spot: Spot,
}

impl Cursor {
    /// Length of the match, tokens.
    pub fn len(&self) -> u32 {
        self.spot.len
    }

    /// Whether nothing of the context was found.
    pub fn is_empty(&self) -> bool {
        self.spot.len == 0
    }

    /// The same context with patterns of at most `len` tokens.
    pub fn at_most(self, len: u32) -> Cursor {
        Cursor {
            spot: Spot {
                len: self.spot.len.min(len),
                ..self.spot
            },
            ..self
        }
    }
}

/// How much of the occurrences is read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SearchLimits {
    /// Longest pattern, tokens; longer matches are taken for matches of this length.
    pub len_max: u32,
    /// Most sealed occurrences of a pattern that are read. Of more, so many evenly spaced ones are, each weighing
    /// what it stands for: totals stay exact, and the count of a token is wrong by at most one such weight for each
    /// run of it among the occurrences in their order. `usize::MAX` reads all, which is exact, and takes as long.
    pub samples_max: usize,
    /// What the live part saw follow in more different ways than this is not read. Those are short patterns such as
    /// a comma, which predict little; reading all that ever followed one would be most of the cost of a search. Where
    /// segments know the pattern too, `samples_max` is the limit here as well, and beyond it they speak for both.
    pub fan_out_max: usize,
}

impl SearchLimits {
    /// No limits: every count is exact, but for those saturated in the live part.
    pub const EXACT: SearchLimits = SearchLimits {
        len_max: u32::MAX,
        samples_max: usize::MAX,
        fan_out_max: usize::MAX,
    };
}

/// A pattern (a suffix of the context) that was seen before.
#[derive(Clone, Copy, Debug)]
pub struct Match {
    /// Length of the pattern, tokens: the longest that occurs at exactly these places.
    pub len: u32,
    /// Length of the longest pattern that occurs at more places, 0 if there is none. Patterns longer than that have
    /// the places of this one.
    pub next_len: u32,
    /// The pattern itself; its [continuations](Search::continuations) are what followed.
    pub node: Node,
}

/// A string of tokens in the index: a pattern, or a pattern and a draft that continues it. It belongs to the search
/// that made it, and to the latest match of that.
#[derive(Clone, Copy, Debug)]
pub struct Node {
    live: Option<At>,
    /// The sealed occurrences, in the search's list of them.
    hits: (u32, u32),
    /// Draft tokens.
    depth: u32,
}

#[derive(Clone, Copy, Debug)]
enum At {
    State(StateId),
    /// The string occurs once in the live part, so what follows is read from the text: contiguous memory instead of a
    /// state per token.
    Text(Place),
}

/// A token that was seen after a [`Node`].
#[derive(Clone, Copy, Debug)]
pub struct Continuation {
    /// The token.
    pub token: Token,
    /// How often it was seen there, at least 1. Saturates for the live part, is an estimate where occurrences were
    /// sampled.
    pub count: u32,
    /// The node's string and the token.
    pub node: Node,
    /// An occurrence of it.
    pub sighting: Sighting,
}

/// An occurrence of something offered; [`Index::origin`] tells whose. Plain data, valid until the index changes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Sighting(Seen);

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Seen {
    Live(Place),
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

/// A place where something offered stands, to credit a document with an accepted draft.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Origin {
    /// The document.
    pub document: DocumentKey,
    /// Offset of the token in the document's output.
    pub position: u32,
}

/// A sealed occurrence.
#[derive(Clone, Copy, Debug)]
struct Hit {
    /// The token that comes next where it was last read.
    token: Token,
    place: HitPlace,
    /// How many occurrences it stands for.
    weight: u32,
    segment: u32,
}

#[derive(Clone, Copy, Debug)]
enum HitPlace {
    /// Text position of the token after the pattern.
    Text(u32),
    /// An entry of the suffix array: all that is known while no more than the next token was asked for.
    Entry(u32),
}

/// A search for one context, from its longest pattern that occurs to the shortest. See [`Index::search`].
pub struct Search<'a> {
    index: &'a Index,
    limits: SearchLimits,
    /// The live part's state for the current pattern.
    live: Option<StateId>,
    /// And for the next shorter pattern that has another one.
    live_next: Spot,
    probes: Probes<'a>,
    /// Occurrences of the current pattern in segments. Those of a node stand together.
    hits: Vec<Hit>,
    hits_read: usize,
    /// How many occurrences those were taken from.
    occurrences_read: usize,
}

impl<'a> Search<'a> {
    pub(crate) fn new(
        index: &'a Index,
        cursor: Cursor,
        context: &'a [Token],
        limits: SearchLimits,
    ) -> Self {
        let spot = if index.is_current(&cursor) {
            cursor.at_most(limits.len_max).spot
        } else {
            Spot::default()
        };
        let automaton = &index.live.automaton;
        automaton.fetch(spot.state);
        let len_max = limits.len_max.min(index.config.pattern_tokens_max) as usize;
        let views = index.sealed.iter().map(|mounted| mounted.segment.view());
        let probes = Probes::new(views, context, len_max, limits.samples_max);
        let mut live_next = automaton.fit(spot);
        // Nothing follows the end of a document that ends as no other text does.
        while live_next.len > 0 && automaton.fan_out(live_next.state) == 0 {
            live_next = automaton.link_of(live_next.state);
        }
        automaton.fetch_link(live_next.state);
        Search {
            index,
            limits,
            live: None,
            live_next,
            probes,
            hits: Vec::new(),
            hits_read: 0,
            occurrences_read: 0,
        }
    }

    /// Entries of suffix arrays that were looked at so far, for tests and gauges that reason about work rather than
    /// seconds.
    pub fn entries_read(&self) -> usize {
        self.probes.entries_read() + self.hits_read
    }

    /// Length of the next match, 0 if there is none.
    pub fn next_len(&self) -> u32 {
        self.live_next.len.max(self.probes.next_len() as u32)
    }

    /// The next match: each set of occurrences once, with the longest pattern that has it. Where occurrences are
    /// sampled, sets that are larger than the last one by less than a quarter are passed over: the difference would be
    /// lost in the sampling.
    pub fn next_match(&mut self) -> Option<Match> {
        loop {
            let len = self.next_len();
            if len == 0 {
                return None;
            }
            let live = self.descend_live(len);
            self.probes.descend(len as usize);
            let occurrences = self.probes.iter().map(Probe::occurrences).sum();
            let is_sampled = occurrences > self.limits.samples_max;
            if !live && is_sampled && occurrences * 4 < self.occurrences_read * 5 {
                continue;
            }
            self.read(occurrences);
            let node = Node {
                live: self.live.map(At::State),
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

    /// Shortens the pattern in the live part; returns whether that changed anything.
    fn descend_live(&mut self, len: u32) -> bool {
        if self.live_next.len < len {
            return false;
        }
        let state = self.live_next.state;
        self.live = Some(state);
        let automaton = &self.index.live.automaton;
        self.live_next = automaton.link_of(state);
        automaton.fetch_link(self.live_next.state);
        automaton.fetch_edges(state);
        true
    }

    /// Reads the sealed occurrences of the current pattern, so many in all, and asks for what follows them.
    fn read(&mut self, all: usize) {
        self.hits.clear();
        self.occurrences_read = all;
        let samples_max = self.limits.samples_max;
        self.hits.reserve(all.min(samples_max));
        for (segment, probe) in self.probes.iter().enumerate() {
            let occurrences = probe.occurrences();
            if occurrences == 0 {
                continue;
            }
            // Each segment's share by its occurrences, so that each sample stands for about as many.
            let count_max = if all <= samples_max {
                occurrences
            } else {
                (samples_max as u64 * occurrences as u64).div_ceil(all as u64) as usize
            }
            .max(1);

            let mounted = &self.index.sealed[segment];
            let segment = segment as u32;
            let known = match mounted.is_whole() && all > samples_max {
                true => probe.sample_known(count_max),
                false => None,
            };
            if let Some(known) = known {
                self.hits.extend(known.map(|(entry, token, weight)| Hit {
                    token,
                    place: HitPlace::Entry(entry),
                    weight,
                    segment,
                }));
                continue;
            }
            let read = probe
                .sample(count_max)
                .map(|(end, weight)| (end + 1, weight))
                .filter(|&(position, _)| mounted.is_whole() || !mounted.is_masked_at(position));
            let text = self.probes.text(segment);
            self.hits.extend(read.map(|(position, weight)| {
                fetch(text, position as usize);
                Hit {
                    token: SEPARATOR,
                    place: HitPlace::Text(position),
                    weight,
                    segment,
                }
            }));
        }
        self.hits_read += self.hits.len();
    }
}

impl Index {
    /// Whose a sighting is, and where; `None` if the document was removed since.
    pub fn origin(&self, sighting: Sighting) -> Option<Origin> {
        match sighting.0 {
            Seen::Live(place) => self.live.origin(place),
            Seen::Sealed { segment, position } => {
                self.sealed.get(segment as usize)?.origin(position)
            }
            Seen::After { segment, entry } => {
                let mounted = self.sealed.get(segment as usize)?;
                mounted.origin(mounted.segment.view().after(entry)?)
            }
        }
    }
}
