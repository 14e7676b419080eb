//! One choice and its chunks: asks a worker, reads its events, passes on what a reader can use.

use std::sync::Arc;
use std::time::{Duration, Instant};

use futures_util::StreamExt;
use refrain_protocol::chunk::{ChunkBudget, ChunkEndReason, ChunkEvent, ChunkRequest};
use refrain_protocol::engine::Sampling;
use refrain_protocol::scheduling::{Lease, LeaseRequest};
use refrain_protocol::{ApiError, ErrorKind, RequestId};
use refrain_rpc::{ChunkStream, Worker};
use refrain_service_kit::deadline::Deadline;
use tokio::sync::mpsc;

use crate::attempts::{Attempts, NextChunk, Said};
use crate::choice::{Choice, Progress};
use crate::lease::LeaseHold;
use crate::relay::{Relay, RelayEvent};
use crate::request::GenerateRequest;

/// What a worker is told that a request has left beyond what it has, so that the request ends by the gateway's own clock,
/// however much later a worker's began.
const TIME_MARGIN: Duration = Duration::from_secs(1);

/// A worker is not missed sooner than this, however soon its leases end: machines and networks stall for a moment.
const ALIVE_WITHIN_MS_MIN: u64 = 2_000;

/// How a chunk ended, for the request.
pub(super) enum ChunkOutcome {
    Finished,
    Continues(NextChunk),
    Failed { error: ApiError, said: Said },
}

/// A choice on its way through the mesh.
pub(super) struct ChoiceRun<'a> {
    pub(super) relay: &'a Relay,
    pub(super) request: &'a GenerateRequest,
    pub(super) index: u32,
    pub(super) id: RequestId,
    pub(super) choice: Choice,
    pub(super) events: &'a mpsc::Sender<RelayEvent>,
    pub(super) received: Instant,
    pub(super) first_token: Option<Instant>,
}

impl ChoiceRun<'_> {
    pub(super) fn lease_request(&self, attempts: &Attempts) -> LeaseRequest {
        // Where nobody else is left, a worker that failed is better than none; and a scheduler that is told to
        // leave all of them out would first wait for a new one.
        let workers = self.relay.models.worker_count(&self.request.model);
        let exclude = match attempts.exclude() {
            excluded if excluded.len() < workers => excluded.to_vec(),
            _ => Vec::new(),
        };
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
            transferred: attempts.prefers_named(),
            exclude,
        }
    }

    fn chunk_request(&self, lease: &Lease, attempts: &Attempts) -> ChunkRequest {
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
            urgency: self.request.urgency,
            budget: ChunkBudget {
                attempts: attempts
                    .left()
                    .min(self.relay.retries.left().saturating_add(1)),
                time_left_ms: Some(self.time_left_ms()),
            },
            prediction: self
                .request
                .prediction
                .as_deref()
                .unwrap_or_default()
                .to_vec(),
            transferred: attempts.is_transferred(),
            alive_within_ms: Some(lease.ttl_ms.max(ALIVE_WITHIN_MS_MIN)),
        }
    }

    /// Until the request has certainly taken as long as it may.
    fn time_left_ms(&self) -> u64 {
        let left = self.relay.time.left(self.received);
        u64::try_from(left.saturating_add(TIME_MARGIN).as_millis()).unwrap_or(u64::MAX)
    }

    /// Decodes one chunk. What is left in `open` afterwards is a stream that has to be cut.
    pub(super) async fn chunk(
        &mut self,
        lease: &Lease,
        attempts: &mut Attempts,
        hold: &mut LeaseHold,
        open: &mut Option<(Arc<dyn Worker>, ChunkStream)>,
    ) -> Result<ChunkOutcome, ApiError> {
        let idle_max = self.relay.worker_idle_max;
        let silent = || {
            let message = format!("an engine said nothing for {} s", idle_max.as_secs());
            ApiError::new(ErrorKind::Timeout, message)
        };
        let worker = self.relay.workers.at(&lease.url);
        self.choice.begin_chunk(self.received.elapsed());
        let opened =
            tokio::time::timeout(idle_max, worker.chunk(self.chunk_request(lease, attempts))).await;
        let mut stream = match opened.unwrap_or_else(|_| Err(silent())) {
            Ok(stream) => stream,
            Err(error) => return self.chunk_lost(error).await,
        };
        let mut patience = Deadline::after(idle_max);
        loop {
            let event = match patience.bound(stream.next()).await {
                Some(Some(Ok(event))) => event,
                Some(Some(Err(error))) => return self.chunk_lost(error).await,
                Some(None) => {
                    let error = ApiError::new(
                        ErrorKind::Upstream,
                        "a worker was lost and no other could go on",
                    );
                    return self.chunk_lost(error).await;
                }
                None => return self.chunk_lost(silent()).await,
            };
            patience.set(tokio::time::Instant::now() + idle_max);
            match event {
                // Behind a token it would be no retry.
                ChunkEvent::Retry if self.choice.output_len() > 0 => {}
                ChunkEvent::Retry => {
                    attempts.retried();
                    self.relay.retries.made();
                }
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
                ChunkEvent::End(end)
                    if end.reason == ChunkEndReason::Transfer
                        && attempts.is_transferred()
                        && self.choice.chunk_output_len() == 0 =>
                {
                    let message = "a worker handed a request over that was handed over to it";
                    return self
                        .chunk_lost(ApiError::new(ErrorKind::Upstream, message))
                        .await;
                }
                ChunkEvent::End(end) => {
                    // A worker can leave off though its engine does not answer; it cannot decode to the end. Noted before the
                    // reader has taken it, which may last.
                    if let ChunkEndReason::Stop
                    | ChunkEndReason::Length
                    | ChunkEndReason::ChunkLimit = end.reason
                    {
                        hold.worker_ended();
                    }
                    let progress = self.choice.end(&end);
                    let finished = progress.finish.is_some();
                    self.send(progress).await?;
                    return Ok(if finished {
                        ChunkOutcome::Finished
                    } else {
                        ChunkOutcome::Continues(match (end.reason, end.next_worker) {
                            (ChunkEndReason::Draining, _) => NextChunk::Elsewhere,
                            (ChunkEndReason::Transfer, Some(next)) => NextChunk::On(next),
                            _ => NextChunk::Here,
                        })
                    });
                }
            }
        }
    }

    /// A chunk broke off; often the output has ended all the same.
    async fn chunk_lost(&mut self, error: ApiError) -> Result<ChunkOutcome, ApiError> {
        let said = match (self.choice.output_len(), self.choice.chunk_output_len()) {
            (0, _) => Said::Nothing,
            (_, 0) => Said::Before,
            _ => Said::InThisChunk,
        };
        let progress = self.choice.lost();
        if progress.finish.is_none() {
            return Ok(ChunkOutcome::Failed { error, said });
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

    pub(super) fn observe_pace(&self) {
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
