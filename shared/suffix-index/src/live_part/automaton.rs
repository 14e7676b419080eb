//! The generalised suffix automaton: states, suffix links and counts. It knows tokens and positions, not documents.
//!
//! A state represents all strings that end at the same set of positions. The longest of them has `len` tokens. The
//! others are its suffixes, down to one token more than the `len` of the state's `link`.

use std::mem::size_of;

use super::edges::{Edge, Edges, Fan, StateId};
use crate::Token;
use crate::memory_hints::{prefetch, reserve_huge};

/// The state of the empty string.
pub(crate) const ROOT: StateId = 0;

/// Maximum number of states, so that state numbers and slab offsets fit into 32 bits. An automaton has at most 1.5
/// transitions per state, blocks at most double that, and blocks given up while growing may take as much again.
pub(crate) const STATES_MAX: usize = 1 << 28;

/// The saturated value of [`State::occurrences`], which only tells one occurrence from several.
const SEVERAL: u8 = 2;

/// The end of an occurrence: the slot of a document, and the position of the last token in it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct DocumentPosition {
    pub(crate) slot: u32,
    pub(crate) position: u32,
}

/// The position of a state without a counted occurrence.
const NOWHERE: DocumentPosition = DocumentPosition {
    slot: u32::MAX,
    position: u32::MAX,
};

pub(crate) struct State {
    /// Length of the longest string of the state.
    pub(crate) len: u32,
    /// State of the longest suffix that ends at more positions. The root's link is the root itself.
    pub(crate) link: StateId,
    /// End of a counted occurrence: the newest one, or a recent one if the state is saturated.
    pub(crate) place: DocumentPosition,
    /// Counted occurrences, saturating at the automaton's cap. The count at `link` is never smaller.
    pub(crate) count: u16,
    /// Occurrences, counted or not, saturating at [`SEVERAL`]. The value at `link` is never smaller.
    occurrences: u8,
    fan: Fan,
}

/// Counters of the work done so far. Tests assert these instead of seconds.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct WorkCounts {
    /// Tokens appended.
    pub(crate) tokens: u64,
    /// States visited to add an occurrence to their count.
    pub(crate) climbs: u64,
    /// States visited to add or redirect a transition.
    pub(crate) links: u64,
    /// States split in two.
    pub(crate) clones: u64,
}

/// A string of the automaton: its state and its length. It may be out of date, and [`Automaton::fit`] corrects it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct StatePoint {
    pub(crate) state: StateId,
    pub(crate) len: u32,
}

pub(crate) struct Automaton {
    states: Vec<State>,
    edges: Edges,
    count_cap: u16,
    pub(crate) work: WorkCounts,
}

impl Automaton {
    /// Creates an empty automaton. The cap is raised to at least 2, so that a saturated state surely occurs more than
    /// once.
    pub(crate) fn new(count_cap: u16) -> Self {
        let root = State {
            len: 0,
            link: ROOT,
            place: NOWHERE,
            count: 0,
            occurrences: SEVERAL,
            fan: Fan::default(),
        };
        Automaton {
            states: vec![root],
            edges: Edges::default(),
            count_cap: count_cap.max(2),
            work: WorkCounts::default(),
        }
    }

    pub(crate) fn state(&self, id: StateId) -> &State {
        &self.states[id as usize]
    }

    /// Prefetches a state.
    pub(crate) fn prefetch(&self, id: StateId) {
        prefetch(&self.states, id as usize);
    }

    /// Prefetches the link of a state that is in the cache.
    pub(crate) fn prefetch_link(&self, id: StateId) {
        self.prefetch(self.state(id).link);
    }

    /// Prefetches the transitions of a state that is in the cache.
    pub(crate) fn prefetch_edges(&self, id: StateId) {
        self.edges.prefetch(&self.state(id).fan);
    }

    /// The longest string of the state's link.
    pub(crate) fn link_of(&self, state: StateId) -> StatePoint {
        let link = self.state(state).link;
        StatePoint {
            state: link,
            len: self.state(link).len,
        }
    }

    pub(crate) fn next(&self, state: StateId, token: Token) -> Option<StateId> {
        self.edges.get(state, &self.state(state).fan, token)
    }

    pub(crate) fn edges(&self, state: StateId) -> impl Iterator<Item = Edge> + '_ {
        self.edges.iter(&self.state(state).fan)
    }

    pub(crate) fn fan_out(&self, state: StateId) -> usize {
        self.state(state).fan.len()
    }

    /// Whether the state's strings occur exactly once, left contexts included.
    pub(crate) fn occurs_once(&self, state: StateId) -> bool {
        self.state(state).occurrences == 1
    }

    pub(crate) fn len(&self) -> usize {
        self.states.len()
    }

    pub(crate) fn bytes(&self) -> usize {
        self.states.capacity() * size_of::<State>() + self.edges.bytes()
    }

    /// Appends `token` to the text that ends in `last`. Returns the state of the longer text.
    ///
    /// The text of a document starts at the root, so nothing is to the left of it, and it is the longest string of
    /// its state. A clone takes the shorter strings of a state, so `last` of any document stays right whatever other
    /// documents append. This makes interleaved appends work (Blumer et al. 1985; Takagi et al., "Fully-Online Suffix
    /// Tree and Directed Acyclic Word Graph Construction for Multiple Texts").
    pub(crate) fn extend(&mut self, last: StateId, token: Token) -> StateId {
        self.work.tokens += 1;
        let len = self.state(last).len + 1;
        // Another document has the same text so far. No state is added, but perhaps one is split.
        if let Some(next) = self.next(last, token) {
            return self.split_to(last, token, next, len);
        }
        let new = self.push(State {
            len,
            link: ROOT,
            place: NOWHERE,
            count: 0,
            occurrences: 0,
            fan: Fan::default(),
        });
        let mut at = last;
        let link = loop {
            self.work.links += 1;
            if let Some(next) = self.next(at, token) {
                break self.split_to(at, token, next, self.state(at).len + 1);
            }
            self.edges
                .insert(at, &mut self.states[at as usize].fan, token, new);
            if at == ROOT {
                break ROOT;
            }
            at = self.state(at).link;
        };
        self.states[new as usize].link = link;
        new
    }

    /// Returns the state that is reached from `from` by `token` and that has a longest string of `len` tokens. That
    /// is `whole`, or, if `whole` has longer strings as well, a new clone that takes the shorter ones.
    fn split_to(&mut self, from: StateId, token: Token, whole: StateId, len: u32) -> StateId {
        if self.state(whole).len == len {
            return whole;
        }
        self.work.clones += 1;
        let State {
            link,
            place,
            count,
            occurrences,
            fan,
            ..
        } = *self.state(whole);
        // All strings of the state ended at the same positions until now, so the clone starts with the same count and
        // position. The climb that follows adds the new occurrence.
        let clone = self.push(State {
            len,
            link,
            place,
            count,
            occurrences,
            fan: Fan::default(),
        });
        self.states[clone as usize].fan = self.edges.copy(clone, fan);
        self.states[whole as usize].link = clone;
        let mut at = from;
        while self.next(at, token) == Some(whole) {
            self.work.links += 1;
            self.edges
                .redirect(at, &mut self.states[at as usize].fan, token, clone);
            if at == ROOT {
                break;
            }
            at = self.state(at).link;
        }
        clone
    }

    fn push(&mut self, state: State) -> StateId {
        let id = self.states.len() as StateId;
        reserve_huge(&mut self.states, 1);
        self.states.push(state);
        id
    }

    /// Records one more occurrence of the text of `state`, and so of each of its suffixes. The occurrence ends at
    /// `place`. `counted` is false for left context, which is matched but must never be offered.
    ///
    /// Counts only grow towards the root, so the climb ends at the first saturated state: all states beyond it are
    /// saturated too. A state is therefore visited at most `count_cap` times, and the work is at most 2 * `count_cap`
    /// per token for any text, and in practice far less.
    pub(crate) fn record(&mut self, state: StateId, place: DocumentPosition, counted: bool) {
        let mut at = state;
        while at != ROOT {
            self.work.climbs += 1;
            let state = &mut self.states[at as usize];
            if counted {
                // The position is stored even where the climb ends: the newest document is the last one to be
                // evicted.
                state.place = place;
                if state.count >= self.count_cap {
                    break;
                }
                state.count += 1;
            } else if state.occurrences == SEVERAL {
                break;
            }
            state.occurrences = (state.occurrences + 1).min(SEVERAL);
            at = state.link;
        }
    }

    /// Follows `token` from the longest match of a context to the longest match of the context and the token, of at
    /// most `len_max` tokens. The cost is amortised O(1): a step adds at most one token to the match, and each link
    /// removes at least one.
    pub(crate) fn step(&self, point: StatePoint, token: Token, len_max: u32) -> StatePoint {
        let StatePoint { mut state, mut len } = self.fit(point);
        loop {
            if let Some(next) = self.next(state, token) {
                return self.fit(StatePoint {
                    state: next,
                    len: (len + 1).min(len_max),
                });
            }
            if state == ROOT {
                return StatePoint::default();
            }
            state = self.state(state).link;
            len = self.state(state).len;
        }
    }

    /// Moves to the state that has the string of `len` tokens. If the state was split since the point was taken, its
    /// shorter strings are in the clone, one link away.
    pub(crate) fn fit(&self, point: StatePoint) -> StatePoint {
        let StatePoint { mut state, len } = point;
        while state != ROOT && len <= self.state(self.state(state).link).len {
            state = self.state(state).link;
        }
        StatePoint { state, len }
    }
}
