//! One chunk's task: it opens a stream, relays the tokens, and reports how the chunk ended.

use std::convert::Infallible;
use std::pin::pin;
use std::sync::Arc;
use std::task::{Poll, ready};
use std::time::{Duration, Instant};

use futures_util::future::poll_fn;
use futures_util::{FutureExt, StreamExt};
use refrain_protocol::chunk::{ChunkEndReason, ChunkEvent};
use refrain_protocol::document::FinishReason;
use refrain_protocol::error::code;
use refrain_protocol::{ApiError, ErrorKind};
use tokio::sync::mpsc;

use super::context::StreamContext;
use super::form_phase::{FormPhase, PhaseTokens, truncate};
use super::interrupts::Interrupts;
use super::open::Opening;
use super::step_gaps::StreamClock;
use super::timeout::{HELD_CHECK, Moment, TokenTimeout};
use crate::chunk::{ActiveChunk, ChunkEnding, Watch};
use crate::engine::{Generated, GeneratedEnd, GeneratedStream};
use crate::orders::Fate;
use crate::running::Absorbed;
use crate::shared::Shared;

/// How long an ended chunk waits for the engine's last event, which frees the connection for the next call.
const LAST_EVENT_TIMEOUT: Duration = Duration::from_millis(100);

/// Maximum number of tokens that an engine generates and does not send: those of a character without its last byte.
const UNSENT_TOKENS_MAX: u32 = 3;

/// Runs a chunk to its end.
pub(super) async fn run_chunk(
    context: &StreamContext,
    chunk: ActiveChunk,
    controls: mpsc::Receiver<ChunkEnding>,
) {
    let shared = &context.shared;
    let mut interrupts = Interrupts::new(controls, chunk.watch.reader.events());
    let mut task = RunningTask {
        chunk: Some(chunk),
        shared: shared.clone(),
    };
    if let Some(chunk) = &mut task.chunk {
        shared.sink.adopt(&chunk.running);
        let Err(ending) = StreamedChunk::run(context, chunk, &mut interrupts).await;
        task.end(ending);
    }
    interrupts.close(shared);
}

/// A chunk whose task runs. The task may be dropped at any time, together with the listener thread of its reader;
/// then the chunk ends as if its reader had left.
struct RunningTask {
    /// `None` once it has ended.
    chunk: Option<ActiveChunk>,
    shared: Arc<Shared>,
}

impl RunningTask {
    fn end(&mut self, ending: ChunkEnding) {
        if let Some(chunk) = self.chunk.take() {
            self.shared.end(chunk, ending);
        }
    }
}

impl Drop for RunningTask {
    fn drop(&mut self) {
        self.end(ChunkEnding::ReaderLeft);
    }
}

/// A chunk that may call its engine. Each of its steps ends the chunk by returning a [`ChunkEnding`].
struct StreamedChunk<'a> {
    context: &'a StreamContext,
    chunk: &'a mut ActiveChunk,
    interrupts: &'a mut Interrupts,
    timeout: TokenTimeout,
    /// The engine has sent a token of this chunk.
    has_output: bool,
    /// Whether no earlier stream of the chunk has told what it found in the cache, or had output. After one that has,
    /// the cache holds what that one left there.
    is_first: bool,
}

/// The call that follows a stream which was given up.
enum NextCall {
    /// The reasoning is over, and the form begins.
    WithForm,
    /// The model does not reason, so the output begins with its form.
    WithoutReasoning,
    /// The same once more, after an order for which the engine gave the request up.
    Again,
}

impl<'a> StreamedChunk<'a> {
    /// Reads streams until the chunk ends: one, or two with reasoning before a form. A stream that the engine gave up
    /// for an order is opened again.
    ///
    /// # Errors
    /// The chunk ends in this way.
    async fn run(
        context: &'a StreamContext,
        chunk: &'a mut ActiveChunk,
        interrupts: &'a mut Interrupts,
    ) -> Result<Infallible, ChunkEnding> {
        pass_gate(context, &mut chunk.watch, interrupts).await?;
        let first_token_ms_max = context.config().first_token_ms_max;
        let deadline = chunk.watch.deadline();
        let mut streamed = StreamedChunk {
            timeout: TokenTimeout::new(first_token_ms_max, deadline, context.moment()),
            context,
            chunk,
            interrupts,
            has_output: false,
            is_first: true,
        };
        let mut reasons = true;
        loop {
            let running = &streamed.chunk.running;
            let form = running.request.sampling.form.as_deref();
            let phase = FormPhase::after(form, running.text.output(), reasons);
            let stream = streamed.open(phase).await?;
            let next = streamed.read(stream, phase).await?;
            reasons &= !matches!(next, NextCall::WithoutReasoning);
            pass_gate(context, &mut streamed.chunk.watch, streamed.interrupts).await?;
            // The next stream waits in the engine's queue and reads its text like the first one.
            let moment = context.moment();
            streamed.timeout.restart(first_token_ms_max, moment);
        }
    }

    /// Opens a stream that continues the chunk's text.
    ///
    /// # Errors
    /// The chunk ends: it was interrupted, it timed out, or the engine failed.
    async fn open(&mut self, phase: FormPhase) -> Result<GeneratedStream, ChunkEnding> {
        let ActiveChunk { running, watch, .. } = &mut *self.chunk;
        let opening = Opening {
            context: self.context,
            running,
            phase,
            begun_in: watch.begun_in(),
            events: watch.reader.events().clone(),
        };
        let mut opening = pin!(opening.open());
        loop {
            let opened = tokio::select! {
                biased;
                ending = self.interrupts.wait() => return Err(ending),
                opened = self.timeout.due.bound(opening.as_mut()) => opened,
            };
            match opened {
                Some(opened) => return opened,
                None => check_time(self.context, watch, &mut self.timeout, self.has_output)?,
            }
        }
    }

    /// Relays a stream until another one should be opened instead.
    ///
    /// # Errors
    /// The chunk ends.
    async fn read(
        &mut self,
        mut stream: GeneratedStream,
        mut phase: FormPhase,
    ) -> Result<NextCall, ChunkEnding> {
        let (context, shared) = (self.context, &self.context.shared);
        let failed = |error| context.health.failed(error);
        let tells_cached = self.is_first;
        let mut clock = StreamClock::new(&context.active_streams);
        // The version of the weights that the engine has told.
        let mut told_version = None;
        loop {
            match self.next_piece(&mut stream).await?.map_err(failed)? {
                Generated::Cached { tokens } => {
                    // A first stream tells it once, either before its output or after it.
                    if tells_cached {
                        self.is_first = false;
                        self.chunk.running.tally.found_in_cache(tokens);
                    }
                    context.health.works();
                }
                Generated::Weights { version } => {
                    told_version = Some(version);
                    shared.orders.set_weight_version(version);
                }
                Generated::Tokens {
                    mut tokens,
                    mut logprobs,
                } => {
                    self.is_first = false;
                    let verdict = phase.judge(&tokens);
                    match verdict {
                        PhaseTokens::Go => {}
                        PhaseTokens::EndAfter(len) => truncate(&mut tokens, &mut logprobs, len),
                        PhaseTokens::NoReasoning => return Ok(NextCall::WithoutReasoning),
                    }
                    phase = phase.begun();
                    let now = Instant::now();
                    if !std::mem::replace(&mut self.has_output, true) {
                        context.health.works();
                    }
                    context.count_step(&mut clock, now);
                    let ActiveChunk { running, watch, .. } = &mut *self.chunk;
                    watch.reader.note_held(false, now);
                    let version = told_version.unwrap_or_else(|| shared.orders.weight_version());
                    let absorbed = running.absorb_generated(tokens, logprobs, version, now);
                    if let Some(reason) = self.relay(absorbed.map_err(failed)?).await? {
                        read_last_event(stream);
                        return Err(ChunkEnding::Ended(reason));
                    }
                    if let PhaseTokens::EndAfter(_) = verdict {
                        read_last_event(stream);
                        return Ok(NextCall::WithForm);
                    }
                    // The time that the reader took does not count as the engine's.
                    let moment = context.moment();
                    self.timeout.restart(context.config().idle_ms_max, moment);
                }
                Generated::End(end) => {
                    read_last_event(stream);
                    let is_held = self.chunk.watch.fate(&shared.orders.gate()) == Fate::Held;
                    if matches!(end, GeneratedEnd::Aborted) && is_held {
                        return Ok(NextCall::Again);
                    }
                    return Err(self.engine_ended(end));
                }
            }
        }
    }

    /// Waits for the next piece of a stream.
    ///
    /// # Errors
    /// The chunk ends: it was interrupted, or its time is up.
    async fn next_piece(
        &mut self,
        stream: &mut GeneratedStream,
    ) -> Result<Result<Generated, ApiError>, ChunkEnding> {
        let piece = poll_fn(|context| {
            loop {
                if let Poll::Ready(piece) = stream.poll_next_unpin(context) {
                    return Poll::Ready(Ok(piece));
                }
                if let Poll::Ready(ending) = self.interrupts.poll(context) {
                    return Poll::Ready(Err(ending));
                }
                ready!(self.timeout.due.poll_due(context));
                let watch = &mut self.chunk.watch;
                let checked = check_time(self.context, watch, &mut self.timeout, self.has_output);
                if let Err(ending) = checked {
                    return Poll::Ready(Err(ending));
                }
            }
        });
        Ok(piece.await?.unwrap_or_else(|| {
            let message = "the engine ended its response without an end event";
            Err(ApiError::new(ErrorKind::Upstream, message))
        }))
    }

    /// Records a step's tokens, and sends them to the reader. Returns the reason for which they end the chunk, if
    /// they do.
    ///
    /// # Errors
    /// The chunk ends for another reason: its reader left or stalled, or it was interrupted.
    async fn relay(&mut self, absorbed: Absorbed) -> Result<Option<ChunkEndReason>, ChunkEnding> {
        let Absorbed {
            message,
            record,
            end,
        } = absorbed;
        let shared = &self.context.shared;
        let ActiveChunk { running, watch, .. } = &mut *self.chunk;
        running.remember(running.document.piece_of(&record));
        shared.sink.record_step(running, record);
        let event = ChunkEvent::Step(message);
        let interrupted = self.interrupts.wait();
        let delivery = watch
            .reader
            .deliver(event, shared.reader_stall_max(), interrupted);
        delivery.await?;
        match self.interrupts.pending_control() {
            Some(ending) if end.is_none() => Err(ending),
            _ => Ok(end),
        }
    }

    /// The ending of a chunk whose engine ended by itself.
    fn engine_ended(&self, end: GeneratedEnd) -> ChunkEnding {
        let StreamContext { shared, health, .. } = self.context;
        let running = &self.chunk.running;
        let failed = |message| health.failed(ApiError::new(ErrorKind::Upstream, message));
        let (reason, finish) = match end {
            GeneratedEnd::Aborted if shared.orders.gate().is_ordered() => {
                return ChunkEnding::Ended(ChunkEndReason::Aborted);
            }
            GeneratedEnd::Aborted => return failed("the engine aborted the request"),
            GeneratedEnd::Stop => (ChunkEndReason::Stop, FinishReason::Stop),
            GeneratedEnd::Length if !self.has_output => {
                return failed("the engine reached its length limit without a token");
            }
            // The chunk is short of its limit by tokens that the engine generated and never sent.
            GeneratedEnd::Length
                if running.request.chunk_tokens.is_some_and(|tokens| {
                    tokens < running.request.max_new_tokens
                        && running.tally.emitted() + UNSENT_TOKENS_MAX >= tokens
                }) =>
            {
                return ChunkEnding::Ended(ChunkEndReason::ChunkLimit);
            }
            // The engine's own limit.
            GeneratedEnd::Length => (ChunkEndReason::Length, FinishReason::Length),
        };
        shared.sink.record_finish(running, finish);
        ChunkEnding::Ended(reason)
    }
}

/// Waits until a chunk may call its engine.
///
/// # Errors
/// The chunk ends.
async fn pass_gate(
    context: &StreamContext,
    watch: &mut Watch,
    interrupts: &mut Interrupts,
) -> Result<(), ChunkEnding> {
    let StreamContext { shared, .. } = context;
    loop {
        let gate = shared.orders.gate();
        let is_held = watch.look(&gate, Instant::now(), shared.reader_stall_max())?;
        if !is_held {
            return Ok(());
        }
        tokio::select! {
            biased;
            ending = interrupts.wait() => return Err(ending),
            () = shared.orders.changed_since(gate.changes()) => {}
            () = tokio::time::sleep(HELD_CHECK) => {}
        }
    }
}

/// Looks whether the time of a chunk is really up, or was only held up.
///
/// # Errors
/// It is up, and the chunk ends.
fn check_time(
    context: &StreamContext,
    watch: &mut Watch,
    timeout: &mut TokenTimeout,
    has_output: bool,
) -> Result<(), ChunkEnding> {
    let StreamContext { shared, health, .. } = context;
    let gate = shared.orders.gate();
    let moment = Moment::at(&gate, Instant::now());
    if watch.look(&gate, moment.now, shared.reader_stall_max())? {
        timeout.look_again(moment);
    } else if timeout.is_over(moment) {
        let what = if has_output {
            "a token"
        } else {
            "its first token"
        };
        let message = format!("the engine did not give {what} in time");
        let error = ApiError::new(ErrorKind::Timeout, message);
        return Err(health.failed(error.with_code(code::ENGINE_TIMEOUT)));
    }
    Ok(())
}

/// Reads the engine's last event if nothing but that is left, in the background unless it has arrived.
fn read_last_event(mut stream: GeneratedStream) {
    let mut last_event = Box::pin(async move {
        while let Some(Ok(piece)) = stream.next().await {
            if matches!(piece, Generated::Tokens { .. }) {
                // The engine goes on: dropping the stream stops it.
                return;
            }
        }
    });
    if last_event.as_mut().now_or_never().is_none() {
        tokio::spawn(tokio::time::timeout(LAST_EVENT_TIMEOUT, last_event));
    }
}
