//! The run of one request: all its choices at once, and for each the loop over leases and chunks.

use std::sync::Arc;
use std::time::{Duration, Instant};

use futures_util::future::try_join_all;
use refrain_output_parsers::{OutputParser, ToolParserKind};
use refrain_protocol::chunk::DraftSource;
use refrain_protocol::error::code;
use refrain_protocol::openai::{
    CompletionTokensDetails, FinishReason, PromptTokensDetails, ResponseMetrics, Usage,
};
use refrain_protocol::scheduling::LeaseOutcome;
use refrain_protocol::{ApiError, RequestId};
use refrain_service_kit::random;
use tokio::sync::mpsc;
use tracing::{Instrument, Span};

use crate::STAGE;
use crate::intake::AdmissionTicket;
use crate::relay::attempts::Attempts;
use crate::relay::choice::{ChoicePlan, ChoiceProgress, ChoiceState, ChoiceSummary};
use crate::relay::choice_run::{ChoiceRun, ChunkOutcome};
use crate::relay::context::RelayContext;
use crate::relay::events::{RelayEvent, RequestSummary};
use crate::relay::lease_guard::LeaseGuard;
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
        ticket: AdmissionTicket,
        received: Instant,
    ) -> RequestEvents {
        let context = self.clone();
        let events = RequestEvents::new(self.tuning.stream_events_max, move |events| {
            let work = async move {
                let mut record = OutcomeRecord {
                    context: &context,
                    request: &request,
                    received,
                    outcome: None,
                };
                let outcome = context.run(&request, &events, received).await;
                let outcome = record.outcome.insert(outcome).clone();
                drop(record);
                let last = match outcome {
                    Ok(summary) => RelayEvent::Done(Box::new(summary)),
                    Err(error) => RelayEvent::Failed(error),
                };
                // An error means that the reader has left meanwhile.
                let _ = events.send(last).await;
                drop(ticket);
            };
            work.instrument(Span::current())
        });
        events.within(&self.time, received)
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
        // A worker scores only tokens that it emits. So all but the first token of such a prompt are forced output.
        let (first, forced) = match request.output.scores_prompt() {
            true => prompt.tokens.split_at(1),
            false => (&*prompt.tokens, &[][..]),
        };
        let plan = ChoicePlan {
            prompt: first.into(),
            max_new_tokens: prompt.max_new_tokens + forced.len() as u32,
            stop_token_ids: request.sampling.stop_token_ids.clone(),
            wants_logprobs: request.wants_logprobs(),
            forced: forced.into(),
            min_tokens: request.sampling.min_tokens,
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
        let mut run = ChoiceRun {
            context: self,
            request,
            index,
            id: RequestId(random::u128()?),
            choice: ChoiceState::new(plan, text),
            events,
            received,
            first_token: None,
            unsent: ChoiceProgress::default(),
            parked: ParkedAt::default(),
        };
        let (failures_max, first_pause) = (self.tuning.failures_max, self.tuning.retry_backoff);
        let mut attempts = Attempts::new(failures_max, first_pause, self.scheduler_wait);
        let may_retry = || self.retries.take();
        loop {
            let lease = self.scheduler.lease(run.lease_request(&attempts));
            let stage = tracing::trace_span!(target: STAGE, "lease");
            let lease = match lease.instrument(stage).await {
                Ok(lease) => lease,
                Err(error) => {
                    let has_output = run.choice.output_len() > 0;
                    let decision = attempts.lease_refused(error, has_output, Instant::now());
                    let pause = decision.inspect_err(|error| {
                        if error.has_code(code::SCHEDULER_UNAVAILABLE) {
                            self.metrics.rejected("scheduler_wait");
                        }
                    })?;
                    tokio::time::sleep(pause).await;
                    continue;
                }
            };
            attempts.leased(&lease.worker);
            if !attempts.is_after_failure() {
                self.retries.chunk_begins();
            }
            let mut guard = LeaseGuard::new(self.scheduler.clone(), self.tasks.clone(), &lease);
            let mut open = None;
            let outcome = run
                .chunk(&lease, &mut attempts, &mut guard, &mut open)
                .instrument(tracing::trace_span!(target: STAGE, "chunk"))
                .await?;
            let (given_back, decision) = match outcome {
                ChunkOutcome::Finished => {
                    match open {
                        Some((worker, stream)) => {
                            guard.end_with_cut(worker, stream, run.choice.output_len());
                        }
                        None => drop(guard.end(LeaseOutcome::Finished)),
                    }
                    run.observe_time_per_token();
                    let summary = run.choice.summary();
                    self.metrics.called(&request.model.id, summary.calls);
                    return Ok(summary);
                }
                ChunkOutcome::Continues(next) => {
                    attempts.chunk_ended(&lease.worker, next);
                    (guard.end(LeaseOutcome::Continues), Ok(Duration::ZERO))
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
                    (guard.end(outcome), decision)
                }
            };
            if let Some(task) = given_back {
                // The result does not matter: if the task panicked, the lease ends by its time to live.
                let _ = task.await;
            }
            tokio::time::sleep(decision?).await;
        }
    }
}

/// Counts the outcome of a request when it is dropped, also if the client went away before there was one.
struct OutcomeRecord<'a> {
    context: &'a RelayContext,
    request: &'a GenerateRequest,
    received: Instant,
    outcome: Option<Result<RequestSummary, ApiError>>,
}

impl Drop for OutcomeRecord<'_> {
    fn drop(&mut self) {
        let RelayContext { metrics, time, .. } = self.context;
        let families = &metrics.families;
        // The gateway may have ended the request while the client still waits.
        let outcome = self.outcome.take();
        let outcome = outcome.or_else(|| time.ended_by(self.received).map(Err));
        let status = match &outcome {
            None => "499".to_owned(),
            Some(Ok(_)) => "200".to_owned(),
            Some(Err(error)) => error.kind.status().to_string(),
        };
        metrics.ended(&status);
        let seconds = self.received.elapsed().as_secs_f64();
        metrics.observe(&families.request_seconds, self.request, seconds);
        let span = Span::current();
        let Some(Ok(RequestSummary { usage, .. })) = outcome else {
            span.record("error.type", status);
            return;
        };
        let (tenant, model) = (
            metrics.tenant_label(&self.request.tenant),
            &*self.request.model.id,
        );
        for (kind, tokens) in [
            ("input", usage.prompt_tokens),
            ("output", usage.completion_tokens),
        ] {
            let of_kind = families
                .token_usage
                .with_label_values(&[tenant, model, kind]);
            of_kind.observe(tokens as f64);
        }
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
        metrics,
    }
}
