//! Carries a request out: lease, chunk, next lease, until every choice has ended.
//!
//! Whoever reads a request's events (an event stream, or the collector of a plain answer) drives all its choices by reading
//! ([`Relayed`]), and may go away at any time: with it go the workers' streams, and the leases go back. So they do when its
//! time is up ([`RequestTime`]), whether or not anybody reads.

mod relayed;
mod run;
mod time;

use std::sync::Arc;
use std::time::{Duration, Instant};

use futures_util::future::try_join_all;
use refrain_protocol::chunk::DraftSource;
use refrain_protocol::openai::{
    CompletionTokensDetails, PromptTokensDetails, ResponseMetrics, Usage,
};
use refrain_protocol::scheduling::LeaseOutcome;
use refrain_protocol::{ApiError, RequestId};
use refrain_rpc::{Scheduler, Workers};
use refrain_service_kit::random;
use tokio::sync::mpsc;
use tracing::{Instrument, Span};

use crate::admission::Ticket;
use crate::attempts::{Attempts, Verdict};
use crate::choice::{Choice, ChoicePlan, ChoiceSummary, Progress};
use crate::lease::LeaseHold;
use crate::metrics::GatewayMetrics;
use crate::models::Models;
pub(crate) use crate::relay::relayed::Relayed;
use crate::relay::run::{ChoiceRun, ChunkOutcome};
pub(crate) use crate::relay::time::RequestTime;
use crate::request::{GenerateRequest, PreparedPrompt};
use crate::retries::Retries;
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
    pub(crate) retries: Retries,
    pub(crate) retry_backoff: Duration,
    pub(crate) worker_idle_max: Duration,
    pub(crate) scheduler_wait: Duration,
    pub(crate) time: Arc<RequestTime>,
    pub(crate) events_max: usize,
}

/// What happens to a request. The last event is `Done` or `Failed`.
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

impl Relay {
    /// What carries a request out as it is read.
    pub(crate) fn carry_out(
        self: &Arc<Self>,
        request: Arc<GenerateRequest>,
        ticket: Ticket,
        received: Instant,
    ) -> Relayed {
        let relay = self.clone();
        Relayed::new(self.events_max, move |events| {
            let work = async move {
                let mut record = Record {
                    relay: &relay,
                    request: &request,
                    received,
                    outcome: None,
                };
                let outcome = relay.run(&request, &events, received).await;
                let outcome = record.outcome.insert(outcome).clone();
                drop(record);
                let last = match outcome {
                    Ok(summary) => RelayEvent::Done(Box::new(summary)),
                    Err(error) => RelayEvent::Failed(error),
                };
                // An error means that the reader left meanwhile.
                let _ = events.send(last).await;
                drop(ticket);
            };
            work.instrument(Span::current())
        })
        .within(&self.time, received)
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
        let summaries = tokio::time::timeout(self.time.left(received), try_join_all(choices))
            .await
            .map_err(|_| self.time.error())??;
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
            id: RequestId(random::u128()?),
            choice: Choice::new(plan, text),
            events,
            received,
            first_token: None,
        };
        let mut attempts =
            Attempts::new(self.failures_max, self.retry_backoff, self.scheduler_wait);
        let may_retry = || self.retries.take();
        loop {
            let lease = match self.scheduler.lease(run.lease_request(&attempts)).await {
                Ok(lease) => lease,
                Err(error) => {
                    let has_output = run.choice.output_len() > 0;
                    match attempts.lease_refused(error, has_output, Instant::now()) {
                        Verdict::GiveUp(error) => {
                            self.metrics.lease_given_up(&error);
                            return Err(error);
                        }
                        Verdict::Again(pause) => {
                            tokio::time::sleep(pause).await;
                            continue;
                        }
                    }
                }
            };
            attempts.leased(&lease.worker);
            if !attempts.is_again() {
                self.retries.chunk_begins();
            }
            let mut hold = LeaseHold::new(self.scheduler.clone(), self.tasks.clone(), &lease);
            let mut open = None;
            let outcome = run
                .chunk(&lease, &mut attempts, &mut hold, &mut open)
                .await?;
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
                ChunkOutcome::Continues(next) => {
                    attempts.chunk_ended(&lease.worker, next);
                    (
                        hold.end(LeaseOutcome::Continues),
                        Verdict::Again(Duration::ZERO),
                    )
                }
                ChunkOutcome::Failed { error, said } => {
                    let detail = error.detail.clone();
                    tracing::warn!(worker = %lease.worker, kind = ?error.kind, detail, "chunk failed");
                    let (outcome, verdict) =
                        attempts.chunk_failed(&lease.worker, error, said, may_retry);
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

    /// `outcome`: `None` where the client went away.
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

/// Records what became of a request, when that is known or nobody waits for it any more.
struct Record<'a> {
    relay: &'a Relay,
    request: &'a GenerateRequest,
    received: Instant,
    outcome: Option<Result<RequestSummary, ApiError>>,
}

impl Drop for Record<'_> {
    fn drop(&mut self) {
        let outcome = match self.outcome.take() {
            // Its client may be there still: it was not the one to end it.
            None => self.relay.time.ended_by(self.received).map(Err),
            outcome => outcome,
        };
        self.relay
            .record(self.request, outcome.as_ref(), self.received);
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
    let predicted = metrics
        .speculative_decoding
        .by_source
        .get(&DraftSource::Prediction)
        .copied()
        .unwrap_or_default();
    RequestSummary {
        usage: Usage {
            prompt_tokens,
            completion_tokens,
            total_tokens: prompt_tokens + completion_tokens,
            prompt_tokens_details: PromptTokensDetails { cached_tokens },
            completion_tokens_details: request.prediction.as_ref().map(|_| {
                CompletionTokensDetails {
                    accepted_prediction_tokens: predicted.accepted,
                    rejected_prediction_tokens: predicted.drafted - predicted.accepted,
                }
            }),
        },
        metrics,
    }
}
