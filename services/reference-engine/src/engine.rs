//! A step: what is asked, checked; one forward pass; the target's tokens walked through the drafts.
//!
//! No clock and no threads: the caller passes `now`, and one owner calls at a time.

use std::sync::Arc;
use std::time::{Duration, Instant};

use refrain_protocol::engine::{
    CloseRequest, Draft, StepItem, StepOutput, StepRequest, StepResult,
};
use refrain_protocol::{ApiError, EngineSessionId, TokenId};

use crate::config::EngineConfig;
use crate::forward::{Branch, Forward, Pass};
use crate::kv::{BLOCK_TOKENS, KvShape};
use crate::limits::{Limits, unknown_session};
use crate::sampler::Sampler;
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
}

/// The model and its sessions.
#[derive(Debug)]
pub(crate) struct Core {
    model: Arc<Model>,
    limits: Limits,
    forward: Forward,
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
    /// For each draft node, its place among those that are computed.
    computed: Vec<Option<usize>>,
    nodes: Vec<TokenId>,
    parents: Vec<Option<u32>>,
}

impl Core {
    pub(crate) fn new(model: Arc<Model>, config: &EngineConfig) -> Self {
        let own = u32::try_from(model.architecture.max_context).unwrap_or(u32::MAX);
        let limits = Limits {
            vocab_size: u32::try_from(model.architecture.vocab_size).unwrap_or(u32::MAX),
            max_context: config.max_context.unwrap_or(own).min(own),
            max_batch: config.max_batch,
            max_step_tokens: config.max_step_tokens,
            max_draft_tokens: config.max_draft_tokens,
        };
        Core {
            limits,
            forward: Forward::new(&model, config.threads),
            sampler: Sampler::default(),
            sessions: Sessions::new(
                KvShape::of(&model.architecture),
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

    /// One batch.
    ///
    /// # Errors
    /// `InvalidRequest` for a batch that breaks a limit as a whole. What is wrong with one item is that
    /// item's result, and leaves its session as it was, cut to `keep_len` at most.
    pub(crate) fn step(&mut self, request: StepRequest, now: Instant) -> Result<Stepped, ApiError> {
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
        let mut branches: Vec<Branch<'_>> = works
            .iter_mut()
            .map(|(plan, session)| Branch {
                kv: &mut session.kv,
                start: plan.start,
                chain: &plan.chain,
                nodes: &plan.nodes,
                parents: &plan.parents,
                logits: plan.sample,
            })
            .collect();
        let pass = self.forward.run(&self.model, &mut branches);
        let (mut computed_tokens, mut cached_tokens) = (0, 0);
        for (branch, (plan, mut session)) in works.into_iter().enumerate() {
            computed_tokens += plan.chain.len() + plan.nodes.len();
            cached_tokens += plan.cached_tokens;
            let output = self.emit(&pass, branch, &plan, &mut session);
            self.sessions.put(plan.id, session, now);
            results[plan.item] = Some(Ok(output));
        }
        let results = results
            .into_iter()
            .map(|result| {
                result
                    .unwrap_or_else(|| Err(ApiError::internal("an item was left without a result")))
            })
            .collect();
        Ok(Stepped {
            results,
            computed_tokens,
            cached_tokens,
        })
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
        let known_len = self.sessions.get(id).map(|session| session.text.len());
        let text_len = self.limits.check_item(index, &item, known_len)?;
        let opened = item.open.is_some();
        if let Some(spec) = item.open {
            self.sessions.open(id, spec, now)?;
        }
        let session = self
            .sessions
            .get_mut(id)
            .ok_or_else(|| unknown_session(id))?;
        let keep = item.keep_len as usize;
        session.text.truncate(keep);
        session.text.extend_from_slice(&item.tokens);
        session.kv.truncate(keep.min(text_len - 1));
        // Looking for a shared prefix pays from about a block of tokens on; short pieces are just computed.
        let cached_tokens = if opened || text_len > session.kv.len() + BLOCK_TOKENS {
            self.sessions.reuse(id)
        } else {
            0
        };
        let draft = item.draft.unwrap_or_default();
        let grown = text_len + draft.tokens.len();
        let needed = self
            .sessions
            .get(id)
            .map_or(0, |session| session.kv.growth_blocks(grown));
        if let Err(error) = self.sessions.reserve(*blocks + needed) {
            if opened {
                self.sessions.close(id, false);
            } else if let Some(session) = self.sessions.get_mut(id) {
                session.text.truncate(keep);
                session.kv.truncate(keep.saturating_sub(1));
            }
            return Err(error);
        }
        *blocks += needed;
        let session = self.sessions.get(id).ok_or_else(|| unknown_session(id))?;
        let start = session.kv.len();
        let end = if item.sample { text_len } else { text_len - 1 };
        let chain = session.text[start..end].to_vec();
        let max_emit = (item.max_emit as usize).min(self.limits.max_context as usize - text_len);
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
            draft,
        };
        plan.select_nodes();
        Ok(plan)
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
            self_drafted: 0,
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
            let drawn = self
                .sampler
                .draw(pass.logits(branch, node), &session.sampling, position);
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
                pass.accept(branch, node, &mut session.kv);
            }
        }
        output
    }
}

impl Plan {
    /// Picks the draft nodes whose logits can matter: a node at depth d matters for token d + 1 of the output.
    fn select_nodes(&mut self) {
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
