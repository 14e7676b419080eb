//! One chunk while it is decoded: what the engine has of it, what it may draft, what has been said.
//!
//! No clock and no I/O: the decode loop hands in instants and engine outputs.

mod answer;
mod draft;
mod sources;
mod stream;

use std::time::Instant;

use refrain_protocol::chunk::{ChunkEnd, ChunkEndReason, ChunkRequest, Speculation, StepCounts};
use refrain_protocol::document::{DocumentHead, DocumentUpdate, FinishReason};
use refrain_protocol::engine::{SelfDraft, SessionSpec, StepItem};
use refrain_protocol::{ApiError, DocumentId, EngineSessionId, ErrorKind, NamespaceId, WorkerId};
use refrain_speculation::{Candidacy, Decision, Fallback, RecentRoutes, RouteReason};

use self::sources::{OWN, prompt_end};
use crate::router::{Router, asked};
use refrain_draft_replica::{Membership, Piece};

pub(crate) use self::answer::{Absorbed, Heard};
pub(crate) use self::draft::{Allotment, AskedHead, Lesson, Offer, Prospect, labels};
pub(crate) use self::sources::Sources;
pub(crate) use self::stream::Judged;

/// Limits of the engine that matter to one request.
#[derive(Clone, Copy, Debug)]
pub(crate) struct EngineLimits {
    pub(crate) max_context: u32,
    pub(crate) max_draft_tokens: u32,
}

/// What the router goes by in one step.
#[derive(Clone, Copy)]
pub(crate) struct Routing<'a> {
    pub(crate) router: &'a Router,
    pub(crate) fallback: Fallback,
    /// `auto` requests go without suffix drafts in this step.
    pub(crate) withholds: bool,
}

/// Speeds that a hand-over is reckoned with.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Rates {
    pub(crate) speedup: Option<f32>,
    pub(crate) prefill_tokens_s: Option<f64>,
    pub(crate) decode_tokens_s: Option<f64>,
}

/// A request in the batch.
pub(crate) struct Running {
    pub(crate) request: ChunkRequest,
    pub(crate) namespace: NamespaceId,
    /// What it may draft from; none where the engine generates by itself.
    pub(crate) sources: Option<Sources>,
    pub(crate) session: EngineSessionId,
    /// Prompt and output.
    text: Vec<u32>,
    /// How much of `text` the engine's session holds; 0 before it is opened.
    engine_len: u32,
    /// Length of `text` when the chunk began.
    start_len: u32,
    head: DocumentHead,
    /// Whether the engine's sessions are opened for drafts of its own head.
    self_drafts: bool,
    /// How much of `text` the head has read, as far as is known here.
    head_len: u32,
    /// The draft of the step in progress.
    offered: Offer,
    lesson: Lesson,
    /// Text that the head has to read for it, beyond what the last steps brought.
    catch_up_tokens: u32,
    recent: RecentRoutes,
    /// Length of the session's text that the step in progress brings, what it emits apart.
    sent_len: u32,
    max_emit: u32,
    counts: StepCounts,
    /// Of the tokens emitted, those of steps that verified a suffix draft.
    suffix_emitted: u64,
    sequence: u64,
    cached_tokens: u32,
    started_at: Instant,
    first_token_at: Option<Instant>,
    first_step_tokens: u32,
    last_token_at: Option<Instant>,
    /// Times the engine lost the session.
    reopened: u32,
}

/// A session that is lost this often within one chunk is the engine's fault, not bad luck.
const REOPENED_MAX: u32 = 3;

/// Text that some plain or suffix steps leave to the head to read: below this it is part of drafting, above it a
/// context that is read at once.
const CATCH_UP_TOKENS_MIN: u32 = 32;

impl Running {
    pub(crate) fn new(
        mut request: ChunkRequest,
        namespace: NamespaceId,
        sources: Option<Sources>,
        created_ms: u64,
        self_drafts: bool,
        now: Instant,
    ) -> Result<Self, ApiError> {
        let head = DocumentHead {
            session: request.session.clone(),
            group: request.group.clone(),
            choice: request.sampling.choice,
            weight_version: 0,
            created_ms,
            left_context: prompt_end(&request).to_vec(),
        };
        let text = std::mem::take(&mut request.tokens);
        let running = Running {
            start_len: text.len() as u32,
            engine_len: 0,
            text,
            head,
            self_drafts,
            head_len: 0,
            offered: Offer::Nothing,
            lesson: Lesson::default(),
            catch_up_tokens: 0,
            recent: RecentRoutes::default(),
            sent_len: 0,
            max_emit: 0,
            counts: StepCounts::default(),
            suffix_emitted: 0,
            sequence: 0,
            cached_tokens: 0,
            started_at: now,
            first_token_at: None,
            first_step_tokens: 0,
            last_token_at: None,
            reopened: 0,
            request,
            namespace,
            sources,
            session: new_session()?,
        };
        let Some(sources) = &running.sources else {
            return Ok(running);
        };
        // What a continued request has said so far can be drafted from here as well; a worker that heard it
        // said has it already.
        sources.memory.begin(running.document());
        let from = |held: Option<u32>| {
            let output = running.output();
            let held = held.unwrap_or(0).min(output.len() as u32);
            DocumentUpdate::from(running.piece(held, &output[held as usize..], None))
        };
        let held = sources.memory.read().len_of(running.document());
        sources.memory.merge(&from(held));
        if let Some(group) = sources.group.as_ref().map(Membership::group) {
            let held = group.read().len_of(running.document());
            group.merge(&from(held));
        }
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

    /// How much of the text the engine's session holds once it was brought the next `context` tokens.
    pub(crate) fn engine_len_with(&self, context: u32) -> u32 {
        (self.engine_len + context).min(self.text.len() as u32)
    }

    /// What the step in progress asks of the engine's head.
    pub(crate) fn asked_head(&self) -> Option<SelfDraft> {
        self.offered.wanted()
    }

    /// Draft tokens that the step in progress brings along.
    pub(crate) fn offered_tree_tokens(&self) -> u32 {
        self.offered.sent()
    }

    /// Length of the text that the chunk came with.
    pub(crate) fn start_len(&self) -> u32 {
        self.start_len
    }

    /// Tokens emitted by steps without a suffix draft.
    pub(crate) fn unmatched(&self) -> u32 {
        (self.counts.emitted - self.suffix_emitted) as u32
    }

    /// Tokens emitted in this chunk.
    pub(crate) fn emitted(&self) -> u32 {
        self.text.len() as u32 - self.start_len
    }

    /// Whether the engine's head may draft for it.
    pub(crate) fn self_drafts(&self) -> bool {
        self.self_drafts
    }

    /// Whether the router may choose the engine's head for it.
    pub(crate) fn may_fall_back(&self) -> bool {
        self.self_drafts && self.request.speculation == Speculation::Auto
    }

    /// Text that the head would have to read before it drafts, if that is more than a part of drafting.
    fn unread_tokens(&self) -> u32 {
        let behind = self.engine_len.saturating_sub(self.head_len);
        if behind > CATCH_UP_TOKENS_MIN {
            behind
        } else {
            0
        }
    }

    /// See [`CATCH_UP_TOKENS_MIN`].
    pub(crate) fn catch_up_tokens(&self) -> u32 {
        self.catch_up_tokens
    }

    /// Whether the next item is decoding: one token of context.
    pub(crate) fn is_decoding(&self) -> bool {
        self.owed() == 1
    }

    /// Context tokens whose forward pass is owed.
    pub(crate) fn owed(&self) -> u32 {
        // The engine always owes the pass over the last token, whether it holds the token already or not.
        (self.text.len() as u32 - self.engine_len).max(1)
    }

    fn emit_left(&self, limits: EngineLimits) -> u32 {
        let by_request = self.request.max_new_tokens.saturating_sub(self.emitted());
        by_request.min(limits.max_context.saturating_sub(self.text.len() as u32))
    }

    /// The request's part of the next step: the next `context` tokens of what it owes and, if those are all, what it was
    /// allotted. `decisions_kept` of the router's decisions are remembered for a hand-over.
    pub(crate) fn item(
        &mut self,
        context: u32,
        allotment: Option<Allotment>,
        limits: EngineLimits,
        decisions_kept: usize,
    ) -> StepItem {
        let owed = self.owed();
        let context = owed.min(context.max(1));
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
        (self.offered, self.lesson) = match allotment.filter(|_| sample) {
            Some(allotment) => {
                let Decision { route, reason } = allotment.decision;
                if reason != RouteReason::NoRoom {
                    self.recent.push(route, decisions_kept);
                }
                (allotment.offer, allotment.lesson)
            }
            None => Default::default(),
        };
        self.catch_up_tokens = match self.offered.wanted() {
            Some(_) => self.unread_tokens(),
            None => 0,
        };
        let (draft, self_draft) = self.offered.wire();
        StepItem {
            session: self.session,
            open: (self.engine_len == 0).then(|| SessionSpec {
                namespace: self.namespace,
                sampling: self.request.sampling.clone(),
                self_drafts: self.self_drafts,
            }),
            keep_len: self.engine_len,
            tokens: self.text[new_from..new_to].to_vec(),
            sample,
            draft,
            self_draft,
            max_emit,
        }
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
        self.head_len = 0;
        self.offered = Offer::Nothing;
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
            decode_tokens: self.emitted().saturating_sub(self.first_step_tokens),
        }
    }

    /// The last event of a chunk that goes on at another worker.
    pub(crate) fn end_for(&self, next_worker: WorkerId) -> ChunkEnd {
        ChunkEnd {
            next_worker: Some(next_worker),
            ..self.end(ChunkEndReason::Transfer)
        }
    }

    /// What speaks for and against handing the request over.
    pub(crate) fn candidacy(&self, rates: Rates) -> Candidacy {
        Candidacy {
            asked: asked(self.request.speculation),
            handed_over: self.request.transferred,
            fallback_here: self.self_drafts,
            decisions: self.recent.len(),
            misses_share: self.recent.misses_share(),
            context_tokens: self.text.len() as u32,
            output_tokens: self.output().len() as u32,
            remaining_tokens_max: self.request.max_new_tokens.saturating_sub(self.emitted()),
            speedup: rates.speedup,
            prefill_tokens_s: rates.prefill_tokens_s,
            decode_tokens_s: rates.decode_tokens_s,
        }
    }

    /// Lets others draft from a piece of the output.
    pub(crate) fn remember(&self, piece: Piece<'_>) {
        let Some(sources) = &self.sources else {
            return;
        };
        let update = DocumentUpdate::from(piece);
        sources.memory.merge(&update);
        if let Some(membership) = &sources.group {
            membership.group().merge(&update);
        }
    }

    /// A piece of the output for the index and the store.
    pub(crate) fn piece<'a>(
        &'a self,
        prev_len: u32,
        tokens: &'a [u32],
        finish: Option<FinishReason>,
    ) -> Piece<'a> {
        Piece {
            document: self.document(),
            epoch: self.request.epoch,
            prev_len,
            tokens,
            head: &self.head,
            finish,
        }
    }

    /// The piece of the output that was heard.
    pub(crate) fn piece_of<'a>(&'a self, heard: &'a Heard) -> Piece<'a> {
        self.piece(heard.prev_len, &heard.tokens, heard.finish)
    }

    /// The update that keeps only the first `output_len` output tokens, because a stop string ended there.
    pub(crate) fn cut(&self, output_len: u32) -> DocumentUpdate {
        let output_len = output_len.min(self.output().len() as u32);
        let piece = self.piece(output_len, &[], Some(FinishReason::Stop));
        let mut update = DocumentUpdate::from(piece);
        // No lease of this request comes after it, so the next epoch is free.
        update.epoch += 1;
        update
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        if let Some(sources) = &self.sources {
            sources.memory.end(self.document());
        }
    }
}

/// A random session id: two workers of one engine never meet.
fn new_session() -> Result<EngineSessionId, ApiError> {
    Ok(EngineSessionId(refrain_service_kit::random::u128()?))
}
