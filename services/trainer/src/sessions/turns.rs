//! The turns of a session as plain values, and the trajectories that they make.
//!
//! A turn has the tokens that it adds to those of the turn before. Turns that go on from the same one are branches.
//! Each way from a first turn to a last one is a trajectory: what the engine has seen, token by token.

use std::collections::HashMap;
use std::sync::Arc;

use refrain_gateway::ChoiceFigures;
use refrain_protocol::TokenId;
use refrain_protocol::openai::WeightSpan;
use serde::{Deserialize, Serialize};

use super::digests::Digest;

/// A prompt and its answer.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub(crate) struct Turn {
    /// The number of the turn that it goes on from.
    pub(crate) parent: Option<u32>,
    /// The tokens of the prompt behind those of that turn.
    pub(crate) prompt: Vec<TokenId>,
    /// The tokens that were sampled.
    pub(crate) output: Vec<TokenId>,
    /// The log-probability of each of them.
    pub(crate) logprobs: Vec<f32>,
    /// The versions of the weights that sampled them: how many tokens, and by which.
    pub(crate) versions: Vec<(u32, u64)>,
    pub(crate) finish: String,
    pub(crate) figures: TurnFigures,
    /// The digest of all messages up to the answer; `None` if nothing can go on from it.
    pub(crate) digest: Option<Digest>,
    /// Unix time of its end, seconds.
    pub(crate) ended_s: u64,
}

/// The figures of a turn.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct TurnFigures {
    pub(crate) cached_tokens: u64,
    pub(crate) steps: u64,
    pub(crate) drafted: u64,
    pub(crate) accepted: u64,
}

impl From<ChoiceFigures> for TurnFigures {
    fn from(figures: ChoiceFigures) -> Self {
        TurnFigures {
            cached_tokens: figures.cached_tokens,
            steps: figures.steps,
            drafted: figures.drafted,
            accepted: figures.accepted,
        }
    }
}

/// The turns of a session.
#[derive(Clone, Debug, Default, PartialEq)]
pub(crate) struct Turns {
    turns: Vec<Arc<Turn>>,
    /// The last turn with each digest.
    by_digest: HashMap<Digest, u32>,
}

/// The tokens that the engine has seen from a first turn to a last one.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Trajectory<'a> {
    /// The turns in order, each with the place of its first token.
    pub(crate) turns: Vec<(usize, &'a Turn)>,
    /// Tokens at its beginning that an earlier trajectory of the list has as well.
    pub(crate) shared_tokens: usize,
}

impl Turn {
    /// Tokens that it adds.
    pub(crate) fn len(&self) -> usize {
        self.prompt.len() + self.output.len()
    }

    /// Bytes of memory that it takes, about.
    pub(crate) fn bytes(&self) -> u64 {
        let tokens = 4 * (self.prompt.len() + 2 * self.output.len()) + 16 * self.versions.len();
        (size_of::<Turn>() + tokens) as u64
    }

    /// The versions of the output, whose first token is at `start`.
    pub(crate) fn spans(&self, start: usize) -> Vec<WeightSpan> {
        let mut at = start;
        let span = |(tokens, version): &(u32, u64)| {
            let start = at;
            at += *tokens as usize;
            WeightSpan {
                start,
                end: at,
                version: *version,
            }
        };
        self.versions.iter().map(span).collect()
    }
}

impl Turns {
    /// Adds a turn. Returns its number.
    pub(crate) fn add(&mut self, turn: Turn) -> u32 {
        let number = self.turns.len() as u32;
        if let Some(digest) = turn.digest {
            self.by_digest.insert(digest, number);
        }
        self.turns.push(Arc::new(turn));
        number
    }

    pub(crate) fn len(&self) -> usize {
        self.turns.len()
    }

    pub(crate) fn get(&self, number: u32) -> Option<&Turn> {
        self.turns.get(number as usize).map(|turn| &**turn)
    }

    /// The turn that a chat goes on from, and how many of its messages that turn has. `digests` are those of its
    /// first 0, 1, 2 and so on messages.
    pub(crate) fn latest(&self, digests: &[Digest]) -> Option<(u32, usize)> {
        let known = |(count, digest): (usize, &Digest)| {
            let turn = self.by_digest.get(digest)?;
            Some((*turn, count))
        };
        digests.iter().enumerate().rev().find_map(known)
    }

    /// The turns from a first one up to this.
    fn way(&self, number: u32) -> Vec<u32> {
        let mut way: Vec<u32> =
            std::iter::successors(Some(number), |at| self.get(*at)?.parent).collect();
        way.reverse();
        way
    }

    /// All tokens up to the end of a turn.
    pub(crate) fn tokens(&self, number: u32) -> Vec<TokenId> {
        let turns = self.way(number).into_iter().filter_map(|at| self.get(at));
        turns
            .flat_map(|turn| turn.prompt.iter().chain(&turn.output))
            .copied()
            .collect()
    }

    /// The ends of the trajectories in order: the last turn of each, and how many tokens at its beginning an earlier
    /// trajectory has as well. Only whole turns count.
    pub(crate) fn ends(&self) -> Vec<(u32, usize)> {
        let mut has_children = vec![false; self.turns.len()];
        for parent in self.turns.iter().filter_map(|turn| turn.parent) {
            has_children[parent as usize] = true;
        }
        let mut is_listed = vec![false; self.turns.len()];
        let ends = (0u32..).zip(&has_children).filter(|(_, has)| !**has);
        let shared = |(end, _): (u32, _)| {
            let (mut at, mut shared_tokens) = (0, 0);
            for number in self.way(end) {
                at += self.turns[number as usize].len();
                if std::mem::replace(&mut is_listed[number as usize], true) {
                    shared_tokens = at;
                }
            }
            (end, shared_tokens)
        };
        ends.map(shared).collect()
    }

    /// The trajectory that ends so.
    pub(crate) fn trajectory(&self, (end, shared_tokens): (u32, usize)) -> Trajectory<'_> {
        let mut at = 0;
        let turns = self.way(end).into_iter().map(|number| {
            let turn = &*self.turns[number as usize];
            let start = at;
            at += turn.len();
            (start, turn)
        });
        Trajectory {
            turns: turns.collect(),
            shared_tokens,
        }
    }
}

impl Trajectory<'_> {
    /// Its tokens.
    pub(crate) fn tokens(&self) -> usize {
        self.turns.last().map_or(0, |(at, turn)| at + turn.len())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn turn(parent: Option<u32>, prompt: &[TokenId], output: &[TokenId], digest: Digest) -> Turn {
        Turn {
            parent,
            prompt: prompt.to_vec(),
            output: output.to_vec(),
            digest: Some(digest),
            ..Turn::default()
        }
    }

    #[test]
    fn each_end_is_a_trajectory_that_tells_what_it_shares() {
        let mut turns = Turns::default();
        let first = turns.add(turn(None, &[1, 2], &[3], 10));
        let second = turns.add(turn(Some(first), &[4], &[5, 6], 11));
        let branch = turns.add(turn(Some(first), &[7], &[8], 12));
        let third = turns.add(turn(Some(second), &[9], &[10], 13));
        let apart = turns.add(turn(None, &[20], &[21], 14));
        assert_eq!(turns.tokens(third), [1, 2, 3, 4, 5, 6, 9, 10]);
        let all = turns.ends().into_iter();
        let shown: Vec<_> = all
            .map(|end| turns.trajectory(end))
            .map(|one| {
                let places: Vec<_> = one.turns.iter().map(|(at, _)| *at).collect();
                (places, one.tokens(), one.shared_tokens)
            })
            .collect();
        assert_eq!(
            shown,
            [(vec![0, 3], 5, 0), (vec![0, 3, 6], 8, 3), (vec![0], 2, 0),]
        );
        assert_eq!(turns.tokens(branch), [1, 2, 3, 7, 8]);
        assert_eq!(turns.tokens(apart), [20, 21]);
    }

    #[test]
    fn a_chat_goes_on_from_the_last_turn_that_it_begins_with() {
        let mut turns = Turns::default();
        let first = turns.add(turn(None, &[1], &[2], 102));
        let second = turns.add(turn(Some(first), &[3], &[4], 104));
        assert_eq!(
            turns.latest(&[100, 101, 102, 103, 104, 105]),
            Some((second, 4))
        );
        assert_eq!(
            turns.latest(&[100, 101, 102, 203, 204, 205]),
            Some((first, 2))
        );
        assert_eq!(turns.latest(&[100, 101]), None);
        // The later one of two answers with the same words counts.
        let again = turns.add(turn(None, &[1], &[5], 102));
        assert_eq!(turns.latest(&[100, 101, 102]), Some((again, 2)));
    }

    #[test]
    fn spans_have_their_places_in_the_trajectory() {
        let turn = Turn {
            versions: vec![(2, 0), (3, 7)],
            ..Turn::default()
        };
        let spans: Vec<_> = turn
            .spans(5)
            .iter()
            .map(|s| (s.start, s.end, s.version))
            .collect();
        assert_eq!(spans, [(5, 7, 0), (7, 10, 7)]);
    }
}
