//! The engine's own drafts, whoever makes them: an EAGLE-3 head or a draft model, which are [`Network`]s.
//!
//! [`Drafter`] serves all sessions of a step together: first it catches up with their texts in one pass,
//! then all trees grow level by level, one pass per level. What a session keeps between steps is its
//! [`Trail`].

mod network;
mod states;
mod trail;
mod tree;

use std::ops::Range;

use refrain_protocol::TokenId;
use refrain_protocol::engine::{Draft, DrafterCapabilities, Sampling};
use refrain_speculation::verify::sampled::Weight;

use crate::attention::DraftKv;
use crate::blocks::Branch;
use crate::math::{exp_weights, peak};
use crate::sampler::Sampler;
use crate::weights::Model;

pub(crate) use network::{DraftOutputs, Network};
pub(crate) use states::StatesShape;
pub(crate) use trail::{Trail, TrailShape};
pub(crate) use tree::Growth;
use tree::{Guess, Tree};

/// Deepest draft that may be asked for: heads are trained for fewer.
const DEPTH_MAX: u32 = 16;
/// Most children of a node that may be asked for.
const TOP_K_MAX: u32 = 16;

/// One session's wish for a draft.
pub(crate) struct Wish<'a> {
    /// All of its text; what the target captured of all but the last token is in `trail`, as far as it is kept.
    pub(crate) text: &'a [TokenId],
    pub(crate) trail: &'a mut Trail,
    pub(crate) growth: Growth,
    /// How a drawn draft is drawn.
    pub(crate) sampling: &'a Sampling,
}

/// A draft that was made.
#[derive(Clone, Debug, Default)]
pub(crate) struct Made {
    pub(crate) draft: Draft,
    /// What each token was drawn from, if they were drawn.
    pub(crate) drawn_from: Vec<Vec<Weight>>,
}

/// Rows that a drafter computed.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct DraftRows {
    /// Of texts.
    pub(crate) follow: usize,
    /// Of drafts.
    pub(crate) guess: usize,
}

/// Drafts with a network; keeps the buffers between drafts.
#[derive(Debug)]
pub(crate) struct Drafter {
    network: Box<dyn Network>,
    /// Most rows of texts in one step. A session that owes more gets its draft in a later one.
    follow_max: usize,
    weights: Vec<f32>,
    sampler: Sampler,
}

/// A tree in the making.
struct Growing<'a> {
    /// Place among the wishes.
    wish: usize,
    trail: &'a mut Trail,
    tree: Tree,
    guesser: Guesser<'a>,
    /// The rows' keys and values.
    kv: DraftKv,
    /// Output of the text's last row, then of each row of the tree.
    hidden: Vec<f32>,
}

/// How guesses come out of logits.
enum Guesser<'a> {
    /// The likeliest so many.
    Likeliest(usize),
    /// One that is drawn.
    Drawn {
        sampling: &'a Sampling,
        /// Where in the text the next one would stand.
        position: u32,
        from: Vec<Vec<Weight>>,
    },
}

impl Drafter {
    pub(crate) fn new(network: Box<dyn Network>, follow_max: usize) -> Self {
        Drafter {
            network,
            follow_max,
            weights: Vec::new(),
            sampler: Sampler::default(),
        }
    }

    /// What it may be asked for.
    pub(crate) fn capabilities(&self) -> DrafterCapabilities {
        DrafterCapabilities {
            kind: self.network.kind(),
            depth_max: DEPTH_MAX,
            top_k_max: TOP_K_MAX.min(self.network.tokens().len() as u32),
        }
    }

    /// Layers of the target whose outputs it reads, counted from 0.
    pub(crate) fn captured(&self) -> &[usize] {
        self.network.captured()
    }

    /// What it keeps of a session; see [`Network::trail_shape`].
    pub(crate) fn trail_shape(&self, target: &Model, window: usize) -> TrailShape {
        self.network.trail_shape(target, window)
    }

    /// A draft for each wish; an empty one where the drafter cannot go on from the end of the text yet.
    pub(crate) fn draft(
        &mut self,
        target: &Model,
        wishes: Vec<Wish<'_>>,
    ) -> (Vec<Made>, DraftRows) {
        let mut drafts = vec![Made::default(); wishes.len()];
        let mut rows = DraftRows::default();
        let mut growing = self.follow(target, wishes, &mut rows);
        loop {
            let guessed = self.guess(target, &mut growing);
            if guessed == 0 {
                break;
            }
            rows.guess += guessed;
        }
        for growing in growing {
            drafts[growing.wish] = Made {
                draft: growing.tree.into_draft(),
                drawn_from: match growing.guesser {
                    Guesser::Likeliest(_) => Vec::new(),
                    Guesser::Drawn { from, .. } => from,
                },
            };
        }
        (drafts, rows)
    }

    /// Computes the rows of texts that are owed, and plants a tree at the end of each text that is done.
    fn follow<'a>(
        &mut self,
        target: &Model,
        wishes: Vec<Wish<'a>>,
        computed: &mut DraftRows,
    ) -> Vec<Growing<'a>> {
        let mut left = self.follow_max;
        let mut captured = Vec::new();
        let mut followed: Vec<(usize, Wish<'a>, Range<usize>, bool)> = Vec::new();
        for (at, wish) in wishes.into_iter().enumerate() {
            let mut rows = wish.trail.owed(wish.text.len());
            let complete = rows.len() <= left;
            rows.end = rows.end.min(rows.start + left);
            if !rows.is_empty() {
                left -= rows.len();
                for position in rows.clone() {
                    captured.extend_from_slice(wish.trail.captured(position));
                }
                followed.push((at, wish, rows, complete));
            }
        }
        if followed.is_empty() {
            return Vec::new();
        }
        let mut branches: Vec<Branch<'_>> = followed
            .iter_mut()
            .map(|(_, wish, rows, complete)| {
                let tokens = wish.trail.tokens(wish.text, rows);
                let (kv, start) = wish.trail.extend(rows);
                Branch {
                    logits: *complete,
                    ..Branch::new(kv, start, tokens)
                }
            })
            .collect();
        let outputs = self.network.follow(target, &mut branches, &captured);
        computed.follow = self.follow_max - left;
        let mut growing = Vec::with_capacity(followed.len());
        for (branch, (at, wish, _, complete)) in followed.into_iter().enumerate() {
            wish.trail.release_read();
            if complete {
                let mut tree = Tree::new(wish.growth);
                let mut guesser = Guesser::of(&wish);
                tree.grow(&[self.guesses(outputs.logits(branch, 0), &mut guesser)]);
                growing.push(Growing {
                    wish: at,
                    tree,
                    guesser,
                    kv: DraftKv::new(wish.trail.kv().shape(), wish.growth.rows_max()),
                    hidden: outputs.hidden(branch, 0).to_vec(),
                    trail: wish.trail,
                });
            }
        }
        growing
    }

    /// Grows every tree by a level. Gives the rows that it took; none when all are complete.
    fn guess(&mut self, target: &Model, growing: &mut [Growing<'_>]) -> usize {
        let width = self.network.hidden_width();
        let mut hidden = Vec::new();
        let mut rows = 0;
        for growing in growing.iter() {
            for parent in &growing.tree.row_parents()[growing.tree.followed()..] {
                let row = parent.map_or(0, |parent| parent as usize + 1);
                hidden.extend_from_slice(&growing.hidden[row * width..][..width]);
                rows += 1;
            }
        }
        if rows == 0 {
            return 0;
        }
        // A complete tree takes part with no rows, so that branches and trees stay in step.
        let (mut branches, mut drafts) = (Vec::new(), Vec::new());
        for growing in growing.iter_mut() {
            let kv = growing.trail.kv();
            let end = kv.len();
            branches.push(Branch {
                nodes: growing.tree.rows(),
                parents: growing.tree.row_parents(),
                known: growing.tree.followed(),
                logits: true,
                ..Branch::new(kv, end, &[])
            });
            drafts.push(&mut growing.kv);
        }
        let outputs = self
            .network
            .guess(target, &mut branches, &mut drafts, &hidden);
        let counts: Vec<usize> = branches.iter().map(Branch::rows).collect();
        for (branch, (growing, count)) in growing.iter_mut().zip(&counts).enumerate() {
            if *count == 0 {
                continue;
            }
            let mut guesses = Vec::with_capacity(*count);
            for row in 0..*count {
                guesses.push(self.guesses(outputs.logits(branch, row), &mut growing.guesser));
                growing
                    .hidden
                    .extend_from_slice(outputs.hidden(branch, row));
            }
            growing.tree.grow(&guesses);
        }
        rows
    }

    fn guesses(&mut self, logits: &[f32], guesser: &mut Guesser<'_>) -> Vec<Guess> {
        match guesser {
            Guesser::Likeliest(count) => self.likeliest(logits, *count),
            Guesser::Drawn {
                sampling,
                position,
                from,
            } => {
                let tokens = self.network.tokens();
                let drawn = self.sampler.propose(logits, sampling, *position, tokens);
                *position += 1;
                let guess = drawn.map(|drawn| {
                    from.push(drawn.from);
                    Guess {
                        token: drawn.token,
                        prob: drawn.prob,
                    }
                });
                guess.into_iter().collect()
            }
        }
    }

    /// The `count` likeliest tokens by these logits, likeliest first, lower draft ids first among equals.
    fn likeliest(&mut self, logits: &[f32], count: usize) -> Vec<Guess> {
        let peak = peak(logits);
        if !peak.is_finite() {
            return Vec::new();
        }
        self.weights.resize(logits.len(), 0.0);
        exp_weights(logits, peak, 1.0, &mut self.weights);
        let mut best: Vec<(f32, usize)> = Vec::with_capacity(count + 1);
        let mut total = 0.0;
        for (id, weight) in self.weights.iter().enumerate() {
            // Not a number: that token is never guessed.
            if weight.is_nan() {
                continue;
            }
            total += weight;
            if best.len() == count && best.last().is_some_and(|(least, _)| weight <= least) {
                continue;
            }
            let at = best.partition_point(|(other, _)| other >= weight);
            best.insert(at, (*weight, id));
            best.truncate(count);
        }
        best.into_iter()
            .map(|(weight, id)| Guess {
                token: self.network.tokens()[id],
                prob: weight / total,
            })
            .collect()
    }
}

impl<'a> Guesser<'a> {
    fn of(wish: &Wish<'a>) -> Self {
        match wish.growth.sampled {
            false => Guesser::Likeliest(wish.growth.top_k),
            true => Guesser::Drawn {
                sampling: wish.sampling,
                position: wish.text.len() as u32,
                from: Vec::new(),
            },
        }
    }
}
