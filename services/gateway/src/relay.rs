//! Carries a request out: lease, chunk, next lease, until every choice has ended.
//!
//! One task per request drives all its choices and sends what happens into a bounded channel. Whoever reads
//! it (an event stream, or the collector of a plain answer) may go away at any time: the task then stops,
//! the workers' streams are dropped, and the leases go back.

use std::sync::Arc;
use std::time::{Duration, Instant};

use futures_util::StreamExt;
use futures_util::future::try_join_all;
use refrain_clients::{ChunkStream, Scheduler, Worker, Workers};
use refrain_protocol::chunk::{ChunkEndReason, ChunkEvent, ChunkRequest};
use refrain_protocol::engine::Sampling;
use refrain_protocol::openai::{PromptTokensDetails, ResponseMetrics, Usage};
use refrain_protocol::scheduling::{Lease, LeaseOutcome, LeaseRequest};
use refrain_protocol::{ApiError, ErrorKind, RequestId};
use tokio::sync::mpsc;
use tracing::{Instrument, Span};

use crate::admission::Ticket;
use crate::attempts::{Attempts, Verdict};
use crate::choice::{Choice, ChoicePlan, ChoiceSummary, Progress};
use crate::lease::LeaseHold;
use crate::metrics::GatewayMetrics;
use crate::models::Models;
use crate::request::{GenerateRequest, PreparedPrompt};
use crate::text::OutputText;

/// What the relay needs of the mesh and of the configuration.
pub(crate) struct Relay {
    pub(crate) scheduler: Arc<dyn Scheduler>,
    pub(crate) workers: Arc<dyn Workers>,
    pub(crate) models: Arc<Models>,
    pub(crate) metrics: Arc<GatewayMetrics>,
    /// Where leases are given back.
    pub(crate) tasks: tokio::runtime::Handle,
    pub(crate) failures_max: u32,
    pub(crate) retry_backoff: Duration,
    pub(crate) worker_idle_max: Duration,
    pub(crate) request_max: Duration,
    pub(crate) events_max: usize,
}

/// What happens to a request. The last event is `Done` or `Failed`; a channel that closes without either
/// means that the task died.
#[derive(Debug)]
pub(crate) enum RelayEvent {
    /// A choice got on, or ended.
    Progress {
        /// Which.
        index: u32,
        /// How.
        progress: Progress,
    },
    /// All choices have ended.
    Done(Box<RequestSummary>),
    /// The request cannot be carried out.
    Failed(ApiError),
}

/// What a finished request took.
#[derive(Clone, Debug, Default, PartialEq)]
pub(crate) struct RequestSummary {
    pub(crate) usage: Usage,
    pub(crate) metrics: ResponseMetrics,
}

/// How a chunk ended, for the request.
enum ChunkOutcome {
    Finished,
    Continues { draining: bool },
    Failed { error: ApiError, progressed: bool },
}

impl Relay {
    /// Starts carrying out a request.
    pub(crate) fn start(
        self: &Arc<Self>,
        request: Arc<GenerateRequest>,
        ticket: Ticket,
        received: Instant,
    ) -> mpsc::Receiver<RelayEvent> {
        let (events, reader) = mpsc::channel(self.events_max);
        let relay = self.clone();
        let task = async move {
            let outcome = tokio::select! {
                biased;
                () = events.closed() => None,
                outcome = relay.run(&request, &events, received) => Some(outcome),
            };
            relay.record(&request, outcome.as_ref(), received);
            let last = match outcome {
                None => return,
                Some(Ok(summary)) => RelayEvent::Done(Box::new(summary)),
                Some(Err(error)) => RelayEvent::Failed(error),
            };
            // An error means that the reader left meanwhile.
            let _ = events.send(last).await;
            drop(ticket);
        };
        tokio::spawn(task.instrument(Span::current()));
        reader
    }

    async fn run(
        &self,
        request: &GenerateRequest,
        events: &mpsc::Sender<RelayEvent>,
        received: Instant,
    ) -> Result<RequestSummary, ApiError> {
        let per_prompt = request.choices_per_prompt as usize;
        let choices = (0..request.choice_count()).map(|index| {
            let prompt = &request.prompts[index / per_prompt];
            self.run_choice(request, prompt, index as u32, events, received)
        });
        let summaries = tokio::time::timeout(self.request_max, try_join_all(choices))
            .await
            .map_err(|_| {
                let most = self.request_max.as_secs();
                ApiError::new(
                    ErrorKind::Timeout,
                    format!("the request took longer than {most} s"),
                )
            })??;
        Ok(summarize(request, &summaries))
    }

    async fn run_choice(
        &self,
        request: &GenerateRequest,
        prompt: &PreparedPrompt,
        index: u32,
        events: &mpsc::Sender<RelayEvent>,
        received: Instant,
    ) -> Result<ChoiceSummary, ApiError> {
        let plan = ChoicePlan {
            prompt: prompt.tokens.clone(),
            max_new_tokens: prompt.max_new_tokens,
            stop_token_ids: request.sampling.stop_token_ids.clone(),
            wants_logprobs: request.wants_logprobs(),
        };
        let text = OutputText::new(request.model.tokenizer.clone(), request.stops.clone());
        let mut run = ChoiceRun {
            relay: self,
            request,
            index,
            id: random_id()?,
            choice: Choice::new(plan, text),
            events,
            received,
            first_token: None,
        };
        let mut attempts = Attempts::new(self.failures_max, self.retry_backoff);
        loop {
            let lease = match self.scheduler.lease(run.lease_request(&attempts)).await {
                Ok(lease) => lease,
                Err(error) => match attempts.lease_refused(error, run.choice.output_len() > 0) {
                    Verdict::GiveUp(error) => return Err(error),
                    Verdict::Again(pause) => {
                        tokio::time::sleep(pause).await;
                        continue;
                    }
                },
            };
            let mut hold = LeaseHold::new(self.scheduler.clone(), self.tasks.clone(), &lease);
            let mut open = None;
            let outcome = run.chunk(&lease, &mut hold, &mut open).await?;
            let (given_back, verdict) = match outcome {
                ChunkOutcome::Finished => {
                    match open {
                        Some((worker, stream)) => {
                            hold.end_with_cut(worker, stream, run.choice.output_len())
                        }
                        None => drop(hold.end(LeaseOutcome::Done)),
                    }
                    run.observe_pace();
                    return Ok(run.choice.summary());
                }
                ChunkOutcome::Continues { draining } => {
                    attempts.chunk_ended(&lease.worker, draining);
                    (
                        hold.end(LeaseOutcome::Continues),
                        Verdict::Again(Duration::ZERO),
                    )
                }
                ChunkOutcome::Failed { error, progressed } => {
                    let detail = error.detail.clone();
                    tracing::warn!(worker = %lease.worker, kind = ?error.kind, detail, "chunk failed");
                    let (outcome, verdict) =
                        attempts.chunk_failed(&lease.worker, error, progressed);
                    if matches!(verdict, Verdict::Again(_)) {
                        self.metrics.continuations.inc();
                    }
                    (hold.end(outcome), verdict)
                }
            };
            if let Some(task) = given_back {
                // A task that panicked has nothing to tell; the lease then ends by its ttl.
                let _ = task.await;
            }
            match verdict {
                Verdict::GiveUp(error) => return Err(error),
                Verdict::Again(pause) => tokio::time::sleep(pause).await,
            }
        }
    }

    fn record(
        &self,
        request: &GenerateRequest,
        outcome: Option<&Result<RequestSummary, ApiError>>,
        received: Instant,
    ) {
        let labels = [
            self.metrics.tenant_label(&request.tenant),
            request.model.id.as_str(),
        ];
        let status = match outcome {
            None => "499".to_owned(),
            Some(Ok(_)) => "200".to_owned(),
            Some(Err(error)) => error.kind.status().to_string(),
        };
        self.metrics
            .requests
            .with_label_values(&[status.as_str()])
            .inc();
        self.metrics
            .request_seconds
            .with_label_values(&labels)
            .observe(received.elapsed().as_secs_f64());
        let span = Span::current();
        match outcome {
            Some(Ok(summary)) => {
                let usage = summary.usage;
                for (kind, tokens) in [
                    ("input", usage.prompt_tokens),
                    ("output", usage.completion_tokens),
                ] {
                    let labels = [labels[0], labels[1], kind];
                    self.metrics
                        .token_usage
                        .with_label_values(&labels)
                        .observe(tokens as f64);
                }
                span.record("gen_ai.usage.input_tokens", usage.prompt_tokens);
                span.record("gen_ai.usage.output_tokens", usage.completion_tokens);
            }
            Some(Err(_)) | None => {
                span.record("error.type", status);
            }
        }
    }
}

/// A choice on its way through the mesh.
struct ChoiceRun<'a> {
    relay: &'a Relay,
    request: &'a GenerateRequest,
    index: u32,
    id: RequestId,
    choice: Choice,
    events: &'a mpsc::Sender<RelayEvent>,
    received: Instant,
    first_token: Option<Instant>,
}

impl ChoiceRun<'_> {
    fn lease_request(&self, attempts: &Attempts) -> LeaseRequest {
        LeaseRequest {
            request: self.id,
            namespace: self
                .relay
                .models
                .namespace(&self.request.tenant, &self.request.model),
            group: self.request.group.clone(),
            context_tokens: self.choice.prompt_len() + self.choice.output_len(),
            generated_tokens: self.choice.output_len(),
            max_new_tokens: self.choice.max_new_tokens(),
            prefer: attempts.prefer().cloned(),
            exclude: attempts.exclude().to_vec(),
        }
    }

    fn chunk_request(&self, lease: &Lease) -> ChunkRequest {
        ChunkRequest {
            lease: lease.lease,
            epoch: lease.epoch,
            request: self.id,
            namespace: self
                .relay
                .models
                .namespace(&self.request.tenant, &self.request.model),
            session: self.request.session.clone(),
            group: self.request.group.clone(),
            tokens: self.choice.context(),
            prompt_len: self.choice.prompt_len(),
            sampling: Sampling {
                choice: self.index,
                ..self.request.sampling.clone()
            },
            max_new_tokens: self.choice.max_new_tokens() - self.choice.output_len(),
            chunk_tokens: self.request.chunk_tokens,
            speculation: self.request.speculation,
        }
    }

    /// Decodes one chunk. What is left in `open` afterwards is a stream that has to be cut.
    async fn chunk(
        &mut self,
        lease: &Lease,
        hold: &mut LeaseHold,
        open: &mut Option<(Arc<dyn Worker>, ChunkStream)>,
    ) -> Result<ChunkOutcome, ApiError> {
        let idle_max = self.relay.worker_idle_max;
        let silent = || {
            let message = format!("a worker sent nothing for {} s", idle_max.as_secs());
            ApiError::new(ErrorKind::Timeout, message)
        };
        let worker = self.relay.workers.at(&lease.url);
        self.choice.begin_chunk(self.received.elapsed());
        let opened = tokio::time::timeout(idle_max, worker.chunk(self.chunk_request(lease))).await;
        let mut stream = match opened.unwrap_or_else(|_| Err(silent())) {
            Ok(stream) => stream,
            Err(error) => return self.chunk_lost(error).await,
        };
        loop {
            let event = match tokio::time::timeout(idle_max, stream.next()).await {
                Ok(Some(Ok(event))) => event,
                Ok(Some(Err(error))) => return self.chunk_lost(error).await,
                Ok(None) => {
                    let error = ApiError::new(
                        ErrorKind::Upstream,
                        "a worker was lost and no other could go on",
                    );
                    return self.chunk_lost(error).await;
                }
                Err(_) => return self.chunk_lost(silent()).await,
            };
            match event {
                ChunkEvent::Step(message) => {
                    let progress = match self.choice.step(self.received.elapsed(), message) {
                        Ok(progress) => progress,
                        Err(fault) => {
                            let error =
                                ApiError::new(ErrorKind::Upstream, "a worker broke the protocol");
                            return self.chunk_lost(error.with_detail(fault)).await;
                        }
                    };
                    hold.emitted(self.choice.chunk_output_len());
                    self.observe_first_token();
                    let needs_cut = progress.needs_cut;
                    if needs_cut {
                        *open = Some((worker.clone(), stream));
                        self.send(progress).await?;
                        return Ok(ChunkOutcome::Finished);
                    }
                    self.send(progress).await?;
                }
                ChunkEvent::End(end) => {
                    let progress = self.choice.end(&end);
                    let finished = progress.finish.is_some();
                    self.send(progress).await?;
                    return Ok(if finished {
                        ChunkOutcome::Finished
                    } else {
                        ChunkOutcome::Continues {
                            draining: end.reason == ChunkEndReason::Draining,
                        }
                    });
                }
            }
        }
    }

    /// A chunk broke off; often the output has ended all the same.
    async fn chunk_lost(&mut self, error: ApiError) -> Result<ChunkOutcome, ApiError> {
        let progressed = self.choice.chunk_output_len() > 0;
        let progress = self.choice.lost();
        if progress.finish.is_none() {
            return Ok(ChunkOutcome::Failed { error, progressed });
        }
        self.send(progress).await?;
        Ok(ChunkOutcome::Finished)
    }

    /// Passes on what a reader can use; the first token always, since it starts the answer.
    async fn send(&mut self, progress: Progress) -> Result<(), ApiError> {
        let is_first = !progress.tokens.is_empty()
            && progress.tokens.len() == self.choice.output_len() as usize;
        let has_logprobs = self.request.wants_logprobs() && !progress.tokens.is_empty();
        if progress.text.is_empty() && progress.finish.is_none() && !has_logprobs && !is_first {
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

    fn observe_first_token(&mut self) {
        if self.first_token.is_none() {
            self.first_token = Some(Instant::now());
            let metrics = &self.relay.metrics;
            let labels = [
                metrics.tenant_label(&self.request.tenant),
                self.request.model.id.as_str(),
            ];
            metrics
                .first_token_seconds
                .with_label_values(&labels)
                .observe(self.received.elapsed().as_secs_f64());
        }
    }

    fn observe_pace(&self) {
        let (Some(first), tokens @ 2..) = (self.first_token, self.choice.output_len()) else {
            return;
        };
        let metrics = &self.relay.metrics;
        let labels = [
            metrics.tenant_label(&self.request.tenant),
            self.request.model.id.as_str(),
        ];
        let pace = first.elapsed().as_secs_f64() / f64::from(tokens - 1);
        metrics
            .per_token_seconds
            .with_label_values(&labels)
            .observe(pace);
    }
}

fn summarize(request: &GenerateRequest, choices: &[ChoiceSummary]) -> RequestSummary {
    let prompt_tokens: u64 = request
        .prompts
        .iter()
        .map(|prompt| prompt.tokens.len() as u64)
        .sum();
    let completion_tokens = choices.iter().map(|choice| choice.completion_tokens).sum();
    // Each prompt counts once, and so does what was cached of it: for the first of its choices.
    let firsts = choices.iter().step_by(request.choices_per_prompt as usize);
    let cached_tokens = firsts.map(|choice| choice.cached_tokens).sum();
    let mut metrics = ResponseMetrics::default();
    for choice in choices {
        metrics.timings.prefill_s += choice.timings.prefill_s;
        metrics.timings.decode_s += choice.timings.decode_s;
        metrics.timings.decode_tokens += choice.timings.decode_tokens;
        metrics.timings.chunks += choice.timings.chunks;
        for (source, counts) in &choice.counts {
            let speculative = &mut metrics.speculative_decoding;
            speculative.steps += counts.steps;
            speculative.drafted += counts.drafted;
            speculative.accepted += counts.accepted;
            speculative
                .by_source
                .entry(*source)
                .or_default()
                .add(*counts);
        }
    }
    RequestSummary {
        usage: Usage {
            prompt_tokens,
            completion_tokens,
            total_tokens: prompt_tokens + completion_tokens,
            prompt_tokens_details: PromptTokensDetails { cached_tokens },
        },
        metrics,
    }
}

fn random_id() -> Result<RequestId, ApiError> {
    let mut bytes = [0u8; 16];
    getrandom::fill(&mut bytes)
        .map_err(|error| ApiError::internal(format!("no random numbers: {error}")))?;
    Ok(RequestId(u128::from_be_bytes(bytes)))
}
