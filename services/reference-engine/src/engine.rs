//! A step: what is asked, checked; one forward pass; the target's tokens walked through the drafts.
//!
//! No clock and no threads: the caller passes `now`, and one owner calls at a time.

use std::sync::Arc;
use std::time::{Duration, Instant};

use refrain_protocol::engine::{
    CloseRequest, Draft, StepItem, StepOutput, StepRequest, StepResult,
};
use refrain_protocol::{ApiError, EngineSessionId, TokenId};
use refrain_speculation::verify::sampled::Weight;

use crate::blocks::Branch;
use crate::config::EngineConfig;
use crate::drafter::{DraftRows, Drafter, Growth, Made, Network, Wish};
use crate::forward::{Forward, Pass};
use crate::kv::{BLOCK_TOKENS, KvShape};
use crate::limits::{Known, Limits, unknown_session};
use crate::sampler::{Proposal, Sampler};
use crate::sessions::{Session, Sessions};
use crate::weights::Model;

/// Results of a step, and the work it took.
#[derive(Debug)]
pub(crate) struct Stepped {
    pub(crate) results: Vec<StepResult>,
    /// Rows that were computed.
    pub(crate) computed_tokens: usize,
    /// Tokens whose KV another session had.
    pub(crate) cached_tokens: usize,
    /// Rows of the drafter.
    pub(crate) draft_rows: DraftRows,
    /// Tokens whose captured states were dropped before the head had read them.
    pub(crate) states_dropped: u64,
}

/// A step between its phases. Dropping it drops its sessions.
pub(crate) struct Batch {
    results: Vec<Option<StepResult>>,
    works: Vec<(Plan, Session)>,
    draft_rows: DraftRows,
}

/// The model and its sessions.
#[derive(Debug)]
pub(crate) struct Core {
    model: Arc<Model>,
    limits: Limits,
    forward: Forward,
    drafter: Option<Drafter>,
    sampler: Sampler,
    sessions: Sessions,
}

/// An item that passed all checks.
struct Plan {
    /// Place in the request.
    item: usize,
    id: EngineSessionId,
    cached_tokens: usize,
    /// First position to compute.
    start: usize,
    /// What is computed of the text from `start` on.
    chain: Vec<TokenId>,
    sample: bool,
    max_emit: usize,
    draft: Draft,
    /// So many nodes of the draft came with the item; what the engine adds by itself stands behind them.
    sent: usize,
    /// Of the draft that the engine is to make by itself.
    growth: Option<Growth>,
    /// The nodes that came with the item and that the engine drafted as well.
    agreed: Vec<u32>,
    /// What a drawn draft, a chain, was drawn from, by node; empty for any other.
    drawn_from: Vec<Vec<Weight>>,
    /// For each draft node, its place among those that are computed.
    computed: Vec<Option<usize>>,
    nodes: Vec<TokenId>,
    parents: Vec<Option<u32>>,
}

#[cfg(test)]
impl Batch {
    /// Of each item that is in order.
    pub(crate) fn drafts(&self) -> Vec<&Draft> {
        self.works.iter().map(|(plan, _)| &plan.draft).collect()
    }
}

impl Core {
    /// `network` drafts, and was made for `model`.
    pub(crate) fn new(
        model: Arc<Model>,
        network: Option<Box<dyn Network>>,
        config: &EngineConfig,
    ) -> Self {
        let rows_max = config.max_step_tokens as usize;
        let drafter = network.map(|network| Drafter::new(network, rows_max));
        let own = u32::try_from(model.architecture.max_context).unwrap_or(u32::MAX);
        let limits = Limits {
            vocab_size: u32::try_from(model.architecture.vocab_size).unwrap_or(u32::MAX),
            max_context: config.max_context.unwrap_or(own).min(own),
            max_batch: config.max_batch,
            max_step_tokens: config.max_step_tokens,
            max_draft_tokens: config.max_draft_tokens,
            drafter: drafter.as_ref().map(Drafter::capabilities),
        };
        let window = config.eagle3_window_tokens;
        let trails = drafter
            .as_ref()
            .map(|drafter| drafter.trail_shape(&model, window));
        let captured = drafter.as_ref().map_or(&[][..], Drafter::captured);
        Core {
            limits,
            forward: Forward::new(&model, captured, config.threads),
            drafter,
            sampler: Sampler::default(),
            sessions: Sessions::new(
                KvShape::of(&model.architecture),
                trails,
                config.max_sessions as usize,
                config.kv_tokens_max,
                Duration::from_millis(config.session_idle_ms),
            ),
            model,
        }
    }

    pub(crate) fn limits(&self) -> Limits {
        self.limits
    }

    pub(crate) fn sessions(&self) -> &Sessions {
        &self.sessions
    }

    /// Ends sessions; unknown ones are ignored.
    pub(crate) fn close(&mut self, request: &CloseRequest) {
        for id in &request.sessions {
            self.sessions.close(*id, request.keep_kv);
        }
    }

    /// Closes idle sessions. Returns how many.
    pub(crate) fn expire(&mut self, now: Instant) -> usize {
        self.sessions.expire(now)
    }

    /// One batch: [`Core::begin`], [`Core::draft`] and [`Core::verify`].
    ///
    /// # Errors
    /// As of [`Core::begin`].
    #[cfg(test)]
    pub(crate) fn step(&mut self, request: StepRequest, now: Instant) -> Result<Stepped, ApiError> {
        let mut batch = self.begin(request, now)?;
        self.draft(&mut batch);
        Ok(self.verify(batch, now))
    }

    /// Checks a batch, and takes its sessions out of the table.
    ///
    /// # Errors
    /// `InvalidRequest` for a batch that breaks a limit as a whole. What is wrong with one item is that
    /// item's result, and leaves its session as it was, cut to `keep_len` at most.
    pub(crate) fn begin(&mut self, request: StepRequest, now: Instant) -> Result<Batch, ApiError> {
        self.limits.check_batch(&request)?;
        let mut results: Vec<Option<StepResult>> = Vec::new();
        let mut plans = Vec::new();
        let mut blocks = 0;
        for (index, item) in request.items.into_iter().enumerate() {
            match self.prepare(index, item, &mut blocks, now) {
                Ok(plan) => {
                    plans.push(plan);
                    results.push(None);
                }
                Err(error) => results.push(Some(Err(error))),
            }
        }
        self.reserve_drafters(&mut plans, blocks);
        // Only now are sessions taken out of the table: each may have lent its KV to another of the batch.
        let mut works: Vec<(Plan, Session)> = Vec::with_capacity(plans.len());
        for plan in plans {
            match self.sessions.take(plan.id) {
                Some(mut session) => {
                    session.kv.grow(plan.start + plan.chain.len());
                    works.push((plan, session));
                }
                None => results[plan.item] = Some(Err(unknown_session(plan.id))),
            }
        }
        Ok(Batch {
            results,
            works,
            draft_rows: DraftRows::default(),
        })
    }

    /// Makes the drafts that the engine is to make by itself. Says whether there were any to make.
    pub(crate) fn draft(&mut self, batch: &mut Batch) -> bool {
        let Some(drafter) = &mut self.drafter else {
            return false;
        };
        let mut wishes = Vec::new();
        let mut wishing = Vec::new();
        for (plan, session) in &mut batch.works {
            if let (Some(growth), Some(trail)) = (plan.growth, &mut session.trail) {
                wishes.push(Wish {
                    text: &session.text,
                    trail,
                    growth,
                    sampling: &session.sampling,
                });
                wishing.push(plan);
            }
        }
        if wishes.is_empty() {
            return false;
        }
        let (drafts, rows) = drafter.draft(&self.model, wishes);
        batch.draft_rows = rows;
        for (plan, made) in wishing.into_iter().zip(drafts) {
            plan.merge(made);
        }
        true
    }

    /// One forward pass over everything, and the walks through the drafts.
    pub(crate) fn verify(&mut self, batch: Batch, now: Instant) -> Stepped {
        let Batch {
            mut results,
            mut works,
            draft_rows,
        } = batch;
        let mut branches: Vec<Branch<'_>> = works
            .iter_mut()
            .map(|(plan, session)| Branch {
                nodes: &plan.nodes,
                parents: &plan.parents,
                logits: plan.sample,
                capture: session.trail.is_some(),
                ..Branch::new(&mut session.kv, plan.start, &plan.chain)
            })
            .collect();
        let pass = self.forward.run(&self.model, &mut branches);
        let mut stepped = Stepped {
            results: Vec::new(),
            computed_tokens: 0,
            cached_tokens: 0,
            draft_rows,
            states_dropped: 0,
        };
        for (branch, (plan, mut session)) in works.into_iter().enumerate() {
            stepped.computed_tokens += plan.chain.len() + plan.nodes.len();
            stepped.cached_tokens += plan.cached_tokens;
            let output = self.emit(&pass, branch, &plan, &mut session);
            if let Some(trail) = &mut session.trail {
                stepped.states_dropped += trail.take_dropped();
            }
            self.sessions.put(plan.id, session, now);
            results[plan.item] = Some(Ok(output));
        }
        stepped.results = results
            .into_iter()
            .map(|result| {
                result
                    .unwrap_or_else(|| Err(ApiError::internal("an item was left without a result")))
            })
            .collect();
        stepped
    }

    /// Checks an item and brings its session's text up to date. `blocks` counts what earlier items of the
    /// batch are going to allocate.
    fn prepare(
        &mut self,
        index: usize,
        item: StepItem,
        blocks: &mut u64,
        now: Instant,
    ) -> Result<Plan, ApiError> {
        let id = item.session;
        let known = self.sessions.get(id).map(|session| Known {
            text_len: session.text.len(),
            self_drafts: session.trail.is_some(),
        });
        let text_len = self.limits.check_item(index, &item, known)?;
        let opened = item.open.is_some();
        if let Some(spec) = item.open {
            self.sessions.open(id, spec, now)?;
        }
        let session = self
            .sessions
            .get_mut(id)
            .ok_or_else(|| unknown_session(id))?;
        let keep = item.keep_len as usize;
        let is_greedy = session.sampling.temperature == 0.0;
        session.text.truncate(keep);
        session.text.extend_from_slice(&item.tokens);
        session.kv.truncate(keep.min(text_len - 1));
        if let Some(trail) = &mut session.trail {
            trail.truncate(keep, keep.min(text_len - 1));
        }
        // Looking for a shared prefix pays from about a block of tokens on; short pieces are just computed.
        let cached_tokens = if opened || text_len > session.kv.len() + BLOCK_TOKENS {
            self.sessions.reuse(id)
        } else {
            0
        };
        let draft = item.draft.unwrap_or_default();
        let max_emit = (item.max_emit as usize).min(self.limits.max_context as usize - text_len);
        // A node at depth d matters for token d + 1 of the output.
        let growth = item.self_draft.map(|wanted| Growth {
            depth: (wanted.depth as usize).min(max_emit.saturating_sub(1)),
            top_k: wanted.top_k as usize,
            tokens_max: wanted.tokens_max as usize,
            path_prob_min: wanted.path_prob_min,
            sampled: wanted.sampled && !is_greedy,
        });
        let growth = growth.filter(|growth| growth.depth > 0 && growth.tokens_max > 0);
        let accepted_max = growth
            .map_or(0, |growth| growth.depth)
            .max(draft.tokens.len());
        let grown = text_len + accepted_max;
        let needed = self
            .sessions
            .get(id)
            .map_or(0, |session| session.kv.growth_blocks(grown));
        if let Err(error) = self.sessions.reserve(*blocks + needed, 0) {
            if opened {
                self.sessions.close(id, false);
            } else if let Some(session) = self.sessions.get_mut(id) {
                session.text.truncate(keep);
                session.kv.truncate(keep.saturating_sub(1));
                if let Some(trail) = &mut session.trail {
                    trail.truncate(keep, keep.saturating_sub(1));
                }
            }
            return Err(error);
        }
        *blocks += needed;
        let session = self.sessions.get(id).ok_or_else(|| unknown_session(id))?;
        let start = session.kv.len();
        let end = if item.sample { text_len } else { text_len - 1 };
        let chain = session.text[start..end].to_vec();
        let mut plan = Plan {
            item: index,
            id,
            cached_tokens,
            start,
            chain,
            sample: item.sample,
            max_emit,
            computed: Vec::with_capacity(draft.tokens.len()),
            nodes: Vec::new(),
            parents: Vec::new(),
            sent: draft.tokens.len(),
            draft,
            growth,
            agreed: Vec::new(),
            drawn_from: Vec::new(),
        };
        plan.select_nodes();
        Ok(plan)
    }

    /// Makes room for what the drafter is to compute, after `blocks` for the target. Where there is none, the item
    /// goes without draft: its output is the same.
    fn reserve_drafters(&mut self, plans: &mut [Plan], blocks: u64) {
        let mut draft_blocks = 0;
        for plan in plans.iter_mut().filter(|plan| plan.growth.is_some()) {
            let needed = self.sessions.get_mut(plan.id).map_or(0, |session| {
                session.trail.as_mut().map_or(0, |trail| {
                    let rows = trail.owed(session.text.len());
                    trail.growth_blocks(&rows)
                })
            });
            match self.sessions.reserve(blocks, draft_blocks + needed) {
                Ok(()) => draft_blocks += needed,
                Err(_) => plan.growth = None,
            }
        }
    }

    /// Walks the target's own tokens through the draft, and brings text and KV to where the walk ends.
    fn emit(
        &mut self,
        pass: &Pass,
        branch: usize,
        plan: &Plan,
        session: &mut Session,
    ) -> StepOutput {
        let text_len = session.text.len();
        let mut output = StepOutput {
            self_drafted: plan.computed[plan.sent..].iter().flatten().count() as u32,
            agreed_nodes: plan.agreed.clone(),
            emitted: Vec::new(),
            accepted_nodes: Vec::new(),
            text_len: text_len as u32,
            cached_tokens: plan.cached_tokens as u32,
            stopped: false,
            logprobs: session
                .sampling
                .top_logprobs
                .filter(|_| plan.sample)
                .map(|_| Vec::new()),
        };
        if let Some(trail) = &mut session.trail {
            for row in 0..plan.chain.len() {
                trail.push(plan.start + row, pass.captured(branch, row));
            }
        }
        if !plan.sample {
            return output;
        }
        let mut at: Option<u32> = None;
        loop {
            // Nodes too deep to be reached are not computed, and the walk ends before them.
            let node = match at {
                None => None,
                Some(node) => match plan.computed[node as usize] {
                    Some(node) => Some(node),
                    None => break,
                },
            };
            let position = (text_len + output.emitted.len()) as u32;
            let (logits, sampling) = (pass.logits(branch, node), &session.sampling);
            let drawn = match plan.proposal(at) {
                None => self.sampler.draw(logits, sampling, position),
                Some(proposal) => self.sampler.judge(logits, sampling, position, proposal),
            };
            output.emitted.push(drawn.token);
            if let (Some(logprobs), Some(logprob)) = (&mut output.logprobs, drawn.logprob) {
                logprobs.push(logprob);
            }
            let child = (0..plan.draft.tokens.len()).find(|node| {
                plan.draft.parents[*node] == at && plan.draft.tokens[*node] == drawn.token
            });
            output
                .accepted_nodes
                .extend(child.map(|child| child as u32));
            output.stopped = session.sampling.stop_token_ids.contains(&drawn.token);
            if output.stopped || output.emitted.len() >= plan.max_emit || child.is_none() {
                break;
            }
            at = child.map(|child| child as u32);
        }
        session.text.extend_from_slice(&output.emitted);
        output.text_len = session.text.len() as u32;
        // The forward pass of the last token stays owed, even where it was an accepted node.
        let owed = output.emitted.len().saturating_sub(1);
        for node in output.accepted_nodes.iter().take(owed) {
            if let Some(node) = plan.computed[*node as usize] {
                if let Some(trail) = &mut session.trail {
                    let row = plan.chain.len() + node;
                    trail.push(session.kv.len(), pass.captured(branch, row));
                }
                pass.accept(branch, node, &mut session.kv);
            }
        }
        output
    }
}

impl Plan {
    /// What was drawn to follow a node of a drawn draft, or the text.
    fn proposal(&self, at: Option<u32>) -> Option<Proposal<'_>> {
        let next = at.map_or(0, |at| at as usize + 1);
        Some(Proposal {
            token: *self.draft.tokens.get(next)?,
            from: self.drawn_from.get(next)?,
        })
    }

    /// Adds what the engine drafted to what came with the item.
    fn merge(&mut self, made: Made) {
        let sent = self.sent as u32;
        let places = self.draft.merge(&made.draft);
        self.agreed = places.into_iter().filter(|node| *node < sent).collect();
        self.agreed.sort_unstable();
        self.drawn_from = made.drawn_from;
        self.select_nodes();
    }

    /// Picks the draft nodes whose logits can matter: a node at depth d matters for token d + 1 of the output.
    fn select_nodes(&mut self) {
        self.computed.clear();
        self.nodes.clear();
        self.parents.clear();
        let mut depths: Vec<usize> = Vec::with_capacity(self.draft.tokens.len());
        for (token, parent) in self.draft.tokens.iter().zip(&self.draft.parents) {
            let parent = parent.map(|parent| parent as usize);
            let depth = parent.map_or(1, |parent| depths[parent] + 1);
            depths.push(depth);
            if depth < self.max_emit {
                self.computed.push(Some(self.nodes.len()));
                self.nodes.push(*token);
                // A parent is less deep, so it was picked as well.
                self.parents.push(
                    parent
                        .and_then(|parent| self.computed[parent])
                        .map(|node| node as u32),
                );
            } else {
                self.computed.push(None);
            }
        }
    }
}
