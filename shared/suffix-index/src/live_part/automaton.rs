//! The generalised suffix automaton: states, suffix links, counts. Knows tokens and places, not documents.
//!
//! A state stands for all strings that end at the same set of places. The longest of them has `len`
//! tokens; the others are its suffixes, down to one token more than the `len` of the state's `link`.

use std::mem::size_of;

use super::edges::{Edge, Edges, Fan, StateId};
use crate::Token;
use crate::memory::{fetch, make_room};

/// The state of the empty string.
pub(crate) const ROOT: StateId = 0;

/// Keeps state numbers and slab offsets within 32 bits (an automaton has at most 1.5 transitions per
/// state, and blocks at most double that, with as much again given up while growing).
pub(crate) const STATES_MAX: usize = 1 << 28;

/// "More than one": how often a string occurs is only asked to tell one from several.
const SEVERAL: u8 = 2;

/// Where an occurrence ends: a document's slot and the position of the last token in it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Place {
    pub(crate) slot: u32,
    pub(crate) position: u32,
}

const NOWHERE: Place = Place {
    slot: u32::MAX,
    position: u32::MAX,
};

pub(crate) struct State {
    /// Length of the longest string of the state.
    pub(crate) len: u32,
    /// State of the longest suffix that ends at more places. The root's is the root.
    pub(crate) link: StateId,
    /// End of an occurrence that was counted: the newest, or for a saturated state a recent one.
    pub(crate) place: Place,
    /// Counted occurrences, saturating at the automaton's cap. Never smaller at `link`.
    pub(crate) count: u16,
    /// Occurrences, counted or not, saturating at `SEVERAL`. Never smaller at `link`.
    occurrences: u8,
    fan: Fan,
}

/// How much was done so far, for tests and gauges that reason about work rather than seconds.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Work {
    /// Tokens appended.
    pub tokens: u64,
    /// States visited to add an occurrence to their count.
    pub climbs: u64,
    /// States visited to add or redirect a transition.
    pub links: u64,
    /// States split in two.
    pub clones: u64,
}

/// A state and how many tokens of its string are meant; kept for contexts and healed on use.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Spot {
    pub(crate) state: StateId,
    pub(crate) len: u32,
}

pub(crate) struct Automaton {
    states: Vec<State>,
    edges: Edges,
    count_cap: u16,
    pub(crate) work: Work,
}

impl Automaton {
    /// `count_cap` is at least 2, so that a saturated state is known to occur more than once.
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
            work: Work::default(),
        }
    }

    pub(crate) fn state(&self, id: StateId) -> &State {
        &self.states[id as usize]
    }

    /// Asks for a state.
    pub(crate) fn fetch(&self, id: StateId) {
        fetch(&self.states, id as usize);
    }

    /// Asks for the link of a state that is at hand.
    pub(crate) fn fetch_link(&self, id: StateId) {
        self.fetch(self.state(id).link);
    }

    /// Asks for the transitions of a state that is at hand.
    pub(crate) fn fetch_edges(&self, id: StateId) {
        self.edges.fetch(&self.state(id).fan);
    }

    /// The longest string at the state's link.
    pub(crate) fn link_of(&self, state: StateId) -> Spot {
        let link = self.state(state).link;
        Spot {
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

    /// Appends `token` to the text that ends in `last`; returns the state of the longer text.
    ///
    /// The text of a document starts at the root, so nothing stands to the left of it and it is the longest
    /// string of its state. A clone takes the shorter strings of a state, so `last` of any document stays
    /// right whatever other documents append: this is what makes interleaved appends work (Blumer et
    /// al. 1985; Takagi et al., "Fully-Online Suffix Tree and Directed Acyclic Word Graph Construction for
    /// Multiple Texts").
    pub(crate) fn extend(&mut self, last: StateId, token: Token) -> StateId {
        self.work.tokens += 1;
        let len = self.state(last).len + 1;
        // Another document went this way before: no new state, but perhaps a split.
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

    /// The state whose longest string has `len` tokens and is reached from `from` by `token`: the state that
    /// is there, or, where that one holds longer strings as well, a clone that takes the shorter ones.
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
        // What ended in one state until now ended at the same places, so the clone starts with the same
        // count and place. The climb that follows adds the new occurrence to it.
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
        make_room(&mut self.states, 1);
        self.states.push(state);
        id
    }

    /// Records that the text of `state`, and so each of its suffixes, occurs once more, ending at `place`.
    /// `counted` is false for left context, which matches but must never be offered.
    ///
    /// Counts only grow towards the root, so the climb ends at the first saturated state: all beyond are
    /// saturated too. A state is therefore visited at most `count_cap` times and the work is at most
    /// 2 * `count_cap` per token whatever the text (in practice a handful).
    pub(crate) fn record(&mut self, state: StateId, place: Place, counted: bool) {
        let mut at = state;
        while at != ROOT {
            self.work.climbs += 1;
            let state = &mut self.states[at as usize];
            if counted {
                // Also where the climb ends: the newest place is the one least likely to be evicted.
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

    /// Follows `token` from the longest match `spot` of a context to that of the context and the token, at
    /// most `len_max` tokens of it. Amortised O(1): a step adds at most one to the length, and each link
    /// takes at least one away.
    pub(crate) fn step(&self, spot: Spot, token: Token, len_max: u32) -> Spot {
        let Spot { mut state, mut len } = self.fit(spot);
        loop {
            if let Some(next) = self.next(state, token) {
                return self.fit(Spot {
                    state: next,
                    len: (len + 1).min(len_max),
                });
            }
            if state == ROOT {
                return Spot::default();
            }
            state = self.state(state).link;
            len = self.state(state).len;
        }
    }

    /// Moves to the state that holds the string of `len` tokens. A state may have been split since the spot
    /// was taken, and its shorter strings then live in the clone, one link away.
    pub(crate) fn fit(&self, spot: Spot) -> Spot {
        let Spot { mut state, len } = spot;
        while state != ROOT && len <= self.state(self.state(state).link).len {
            state = self.state(state).link;
        }
        Spot { state, len }
    }
}
