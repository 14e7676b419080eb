//! The chunks of one choice: asks a worker, reads its events, and passes on what a reader can use.

use std::sync::Arc;
use std::time::{Duration, Instant};

use futures_util::{FutureExt as _, StreamExt};
use refrain_accounts::tenants::Made;
use refrain_accounts::{ProgressClock, UsageMeter};
use refrain_protocol::chunk::{
    ChunkBudget, ChunkEndReason, ChunkEvent, ChunkRequest, ParkedContext,
};
use refrain_protocol::engine::Sampling;
use refrain_protocol::error::code;
use refrain_protocol::prefix::PrefixHasher;
use refrain_protocol::scheduling::{Lease, LeaseRequest, SessionHash};
use refrain_protocol::{ApiError, ErrorKind, RequestId};
use refrain_rpc::{ChunkStream, Worker};
use refrain_service_kit::clock::millis;
use refrain_service_kit::deadline::Deadline;
use tokio::sync::mpsc;

use crate::metrics::RequestSeries;
use crate::models::KnownNamespace;
use crate::relay::aborts::until_aborted;
use crate::relay::attempts::{Attempts, NextChunk, OutputSoFar};
use crate::relay::choice::{ChoiceProgress, ChoiceState, ChoiceSummary};
use crate::relay::context::RelayContext;
use crate::relay::events::RelayEvent;
use crate::relay::implicit_groups::PromptGroup;
use crate::relay::lease_guard::LeaseGuard;
use crate::relay::parked_at::ParkedAt;
use crate::request::GenerateRequest;

/// Slack added to the deadline sent to workers, so that the gateway's own timer always fires first.
const WORKER_TIME_SLACK: Duration = Duration::from_secs(1);

/// Least silence after which a worker counts as lost, however short its leases are: machines and networks stall for a
/// moment.
const ALIVE_WITHIN_MS_MIN: u64 = 2_000;

/// How often a chunk looks whether the workers are still paused.
const PAUSE_CHECK: Duration = Duration::from_millis(100);

/// Tokens that have arrived from which on they are sent, however many more have.
const UNSENT_TOKENS_MAX: usize = 64;

/// The end of a chunk, as the request sees it.
pub(super) enum ChunkOutcome {
    /// The choice has ended.
    Finished,
    /// The choice continues with another chunk.
    Continues(NextChunk),
    /// The chunk failed.
    Failed {
        error: ApiError,
        output: OutputSoFar,
    },
}

/// A choice on its way through the mesh.
pub(super) struct ChoiceRun<'a> {
    pub(super) context: &'a RelayContext,
    pub(super) request: &'a GenerateRequest,
    pub(super) index: u32,
    pub(super) id: RequestId,
    /// The length to expect of the output, where earlier ones to the same prompt are known.
    pub(super) expected_tokens: Option<u32>,
    pub(super) choice: ChoiceState,
    /// The prompt, and as much of the output as the last lease was asked for with.
    pub(super) prefixes: PrefixHasher,
    /// The samples of the same prompt, where the client names no group.
    pub(super) prompt_group: Option<Arc<PromptGroup>>,
    /// When a lease was first asked for.
    pub(super) asked: Option<Instant>,
    pub(super) events: &'a mpsc::Sender<RelayEvent>,
    pub(super) received: Instant,
    pub(super) first_token: Option<Instant>,
    /// When the last step arrived.
    pub(super) last_step: Option<Instant>,
    /// The metrics that the request counts in.
    pub(super) series: Arc<RequestSeries>,
    /// Counts the output tokens of the request.
    pub(super) made: Arc<Made>,
    /// Counts for bills and budgets.
    pub(super) meter: Arc<UsageMeter>,
    pub(super) usage_progress: ProgressClock,
    /// Output that the reader does not have yet.
    pub(super) unsent: ChoiceProgress,
    pub(super) parked: ParkedAt,
}

/// A choice counts however it ends, also when its client leaves.
impl Drop for ChoiceRun<'_> {
    fn drop(&mut self) {
        self.meter.end_choice(self.index, self.choice.usage());
        let reason = self.choice.finish_reason();
        let (tenant, model) = (&self.request.tenant, &self.request.model.id);
        self.context.metrics.choice_ended(tenant, model, reason);
    }
}

fn worker_failed(message: &str) -> ApiError {
    ApiError::new(ErrorKind::Upstream, message)
}

impl ChoiceRun<'_> {
    /// The namespace, whose signature is renewed now and then.
    fn namespace(&self) -> Arc<KnownNamespace> {
        let models = &self.context.models;
        models.namespace(&self.request.standing().scope, &self.request.model)
    }

    /// The group of samples: the client's, or that of the prompt.
    fn group(&self) -> Option<String> {
        let of_prompt = self.prompt_group.as_ref().and_then(|group| group.name());
        let named = self.request.group.as_deref();
        named.or(of_prompt).map(str::to_owned)
    }

    /// The call for the next lease. If `ended` holds the lease of a chunk that has ended, the call gives it back.
    pub(super) fn lease_request(
        &mut self,
        attempts: &Attempts,
        ended: Option<&LeaseGuard>,
    ) -> LeaseRequest {
        let asked = *self.asked.get_or_insert_with(Instant::now);
        // A worker that failed is better than none. A scheduler that has to exclude all workers would wait for a new
        // one first.
        let workers = self.context.models.worker_count(&self.request.model);
        let exclude = match attempts.exclude() {
            excluded if excluded.len() < workers => excluded.to_vec(),
            _ => Vec::new(),
        };
        // One worker needs no choice.
        let prefixes = match workers > 1 {
            true => self.context_hashes().hashes().to_vec(),
            false => Vec::new(),
        };
        let (namespace, group) = (self.namespace(), self.group());
        let session = self.request.session.as_deref().filter(|_| workers > 1);
        if let Some(group) = &group {
            self.context.memory.group_runs(&namespace, group);
        }
        LeaseRequest {
            request: self.id,
            namespace: namespace.signed.clone(),
            group,
            session: session.map(|name| SessionHash::new(namespace.id, name)),
            class: self.request.standing().class,
            weight: self.request.standing().weight,
            age_ms: millis(asked.elapsed()),
            epoch_seen: attempts.epoch_seen(),
            ended: ended.and_then(LeaseGuard::continues),
            expected_tokens: self.expected_tokens,
            prefixes,
            chunk_tokens: self.request.chunk_tokens,
            context_tokens: self.choice.prompt_len() + self.choice.output_len(),
            generated_tokens: self.choice.output_len(),
            max_new_tokens: self.choice.max_new_tokens(),
            prefer: attempts.prefer().cloned(),
            transferred: attempts.transfers_to_preferred(),
            exclude,
        }
    }

    /// The hashes of the context, of which only the output since the last call is read.
    fn context_hashes(&mut self) -> &PrefixHasher {
        let known = self.prefixes.context_len() - self.choice.prompt_len() as usize;
        let fresh = self.choice.output().get(known..).unwrap_or_default();
        self.prefixes.extend(fresh);
        &self.prefixes
    }

    /// Most tokens of a chunk: the fewer of what the lease allows and what the request asks for. An output that an
    /// engine may not be able to continue is not cut, unless its client asks for it.
    fn chunk_tokens(&self, lease: &Lease) -> Option<u32> {
        let wish = self.request.chunk_tokens;
        let may_be_cut = wish.is_some()
            || !self.request.sampling.depends_on_output()
            || self.context.models.compiles_forms(&self.request.model);
        let allowed = lease.chunk_tokens.filter(|_| may_be_cut);
        let least = match (allowed, wish) {
            (Some(allowed), Some(wish)) => Some(allowed.min(wish)),
            (allowed, wish) => allowed.or(wish),
        };
        // A chunk without a token would make no progress.
        least.map(|tokens| tokens.max(1))
    }

    /// The request for a chunk. `resumes` stands for everything that the worker has parked.
    fn chunk_request(
        &self,
        lease: &Lease,
        attempts: &Attempts,
        resumes: Option<ParkedContext>,
    ) -> ChunkRequest {
        let retries_left = self.context.retries.left();
        let time_left = self
            .context
            .time
            .left(self.request.standing().class, self.received);
        let forced = self.choice.forced();
        // Forced tokens are certain, so they are the best draft of themselves.
        let prediction = match forced.is_empty() {
            true => self.request.prediction.as_deref().unwrap_or_default(),
            false => forced,
        };
        ChunkRequest {
            lease: lease.lease,
            epoch: lease.epoch,
            request: self.id,
            namespace: self.namespace().signed.clone(),
            session: self.request.session.clone(),
            group: self.group(),
            resumes,
            tokens: match resumes {
                Some(_) => Vec::new(),
                None => self.choice.context(),
            },
            prompt_len: self.choice.prompt_len(),
            sampling: match resumes {
                Some(_) => Sampling::default(),
                None => Sampling {
                    choice: self.index,
                    forced_output: forced.to_vec(),
                    ..self.request.sampling.clone()
                },
            },
            max_new_tokens: self.choice.max_new_tokens() - self.choice.output_len(),
            chunk_tokens: self.chunk_tokens(lease),
            speculation: self.request.speculation,
            drafts: self.request.standing().drafts,
            urgency: self.request.standing().urgency,
            budget: ChunkBudget {
                attempts: attempts.left().min(retries_left.saturating_add(1)),
                // After this time the request has certainly run out of time.
                time_left_ms: match self.request.abort {
                    None => Some(millis(time_left.saturating_add(WORKER_TIME_SLACK))),
                    // A worker does not know what is left of the time of a trainer that pauses it.
                    Some(_) => None,
                },
            },
            expected_tokens: self.expected_tokens,
            prediction: match resumes {
                Some(_) => Vec::new(),
                None => prediction.to_vec(),
            },
            transferred: attempts.is_transferred(),
            alive_within_ms: Some(lease.ttl_ms.max(ALIVE_WITHIN_MS_MIN)),
        }
    }

    /// Decodes one chunk. If it leaves a stream in `open`, that stream has to be cut.
    pub(super) async fn chunk(
        &mut self,
        lease: &Lease,
        attempts: &mut Attempts,
        guard: &mut LeaseGuard,
        open: &mut Option<(Arc<dyn Worker>, ChunkStream)>,
    ) -> Result<ChunkOutcome, ApiError> {
        let silence_max = self.context.tuning.worker_silence_max;
        let silent = || {
            let message = format!("an engine was silent for {} s", silence_max.as_secs());
            ApiError::new(ErrorKind::Timeout, message)
        };
        let worker = self.context.workers.at(&lease.url);
        self.choice.begin_chunk(self.received.elapsed());
        let mut parked = std::mem::take(&mut self.parked);
        let mut resumes = parked.take(lease, || self.context_hashes());
        let opened = loop {
            let request = self.chunk_request(lease, attempts, resumes);
            let opened = self
                .context
                .time
                .within_active(silence_max, worker.chunk(request));
            let Some(opened) = until_aborted(self.request, opened).await else {
                return self.abort().await;
            };
            match opened.unwrap_or_else(|| Err(silent())) {
                // Nothing has failed: the worker made room, or was started anew, and gets all of the context.
                Err(error) if resumes.is_some() && error.has_code(code::CONTEXT_GONE) => {
                    resumes = None;
                }
                opened => break opened,
            }
        };
        let mut stream = match opened {
            Ok(stream) => stream,
            Err(error) => return self.chunk_lost(error).await,
        };
        let mut silence = Deadline::after(silence_max);
        let mut heard = Instant::now();
        loop {
            // Steps that have arrived together are one event for the reader.
            let arrived = match self.unsent.tokens.len() < UNSENT_TOKENS_MAX {
                true => stream.next().now_or_never(),
                false => None,
            };
            let event = match arrived {
                Some(event) => Some(event),
                None => {
                    self.flush().await?;
                    let next = silence.bound(stream.next());
                    let Some(next) = until_aborted(self.request, next).await else {
                        *open = Some((worker.clone(), stream));
                        return self.abort().await;
                    };
                    next
                }
            };
            let event = match event {
                Some(Some(Ok(event))) => event,
                Some(Some(Err(error))) => return self.chunk_lost(error).await,
                Some(None) => {
                    let message = "a worker was lost and no other could continue";
                    return self.chunk_lost(worker_failed(message)).await;
                }
                None => {
                    let active = self.context.time.active_since(heard);
                    if active >= silence_max {
                        return self.chunk_lost(silent()).await;
                    }
                    // The workers were paused meanwhile.
                    let left = silence_max.saturating_sub(active).max(PAUSE_CHECK);
                    silence.set(tokio::time::Instant::now() + left);
                    continue;
                }
            };
            heard = Instant::now();
            silence.set((heard + silence_max).into());
            match event {
                // It only shows that the silence has a reason.
                ChunkEvent::Held { .. } => {}
                // After a token it would not be a retry.
                ChunkEvent::Retry if self.choice.output_len() > 0 => {}
                ChunkEvent::Retry => {
                    attempts.engine_retried();
                    self.context.retries.worker_retried();
                }
                ChunkEvent::Step(message) => {
                    let before = self.choice.own_len();
                    guard.add_verified(message.accepted(), message.rejected());
                    self.request.model.weights.seen(message.weight_version);
                    let mut pieces = Vec::new();
                    let now = heard.saturating_duration_since(self.received);
                    let each = self
                        .request
                        .standing()
                        .shape
                        .is_some()
                        .then_some(&mut pieces);
                    let progress = match self.choice.step_in_pieces(now, message, each) {
                        Ok(progress) => progress,
                        Err(fault) => {
                            let error = worker_failed("a worker sent an invalid step");
                            return self.chunk_lost(error.with_detail(fault)).await;
                        }
                    };
                    guard.set_emitted(self.choice.chunk_output_len());
                    let made = self.choice.own_len().saturating_sub(before);
                    self.made.add(made as u64);
                    let tokens = u64::from(self.choice.output_len());
                    if self.usage_progress.is_due(tokens, heard) {
                        self.note_usage();
                    }
                    self.observe_first_token(heard);
                    self.observe_step_gap(heard);
                    for piece in pieces {
                        self.send(piece).await?;
                    }
                    if progress.needs_cut {
                        *open = Some((worker.clone(), stream));
                        self.send(progress).await?;
                        return Ok(ChunkOutcome::Finished);
                    }
                    match self.request.standing().shape {
                        Some(_) => self.send(progress).await?,
                        None => self.unsent.append(progress),
                    }
                }
                ChunkEvent::End(end)
                    if end.reason == ChunkEndReason::Transfer
                        && attempts.is_transferred()
                        && self.choice.chunk_output_len() == 0 =>
                {
                    let message = "a worker transferred a request that had been transferred to it";
                    return self.chunk_lost(worker_failed(message)).await;
                }
                // Only a trainer aborts on purpose. For anybody else the worker has failed.
                ChunkEvent::End(end)
                    if end.reason == ChunkEndReason::Aborted && self.request.abort.is_none() =>
                {
                    let message = "a worker aborted a request that nobody had aborted";
                    return self.chunk_lost(worker_failed(message)).await;
                }
                ChunkEvent::End(end) => {
                    // A worker can pause a chunk while its engine is silent, but it cannot finish one. This is noted
                    // before the reader takes the event, which may last.
                    if let ChunkEndReason::Stop
                    | ChunkEndReason::Length
                    | ChunkEndReason::ChunkLimit = end.reason
                    {
                        guard.worker_ended();
                    }
                    // A chunk that ended before its context was read does not know the number.
                    if self.choice.chunk_output_len() > 0 {
                        guard.set_cached(end.cached_tokens);
                    }
                    if let ChunkEndReason::ChunkLimit | ChunkEndReason::GaveWay = end.reason {
                        self.parked.chunk_ended(lease);
                    }
                    let progress = self.choice.end(&end);
                    let finished = progress.finish.is_some();
                    // The end of the only choice is the end of the request, which is settled then, unless a slow
                    // reader keeps it.
                    let is_settled_now = finished && self.request.choice_count() == 1;
                    if !is_settled_now || self.events.capacity() == 0 {
                        self.note_usage();
                    }
                    self.send(progress).await?;
                    return Ok(if finished {
                        ChunkOutcome::Finished
                    } else {
                        ChunkOutcome::Continues(match (end.reason, end.next_worker) {
                            (ChunkEndReason::Draining, _) => NextChunk::OtherWorker,
                            (ChunkEndReason::Transfer, Some(next)) => NextChunk::Transfer(next),
                            _ => NextChunk::SameWorker,
                        })
                    });
                }
            }
        }
    }

    /// Ends the output where it is, because the request was aborted.
    async fn abort(&mut self) -> Result<ChunkOutcome, ApiError> {
        let progress = self.choice.abort();
        self.note_usage();
        self.send(progress).await?;
        Ok(ChunkOutcome::Finished)
    }

    /// Ends a choice without a chunk, because the request was aborted.
    pub(super) async fn aborted(&mut self) -> Result<ChoiceSummary, ApiError> {
        self.abort().await?;
        Ok(self.choice.summary())
    }

    /// Notes what was used so far.
    fn note_usage(&self) {
        self.meter.note(self.index, self.choice.usage());
    }

    /// Ends a chunk that broke off. The output has often ended all the same.
    async fn chunk_lost(&mut self, error: ApiError) -> Result<ChunkOutcome, ApiError> {
        let output = match (self.choice.output_len(), self.choice.chunk_output_len()) {
            (0, _) => OutputSoFar::Nothing,
            (_, 0) => OutputSoFar::EarlierChunks,
            _ => OutputSoFar::ThisChunk,
        };
        self.note_usage();
        let progress = self.choice.lost();
        let has_finished = progress.finish.is_some();
        self.send(progress).await?;
        Ok(match has_finished {
            true => ChunkOutcome::Finished,
            false => ChunkOutcome::Failed { error, output },
        })
    }

    /// Sends this output, and what was not sent before it.
    async fn send(&mut self, mut progress: ChoiceProgress) -> Result<(), ApiError> {
        if progress.finish.is_some() {
            progress.figures = Some(self.choice.figures());
        }
        self.unsent.append(progress);
        self.flush().await
    }

    /// Sends what a reader can use. The first token is always sent, because it starts the answer.
    async fn flush(&mut self) -> Result<(), ApiError> {
        let progress = std::mem::take(&mut self.unsent);
        let is_first = !progress.tokens.is_empty()
            && progress.tokens.len() == self.choice.output_len() as usize;
        let wants_tokens = self.request.wants_logprobs()
            || self.request.output.has_token_ids
            || self.request.abort.is_some();
        let has_tokens = !progress.tokens.is_empty() || !progress.prompt.is_empty();
        let shows_tokens = wants_tokens && has_tokens;
        let is_needed = shows_tokens || is_first || self.request.standing().shape.is_some();
        if progress.events.is_empty() && progress.finish.is_none() && !is_needed {
            return Ok(());
        }
        let event = RelayEvent::Progress {
            index: self.index,
            progress,
        };
        self.events
            .send(event)
            .await
            .map_err(|_| ApiError::internal("the client went away"))
    }

    fn observe_first_token(&mut self, now: Instant) {
        if self.first_token.is_none() {
            self.first_token = Some(now);
            let metrics = &self.context.metrics;
            let waited = now.saturating_duration_since(self.received);
            let (tenant, model) = (&self.request.tenant, &self.request.model.id);
            let class = self.request.standing().class;
            metrics.first_token(tenant, model, class, waited.as_secs_f64());
        }
    }

    fn observe_step_gap(&mut self, now: Instant) {
        if let Some(last) = self.last_step.replace(now) {
            let gap = now.saturating_duration_since(last);
            self.series.step_gap_seconds.observe(gap.as_secs_f64());
        }
    }

    pub(super) fn observe_time_per_token(&self) {
        let (Some(first), tokens @ 2..) = (self.first_token, self.choice.output_len()) else {
            return;
        };
        let per_token_s = first.elapsed().as_secs_f64() / f64::from(tokens - 1);
        self.series.per_token_seconds.observe(per_token_s);
    }
}
