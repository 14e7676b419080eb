//! The state of a request while its chunk is decoded.
//!
//! Read [`ActiveRequest`] first, which consists of parts:
//!
//! * `text`: prompt and output.
//! * `document`: the output as the indexes and the store have it.
//! * `sources`: the texts that its drafts come from, and the form of its output (`form`).
//! * `session`: what the engine holds of the text.
//! * `step`: the request's part in the step in progress.
//! * `tally`: the counts and times of the chunk.
//!
//! Nothing here has a clock or does I/O: the drivers pass instants and engine outputs.

mod document;
mod form;
mod sent_draft;
mod session;
mod sources;
mod step;
mod step_record;
mod tally;
mod text;

use std::time::Instant;

use refrain_draft_replica::DocumentUpdateRef;
use refrain_protocol::chunk::{
    self, ChunkEndReason, ChunkRequest, ParkedContext, Speculation, StepMessage,
};
use refrain_protocol::document::{DocumentUpdate, FinishReason};
use refrain_protocol::engine::{SelfDraft, SessionSpec, StepItem, StepOutput, TokenLogprob};
use refrain_protocol::{ApiError, ErrorKind, NamespaceId, TenantId, TokenId};
use refrain_speculation::draft::{ProposeParams, ProposeRules};
use refrain_speculation::router::{
    Asked, Candidacy, Offer, Priority, Prospect, RecentRoutes, RouteReason, Speeds,
};
use refrain_speculation::statistics::AcceptanceStatistics;

use self::document::OutputDocument;
use self::sent_draft::{accepted_of_head, credited, head_drafted, step_message};
use self::session::EngineSession;
use self::step::PendingStep;
use self::text::Text;
use crate::engine::EngineLimits;

pub(crate) use self::form::RunningForm;
pub(crate) use self::sent_draft::wire_draft;
pub(crate) use self::session::HeadUse;
pub(crate) use self::sources::Sources;
pub(crate) use self::step_record::{Absorbed, StepRecord};
pub(crate) use self::tally::ChunkTally;

/// A request whose chunk is being decoded.
pub(crate) struct ActiveRequest {
    /// The request for the chunk, without its tokens.
    pub(crate) request: ChunkRequest,
    pub(crate) namespace: NamespaceId,
    limits: EngineLimits,
    pub(crate) text: Text,
    pub(crate) document: OutputDocument,
    /// The sources of its drafts; `None` where the worker does not draft.
    pub(crate) sources: Option<Sources>,
    pub(crate) session: EngineSession,
    pub(crate) step: PendingStep,
    pub(crate) tally: ChunkTally,
    /// The router's last decisions.
    recent: RecentRoutes,
    /// Whether the chunk goes on with a request that was parked here.
    pub(crate) was_parked: bool,
}

impl ActiveRequest {
    /// Begins a request with all of its text.
    ///
    /// # Errors
    /// The system's random generator failed.
    pub(crate) fn new(
        mut request: ChunkRequest,
        namespace: NamespaceId,
        sources: Option<Sources>,
        limits: EngineLimits,
        head: HeadUse,
        created_ms: u64,
        now: Instant,
    ) -> Result<Self, ApiError> {
        let document = OutputDocument::new(&request, created_ms);
        let tokens = std::mem::take(&mut request.tokens);
        let running = ActiveRequest {
            text: Text::new(tokens, request.prompt_len, &namespace),
            document,
            session: EngineSession::new(head)?,
            step: PendingStep::default(),
            tally: ChunkTally::new(now, 0),
            recent: RecentRoutes::default(),
            was_parked: false,
            request,
            namespace,
            limits,
            sources,
        };
        if let Some(sources) = running.sources.as_ref().filter(|_| running.is_remembered()) {
            // Other requests can draft from the earlier output of a continued request too. A worker that decoded it
            // has it already.
            let output = running.text.output();
            sources.merge_earlier(|held| {
                let held = held.min(output.len() as u32);
                running.document.piece(held, &output[held as usize..], None)
            });
        }
        Ok(running)
    }

    /// Begins the next chunk of a request that was parked. Its text, its sources and the engine's session go on as
    /// they are; the rest counts from the start of a chunk.
    pub(crate) fn resume(mut self, request: ChunkRequest, now: Instant) -> Self {
        let before = std::mem::replace(&mut self.request, request);
        self.request.sampling = before.sampling;
        self.document.epoch = self.request.epoch;
        self.was_parked = true;
        self.session.forgive_losses();
        self.step = PendingStep::default();
        // The forward pass of the last token is still to come.
        self.tally = ChunkTally::new(now, self.session.len().saturating_sub(1));
        self
    }

    /// Names the context of the request as it is now.
    pub(crate) fn parked_context(&mut self) -> ParkedContext {
        ParkedContext {
            epoch: self.request.epoch,
            tokens: self.text.len(),
            hash: self.text.hash(),
        }
    }

    /// Length of the text when the chunk began.
    pub(crate) fn start_len(&self) -> u32 {
        self.text.len() - self.tally.emitted()
    }

    /// Whether the router may choose the engine's head for this request.
    pub(crate) fn may_fall_back(&self) -> bool {
        self.session.head.self_drafts && self.request.speculation == Speculation::Auto
    }

    /// Number of context tokens that still need a forward pass. A request that decodes has one.
    pub(crate) fn owed(&self) -> u32 {
        self.session.owed(self.text.len())
    }

    /// Whether a step samples for the request that brings its next `context` tokens.
    pub(crate) fn samples_after(&self, context: u32) -> bool {
        context >= self.owed()
    }

    /// Number of tokens that the request may still emit, regardless of chunk limits.
    fn emit_left(&self) -> u32 {
        let by_engine = self.limits.max_context.saturating_sub(self.text.len());
        self.remaining_tokens_max().min(by_engine)
    }

    fn remaining_tokens_max(&self) -> u32 {
        let asked = self.request.max_new_tokens;
        asked.saturating_sub(self.tally.emitted())
    }

    /// Maximum number of tokens that the engine may emit in its next answer, regardless of chunk limits.
    pub(crate) fn may_emit(&self) -> u32 {
        self.emit_left().max(1)
    }

    /// The rules of drafts, with those of the tenant before those of the worker.
    pub(crate) fn rules(&self, of_worker: &ProposeRules) -> ProposeRules {
        let of_tenant = &self.request.drafts;
        of_worker.with(of_tenant.alpha, of_tenant.min_token_prob)
    }

    /// The drafts that the request could have verified in a step with room for `room` draft tokens. With `withholds`,
    /// drafts of `auto` requests are held back.
    pub(crate) fn prospect(
        &self,
        room: u32,
        params: &ProposeParams,
        statistics: Option<&AcceptanceStatistics>,
        withholds: bool,
        now: Instant,
    ) -> Prospect<NamespaceId> {
        let asked = asked(self.request.speculation);
        let tree_max = room.min(self.limits.max_draft_tokens);
        let draft_max = tree_max
            .min(self.request.drafts.max_spec_tokens.unwrap_or(u32::MAX))
            .min(self.emit_left().saturating_sub(1));
        let withheld = withholds && asked == Asked::Auto;
        let looks = draft_max > 0 && !withheld && drafts_from_indexes(self.request.speculation);
        let candidate = self.sources.as_ref().filter(|_| looks).and_then(|sources| {
            let found = sources.suffix_draft(&self.text, draft_max, params, statistics);
            match &sources.form {
                Some(form) => form.bind(self.text.output(), found, draft_max),
                None => found,
            }
        });
        let urgency = &self.request.urgency;
        Prospect {
            namespace: self.namespace,
            asked,
            context_tokens: self.text.len(),
            draft_max,
            tree_max,
            candidate,
            path_probabilities: Vec::new(),
            price: None,
            withheld,
            head: self.session.head_state(self.text.len()),
            priority: match urgency.priority {
                chunk::Priority::Low => Priority::Low,
                chunk::Priority::Normal => Priority::Normal,
                chunk::Priority::High => Priority::High,
            },
            pace: urgency
                .tpot_ms
                .and_then(|tpot_ms| self.tally.pace(tpot_ms, now)),
        }
    }

    /// The request's item in the next step: its next `context` tokens and, if no more are left, its draft. The
    /// router's last decisions are remembered, for a transfer to another worker.
    pub(crate) fn item(
        &mut self,
        context: u32,
        offer: Option<Offer>,
        self_draft: Option<SelfDraft>,
    ) -> StepItem {
        let context = self.owed().min(context.max(1));
        let sample = self.samples_after(context);
        let keep_len = self.session.len();
        let sent_len = self.session.len_with(context, self.text.len());
        if let Some(offer) = &offer
            && offer.decision.reason != RouteReason::NoRoom
        {
            self.recent.push(offer.decision.route);
        }
        let has_head = offer.as_ref().and_then(Offer::head).is_some();
        let draft = offer.as_ref().and_then(Offer::suffix).map(wire_draft);
        let (sent, ahead) = self.text.tokens().split_at(sent_len as usize);
        let tokens = sent[keep_len as usize..].to_vec();
        let emitted_max = self.may_emit();
        self.step = PendingStep {
            samples: sample,
            offer,
            context_tokens: tokens.len() as u32,
            catch_up_tokens: match has_head {
                true => self.session.unread_tokens(),
                false => 0,
            },
            sent_len,
            emitted_max,
        };
        StepItem {
            session: self.session.id,
            open: self.session.is_new().then(|| SessionSpec {
                namespace: self.namespace,
                tenant: TenantId::of(&self.request.namespace.namespace.tenant),
                sampling: self.request.sampling.clone(),
                prompt_len: self.text.prompt_len(),
                self_drafts: self.session.head.self_drafts,
                ahead: match self.limits.reads_ahead {
                    true => ahead.to_vec(),
                    false => Vec::new(),
                },
            }),
            keep_len,
            tokens,
            sample,
            draft,
            self_draft,
            max_emit: emitted_max,
        }
    }

    /// Takes the engine's output of a step. Returns `None` if the step only read a piece of the prompt.
    ///
    /// # Errors
    /// The engine broke its contract.
    pub(crate) fn absorb(
        &mut self,
        output: StepOutput,
        weight_version: u64,
        now: Instant,
    ) -> Result<Option<Absorbed>, ApiError> {
        if self.session.is_new() {
            self.tally.found_in_cache(0);
        }
        // Each piece of a text may find some of it.
        self.tally.found_more_in_cache(output.cached_tokens);
        self.step.check(&output).map_err(broken_contract)?;
        self.session.holds(output.text_len);
        if !self.step.samples {
            return Ok(None);
        }
        // A head that drafted nothing may not have read the whole text yet.
        if head_drafted(&output) {
            self.session.head_has_read(self.step.sent_len);
        }
        let offer = self.step.offer.take();
        self.emit(output, offer, weight_version, now).map(Some)
    }

    /// Takes tokens of an engine that generates by itself. Tokens past a stop id or a limit are dropped: the chunk
    /// ends there.
    ///
    /// # Errors
    /// The engine broke its contract.
    pub(crate) fn absorb_generated(
        &mut self,
        mut tokens: Vec<TokenId>,
        mut logprobs: Option<Vec<TokenLogprob>>,
        weight_version: u64,
        now: Instant,
    ) -> Result<Absorbed, ApiError> {
        if tokens.is_empty() {
            return Err(broken_contract("a step emitted no token"));
        }
        let stop_ids = &self.request.sampling.stop_token_ids;
        let stop = tokens.iter().position(|token| stop_ids.contains(token));
        let emitted_max = self.may_emit() as usize;
        let kept = stop.map_or(tokens.len(), |at| at + 1).min(emitted_max);
        tokens.truncate(kept);
        if let Some(logprobs) = &mut logprobs {
            logprobs.truncate(kept);
        }
        let output = StepOutput {
            text_len: self.text.len() + kept as u32,
            stopped: stop.is_some_and(|at| at < kept),
            emitted: tokens,
            accepted_nodes: Vec::new(),
            self_drafted: 0,
            agreed_nodes: Vec::new(),
            cached_tokens: 0,
            logprobs,
        };
        self.emit(output, None, weight_version, now)
    }

    /// Appends the tokens of a step to the text, and counts them.
    fn emit(
        &mut self,
        mut output: StepOutput,
        offer: Option<Offer>,
        weight_version: u64,
        now: Instant,
    ) -> Result<Absorbed, ApiError> {
        let prev_len = self.text.output_len();
        // An output of several versions is stored with that of its first token: whoever asks for outputs of a version
        // gets none that began with older weights. The version of each token is in its step.
        if prev_len == 0 {
            self.document.head.weight_version = weight_version;
        }
        self.text.append(&output.emitted);
        if let Some(sources) = &mut self.sources {
            sources.append(&output.emitted)?;
        }
        let (offered, drafter) = (offer.as_ref(), self.session.head.drafter);
        let sequence = self.tally.steps();
        let mut step = step_message(sequence, weight_version, offered, drafter, &output);
        step.tokens = std::mem::take(&mut output.emitted);
        self.tally.count(&step, now);
        let end = self.reached_end(output.stopped);
        let record = StepRecord {
            prev_len,
            finish: end.and_then(|(_, finish)| finish),
            credited: credited(offered, &output.accepted_nodes, self.document.id),
            head_drafted: head_drafted(&output),
            head_accepted: accepted_of_head(offered, &output),
            offer,
            step,
        };
        Ok(Absorbed {
            message: StepMessage {
                logprobs: output.logprobs,
                ..record.step.clone()
            },
            record,
            end: end.map(|(reason, _)| reason),
        })
    }

    /// The end that the text has reached, if any: of the chunk and, unless the request goes on, of the output.
    fn reached_end(&self, stopped: bool) -> Option<(ChunkEndReason, Option<FinishReason>)> {
        if stopped {
            return Some((ChunkEndReason::Stop, Some(FinishReason::Stop)));
        }
        if self.emit_left() == 0 {
            return Some((ChunkEndReason::Length, Some(FinishReason::Length)));
        }
        let limit = self.request.chunk_tokens?;
        (self.tally.emitted() >= limit).then_some((ChunkEndReason::ChunkLimit, None))
    }

    /// Opens a new session with the whole text, because the engine lost the old one.
    ///
    /// # Errors
    /// The engine lost too many sessions.
    pub(crate) fn reopen(&mut self) -> Result<(), ApiError> {
        self.step.offer = None;
        self.session.reopen()
    }

    /// The inputs of the decision about a transfer.
    pub(crate) fn candidacy(&self, speedup: f32, speeds: Speeds) -> Candidacy {
        Candidacy {
            asked: asked(self.request.speculation),
            transferred: self.request.transferred,
            fallback_here: self.session.head.self_drafts,
            recent: self.recent,
            context_tokens: self.text.len(),
            output_tokens: self.text.output_len(),
            remaining_tokens_max: self.remaining_tokens_max(),
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
        if let Some(sources) = self.sources.as_ref().filter(|_| self.is_remembered()) {
            sources.merge(piece);
        }
    }

    /// The update that keeps only the first `output_len` output tokens, because a stop string ended there or the
    /// request was aborted.
    pub(crate) fn cut(&self, output_len: u32, finish: FinishReason) -> DocumentUpdate {
        let output_len = output_len.min(self.text.output_len());
        let piece = self.document.piece(output_len, &[], Some(finish));
        let mut update = DocumentUpdate::from(piece);
        // No lease of this request follows, so the next epoch is free.
        update.epoch += 1;
        update
    }
}

/// The error of an engine whose output contradicts its contract.
fn broken_contract(what: &str) -> ApiError {
    ApiError::new(ErrorKind::Upstream, "the engine broke its contract").with_detail(what)
}

/// The drafts that a request asked for, in the router's terms.
fn asked(speculation: Speculation) -> Asked {
    match speculation {
        Speculation::Auto => Asked::Auto,
        Speculation::Suffix => Asked::Suffix,
        Speculation::Eagle3 | Speculation::DraftModel => Asked::Fallback,
        Speculation::Off => Asked::Off,
    }
}

/// Whether such requests draft from suffix indexes.
pub(crate) fn drafts_from_indexes(speculation: Speculation) -> bool {
    matches!(asked(speculation), Asked::Auto | Asked::Suffix)
}
