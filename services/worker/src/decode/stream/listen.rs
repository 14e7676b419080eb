//! One chunk's task: asks the engine, listens, passes on, and tells why it ended.

use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use futures_util::{FutureExt, StreamExt};
use refrain_protocol::chunk::{ChunkCut, ChunkEnd, ChunkEndReason, ChunkEvent};
use refrain_protocol::{ApiError, ErrorKind};
use refrain_service_kit::mesh::token_of;
use tokio::sync::{mpsc, oneshot};

use super::prime::Priming;
use super::steps::LastSent;
use super::{Chunks, Control};
use crate::decode::Outlet;
use crate::decode::entry::Entry;
use crate::drive::{Call, Driving};
use crate::engine::{Breaker, GenerateRequest, Generated, GeneratedEnd, GeneratedStream, Keeping};
use crate::running::{Absorbed, EngineLimits, Running};

/// How long a chunk that has ended waits for its engine's last word, which frees the connection for the next one.
const LAST_WORD_TIMEOUT: Duration = Duration::from_millis(100);
/// Most tokens that an engine draws and does not send: those of a character that lacks its last byte.
const UNSENT_TOKENS_MAX: u32 = 3;
/// Longest pause between two attempts.
const RETRY_PAUSE_MAX: Duration = Duration::from_secs(1);

/// Where a chunk's reader hears from it.
type Events = mpsc::Sender<Result<ChunkEvent, ApiError>>;

/// How a stream ended.
enum Heard {
    /// With the chunk.
    Over(Outcome),
    /// A draft is to be verified instead.
    Call(Box<Call>),
}

/// Who makes a chunk quicker, if anybody does.
struct Helpers<'a> {
    driving: Option<&'a mut Driving>,
    priming: Option<&'a mut Priming>,
}

/// How long the engine's next word is waited for.
struct Patience {
    due: tokio::time::Instant,
    /// When the request's own time is up.
    deadline: Option<Instant>,
    /// It has said something.
    has_output: bool,
}

impl Patience {
    /// Waits for so long from now on.
    fn renew(&mut self, ms: u64) {
        let due = Instant::now() + Duration::from_millis(ms);
        self.due = self
            .deadline
            .map_or(due, |deadline| deadline.min(due))
            .into();
    }

    /// The error of an engine that has said nothing for so long.
    fn spent(&self) -> ApiError {
        let what = if self.has_output {
            "a token"
        } else {
            "its first token"
        };
        ApiError::new(
            ErrorKind::Timeout,
            format!("the engine did not give {what} in time"),
        )
        .with_code("engine_timeout")
    }
}

/// A stream that the engine sends tokens over, from the first one on.
struct SentTo {
    all: Arc<AtomicU32>,
    is_counted: bool,
    last: LastSent,
}

impl SentTo {
    fn new(all: &Arc<AtomicU32>) -> Self {
        SentTo {
            all: all.clone(),
            is_counted: false,
            last: LastSent::default(),
        }
    }

    /// How many there are, this one among them.
    fn batch(&mut self) -> u32 {
        if std::mem::replace(&mut self.is_counted, true) {
            self.all.load(Ordering::Relaxed)
        } else {
            self.all.fetch_add(1, Ordering::Relaxed) + 1
        }
    }
}

impl Drop for SentTo {
    fn drop(&mut self) {
        if self.is_counted {
            self.all.fetch_sub(1, Ordering::Relaxed);
        }
    }
}

/// A chunk that is listened to. Its task may be dropped at any time, with the thread of the listener that its reader runs on:
/// then nobody reads on.
struct Listening {
    entry: Entry,
    outlet: Outlet,
    /// The outcome's label.
    outcome: Option<&'static str>,
}

impl Drop for Listening {
    fn drop(&mut self) {
        let running = &self.entry.running;
        if self.outcome.is_none() {
            self.outlet.cancelled(running);
        }
        self.outlet
            .left(running, self.outcome.unwrap_or("cancelled"));
    }
}

/// Why a chunk's task is over.
pub(super) enum Outcome {
    /// As it should be.
    Ended(ChunkEnd),
    Failed(ApiError),
    /// The request's time is up.
    Overdue(ApiError),
    /// Its reader is gone, or stood still for too long.
    Left {
        stalled: bool,
    },
    Cut(ChunkCut, oneshot::Sender<()>),
    TakenOver,
}

impl Chunks {
    pub(super) async fn chunk(self: Arc<Self>, entry: Entry, mut told: mpsc::Receiver<Control>) {
        let mut listening = Listening {
            entry,
            outlet: self.outlet.clone(),
            outcome: None,
        };
        let entry = &mut listening.entry;
        self.outlet.adopt(&entry.running);
        let over = self.listen(entry, &mut told).await;
        let outcome = match over {
            Outcome::Ended(end) => self.outlet.end(entry, end),
            Outcome::Failed(error) => {
                self.outlet.fail(entry, error);
                "failed"
            }
            Outcome::Overdue(error) => self.outlet.overdue(entry, error),
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
        listening.outcome = Some(outcome);
        drop(listening);
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
        let mut driving = self.helpers.drive.clone().map(|drive| {
            let able = self.engine.capabilities().verifies;
            let running = &entry.running;
            Driving::new(drive, &able, running.namespace, &running.request)
        });
        let shared = self.helpers.priming.as_ref();
        let mut priming = shared.and_then(|shared| Priming::new(shared, &entry.running));
        if let Some(priming) = &mut priming {
            self.prime(&entry.running, priming);
        }
        let mut patience = Patience {
            due: tokio::time::Instant::now(),
            deadline: entry.deadline,
            has_output: false,
        };
        patience.renew(self.config.first_token_ms_max);
        let over = loop {
            let stream = match self.open(entry, told, &patience).await {
                Ok(stream) => stream,
                Err(over) => break over,
            };
            let helpers = Helpers {
                driving: driving.as_mut(),
                priming: priming.as_mut(),
            };
            let heard = self.hear(entry, told, stream, helpers, &mut patience);
            let call = match heard.await {
                Heard::Over(over) => break over,
                Heard::Call(call) => call,
            };
            if let Some(driving) = &mut driving
                && let Err(over) = self.drive(entry, told, driving, call).await
            {
                break over;
            }
            // A stream behind a call queues and reads its text like the first one.
            patience.renew(self.config.first_token_ms_max);
        };
        if let Some(driving) = &mut driving {
            driving.end(Instant::now());
        }
        over
    }

    /// Starts a stream behind what has been said.
    async fn open(
        &self,
        entry: &mut Entry,
        told: &mut mpsc::Receiver<Control>,
        patience: &Patience,
    ) -> Result<GeneratedStream, Outcome> {
        let started = tokio::select! {
            biased;
            over = interrupted(entry, told) => return Err(over),
            started = tokio::time::timeout_at(patience.due, self.begin(entry)) => started,
        };
        started.unwrap_or_else(|_| Err(self.out_of_patience(entry, patience)))
    }

    /// Nothing came in time.
    fn out_of_patience(&self, entry: &Entry, patience: &Patience) -> Outcome {
        match entry.overdue(Instant::now()) {
            Some(error) => Outcome::Overdue(error),
            None => self.failed(patience.spent()),
        }
    }

    /// Listens until the chunk is over or the stream is to be given up for a call.
    async fn hear(
        &self,
        entry: &mut Entry,
        told: &mut mpsc::Receiver<Control>,
        mut stream: GeneratedStream,
        helpers: Helpers<'_>,
        patience: &mut Patience,
    ) -> Heard {
        let Helpers {
            mut driving,
            mut priming,
        } = helpers;
        if let Some(driving) = &mut driving {
            driving.stream_began(patience.has_output, Instant::now());
        }
        let mut sent = SentTo::new(&self.sent_to);
        // What has come already.
        let mut ahead = None;
        loop {
            let next = async {
                match ahead.take() {
                    Some(piece) => piece,
                    None => stream.next().await,
                }
            };
            let piece = tokio::select! {
                biased;
                over = interrupted(entry, told) => return Heard::Over(over),
                piece = tokio::time::timeout_at(patience.due, next) => piece,
            };
            let piece = match piece {
                Ok(Some(Ok(piece))) => piece,
                Ok(Some(Err(error))) => return Heard::Over(self.failed(error)),
                Ok(None) => {
                    let broke_off = "the engine broke off in the middle of its answer";
                    let error = ApiError::new(ErrorKind::Upstream, broke_off);
                    return Heard::Over(self.failed(error));
                }
                Err(_) => return Heard::Over(self.out_of_patience(entry, patience)),
            };
            match piece {
                Generated::Begun { cached_tokens } => {
                    if !patience.has_output {
                        entry.running.begun(cached_tokens);
                    }
                    self.works();
                }
                Generated::Tokens { tokens, logprobs } => {
                    let now = Instant::now();
                    if !std::mem::replace(&mut patience.has_output, true) {
                        self.works();
                    }
                    self.sent(&mut sent, now);
                    let absorbed =
                        entry
                            .running
                            .absorb_generated(tokens, logprobs, self.limits(), now);
                    let absorbed = match absorbed {
                        Ok(absorbed) => absorbed,
                        Err(error) => return Heard::Over(self.failed(error)),
                    };
                    if let Some(driving) = &mut driving {
                        driving.heard(&absorbed.message.tokens, now);
                    }
                    if let Some(priming) = &mut priming {
                        priming.heard(&absorbed.message.tokens);
                    }
                    match self.say(entry, told, absorbed).await {
                        Ok(None) => {}
                        Ok(Some(end)) => {
                            give_back(stream);
                            return Heard::Over(Outcome::Ended(end));
                        }
                        Err(over) => return Heard::Over(over),
                    }
                    patience.renew(self.config.idle_ms_max);
                    if let Some(priming) = &mut priming {
                        self.prime(&entry.running, priming);
                    }
                    let Some(driving) = &mut driving else {
                        continue;
                    };
                    // What has come meanwhile is not given up.
                    ahead = stream.next().now_or_never();
                    if ahead.is_none()
                        && let Some(call) = self.call(&entry.running, driving, true)
                    {
                        return Heard::Call(call);
                    }
                    driving.listens(Instant::now());
                }
                Generated::End(end) => {
                    if let (GeneratedEnd::Stop, Some(driving)) = (end, &mut driving) {
                        driving.stream_ended();
                    }
                    give_back(stream);
                    return Heard::Over(self.ended(entry, end, patience.has_output));
                }
            }
        }
    }

    /// Lets the figures have what the engine's sending tells of its steps.
    fn sent(&self, sent: &mut SentTo, now: Instant) {
        let batch = sent.batch();
        let mut steps = self.steps.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(gap) = steps.heard(&mut sent.last, now, batch) {
            self.metrics.engine_step(gap.share_s, 0.0);
            if let Some((batch, seconds)) = gap.median {
                self.metrics.streamed_step(batch, seconds);
            }
        }
    }

    /// Asks the engine, again while that may help. Before the request's first token that takes from its budget; behind it, only
    /// this worker's limit counts, from each token anew.
    async fn begin(&self, entry: &Entry) -> Result<GeneratedStream, Outcome> {
        let failed = |error| self.failed(error);
        let mut pause = Duration::from_millis(self.config.retry_backoff_ms);
        let mut attempts = 1;
        let has_output = !entry.running.output().is_empty();
        let attempts_max = match has_output {
            true => self.config.attempts_max,
            false => {
                let left = entry.running.request.budget.attempts;
                left.min(self.config.attempts_max)
            }
        };
        self.admit().map_err(failed)?;
        loop {
            let request = self.request(entry).map_err(failed)?;
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
            if !may_pass || attempts >= attempts_max {
                return Err(failed(error));
            }
            attempts += 1;
            self.metrics.engine_retries.inc();
            if !has_output {
                self.tell(&entry.events, ChunkEvent::Retry).await?;
            }
            let hint = Duration::from_millis(error.retry_after_ms.unwrap_or(0));
            tokio::time::sleep(pause.max(hint).min(RETRY_PAUSE_MAX)).await;
            pause = pause.saturating_mul(2);
            // What failed here says more than that others failed meanwhile.
            self.admit().map_err(|_| failed(error))?;
        }
    }

    /// What an engine that has the drafts inside is told of a request.
    fn keeping(&self, running: &Running) -> Result<Option<Keeping>, ApiError> {
        if !self.config.attached {
            return Ok(None);
        }
        let request = &running.request;
        Ok(Some(Keeping {
            token: token_of(&request.namespace).map_err(ApiError::internal)?,
            group: request.group.clone(),
            document: running.document(),
            epoch: request.epoch,
        }))
    }

    pub(super) fn request(&self, entry: &Entry) -> Result<GenerateRequest, ApiError> {
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
            priority: self
                .config
                .pass_priority
                .then_some(running.request.urgency.priority),
            keeping: self.keeping(running)?,
        })
    }

    pub(super) fn limits(&self) -> EngineLimits {
        EngineLimits {
            max_context: self.engine.capabilities().max_context,
            max_draft_tokens: 0,
        }
    }

    /// Passes on what was taken in. Returns the chunk's end, if this is it.
    pub(super) async fn say(
        &self,
        entry: &mut Entry,
        told: &mut mpsc::Receiver<Control>,
        absorbed: Absorbed,
    ) -> Result<Option<ChunkEnd>, Outcome> {
        let Absorbed {
            message,
            heard,
            end,
        } = absorbed;
        entry.running.remember(&heard.update);
        self.outlet.keep(&entry.running, heard);
        tokio::select! {
            biased;
            said = self.tell(&entry.events, ChunkEvent::Step(message)) => said.map(|()| end),
            over = interrupted(entry, told) => Err(over),
        }
    }

    /// Passes an event on, and waits for a reader that has no room only for so long.
    async fn tell(&self, events: &Events, event: ChunkEvent) -> Result<(), Outcome> {
        let Err(unsent) = events.try_send(Ok(event)) else {
            return Ok(());
        };
        let mpsc::error::TrySendError::Full(event) = unsent else {
            return Err(Outcome::Left { stalled: false });
        };
        match tokio::time::timeout(self.reader_stall_max, events.send(event)).await {
            Ok(Ok(())) => Ok(()),
            Ok(Err(_)) => Err(Outcome::Left { stalled: false }),
            Err(_) => Err(Outcome::Left { stalled: true }),
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
    pub(super) fn works(&self) {
        self.engine_ready.store(true, Ordering::Relaxed);
        self.breaker().succeeded();
    }

    pub(super) fn failed(&self, error: ApiError) -> Outcome {
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
pub(super) async fn interrupted(entry: &Entry, told: &mut mpsc::Receiver<Control>) -> Outcome {
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
