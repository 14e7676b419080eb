//! The run of one request: all its choices at once, and for each the loop over leases and chunks.

use std::sync::Arc;
use std::time::Instant;

use futures_util::TryFutureExt as _;
use futures_util::future::try_join_all;
use refrain_accounts::tenants::Made;
use refrain_accounts::{ProgressClock, UsageMeter};
use refrain_output_parsers::{Counts, OutputParser, ToolParserKind};
use refrain_protocol::chunk::DraftSource;
use refrain_protocol::error::code;
use refrain_protocol::history::PromptHash;
use refrain_protocol::openai::{
    CompletionTokensDetails, FinishReason, PromptTokensDetails, ResponseMetrics, Usage,
};
use refrain_protocol::prefix::PrefixHasher;
use refrain_protocol::scheduling::{LeaseOutcome, RequestClass};
use refrain_protocol::{ApiError, ErrorKind, RequestId, TokenId};
use refrain_service_kit::random;
use refrain_service_kit::telemetry::GaugeGuard;
use refrain_tokenization::STAGE;
use tokio::sync::mpsc;
use tokio::task::JoinHandle;
use tracing::{Instrument, Span};

use crate::intake::AdmittedRequest;
use crate::metrics::RequestSeries;
use crate::relay::aborts::until_aborted;
use crate::relay::attempts::Attempts;
use crate::relay::choice::{ChoicePlan, ChoiceProgress, ChoiceState, ChoiceSummary};
use crate::relay::choice_run::{ChoiceRun, ChunkOutcome};
use crate::relay::context::RelayContext;
use crate::relay::events::{RelayEvent, RequestSummary};
use crate::relay::implicit_groups::PromptGroup;
use crate::relay::lease_guard::{DropReason, LeaseGuard};
use crate::relay::output_text::OutputText;
use crate::relay::parked_at::ParkedAt;
use crate::relay::parsing::{CallIds, Parsing};
use crate::relay::request_events::RequestEvents;
use crate::request::{GenerateRequest, PreparedPrompt};

impl RelayContext {
    /// Starts a request. It is carried out as its events are read.
    pub(crate) fn carry_out(
        self: &Arc<Self>,
        request: Arc<GenerateRequest>,
        admitted: AdmittedRequest,
        received: Instant,
    ) -> RequestEvents {
        let (context, class, shape) = (
            self.clone(),
            request.standing().class,
            request.standing().shape,
        );
        let events = RequestEvents::new(self.tuning.stream_events_max, move |events| {
            let work = async move {
                let mut record = OutcomeRecord {
                    context: &context,
                    request: &request,
                    received,
                    series: &admitted.series,
                    outcome: None,
                };
                let reports = Reports {
                    events: &events,
                    received,
                    made: admitted.account.made(),
                    meter: admitted.account.meter().clone(),
                    series: &admitted.series,
                };
                let outcome = context.run(&request, &reports).await;
                let outcome = record.outcome.insert(outcome).clone();
                drop(record);
                admitted.account.meter().settle().await;
                let last = match outcome {
                    Ok(summary) if request.standing().hides_metrics => {
                        RelayEvent::Done(Box::new(summary.without_traces()))
                    }
                    Ok(summary) => RelayEvent::Done(Box::new(summary)),
                    Err(error) => RelayEvent::Failed(error),
                };
                // An error means that the reader has left meanwhile.
                let _ = events.send(last).await;
                drop(admitted);
            };
            work.instrument(Span::current())
        });
        events.shaped(shape).within(&self.time, class, received)
    }

    async fn run(
        &self,
        request: &GenerateRequest,
        reports: &Reports<'_>,
    ) -> Result<RequestSummary, ApiError> {
        let (class, received) = (request.standing().class, reports.received);
        let dropped = Arc::new(DropReason::new(self.time.clone(), class, received));
        let prompts = self.prompts(request)?;
        let per_prompt = request.choices_per_prompt as usize;
        let choices = (0..request.choice_count()).map(|index| {
            let prompt = &prompts[index / per_prompt];
            let run = self.run_choice(request, prompt, index as u32, reports, &dropped);
            // All other choices are dropped then.
            run.inspect_err(|_| dropped.choice_failed())
        });
        let choices = try_join_all(choices);
        let summaries = self.time.bound(class, received, choices).await??;
        Ok(summarize(request, &summaries))
    }

    /// Hashes the prompts of a request, once for all their choices.
    fn prompts<'a>(&self, request: &'a GenerateRequest) -> Result<Vec<HashedPrompt<'a>>, ApiError> {
        let namespace = self
            .models
            .namespace(&request.standing().scope, &request.model);
        let namespace = namespace.id;
        let hashed = request.prompts.iter().map(|prompt| {
            let mut prefixes = PrefixHasher::new(&namespace);
            prefixes.extend(&prompt.tokens);
            let group = match request.group {
                Some(_) => None,
                None => Some(self.groups.join(
                    namespace,
                    prefixes.whole(),
                    request.choices_per_prompt,
                    request.model.weights.changes(),
                    Instant::now(),
                )?),
            };
            if request.output.scores_prompt() {
                // All but the first token are output.
                prefixes = PrefixHasher::new(&namespace);
                prefixes.extend(&prompt.tokens[..1]);
            }
            Ok(HashedPrompt {
                prompt,
                prefixes,
                group,
            })
        });
        hashed.collect()
    }

    async fn run_choice(
        &self,
        request: &GenerateRequest,
        HashedPrompt {
            prompt,
            prefixes,
            group,
        }: &HashedPrompt<'_>,
        index: u32,
        reports: &Reports<'_>,
        dropped: &Arc<DropReason>,
    ) -> Result<ChoiceSummary, ApiError> {
        let (events, received) = (reports.events, reports.received);
        // A worker scores only tokens that it emits. So all but the first token of such a prompt are forced output.
        let (first, forced): (Arc<[TokenId]>, _) = match request.output.scores_prompt() {
            true => (prompt.tokens[..1].into(), &prompt.tokens[1..]),
            false => (prompt.tokens.clone(), &[][..]),
        };
        let plan = ChoicePlan {
            prompt: first,
            max_new_tokens: prompt.max_new_tokens + forced.len() as u32,
            stop_token_ids: request.sampling.stop_token_ids.clone(),
            wants_logprobs: request.wants_logprobs(),
            forced: forced.into(),
            min_tokens: request.sampling.min_tokens,
            keeps_steps: request.traces_steps,
        };
        if plan.max_new_tokens == 0 {
            // There is nothing to decode.
            let progress = ChoiceProgress {
                finish: Some(FinishReason::Length),
                ..ChoiceProgress::default()
            };
            let _ = events.send(RelayEvent::Progress { index, progress }).await;
            return Ok(ChoiceSummary::default());
        }
        let text = output_text(request)?;
        let is_rollout = request.standing().class == RequestClass::Rollout;
        // Somebody who waits for each token does not wait for an estimate as well.
        let expected_tokens = match is_rollout && !request.output.scores_prompt() {
            true => {
                let namespace = self
                    .models
                    .namespace(&request.standing().scope, &request.model);
                let prompt = PromptHash::of(&prompt.tokens);
                self.memory.expected_tokens(&namespace, prompt).await
            }
            false => None,
        };
        let mut run = ChoiceRun {
            context: self,
            request,
            index,
            id: RequestId(random::u128()?),
            expected_tokens,
            choice: ChoiceState::new(plan, text),
            prefixes: prefixes.clone(),
            prompt_group: group.clone(),
            asked: None,
            events,
            received,
            first_token: None,
            last_step: None,
            series: reports.series.clone(),
            made: reports.made.clone(),
            meter: reports.meter.clone(),
            usage_progress: ProgressClock::new(Instant::now()),
            unsent: ChoiceProgress::default(),
            parked: ParkedAt::default(),
        };
        let (failures_max, first_pause) = (self.tuning.failures_max, self.tuning.retry_backoff);
        let scheduler_wait = match is_rollout {
            true => self.rollout_scheduler_wait,
            false => self.scheduler_wait,
        };
        let mut attempts = Attempts::new(failures_max, first_pause, scheduler_wait)
            .patient(is_rollout)
            .holding(request.abort.is_some());
        let may_retry = || self.retries.take();
        // The lease of a chunk after which the choice continues, until the scheduler has it back.
        let mut ended: Option<LeaseGuard> = None;
        loop {
            let lease_request = run.lease_request(&attempts, ended.as_ref());
            let lease = self.scheduler.lease(lease_request);
            let stage = tracing::trace_span!(target: STAGE, "lease");
            let Some(lease) = until_aborted(request, lease.instrument(stage)).await else {
                if let Some(ended) = ended.take() {
                    until_given_back(ended.end(LeaseOutcome::Aborted)).await;
                }
                return run.aborted().await;
            };
            let lease = match lease {
                Ok(lease) => lease,
                Err(error) => {
                    let has_output = run.choice.output_len() > 0;
                    let is_held = attempts.is_held_by(&error);
                    let decision = attempts.lease_refused(error, has_output, Instant::now());
                    if let Err(error) = &decision {
                        let was_patient = is_rollout && error.kind == ErrorKind::Unavailable;
                        if was_patient || error.has_code(code::SCHEDULER_UNAVAILABLE) {
                            self.metrics.rejected(&request.tenant, "scheduler_wait");
                        }
                    }
                    if let Some(ended) = ended.take() {
                        // Whether the scheduler learnt of the end is not known, and a repeat is harmless.
                        let outcome = match decision {
                            Ok(_) => LeaseOutcome::Continues,
                            Err(_) => LeaseOutcome::GivenUp,
                        };
                        until_given_back(ended.end(outcome)).await;
                    }
                    let held = &self.metrics.families.trainer_held;
                    let _held = is_held.then(|| GaugeGuard::new(held));
                    let pause = tokio::time::sleep(decision?);
                    match until_aborted(request, pause).await {
                        Some(()) => continue,
                        None => return run.aborted().await,
                    }
                }
            };
            if let Some(ended) = ended.take() {
                ended.given_back();
            }
            attempts.leased(&lease.worker, lease.epoch);
            if !attempts.is_after_failure() {
                self.retries.chunk_begins();
            }
            let mut guard = LeaseGuard::new(
                self.scheduler.clone(),
                self.tasks.clone(),
                dropped.clone(),
                &lease,
            );
            let mut open = None;
            let outcome = run
                .chunk(&lease, &mut attempts, &mut guard, &mut open)
                .instrument(tracing::trace_span!(target: STAGE, "chunk"))
                .await?;
            match outcome {
                ChunkOutcome::Finished => {
                    let outcome = match run.choice.finish_reason() {
                        Some(FinishReason::Abort) => LeaseOutcome::Aborted,
                        _ => LeaseOutcome::Finished,
                    };
                    match open {
                        Some((worker, stream)) => {
                            let output_len = run.choice.output_len();
                            guard.end_with_cut(worker, stream, output_len, outcome);
                        }
                        None => drop(guard.end(outcome)),
                    }
                    run.observe_time_per_token();
                    let summary = run.choice.summary();
                    if summary.calls != Counts::default() {
                        self.metrics.called(&request.model.id, summary.calls);
                    }
                    return Ok(summary);
                }
                ChunkOutcome::Continues(next) => {
                    attempts.chunk_ended(&lease.worker, next);
                    ended = Some(guard);
                }
                ChunkOutcome::Failed { error, output } => {
                    let detail = error.detail.clone();
                    tracing::warn!(worker = %lease.worker, kind = ?error.kind, detail, "chunk failed");
                    let has_output = run.choice.output_len() > 0;
                    let (outcome, decision) =
                        attempts.chunk_failed(&lease.worker, error, output, may_retry);
                    let decision = decision.map_err(|error| request.form_error(error, has_output));
                    if decision.is_ok() {
                        self.metrics.families.continuations.inc();
                    }
                    until_given_back(guard.end(outcome)).await;
                    let pause = tokio::time::sleep(decision?);
                    if until_aborted(request, pause).await.is_none() {
                        return run.aborted().await;
                    }
                }
            }
        }
    }
}

/// The places to which the run of a request reports, and when it arrived.
struct Reports<'a> {
    events: &'a mpsc::Sender<RelayEvent>,
    received: Instant,
    /// Counts the output tokens.
    made: Arc<Made>,
    /// Counts for bills and budgets.
    meter: Arc<UsageMeter>,
    /// The metrics that the request counts in.
    series: &'a Arc<RequestSeries>,
}

/// Waits until the scheduler has a lease back. If the task panicked, the lease ends by its time to live.
async fn until_given_back(task: Option<JoinHandle<()>>) {
    if let Some(task) = task {
        let _ = task.await;
    }
}

/// A prompt, and what all its choices begin with.
struct HashedPrompt<'a> {
    prompt: &'a PreparedPrompt,
    prefixes: PrefixHasher,
    group: Option<Arc<PromptGroup>>,
}

/// Counts the outcome of a request when it is dropped, also if the client went away before there was one.
struct OutcomeRecord<'a> {
    context: &'a RelayContext,
    request: &'a GenerateRequest,
    received: Instant,
    series: &'a RequestSeries,
    outcome: Option<Result<RequestSummary, ApiError>>,
}

impl Drop for OutcomeRecord<'_> {
    fn drop(&mut self) {
        let RelayContext { metrics, time, .. } = self.context;
        // The gateway may have ended the request while the client still waits.
        let outcome = self.outcome.take();
        let ended_by = || time.ended_by(self.request.standing().class, self.received);
        let outcome = outcome.or_else(|| ended_by().map(Err));
        let status = match &outcome {
            None => "499".to_owned(),
            Some(Ok(_)) => "200".to_owned(),
            Some(Err(error)) => error.kind.status().to_string(),
        };
        metrics.ended(&self.request.tenant, &self.request.model.id, &status);
        let seconds = self.received.elapsed().as_secs_f64();
        self.series.seconds.observe(seconds);
        let span = Span::current();
        let RequestSummary {
            usage,
            metrics: figures,
        } = match outcome {
            Some(Ok(summary)) => summary,
            failed => {
                let code = failed.and_then(Result::err).and_then(|error| error.code);
                span.record("error.type", code.unwrap_or(status));
                span.record("otel.status_code", "ERROR");
                return;
            }
        };
        if let Some(ResponseMetrics {
            timings,
            speculative_decoding,
            ..
        }) = figures
        {
            self.series.observe_phases(&timings);
            let drafts = speculative_decoding;
            span.record("refrain.usage.drafted_tokens", drafts.drafted);
            span.record("refrain.usage.accepted_tokens", drafts.accepted);
        }
        span.record("otel.status_code", "OK");
        self.series.observe_usage(&usage);
        span.record("gen_ai.usage.input_tokens", usage.prompt_tokens);
        span.record("gen_ai.usage.output_tokens", usage.completion_tokens);
    }
}

/// The empty text of a choice.
fn output_text(request: &GenerateRequest) -> Result<OutputText, ApiError> {
    let model = &request.model;
    let token_of = |text: &str| model.tokenizer.token_id(text);
    let parser = request.parsing.clone();
    let call_ids = CallIds {
        base: random::u128()?,
        are_short: request
            .parsing
            .as_ref()
            .is_some_and(|parsing| parsing.tools_as == ToolParserKind::Mistral),
    };
    let parsing = Parsing::new(
        parser.map(|options| OutputParser::new(options, token_of)),
        model.is_text_only,
        call_ids,
    );
    let (tokenizer, stops) = (model.tokenizer.clone(), request.stops.clone());
    let options = request.output;
    Ok(OutputText::new(tokenizer, stops, parsing)
        .with(options.has_stop_text, options.shows_special))
}

fn summarize(request: &GenerateRequest, choices: &[ChoiceSummary]) -> RequestSummary {
    let prompt_tokens: u64 = request
        .prompts
        .iter()
        .map(|prompt| prompt.tokens.len() as u64)
        .sum();
    let completion_tokens = choices.iter().map(|choice| choice.completion_tokens).sum();
    // Each prompt counts once, and so do its cached tokens: those of its first choice.
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
    let reasoning_tokens = choices.iter().map(|choice| choice.reasoning_tokens).sum();
    let has_details = request.prediction.is_some() || request.may_reason();
    // A request that asks for its steps has one choice.
    let steps = choices.first().and_then(|choice| choice.steps.as_ref());
    metrics.step_trace = steps.map(|steps| steps.trace(&request.model.tokenizer));
    RequestSummary {
        usage: Usage {
            prompt_tokens,
            completion_tokens,
            total_tokens: prompt_tokens + completion_tokens,
            prompt_tokens_details: PromptTokensDetails { cached_tokens },
            completion_tokens_details: has_details.then(|| CompletionTokensDetails {
                reasoning_tokens,
                accepted_prediction_tokens: predicted.accepted,
                rejected_prediction_tokens: predicted.drafted - predicted.accepted,
            }),
        },
        metrics: Some(metrics),
    }
}
