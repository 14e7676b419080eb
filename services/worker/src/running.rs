//! One chunk while it is decoded: what the engine has of it, what it may draft, what has been said.
//!
//! No clock and no I/O: the decode loop hands in instants and engine outputs.

use std::sync::Arc;
use std::time::Instant;

use refrain_protocol::chunk::{
    ChunkEnd, ChunkEndReason, ChunkRequest, DraftScope, DraftSource, Speculation, StepCounts,
    StepMessage,
};
use refrain_protocol::document::{DocumentHead, DocumentUpdate, FinishReason, LEFT_CONTEXT_TOKENS};
use refrain_protocol::engine::{Draft, SessionSpec, StepItem, StepOutput};
use refrain_protocol::{ApiError, DocumentId, EngineSessionId, ErrorKind};
use refrain_speculation::{
    Candidate, Expansion, Lookup, ProposeParams, Route, Scope, Source, propose, route,
};
use refrain_suffix_index::{DocumentKey, Index, IndexConfig};

use crate::memory::NamespaceMemory;

/// What one step may hold of one request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Room {
    /// Context tokens.
    pub(crate) context: u32,
    /// Draft tokens.
    pub(crate) draft: u32,
}

/// Limits of the engine that matter to one request.
#[derive(Clone, Copy, Debug)]
pub(crate) struct EngineLimits {
    pub(crate) max_context: u32,
    pub(crate) max_draft_tokens: u32,
    pub(crate) tree_drafts: bool,
}

/// The router's settings.
#[derive(Clone, Debug)]
pub(crate) struct Router {
    pub(crate) params: ProposeParams,
    pub(crate) score_threshold: f32,
}

/// A request in the batch.
pub(crate) struct Running {
    pub(crate) request: ChunkRequest,
    pub(crate) memory: Arc<NamespaceMemory>,
    pub(crate) session: EngineSessionId,
    /// Prompt and output.
    text: Vec<u32>,
    /// How much of `text` the engine's session holds; 0 before it is opened.
    engine_len: u32,
    /// Length of `text` when the chunk began.
    start_len: u32,
    /// The request's own tree: prompt and output.
    own: Index,
    head: DocumentHead,
    /// The draft of the step in progress.
    offered: Option<Candidate>,
    /// Length of the session's text that the step in progress brings, what it emits apart.
    sent_len: u32,
    max_emit: u32,
    counts: StepCounts,
    sequence: u64,
    cached_tokens: u32,
    started_at: Instant,
    first_token_at: Option<Instant>,
    first_step_tokens: u32,
    last_token_at: Option<Instant>,
    /// Times the engine lost the session.
    reopened: u32,
}

/// What one step brought.
pub(crate) struct Absorbed {
    pub(crate) message: StepMessage,
    pub(crate) update: DocumentUpdate,
    /// Documents of the namespace whose draft tokens were accepted.
    pub(crate) credited: Vec<DocumentId>,
    pub(crate) end: Option<ChunkEnd>,
}

/// A session that is lost this often within one chunk is the engine's fault, not bad luck.
const REOPENED_MAX: u32 = 3;

const OWN: DocumentKey = DocumentKey(0);

impl Running {
    pub(crate) fn new(
        mut request: ChunkRequest,
        memory: Arc<NamespaceMemory>,
        created_ms: u64,
        index: IndexConfig,
        now: Instant,
    ) -> Result<Self, ApiError> {
        let prompt_len = request.prompt_len as usize;
        let text = std::mem::take(&mut request.tokens);
        let mut own = Index::new(index);
        own.open(OWN, &[])
            .and_then(|()| own.append(OWN, &text))
            .map_err(ApiError::internal)?;
        let head = DocumentHead {
            session: request.session.clone(),
            group: request.group.clone(),
            choice: request.sampling.choice,
            weight_version: 0,
            created_ms,
            left_context: text[prompt_len.saturating_sub(LEFT_CONTEXT_TOKENS)..prompt_len].to_vec(),
        };
        let running = Running {
            start_len: text.len() as u32,
            engine_len: 0,
            text,
            own,
            head,
            offered: None,
            sent_len: 0,
            max_emit: 0,
            counts: StepCounts::default(),
            sequence: 0,
            cached_tokens: 0,
            started_at: now,
            first_token_at: None,
            first_step_tokens: 0,
            last_token_at: None,
            reopened: 0,
            request,
            memory,
            session: new_session()?,
        };
        // What a continued request has said so far can be drafted from here as well; a worker that heard it
        // said has it already.
        running.memory.begin(running.document());
        let output = running.output();
        let held = running
            .memory
            .lock()
            .len_of(running.document())
            .unwrap_or(0);
        let held = held.min(output.len() as u32);
        running
            .memory
            .merge(&running.update(held, output[held as usize..].to_vec(), None));
        Ok(running)
    }

    pub(crate) fn document(&self) -> DocumentId {
        self.request.request.into()
    }

    /// Output tokens so far, earlier chunks included.
    pub(crate) fn output(&self) -> &[u32] {
        &self.text[self.request.prompt_len as usize..]
    }

    pub(crate) fn counts(&self) -> StepCounts {
        self.counts
    }

    /// Whether the next item is decoding: one token of context.
    pub(crate) fn is_decoding(&self) -> bool {
        self.owed() == 1
    }

    /// Context tokens whose forward pass is owed.
    fn owed(&self) -> u32 {
        // The engine always owes the pass over the last token, whether it holds the token already or not.
        (self.text.len() as u32 - self.engine_len).max(1)
    }

    fn emit_left(&self, limits: EngineLimits) -> u32 {
        let emitted = self.text.len() as u32 - self.start_len;
        let by_request = self.request.max_new_tokens.saturating_sub(emitted);
        by_request.min(limits.max_context.saturating_sub(self.text.len() as u32))
    }

    /// The request's part of the next step.
    pub(crate) fn item(
        &mut self,
        room: Room,
        limits: EngineLimits,
        router: &Router,
    ) -> (StepItem, Routed) {
        let owed = self.owed();
        let context = owed.min(room.context.max(1));
        let sample = context == owed;
        let new_from = self.engine_len as usize;
        let new_to = if sample {
            self.text.len()
        } else {
            new_from + context as usize
        };
        let max_emit = self.emit_left(limits).max(1);
        self.sent_len = new_to as u32;
        self.max_emit = max_emit;
        let mut routed = Routed {
            decision: "prefill",
            reason: "prompt",
        };
        self.offered = None;
        if sample {
            let draft_max = room.draft.min(limits.max_draft_tokens).min(max_emit - 1);
            routed = self.draft(draft_max, limits, router);
        }
        let item = StepItem {
            self_draft: None,
            session: self.session,
            open: (self.engine_len == 0).then(|| SessionSpec {
                self_drafts: false,
                namespace: self.memory.id,
                sampling: self.request.sampling.clone(),
            }),
            keep_len: self.engine_len,
            tokens: self.text[new_from..new_to].to_vec(),
            sample,
            draft: self.offered.as_ref().map(wire_draft),
            max_emit,
        };
        (item, routed)
    }

    /// Looks for a draft of at most `draft_max` tokens and lets the router decide.
    fn draft(&mut self, draft_max: u32, limits: EngineLimits, router: &Router) -> Routed {
        if self.request.speculation == Speculation::Off {
            return Routed {
                decision: "plain",
                reason: "off",
            };
        }
        if draft_max == 0 {
            return Routed {
                decision: "plain",
                reason: "no_room",
            };
        }
        let limited;
        let params = if limits.tree_drafts || router.params.expansion == Expansion::Linear {
            &router.params
        } else {
            limited = ProposeParams {
                expansion: Expansion::Linear,
                ..router.params.clone()
            };
            &limited
        };
        let drafts = self.memory.lock();
        let key = DocumentKey(self.document().0);
        let lookup = |scope, index, cursor| Lookup {
            source: Source::Suffix,
            scope,
            index,
            cursor,
            context: &self.text,
        };
        let mut lookups = Vec::with_capacity(2);
        lookups.extend(
            self.own
                .tip(OWN)
                .map(|cursor| lookup(Scope::Request, &self.own, cursor)),
        );
        // A document that was removed while it runs ends elsewhere or is gone; then the end of the text is
        // looked up afresh.
        let is_whole = drafts.len_of(self.document()) == Some(self.output().len() as u32);
        let tip = drafts.index.tip(key).filter(|_| is_whole);
        let cursor = tip.unwrap_or_else(|| drafts.index.start(&self.text));
        lookups.push(lookup(Scope::Tenant, &drafts.index, cursor));
        let candidate = propose(&lookups, params, draft_max as usize);
        drop(lookups);
        drop(drafts);
        let threshold = match self.request.speculation {
            Speculation::Auto => router.score_threshold,
            // Asked for: any match will do.
            Speculation::Suffix | Speculation::Eagle3 | Speculation::Off => 0.0,
        };
        let decision = route(
            candidate.as_ref().map(|candidate| candidate.score),
            threshold,
        );
        self.offered = candidate.filter(|_| decision.route == Route::Suffix);
        Routed {
            decision: if self.offered.is_some() {
                "suffix"
            } else {
                "plain"
            },
            reason: decision.reason.as_str(),
        }
    }

    /// Takes what the engine answered.
    ///
    /// # Errors
    /// An answer that no engine may give; or the engine's own error, when it is final for this request.
    pub(crate) fn absorb(
        &mut self,
        output: StepOutput,
        sampled: bool,
        weight_version: u64,
        limits: EngineLimits,
        now: Instant,
    ) -> Result<Option<Absorbed>, ApiError> {
        if self.engine_len == 0 {
            self.cached_tokens = output.cached_tokens;
        }
        let offered = self.offered.take();
        let drafted = offered.as_ref().map_or(0, |candidate| candidate.tree.len());
        let broken = |what: &str| {
            Err(
                ApiError::new(ErrorKind::Upstream, "the engine broke its contract")
                    .with_detail(what),
            )
        };
        if output.text_len as usize != self.sent_len as usize + output.emitted.len() {
            return broken("the session's length is not that of the text");
        }
        if !sampled {
            self.engine_len = output.text_len;
            return if output.emitted.is_empty() {
                Ok(None)
            } else {
                broken("a step emitted without sampling")
            };
        }
        if output.emitted.is_empty() || output.emitted.len() > self.max_emit as usize {
            return broken("a step emitted nothing, or more than it may");
        }
        if output.accepted_nodes.len() > drafted.min(output.emitted.len()) {
            return broken("a step accepted more than was drafted or emitted");
        }
        if self.sequence == 0 {
            self.head.weight_version = weight_version;
        }
        let before = self.output().len() as u32;
        let accepted = output.accepted_nodes.len() as u32;
        let (source, scope, drafted) = match &offered {
            Some(candidate) => (
                DraftSource::Suffix,
                wire_scope(candidate.scope),
                candidate.tree.len() as u32,
            ),
            None => (DraftSource::None, DraftScope::None, 0),
        };
        self.engine_len = output.text_len;
        self.text.extend_from_slice(&output.emitted);
        self.own
            .append(OWN, &output.emitted)
            .map_err(ApiError::internal)?;
        if self.first_token_at.is_none() {
            self.first_token_at = Some(now);
            self.first_step_tokens = output.emitted.len() as u32;
        }
        self.last_token_at = Some(now);
        self.counts.add(StepCounts {
            steps: 1,
            drafted: u64::from(drafted),
            accepted: u64::from(accepted),
            emitted: output.emitted.len() as u64,
        });
        let emitted_here = self.text.len() as u32 - self.start_len;
        let end = if output.stopped {
            Some((ChunkEndReason::Stop, Some(FinishReason::Stop)))
        } else if self.emit_left(limits) == 0 {
            Some((ChunkEndReason::Length, Some(FinishReason::Length)))
        } else if self
            .request
            .chunk_tokens
            .is_some_and(|limit| emitted_here >= limit)
        {
            Some((ChunkEndReason::ChunkLimit, None))
        } else {
            None
        };
        let update = self.update(
            before,
            output.emitted.clone(),
            end.and_then(|(_, finish)| finish),
        );
        let credited = match offered {
            Some(candidate) if candidate.scope == Scope::Tenant => {
                credited(&candidate, &output.accepted_nodes, self.document())
            }
            _ => Vec::new(),
        };
        let message = StepMessage {
            sequence: self.sequence,
            tokens: output.emitted,
            logprobs: output.logprobs,
            weight_version,
            source,
            scope,
            drafted,
            accepted,
        };
        self.sequence += 1;
        let end = end.map(|(reason, _)| self.end(reason));
        Ok(Some(Absorbed {
            message,
            update,
            credited,
            end,
        }))
    }

    /// The engine has forgotten the session: it is opened anew with the whole text.
    ///
    /// # Errors
    /// It happened too often.
    pub(crate) fn reopen(&mut self) -> Result<(), ApiError> {
        self.reopened += 1;
        if self.reopened > REOPENED_MAX {
            return Err(ApiError::new(
                ErrorKind::Upstream,
                "the engine keeps losing this request's session",
            ));
        }
        self.session = new_session()?;
        self.engine_len = 0;
        self.offered = None;
        Ok(())
    }

    /// The last event of the chunk.
    pub(crate) fn end(&self, reason: ChunkEndReason) -> ChunkEnd {
        let first = self.first_token_at.unwrap_or(self.started_at);
        let last = self.last_token_at.unwrap_or(first);
        ChunkEnd {
            next_worker: None,
            reason,
            cached_tokens: self.cached_tokens,
            prefill_s: (first - self.started_at).as_secs_f64(),
            decode_s: (last - first).as_secs_f64(),
            decode_tokens: (self.text.len() as u32 - self.start_len)
                .saturating_sub(self.first_step_tokens),
        }
    }

    /// A piece of the output for the index and the store.
    pub(crate) fn update(
        &self,
        prev_len: u32,
        tokens: Vec<u32>,
        finish: Option<FinishReason>,
    ) -> DocumentUpdate {
        DocumentUpdate {
            document: self.document(),
            epoch: self.request.epoch,
            prev_len,
            tokens,
            head: self.head.clone(),
            finish,
        }
    }

    /// The update that keeps only the first `output_len` output tokens, because a stop string ended there.
    pub(crate) fn cut(&self, output_len: u32) -> DocumentUpdate {
        let output_len = output_len.min(self.output().len() as u32);
        let mut update = self.update(output_len, Vec::new(), Some(FinishReason::Stop));
        // No lease of this request comes after it, so the next epoch is free.
        update.epoch += 1;
        update
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        self.memory.end(self.document());
    }
}

/// A random session id: two workers of one engine never meet.
fn new_session() -> Result<EngineSessionId, ApiError> {
    Ok(EngineSessionId(refrain_service_kit::random::u128()?))
}

/// What the router decided, as metric labels.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Routed {
    pub(crate) decision: &'static str,
    pub(crate) reason: &'static str,
}

fn wire_scope(scope: Scope) -> DraftScope {
    match scope {
        Scope::Request => DraftScope::Request,
        Scope::Group => DraftScope::Group,
        Scope::Tenant => DraftScope::Tenant,
    }
}

fn wire_draft(candidate: &Candidate) -> Draft {
    Draft {
        tokens: candidate.tree.tokens().collect(),
        parents: candidate.tree.parents().collect(),
    }
}

/// The documents that accepted nodes were read from, less the request's own.
fn credited(candidate: &Candidate, accepted: &[u32], own: DocumentId) -> Vec<DocumentId> {
    let nodes = candidate.tree.nodes();
    let mut documents: Vec<DocumentId> = accepted
        .iter()
        .filter_map(|node| nodes.get(*node as usize)?.origin.place)
        .map(|place| DocumentId(place.document.0))
        .filter(|document| *document != own)
        .collect();
    documents.sort_unstable();
    documents.dedup();
    documents
}
