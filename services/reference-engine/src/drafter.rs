//! Drafts that the engine makes itself, with an EAGLE-3 head or a draft model. Both are [`DraftNetwork`]s.
//!
//! [`Drafter`] serves all sessions of a step together. First it catches up with their texts in one pass. Then all
//! draft trees grow level by level, with one pass per level. A session keeps its [`DrafterState`] between steps.

mod captured_states;
mod draft_form;
pub(crate) mod draft_model;
mod draft_network;
mod draft_tree;
pub(crate) mod eagle3;
mod session_state;

use std::ops::Range;
use std::sync::Arc;

use refrain_protocol::TokenId;
use refrain_protocol::engine::{Draft, DrafterCapabilities, Sampling, SelfDraft};
use refrain_speculation::verify::sampled::Weight;
use refrain_tokenization::Tokenizer;

use crate::config::EngineConfig;
use crate::kernels::{exp_weights, peak};
use crate::model::{HeadFiles, Model, ModelError};
use crate::network::{Branch, DraftKv};
use crate::sampler::{Guess, Sampler};

pub(crate) use draft_form::{AllowedTokens, DraftForm};
pub(crate) use draft_model::backend_network;
pub(crate) use draft_network::{DraftNetwork, RowStates};
pub(crate) use session_state::{DrafterState, DrafterStateShape};

use captured_states::CapturedStatesShape;
use draft_model::DraftModelNetwork;
use draft_network::NetworkProfile;
use draft_tree::DraftTree;
use eagle3::{Eagle3Head, Eagle3Network};

/// Greatest depth that a caller may request. Heads are trained for less.
const DEPTH_MAX: u32 = 16;

/// A request for a draft that continues one session.
pub(crate) struct DraftRequest<'a> {
    /// The whole text of the session.
    pub(crate) text: &'a [TokenId],
    pub(crate) state: &'a mut DrafterState,
    /// Limits and mode of the draft. All counts are at least 1.
    pub(crate) options: SelfDraft,
    /// How tokens are drawn, if the draft is drawn at random.
    pub(crate) sampling: &'a Sampling,
    /// The form that the output must have after the text, if it must have one.
    pub(crate) form: Option<&'a mut dyn DraftForm>,
}

/// A finished draft.
#[derive(Clone, Debug, Default)]
pub(crate) struct CompletedDraft {
    pub(crate) draft: Draft,
    /// The distribution that each token was drawn from. Empty if the tokens were not drawn at random.
    pub(crate) drawn_from: Vec<Vec<Weight>>,
}

/// Numbers of rows that a drafter computed.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct DraftRows {
    /// Rows of texts.
    pub(crate) text: usize,
    /// Rows of drafts.
    pub(crate) draft: usize,
}

/// Makes drafts with a network. It keeps its buffers between drafts.
#[derive(Debug)]
pub(crate) struct Drafter {
    network: Box<dyn DraftNetwork>,
    profile: NetworkProfile,
    /// Maximum number of rows of texts in one step. A session that needs more gets its draft in a later step.
    text_rows_max: usize,
    weights: Vec<f32>,
    /// Logits of the tokens that a form allows.
    masked: Vec<f32>,
    sampler: Sampler,
}

/// A draft tree that is being grown.
struct GrowingTree<'a> {
    /// Index of the request.
    request: usize,
    state: &'a mut DrafterState,
    tree: DraftTree,
    guesser: Guesser<'a>,
    form: Option<&'a mut dyn DraftForm>,
    /// Hidden states of the text's last row, then of each expanded node.
    hidden: Vec<f32>,
}

/// How guesses are chosen from logits.
enum Guesser<'a> {
    /// Chooses this many of the likeliest tokens.
    Likeliest(usize),
    /// Draws one token at random.
    Drawn {
        sampling: &'a Sampling,
        /// Position of the next token in the text.
        position: u32,
        from: Vec<Vec<Weight>>,
    },
}

/// Loads the draft model or the EAGLE-3 head that `config` names, if it names one, for a target with `vocab_size`
/// tokens. A head needs `target`, which a backend does not have.
///
/// # Errors
/// Fails for files that are missing or damaged, and for a drafter that does not fit the target.
pub(crate) fn open_network(
    config: &EngineConfig,
    target: Option<&Model>,
    vocab_size: u32,
    tokenizer: Option<&Tokenizer>,
) -> Result<Option<Box<dyn DraftNetwork>>, ModelError> {
    if let Some(source) = &config.draft_model {
        let draft_model = draft_model::load(source, vocab_size, tokenizer, config.weights)?;
        let network = DraftModelNetwork::new(draft_model, config.threads);
        let weight_bytes = network.weight_bytes();
        tracing::info!(draft_model = source, weight_bytes, "draft model loaded");
        return Ok(Some(Box::new(network)));
    }
    let files = HeadFiles::open(&config.eagle3, &config.model)?;
    let (Some(target), Some(files)) = (target, files) else {
        return Ok(None);
    };
    let head = Eagle3Head::load(&files, target, config.weights)?;
    tracing::info!(
        eagle3 = config.eagle3,
        weight_bytes = head.weight_bytes(),
        draft_vocab = head.tokens.len(),
        "EAGLE-3 head loaded"
    );
    let network = Eagle3Network::new(Arc::new(head), config.threads);
    Ok(Some(Box::new(network)))
}

impl Drafter {
    pub(crate) fn new(network: Box<dyn DraftNetwork>, text_rows_max: usize) -> Self {
        Drafter {
            profile: network.profile(),
            network,
            text_rows_max,
            weights: Vec::new(),
            masked: Vec::new(),
            sampler: Sampler::default(),
        }
    }

    /// Returns the drafts that callers may request.
    pub(crate) fn capabilities(&self) -> DrafterCapabilities {
        DrafterCapabilities {
            kind: self.profile.kind,
            depth_max: DEPTH_MAX,
            top_k_max: self.profile.top_k_max.min(self.profile.tokens.len() as u32),
        }
    }

    /// Returns the indices of the target's layers whose outputs the drafter reads.
    pub(crate) fn captured_layers(&self) -> &[usize] {
        &self.profile.captured_layers
    }

    /// Returns the shape of the drafter's per-session state. If it reads captured states, a session holds at most
    /// `window` of them.
    pub(crate) fn state_shape(&self, target: Option<&Model>, window: usize) -> DrafterStateShape {
        let hidden_size = target.map_or(0, |target| target.architecture.hidden_size);
        let width = self.profile.captured_layers.len() * hidden_size;
        let states = (width > 0).then(|| CapturedStatesShape::new(width, window));
        let backend = self.profile.backend.clone();
        DrafterStateShape::new(self.profile.kv, backend, self.profile.context_max, states)
    }

    /// Makes a draft for each request. A draft is empty if the drafter cannot continue the text yet.
    ///
    /// # Errors
    /// That of the network. The states of the requests must be read anew.
    pub(crate) fn draft(
        &mut self,
        target: Option<&Model>,
        requests: Vec<DraftRequest<'_>>,
    ) -> Result<(Vec<CompletedDraft>, DraftRows), String> {
        let mut drafts = vec![CompletedDraft::default(); requests.len()];
        let mut rows = DraftRows::default();
        let mut trees = self.catch_up(target, requests, &mut rows)?;
        // Keys and values of the expanded nodes.
        let mut kvs: Vec<DraftKv> = trees
            .iter_mut()
            .map(|tree| DraftKv::new(tree.state.kv().shape(), tree.tree.expanded_max()))
            .collect();
        loop {
            let computed = self.grow_level(target, &mut trees, &mut kvs)?;
            if computed == 0 {
                break;
            }
            rows.draft += computed;
        }
        // A backend still has the keys and values of the drafts.
        for tree in &mut trees {
            let kv = tree.state.kv();
            kv.truncate(kv.len());
        }
        for tree in trees {
            drafts[tree.request] = CompletedDraft {
                draft: tree.tree.into_draft(),
                drawn_from: match tree.guesser {
                    Guesser::Likeliest(_) => Vec::new(),
                    Guesser::Drawn { from, .. } => from,
                },
            };
        }
        Ok((drafts, rows))
    }

    /// Computes the missing rows of texts, and starts a tree at the end of each text that is complete.
    fn catch_up<'a>(
        &mut self,
        target: Option<&Model>,
        requests: Vec<DraftRequest<'a>>,
        computed: &mut DraftRows,
    ) -> Result<Vec<GrowingTree<'a>>, String> {
        let mut left = self.text_rows_max;
        let mut captured = Vec::new();
        let mut reading: Vec<(usize, DraftRequest<'a>, Range<usize>, bool)> = Vec::new();
        for (index, request) in requests.into_iter().enumerate() {
            let mut rows = request.state.missing_rows(request.text.len());
            let complete = rows.len() <= left;
            rows.end = rows.end.min(rows.start + left);
            if !rows.is_empty() {
                left -= rows.len();
                for position in rows.clone() {
                    captured.extend_from_slice(request.state.captured(position));
                }
                reading.push((index, request, rows, complete));
            }
        }
        if reading.is_empty() {
            return Ok(Vec::new());
        }
        let mut branches: Vec<Branch<'_>> = reading
            .iter_mut()
            .map(|(_, request, rows, complete)| {
                let tokens = request.state.row_tokens(request.text, rows);
                let (kv, start) = request.state.grow_rows(rows);
                Branch {
                    wants_logits: *complete,
                    ..Branch::new(kv, start, tokens)
                }
            })
            .collect();
        let mut no_drafts = DraftKv::of_branches(&branches);
        let states = RowStates::Captured(&captured);
        let outputs = self
            .network
            .compute(target, &mut branches, &mut no_drafts, states)?;
        computed.text = self.text_rows_max - left;
        let mut trees = Vec::with_capacity(reading.len());
        for (branch, (index, request, _, complete)) in reading.into_iter().enumerate() {
            request.state.release_read_states();
            if complete {
                let mut tree = GrowingTree {
                    request: index,
                    tree: DraftTree::new(request.options),
                    guesser: Guesser::new(&request),
                    form: request.form,
                    hidden: outputs.hidden(branch, 0).to_vec(),
                    state: request.state,
                };
                let guesses = self.guesses(outputs.logits(branch, 0), &mut tree, None);
                tree.tree.grow(&[guesses]);
                trees.push(tree);
            }
        }
        Ok(trees)
    }

    /// Grows every tree by a level. Returns the number of rows that it computed, which is 0 if all trees are
    /// complete.
    fn grow_level(
        &mut self,
        target: Option<&Model>,
        trees: &mut [GrowingTree<'_>],
        kvs: &mut [DraftKv],
    ) -> Result<usize, String> {
        let width = self.profile.hidden_width;
        let mut hidden = Vec::new();
        let mut rows = 0;
        for tree in trees.iter() {
            for parent in &tree.tree.expanded().parents[tree.tree.computed()..] {
                let row = parent.map_or(0, |parent| parent as usize + 1);
                hidden.extend_from_slice(&tree.hidden[row * width..][..width]);
                rows += 1;
            }
        }
        if rows == 0 {
            return Ok(0);
        }
        // A complete tree takes part without rows, so that branches and trees have the same indices.
        let mut branches: Vec<Branch<'_>> = trees
            .iter_mut()
            .map(|tree| {
                let kv = tree.state.kv();
                let end = kv.len();
                Branch {
                    nodes: &tree.tree.expanded().tokens,
                    parents: &tree.tree.expanded().parents,
                    computed_nodes: tree.tree.computed(),
                    wants_logits: true,
                    ..Branch::new(kv, end, &[])
                }
            })
            .collect();
        let states = RowStates::OfParents(&hidden);
        let outputs = self.network.compute(target, &mut branches, kvs, states)?;
        let counts: Vec<usize> = branches.iter().map(Branch::rows).collect();
        for (branch, (tree, count)) in trees.iter_mut().zip(&counts).enumerate() {
            if *count == 0 {
                continue;
            }
            let first = tree.tree.computed();
            let mut guesses = Vec::with_capacity(*count);
            for row in 0..*count {
                let logits = outputs.logits(branch, row);
                guesses.push(self.guesses(logits, tree, Some(first + row)));
                tree.hidden.extend_from_slice(outputs.hidden(branch, row));
            }
            tree.tree.grow(&guesses);
        }
        Ok(rows)
    }

    /// Guesses the token after an expanded node, or after the text. Where the output must have a form, only tokens
    /// that it allows are guessed, with the probabilities that they have among each other: so will the target choose.
    fn guesses(
        &mut self,
        logits: &[f32],
        tree: &mut GrowingTree<'_>,
        node: Option<usize>,
    ) -> Vec<Guess> {
        let allowed = tree.allowed_after(node);
        let mut masked = std::mem::take(&mut self.masked);
        let guesses = match &allowed {
            AllowedTokens::All => self.guess(logits, &mut tree.guesser),
            AllowedTokens::None => Vec::new(),
            AllowedTokens::These(mask) => match mask.only() {
                // It is certain, even if the drafter's own vocabulary lacks it.
                Some(token) => tree.guesser.certain(token),
                None => {
                    masked.clear();
                    let tokens = self.profile.tokens.iter().zip(logits);
                    masked.extend(tokens.map(|(token, logit)| match mask.contains(*token) {
                        true => *logit,
                        false => f32::NEG_INFINITY,
                    }));
                    self.guess(&masked, &mut tree.guesser)
                }
            },
        };
        self.masked = masked;
        guesses
    }

    fn guess(&mut self, logits: &[f32], guesser: &mut Guesser<'_>) -> Vec<Guess> {
        match guesser {
            Guesser::Likeliest(count) => self.likeliest(logits, *count),
            Guesser::Drawn {
                sampling,
                position,
                from,
            } => {
                let tokens = &self.profile.tokens;
                let drawn = self.sampler.draw_draft(logits, sampling, *position, tokens);
                *position += 1;
                let guess = drawn.map(|(guess, weights)| {
                    from.push(weights);
                    guess
                });
                guess.into_iter().collect()
            }
        }
    }

    /// Returns the `count` likeliest tokens, likeliest first. Among equals, lower draft ids come first.
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
            // A token whose logit is NaN is never guessed.
            if weight.is_nan() {
                continue;
            }
            total += weight;
            if best.len() == count && best.last().is_some_and(|(least, _)| weight <= least) {
                continue;
            }
            let place = best.partition_point(|(other, _)| other >= weight);
            best.insert(place, (*weight, id));
            best.truncate(count);
        }
        best.into_iter()
            .map(|(weight, id)| Guess {
                token: self.profile.tokens[id],
                prob: weight / total,
            })
            .collect()
    }
}

impl GrowingTree<'_> {
    /// The tokens that may follow an expanded node, or the text.
    fn allowed_after(&mut self, node: Option<usize>) -> AllowedTokens {
        let Some(form) = &mut self.form else {
            return AllowedTokens::All;
        };
        let expanded = self.tree.expanded();
        let mut path = Vec::new();
        let mut at = node;
        while let Some(node) = at {
            path.push(expanded.tokens[node]);
            at = expanded.parents[node].map(|parent| parent as usize);
        }
        path.reverse();
        form.allowed_after(&path)
    }
}

impl<'a> Guesser<'a> {
    fn new(request: &DraftRequest<'a>) -> Self {
        match request.options.sampled {
            false => Guesser::Likeliest(request.options.top_k as usize),
            true => Guesser::Drawn {
                sampling: request.sampling,
                position: request.text.len() as u32,
                from: Vec::new(),
            },
        }
    }

    /// Guesses the only token that is possible.
    fn certain(&mut self, token: TokenId) -> Vec<Guess> {
        if let Guesser::Drawn { position, from, .. } = self {
            *position += 1;
            from.push(vec![(token, 1.0)]);
        }
        vec![Guess { token, prob: 1.0 }]
    }
}
