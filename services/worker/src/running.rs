//! The state of a request while its chunk is decoded: its text, the part of it that the engine holds, its draft.
//!
//! It has no clock and does no I/O: the drivers pass instants and engine outputs.

mod absorb;
mod draft;
mod form;
mod generated;
mod resume;
mod sent_draft;
mod sources;
mod step_record;

use std::time::Instant;

use refrain_draft_replica::{DocumentUpdateRef, GroupMembership};
use refrain_protocol::chunk::{ChunkEnd, ChunkEndReason, ChunkRequest, Speculation, StepCounts};
use refrain_protocol::document::{DocumentHead, DocumentUpdate, FinishReason};
use refrain_protocol::engine::{DrafterKind, SessionSpec, StepItem};
use refrain_protocol::history::PromptHash;
use refrain_protocol::prefix::PrefixHasher;
use refrain_protocol::{
    ApiError, DocumentId, EngineSessionId, ErrorKind, NamespaceId, TenantId, WorkerId,
};
use refrain_service_kit::trace::TraceLink;
use refrain_speculation::router::{Candidacy, Offer, RecentRoutes, RouteReason, Speeds};

use self::sources::{OWN, prompt, prompt_end};
use crate::engine::EngineLimits;
use crate::routing::{DraftSettings, asked};

pub(crate) use self::form::RunningForm;
pub(crate) use self::sent_draft::wire_draft;
pub(crate) use self::sources::Sources;
pub(crate) use self::step_record::{Absorbed, StepRecord};

/// A request whose chunk is being decoded.
pub(crate) struct ActiveRequest {
    pub(crate) request: ChunkRequest,
    pub(crate) namespace: NamespaceId,
    /// The sources of its drafts; `None` where the worker does not draft.
    pub(crate) sources: Option<Sources>,
    /// The form of its output, where drafts can come from it.
    form: Option<RunningForm>,
    limits: EngineLimits,
    pub(crate) session: EngineSessionId,
    /// Prompt and output.
    text: Vec<u32>,
    /// The hash of `text`, as far as it has been asked for.
    hasher: PrefixHasher,
    /// Whether the chunk goes on with a request that was parked here.
    was_parked: bool,
    /// Length of the part of `text` that the engine's session holds; 0 before the session is opened.
    engine_len: u32,
    /// Length of `text` when the chunk began.
    start_len: u32,
    head: DocumentHead,
    /// Whether the engine's sessions are opened for drafts of the engine's own head.
    self_drafts: bool,
    /// Length of the part of `text` that the head has read, as far as this worker knows.
    head_len: u32,
    /// The drafter inside the engine.
    drafter: Option<DrafterKind>,
    recent: RecentRoutes,
    step: PendingStep,
    counts: StepCounts,
    /// Number of emitted tokens in steps that verified a suffix draft.
    suffix_emitted: u64,
    sequence: u64,
    cached_tokens: u32,
    started_at: Instant,
    first_token_at: Option<Instant>,
    first_step_tokens: u32,
    last_token_at: Option<Instant>,
    /// Number of times that the engine lost the session.
    reopened: u32,
    /// The request in its trace.
    trace: Option<TraceLink>,
}

/// The request's part in the step in progress.
#[derive(Default)]
pub(crate) struct PendingStep {
    /// The engine samples; otherwise it reads a piece of a prompt.
    samples: bool,
    /// The router's offer; `None` for a piece of a prompt.
    pub(crate) offer: Option<Offer>,
    /// Number of context tokens that are sent.
    pub(crate) context_tokens: u32,
    /// Number of tokens that the head has to read at once before it drafts, beyond those of the last steps.
    pub(crate) catch_up_tokens: u32,
    /// Length of the session's text after the step, without the tokens that it emits.
    sent_len: u32,
    max_emit: u32,
}

/// Number of lost sessions in one chunk from which on the engine is considered faulty.
const REOPENED_MAX: u32 = 3;

/// Number of unread tokens above which the head reads a context at once. Up to this, reading what plain and suffix
/// steps left is a part of drafting.
const CATCH_UP_TOKENS_MIN: u32 = 32;

impl ActiveRequest {
    /// Begins a chunk. `settings` are those of the decode loop; `None` for a streaming engine.
    ///
    /// # Errors
    /// The system's random generator failed.
    pub(crate) fn new(
        mut request: ChunkRequest,
        namespace: NamespaceId,
        sources: Option<Sources>,
        limits: EngineLimits,
        settings: Option<&DraftSettings>,
        created_ms: u64,
        now: Instant,
    ) -> Result<Self, ApiError> {
        let head = DocumentHead {
            session: request.session.clone(),
            group: request.group.clone(),
            choice: request.sampling.choice,
            weight_version: 0,
            created_ms,
            left_context: prompt_end(&request).to_vec(),
            prompt_hash: Some(PromptHash::of(prompt(&request))),
        };
        let text = std::mem::take(&mut request.tokens);
        let running = ActiveRequest {
            start_len: text.len() as u32,
            engine_len: 0,
            text,
            hasher: PrefixHasher::new(&namespace),
            was_parked: false,
            head,
            self_drafts: settings.is_some_and(|settings| settings.self_drafts(request.speculation)),
            head_len: 0,
            drafter: settings.and_then(DraftSettings::drafter),
            recent: RecentRoutes::default(),
            step: PendingStep::default(),
            counts: StepCounts::default(),
            suffix_emitted: 0,
            sequence: 0,
            cached_tokens: 0,
            started_at: now,
            first_token_at: None,
            first_step_tokens: 0,
            last_token_at: None,
            reopened: 0,
            trace: TraceLink::current(),
            request,
            namespace,
            sources,
            form: None,
            limits,
            session: new_session()?,
        };
        let Some(sources) = &running.sources else {
            return Ok(running);
        };
        sources.replica.pin(running.document());
        if !running.is_remembered() {
            return Ok(running);
        }
        // Other requests can draft from the earlier output of a continued request too. A worker that decoded it has
        // it already.
        let from = |held: Option<u32>| {
            let output = running.output();
            let held = held.unwrap_or(0).min(output.len() as u32);
            running.piece(held, &output[held as usize..], None)
        };
        let held = sources.replica.read().len_of(running.document());
        sources.replica.merge(from(held));
        if let Some(group) = sources.group.as_ref().map(GroupMembership::group) {
            let held = group.read().len_of(running.document());
            group.merge(from(held));
        }
        Ok(running)
    }

    /// The request with a form, from which drafts come as well.
    pub(crate) fn with_form(self, form: Option<RunningForm>) -> Self {
        let mut running = self;
        running.form = form;
        running
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

    /// Length of the text that the engine's session holds after the next `context` tokens.
    pub(crate) fn engine_len_with(&self, context: u32) -> u32 {
        (self.engine_len + context).min(self.text.len() as u32)
    }

    /// The request's part in the step in progress.
    pub(crate) fn step(&self) -> &PendingStep {
        &self.step
    }

    /// Length of the text when the chunk began.
    pub(crate) fn start_len(&self) -> u32 {
        self.start_len
    }

    /// Number of tokens emitted by steps without a suffix draft.
    pub(crate) fn unmatched(&self) -> u32 {
        (self.counts.emitted - self.suffix_emitted) as u32
    }

    /// Number of tokens emitted in this chunk.
    pub(crate) fn emitted(&self) -> u32 {
        self.text.len() as u32 - self.start_len
    }

    /// Whether the engine's head may draft for this request.
    pub(crate) fn self_drafts(&self) -> bool {
        self.self_drafts
    }

    /// Whether the router may choose the engine's head for this request.
    pub(crate) fn may_fall_back(&self) -> bool {
        self.self_drafts && self.request.speculation == Speculation::Auto
    }

    /// Number of tokens that the head would have to read at once before it drafts (see [`CATCH_UP_TOKENS_MIN`]).
    fn unread_tokens(&self) -> u32 {
        let behind = self.engine_len.saturating_sub(self.head_len);
        if behind > CATCH_UP_TOKENS_MIN {
            behind
        } else {
            0
        }
    }

    /// Whether the next item decodes: it has one token of context.
    pub(crate) fn is_decoding(&self) -> bool {
        self.owed() == 1
    }

    /// Number of context tokens that still need a forward pass.
    pub(crate) fn owed(&self) -> u32 {
        // The last token always needs a pass, even if the engine holds it already.
        (self.text.len() as u32 - self.engine_len).max(1)
    }

    /// Whether a step samples for the request that brings its next `context` tokens.
    pub(crate) fn samples_after(&self, context: u32) -> bool {
        context >= self.owed()
    }

    fn emit_left(&self) -> u32 {
        let by_request = self.request.max_new_tokens.saturating_sub(self.emitted());
        by_request.min(
            self.limits
                .max_context
                .saturating_sub(self.text.len() as u32),
        )
    }

    /// The request's item in the next step: its next `context` tokens and, if no more are left, its draft. The
    /// router's last decisions are remembered, for a transfer to another worker.
    pub(crate) fn item(
        &mut self,
        context: u32,
        offer: Option<Offer>,
        settings: &DraftSettings,
    ) -> StepItem {
        let context = self.owed().min(context.max(1));
        let sample = self.samples_after(context);
        let new_from = self.engine_len as usize;
        let new_to = self.engine_len_with(context) as usize;
        if let Some(offer) = &offer
            && offer.decision.reason != RouteReason::NoRoom
        {
            self.recent.push(offer.decision.route);
        }
        let head = offer.as_ref().and_then(Offer::head);
        let draft = offer.as_ref().and_then(Offer::suffix).map(wire_draft);
        let tokens = self.text[new_from..new_to].to_vec();
        let ahead = if self.limits.reads_ahead {
            &self.text[new_to..]
        } else {
            &[]
        };
        self.step = PendingStep {
            samples: sample,
            offer,
            context_tokens: tokens.len() as u32,
            catch_up_tokens: head.map_or(0, |_| self.unread_tokens()),
            sent_len: new_to as u32,
            max_emit: self.emit_left().max(1),
        };
        StepItem {
            session: self.session,
            open: (self.engine_len == 0).then(|| SessionSpec {
                namespace: self.namespace,
                tenant: TenantId::of(&self.request.namespace.namespace.tenant),
                sampling: self.request.sampling.clone(),
                prompt_len: self.request.prompt_len,
                self_drafts: self.self_drafts,
                ahead: ahead.to_vec(),
            }),
            keep_len: self.engine_len,
            tokens,
            sample,
            draft,
            self_draft: head.and_then(|head| settings.self_draft(head)),
            max_emit: self.step.max_emit,
        }
    }

    /// Opens a new session with the whole text, because the engine lost the old one.
    ///
    /// # Errors
    /// The engine lost too many sessions.
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
        self.step.offer = None;
        Ok(())
    }

    /// Forgets that the engine has lost sessions: it did so by order.
    pub(crate) fn forgive_losses(&mut self) {
        self.reopened = 0;
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

    /// The last event of a chunk whose request is transferred to another worker.
    pub(crate) fn end_for(&self, next_worker: WorkerId) -> ChunkEnd {
        ChunkEnd {
            next_worker: Some(next_worker),
            ..self.end(ChunkEndReason::Transfer)
        }
    }

    /// The inputs of the decision about a transfer.
    pub(crate) fn candidacy(&self, speedup: f32, speeds: Speeds) -> Candidacy {
        Candidacy {
            asked: asked(self.request.speculation),
            transferred: self.request.transferred,
            fallback_here: self.self_drafts,
            recent: self.recent,
            context_tokens: self.text.len() as u32,
            output_tokens: self.output().len() as u32,
            remaining_tokens_max: self.request.max_new_tokens.saturating_sub(self.emitted()),
            speedup: Some(speedup),
            speeds,
        }
    }

    /// Whether the output is indexed and stored. Where a prompt is scored, what is emitted was given by the client.
    pub(crate) fn is_remembered(&self) -> bool {
        self.request.sampling.forced_output.is_empty()
    }

    /// Indexes a piece of the output, so that other requests can draft from it.
    pub(crate) fn remember(&self, piece: DocumentUpdateRef<'_>) {
        let Some(sources) = self.sources.as_ref().filter(|_| self.is_remembered()) else {
            return;
        };
        sources.replica.merge(piece);
        if let Some(membership) = &sources.group {
            membership.group().merge(piece);
        }
    }

    /// A piece of the output for the index and the store.
    pub(crate) fn piece<'a>(
        &'a self,
        prev_len: u32,
        tokens: &'a [u32],
        finish: Option<FinishReason>,
    ) -> DocumentUpdateRef<'a> {
        DocumentUpdateRef {
            document: self.document(),
            epoch: self.request.epoch,
            prev_len,
            tokens,
            head: &self.head,
            finish,
            trace: self.trace.as_ref(),
        }
    }

    /// The piece of the output that a step emitted.
    pub(crate) fn piece_of<'a>(&'a self, record: &'a StepRecord) -> DocumentUpdateRef<'a> {
        self.piece(record.prev_len, &record.step.tokens, record.finish)
    }

    /// The update that keeps only the first `output_len` output tokens, because a stop string ended there or the
    /// request was aborted.
    pub(crate) fn cut(&self, output_len: u32, finish: FinishReason) -> DocumentUpdate {
        let output_len = output_len.min(self.output().len() as u32);
        let piece = self.piece(output_len, &[], Some(finish));
        let mut update = DocumentUpdate::from(piece);
        // No lease of this request follows, so the next epoch is free.
        update.epoch += 1;
        update
    }
}

impl Drop for ActiveRequest {
    fn drop(&mut self) {
        if let Some(sources) = &self.sources {
            sources.replica.unpin(self.document());
        }
    }
}

/// A random session id, so that two workers of one engine never collide.
fn new_session() -> Result<EngineSessionId, ApiError> {
    Ok(EngineSessionId(refrain_service_kit::random::u128()?))
}
