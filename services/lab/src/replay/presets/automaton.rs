//! A suffix automaton that remembers where each string occurred first: what SAM decoding reads from. It is ours for
//! comparison alone; what Refrain drafts from is the suffix index.

use refrain_suffix_index::Token;

/// Link of the root.
const NONE: u32 = u32::MAX;

/// All substrings of a text that grows.
#[derive(Clone, Debug)]
pub(in super::super) struct Automaton {
    text: Vec<Token>,
    states: Vec<State>,
    /// The whole text.
    last: u32,
}

/// Strings that end at the same places of the text.
#[derive(Clone, Debug)]
struct State {
    /// By token.
    next: Vec<(Token, u32)>,
    /// The longest suffix that ends at more places.
    link: u32,
    /// Length of the longest of them.
    len: u32,
    /// Tokens of the text up to the end of their first occurrence: `min_endpos` of the paper.
    first_end: u32,
}

/// Where a context stands: its longest suffix that occurs in the text.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(super) struct Place {
    state: u32,
    /// Its length.
    pub(super) len: u32,
}

impl Default for Automaton {
    fn default() -> Self {
        let root = State {
            next: Vec::new(),
            link: NONE,
            len: 0,
            first_end: 0,
        };
        Automaton {
            text: Vec::new(),
            states: vec![root],
            last: 0,
        }
    }
}

impl State {
    fn child(&self, token: Token) -> Option<u32> {
        let at = self.next.binary_search_by_key(&token, |next| next.0).ok()?;
        Some(self.next[at].1)
    }

    fn set_child(&mut self, token: Token, child: u32) {
        match self.next.binary_search_by_key(&token, |next| next.0) {
            Ok(at) => self.next[at].1 = child,
            Err(at) => self.next.insert(at, (token, child)),
        }
    }
}

impl Automaton {
    /// Appends to the text, at amortised constant cost but for the search among a state's children.
    pub(in super::super) fn push(&mut self, token: Token) {
        self.text.push(token);
        let len = self.text.len() as u32;
        let new = self.add(State {
            next: Vec::new(),
            link: 0,
            len,
            first_end: len,
        });
        let mut at = self.last;
        self.last = new;
        while at != NONE && self.state(at).child(token).is_none() {
            self.states[at as usize].set_child(token, new);
            at = self.state(at).link;
        }
        let Some(known) = (at != NONE).then(|| self.state(at).child(token)).flatten() else {
            return;
        };
        let len = self.state(at).len + 1;
        if self.state(known).len == len {
            self.states[new as usize].link = known;
            return;
        }
        // The shorter ones of its strings now end here as well. They occurred first where all of them did.
        let shorter = self.add(State {
            len,
            ..self.state(known).clone()
        });
        while at != NONE && self.state(at).child(token) == Some(known) {
            self.states[at as usize].set_child(token, shorter);
            at = self.state(at).link;
        }
        self.states[known as usize].link = shorter;
        self.states[new as usize].link = shorter;
    }

    /// The place of the context with one token more.
    pub(super) fn transfer(&self, place: Place, token: Token) -> Place {
        let Place { mut state, mut len } = self.renewed(place);
        loop {
            if let Some(child) = self.state(state).child(token) {
                let state = child;
                return Place {
                    state,
                    len: len + 1,
                };
            }
            if state == 0 {
                return Place::default();
            }
            state = self.state(state).link;
            len = self.state(state).len;
        }
    }

    /// What followed the first occurrence of the match, at most so many tokens.
    pub(super) fn following(&self, place: Place, tokens: usize) -> &[Token] {
        self.read(place.state, tokens)
    }

    /// The same of the longest suffix of the match whose first occurrence so many tokens follow; of its last token, if
    /// there is none.
    pub(super) fn followed_by(&self, place: Place, tokens: usize) -> &[Token] {
        let mut state = self.renewed(place).state;
        loop {
            let (read, link) = (self.read(state, tokens), self.state(state).link);
            if read.len() == tokens || [0, NONE].contains(&link) {
                return read;
            }
            state = link;
        }
    }

    fn read(&self, state: u32, tokens: usize) -> &[Token] {
        let from = self.state(state).first_end as usize;
        &self.text[from..self.text.len().min(from + tokens)]
    }

    /// A state is divided when some of its strings occur anew; the match may be one of those that left it.
    fn renewed(&self, mut place: Place) -> Place {
        loop {
            let link = self.state(place.state).link;
            if link == NONE || place.len > self.state(link).len {
                return place;
            }
            place.state = link;
        }
    }

    fn state(&self, state: u32) -> &State {
        &self.states[state as usize]
    }

    fn add(&mut self, state: State) -> u32 {
        self.states.push(state);
        self.states.len() as u32 - 1
    }
}
