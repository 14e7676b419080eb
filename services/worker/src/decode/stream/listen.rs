//! One chunk's task: asks the engine, listens, passes on, and tells why it ended.

use std::sync::atomic::Ordering;
use std::sync::{Arc, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use futures_util::StreamExt;
use refrain_protocol::chunk::{ChunkCut, ChunkEnd, ChunkEndReason, ChunkEvent};
use refrain_protocol::engine::TokenLogprob;
use refrain_protocol::{ApiError, ErrorKind, TokenId};
use tokio::sync::{mpsc, oneshot};

use super::{Chunks, Control};
use crate::decode::entry::Entry;
use crate::engine::{Breaker, GenerateRequest, Generated, GeneratedEnd, GeneratedStream};
use crate::running::EngineLimits;

/// How long a chunk that has ended waits for its engine's last word, which frees the connection for the next one.
const LAST_WORD_TIMEOUT: Duration = Duration::from_millis(100);
/// Most tokens that an engine draws and does not send: those of a character that lacks its last byte.
const UNSENT_TOKENS_MAX: u32 = 3;
/// Longest pause between two attempts.
const RETRY_PAUSE_MAX: Duration = Duration::from_secs(1);

/// Why a chunk's task is over.
enum Outcome {
    /// As it should be.
    Ended(ChunkEnd),
    Failed(ApiError),
    /// Its reader is gone, or stood still for too long.
    Left {
        stalled: bool,
    },
    Cut(ChunkCut, oneshot::Sender<()>),
    TakenOver,
}

impl Chunks {
    pub(super) async fn chunk(
        self: Arc<Self>,
        mut entry: Entry,
        mut told: mpsc::Receiver<Control>,
    ) {
        self.outlet.adopt(&entry.running);
        let over = self.listen(&mut entry, &mut told).await;
        let outcome = match over {
            Outcome::Ended(end) => self.outlet.end(&mut entry, end),
            Outcome::Failed(error) => {
                self.outlet.fail(&mut entry, error);
                "failed"
            }
            Outcome::Left { stalled } => {
                if stalled {
                    self.outlet.reader_stalled();
                }
                self.outlet.cancelled(&entry.running);
                "cancelled"
            }
            Outcome::Cut(cut, done) => {
                self.outlet.shorten(entry.ended(cut.output_len));
                let _ = done.send(());
                "cut"
            }
            Outcome::TakenOver => {
                let taken_over = "a newer lease has taken this request over";
                entry.send_last(Err(ApiError::new(ErrorKind::Conflict, taken_over)));
                "taken_over"
            }
        };
        self.outlet.left(&entry.running, outcome);
        // What was told while the chunk was ending.
        told.close();
        while let Ok(control) = told.try_recv() {
            if let Control::Cut(cut, done) = control {
                self.outlet.cut_ended(cut);
                let _ = done.send(());
            }
        }
    }

    async fn listen(&self, entry: &mut Entry, told: &mut mpsc::Receiver<Control>) -> Outcome {
        let deadline =
            tokio::time::Instant::now() + Duration::from_millis(self.config.first_token_ms_max);
        let started = tokio::select! {
            biased;
            over = interrupted(entry, told) => return over,
            started = tokio::time::timeout_at(deadline, self.begin(entry)) => started,
        };
        let mut stream = match started.unwrap_or_else(|_| Err(late("its first token"))) {
            Ok(stream) => stream,
            Err(error) => return self.failed(error),
        };
        let idle_max = Duration::from_millis(self.config.idle_ms_max);
        let mut due = deadline;
        let mut has_output = false;
        loop {
            let piece = tokio::select! {
                biased;
                over = interrupted(entry, told) => return over,
                piece = tokio::time::timeout_at(due, stream.next()) => piece,
            };
            let piece = match piece {
                Ok(Some(Ok(piece))) => piece,
                Ok(Some(Err(error))) => return self.failed(error),
                Ok(None) => {
                    let broke_off = "the engine broke off in the middle of its answer";
                    return self.failed(ApiError::new(ErrorKind::Upstream, broke_off));
                }
                Err(_) if has_output => return self.failed(late("a token")),
                Err(_) => return self.failed(late("its first token")),
            };
            match piece {
                Generated::Begun { cached_tokens } => {
                    entry.running.begun(cached_tokens);
                    self.works();
                }
                Generated::Tokens { tokens, logprobs } => {
                    if !std::mem::replace(&mut has_output, true) {
                        self.works();
                    }
                    match self.say(entry, told, tokens, logprobs).await {
                        Ok(None) => {}
                        Ok(Some(end)) => {
                            give_back(stream);
                            return Outcome::Ended(end);
                        }
                        Err(over) => return over,
                    }
                    due = tokio::time::Instant::now() + idle_max;
                }
                Generated::End(end) => {
                    give_back(stream);
                    return self.ended(entry, end, has_output);
                }
            }
        }
    }

    /// Asks the engine, again while that may help and nothing has been said.
    async fn begin(&self, entry: &Entry) -> Result<GeneratedStream, ApiError> {
        let mut pause = Duration::from_millis(self.config.retry_backoff_ms);
        let mut attempts = 1;
        self.admit()?;
        loop {
            let request = self.request(entry)?;
            let error = match self.engine.generate(request).await {
                Ok(stream) => return Ok(stream),
                Err(error) => error,
            };
            if error.kind == ErrorKind::Overloaded {
                // An engine that has no room is there.
                self.works();
            }
            let may_pass = matches!(
                error.kind,
                ErrorKind::Unavailable | ErrorKind::Overloaded | ErrorKind::Upstream
            );
            if !may_pass || attempts >= self.config.attempts_max {
                return Err(error);
            }
            attempts += 1;
            self.metrics.engine_retries.inc();
            let hint = Duration::from_millis(error.retry_after_ms.unwrap_or(0));
            tokio::time::sleep(pause.max(hint).min(RETRY_PAUSE_MAX)).await;
            pause = pause.saturating_mul(2);
            // What failed here says more than that others failed meanwhile.
            self.admit().map_err(|_| error)?;
        }
    }

    fn request(&self, entry: &Entry) -> Result<GenerateRequest, ApiError> {
        let running = &entry.running;
        let left = running.may_emit(self.limits());
        Ok(GenerateRequest {
            request: running.request.request,
            call: refrain_service_kit::random::u64()?,
            namespace: running.namespace,
            tokens: running.text().to_vec(),
            prompt_len: running.request.prompt_len,
            tokens_max: running.request.chunk_tokens.unwrap_or(left).clamp(1, left),
            sampling: running.request.sampling.clone(),
        })
    }

    fn limits(&self) -> EngineLimits {
        EngineLimits {
            max_context: self.engine.capabilities().max_context,
            max_draft_tokens: 0,
        }
    }

    /// Takes tokens in and passes them on. Returns the chunk's end, if this is it.
    async fn say(
        &self,
        entry: &mut Entry,
        told: &mut mpsc::Receiver<Control>,
        tokens: Vec<TokenId>,
        logprobs: Option<Vec<TokenLogprob>>,
    ) -> Result<Option<ChunkEnd>, Outcome> {
        let now = Instant::now();
        let absorbed = entry
            .running
            .absorb_generated(tokens, logprobs, self.limits(), now);
        let absorbed = absorbed.map_err(|error| self.failed(error))?;
        let (message, end) = self.outlet.keep(&entry.running, absorbed);
        match entry.events.try_send(Ok(ChunkEvent::Step(message))) {
            Ok(()) => Ok(end),
            Err(mpsc::error::TrySendError::Closed(_)) => Err(Outcome::Left { stalled: false }),
            Err(mpsc::error::TrySendError::Full(event)) => {
                let events = entry.events.clone();
                let sent = tokio::time::timeout(self.reader_stall_max, events.send(event));
                tokio::select! {
                    biased;
                    over = interrupted(entry, told) => Err(over),
                    sent = sent => match sent {
                        Ok(Ok(())) => Ok(end),
                        Ok(Err(_)) => Err(Outcome::Left { stalled: false }),
                        Err(_) => Err(Outcome::Left { stalled: true }),
                    },
                }
            }
        }
    }

    /// The engine ended by itself, where the chunk had not.
    fn ended(&self, entry: &mut Entry, end: GeneratedEnd, has_output: bool) -> Outcome {
        let running = &entry.running;
        let reason = match end {
            GeneratedEnd::Stop => ChunkEndReason::Stop,
            GeneratedEnd::Length if !has_output => {
                let nothing = "the engine ended for want of room without a token";
                return self.failed(ApiError::new(ErrorKind::Upstream, nothing));
            }
            // Short of the chunk's limit by tokens that were drawn and never sent. Else it is the engine's own limit.
            GeneratedEnd::Length
                if running.request.chunk_tokens.is_some_and(|tokens| {
                    tokens < running.request.max_new_tokens
                        && running.emitted() + UNSENT_TOKENS_MAX >= tokens
                }) =>
            {
                ChunkEndReason::ChunkLimit
            }
            GeneratedEnd::Length => ChunkEndReason::Length,
        };
        self.outlet.finish(running, reason);
        Outcome::Ended(running.end(reason))
    }

    fn admit(&self) -> Result<(), ApiError> {
        let admitted = self.breaker().admit(Instant::now());
        admitted.map_err(|wait| {
            self.metrics
                .rejections
                .with_label_values(&["breaker"])
                .inc();
            ApiError::new(
                ErrorKind::Unavailable,
                "the engine has failed several times in a row and is left alone for a moment",
            )
            .with_code("engine_breaker_open")
            .with_retry_after_ms(wait.as_millis() as u64 + 1)
        })
    }

    /// The engine does what it should.
    fn works(&self) {
        self.engine_ready.store(true, Ordering::Relaxed);
        self.breaker().succeeded();
    }

    fn failed(&self, error: ApiError) -> Outcome {
        if error.kind == ErrorKind::InvalidRequest {
            // An engine that refuses a request is there.
            self.works();
        } else if error.kind == ErrorKind::Overloaded {
            // It may have got worse since: `begin` has told the breaker.
            self.metrics.engine_failures.inc();
            tracing::warn!("engine overloaded");
        } else if error.code.as_deref() != Some("engine_breaker_open") {
            self.metrics.engine_failures.inc();
            // Its own words are not logged: they may repeat the request.
            tracing::warn!(kind = ?error.kind, code = error.code, detail = error.detail, "engine failed");
            if self.breaker().failed(Instant::now()) {
                tracing::warn!("engine keeps failing; leaving it alone for a moment");
            }
        }
        Outcome::Failed(error)
    }

    fn breaker(&self) -> MutexGuard<'_, Breaker> {
        self.breaker.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Waits for what ends a chunk from outside.
async fn interrupted(entry: &Entry, told: &mut mpsc::Receiver<Control>) -> Outcome {
    tokio::select! {
        biased;
        Some(control) = told.recv() => match control {
            Control::Cut(cut, done) => Outcome::Cut(cut, done),
            Control::HandOver => Outcome::Ended(entry.running.end(ChunkEndReason::Draining)),
            Control::TakenOver => Outcome::TakenOver,
        },
        () = entry.events.closed() => Outcome::Left { stalled: false },
    }
}

/// Lets the engine say its last word, if that is all that is left.
fn give_back(mut stream: GeneratedStream) {
    tokio::spawn(async move {
        let last_word = async {
            while let Some(Ok(piece)) = stream.next().await {
                if matches!(piece, Generated::Tokens { .. }) {
                    // It goes on: dropping the stream stops it.
                    return;
                }
            }
        };
        let _ = tokio::time::timeout(LAST_WORD_TIMEOUT, last_word).await;
    });
}

fn late(what: &str) -> ApiError {
    ApiError::new(
        ErrorKind::Timeout,
        format!("the engine did not give {what} in time"),
    )
    .with_code("engine_timeout")
}
