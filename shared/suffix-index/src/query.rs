//! What an index answers: cursors, matches, and walking on from a match.

use crate::automaton::{Place, ROOT, Spot};
use crate::edges::StateId;
use crate::{DocumentKey, Index, Token};

/// Where a context stands in an index: its longest suffix that occurs there. Plain data; see
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

/// A pattern (a suffix of the context) that was seen before with something after it.
#[derive(Clone, Copy)]
pub struct Match<'a> {
    /// Length of the pattern, tokens: the longest that occurs at exactly these places.
    pub len: u32,
    /// The pattern itself; its [continuations](Node::continuations) are what followed.
    pub node: Node<'a>,
}

/// See [`Index::matches`].
pub struct Matches<'a> {
    index: &'a Index,
    spot: Spot,
}

impl<'a> Matches<'a> {
    pub(crate) fn new(index: &'a Index, cursor: Cursor) -> Self {
        let spot = if index.is_current(&cursor) {
            cursor.spot
        } else {
            Spot::default()
        };
        Matches {
            index,
            spot: index.automaton.fit(spot),
        }
    }
}

impl<'a> Iterator for Matches<'a> {
    type Item = Match<'a>;

    fn next(&mut self) -> Option<Match<'a>> {
        while self.spot.state != ROOT {
            let Spot { state, len } = self.spot;
            let link = self.index.automaton.state(state).link;
            self.spot = Spot {
                state: link,
                len: self.index.automaton.state(link).len,
            };
            if self.index.offered(state).next().is_some() {
                return Some(Match {
                    len,
                    node: Node {
                        index: self.index,
                        at: At::State(state),
                    },
                });
            }
        }
        None
    }
}

/// A string of tokens in the index: a pattern, or a pattern and a draft that continues it.
#[derive(Clone, Copy)]
pub struct Node<'a> {
    index: &'a Index,
    at: At,
}

#[derive(Clone, Copy)]
enum At {
    State(StateId),
    /// The string occurs once, so what follows is read from the text: contiguous memory instead of a state
    /// per token.
    Text(Place),
}

/// A token that was seen after a [`Node`].
#[derive(Clone, Copy)]
pub struct Continuation<'a> {
    /// The token.
    pub token: Token,
    /// How often it was seen there; at least 1, at most the index's `count_cap`.
    pub count: u32,
    /// The node's string and the token.
    pub node: Node<'a>,
}

/// A place where something offered stands, to credit a document with an accepted draft.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Origin {
    /// The document.
    pub document: DocumentKey,
    /// Offset of the token in the document's output.
    pub position: u32,
}

impl<'a> Node<'a> {
    /// How many different tokens are known to follow, without looking at them: an upper bound, as left
    /// context and removed text count too. What [`continuations`](Self::continuations) costs is
    /// proportional to it.
    pub fn fan_out(&self) -> usize {
        match self.at {
            At::State(state) => self.index.automaton.fan_out(state),
            At::Text(_) => 1,
        }
    }

    /// Replaces the content of `into` by all continuations, most frequent first and then by token. Returns
    /// the sum of their counts.
    pub fn continuations(&self, into: &mut Vec<Continuation<'a>>) -> u64 {
        self.continuations_where(|_, _| true, into)
    }

    /// As [`continuations`](Self::continuations), but collects only those for which `keep(count, total)`
    /// holds; the returned total is that of all.
    pub fn continuations_where(
        &self,
        keep: impl Fn(u32, u64) -> bool,
        into: &mut Vec<Continuation<'a>>,
    ) -> u64 {
        into.clear();
        match self.at {
            At::Text(place) => {
                let document = &self.index.documents[place.slot as usize];
                let Some((position, token)) = document.after(place.position) else {
                    return 0;
                };
                if keep(1, 1) {
                    let node = Node {
                        index: self.index,
                        at: At::Text(Place { position, ..place }),
                    };
                    into.push(Continuation {
                        token,
                        count: 1,
                        node,
                    });
                }
                1
            }
            At::State(state) => {
                let total = self
                    .index
                    .offered(state)
                    .map(|(_, _, count)| u64::from(count))
                    .sum();
                for (token, target, count) in self.index.offered(state) {
                    if keep(count, total) {
                        into.push(Continuation {
                            token,
                            count,
                            node: Node::of_state(self.index, target),
                        });
                    }
                }
                into.sort_unstable_by_key(|next| (std::cmp::Reverse(next.count), next.token));
                total
            }
        }
    }

    /// Where the last token of the string stands: the newest occurrence known, if one is left.
    pub fn origin(&self) -> Option<Origin> {
        let place = match self.at {
            At::State(state) => self.index.automaton.state(state).place,
            At::Text(place) => place,
        };
        let document = self.index.documents.get(place.slot as usize)?;
        document.is_live(place.position).then(|| Origin {
            document: document.key,
            position: document.output_offset(place.position),
        })
    }

    /// For a state that is offered: its place is alive.
    fn of_state(index: &'a Index, state: StateId) -> Self {
        let at = if index.automaton.occurs_once(state) {
            At::Text(index.automaton.state(state).place)
        } else {
            At::State(state)
        };
        Node { index, at }
    }
}

impl Index {
    /// Transitions of a state that lead to what may be offered: token, target and count. A count of 0 is
    /// left context; a dead place is all that is known of a string whose newest occurrence was removed.
    fn offered(&self, state: StateId) -> impl Iterator<Item = (Token, StateId, u32)> + '_ {
        self.automaton.edges(state).filter_map(|edge| {
            let target = self.automaton.state(edge.target);
            (target.count > 0 && self.is_live(target.place)).then_some((
                edge.token,
                edge.target,
                u32::from(target.count),
            ))
        })
    }
}
