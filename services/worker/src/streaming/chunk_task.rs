//! One chunk's task: it opens a stream, relays the tokens, and reports how the chunk ended.

use std::convert::Infallible;
use std::sync::Arc;
use std::task::{Poll, ready};
use std::time::{Duration, Instant};

use futures_util::future::poll_fn;
use futures_util::{FutureExt, StreamExt};
use refrain_protocol::{ApiError, ErrorKind};
use tokio::sync::mpsc;

use super::context::StreamContext;
use super::form_phase::{FormPhase, PhaseTokens, truncate};
use super::interrupts::Interrupts;
use super::step_gaps::StreamClock;
use super::timeout::TokenTimeout;
use crate::chunk::{ActiveChunk, ChunkEnding};
use crate::engine::{Generated, GeneratedEnd, GeneratedStream};
use crate::orders::Fate;
use crate::shared::Shared;

/// How long an ended chunk waits for the engine's last event, which frees the connection for the next call.
const LAST_EVENT_TIMEOUT: Duration = Duration::from_millis(100);

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

/// A stream that is read.
struct StreamReader<'a> {
    stream: GeneratedStream,
    /// Whether no earlier stream of the chunk has told what it found in the cache, or had output. After one that has,
    /// the cache holds what that one left there.
    is_first: &'a mut bool,
    phase: FormPhase,
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

impl StreamContext {
    /// Runs a chunk to its end.
    pub(super) async fn run_chunk(
        self: Arc<Self>,
        chunk: ActiveChunk,
        controls: mpsc::Receiver<ChunkEnding>,
    ) {
        let mut interrupts = Interrupts::new(controls, chunk.watch.reader.events());
        let mut task = RunningTask {
            chunk: Some(chunk),
            shared: self.shared.clone(),
        };
        if let Some(chunk) = &mut task.chunk {
            self.shared.sink.adopt(&chunk.running);
            let Err(ending) = self.decode_chunk(chunk, &mut interrupts).await;
            task.end(ending);
        }
        interrupts.close(&self.shared);
    }

    /// Reads streams until the chunk ends: one, or two with reasoning before a form. A stream that the engine gave up
    /// for an order is opened again.
    ///
    /// # Errors
    /// The chunk ends in this way.
    async fn decode_chunk(
        &self,
        chunk: &mut ActiveChunk,
        interrupts: &mut Interrupts,
    ) -> Result<Infallible, ChunkEnding> {
        self.pass_gate(&mut chunk.watch, interrupts).await?;
        let first_token_ms_max = self.config().first_token_ms_max;
        let deadline = chunk.watch.deadline();
        let mut timeout = TokenTimeout::new(first_token_ms_max, deadline, self.moment());
        let (mut is_first, mut reasons) = (true, true);
        loop {
            let running = &chunk.running;
            let form = running.request.sampling.form.as_deref();
            let phase = FormPhase::after(form, running.text.output(), reasons);
            let reader = StreamReader {
                stream: self.open(chunk, interrupts, &mut timeout, phase).await?,
                is_first: &mut is_first,
                phase,
            };
            let next = self.read_stream(chunk, interrupts, reader, &mut timeout);
            reasons &= !matches!(next.await?, NextCall::WithoutReasoning);
            self.pass_gate(&mut chunk.watch, interrupts).await?;
            // The next stream waits in the engine's queue and reads its text like the first one.
            timeout.restart(first_token_ms_max, self.moment());
        }
    }

    /// Relays a stream until another one should be opened instead.
    ///
    /// # Errors
    /// The chunk ends.
    async fn read_stream(
        &self,
        chunk: &mut ActiveChunk,
        interrupts: &mut Interrupts,
        reader: StreamReader<'_>,
        timeout: &mut TokenTimeout,
    ) -> Result<NextCall, ChunkEnding> {
        let StreamReader {
            mut stream,
            is_first,
            mut phase,
        } = reader;
        let failed = |error| self.engine_failed(error);
        let tells_cached = *is_first;
        let mut clock = StreamClock::new(&self.active_streams);
        // The version of the weights that the engine has told.
        let mut told_version = None;
        loop {
            let piece = poll_fn(|context| {
                loop {
                    if let Poll::Ready(piece) = stream.poll_next_unpin(context) {
                        return Poll::Ready(Ok(piece));
                    }
                    if let Poll::Ready(ending) = interrupts.poll(context) {
                        return Poll::Ready(Err(ending));
                    }
                    ready!(timeout.due.poll_due(context));
                    if let Err(ending) = self.check_time(&mut chunk.watch, timeout) {
                        return Poll::Ready(Err(ending));
                    }
                }
            })
            .await?;
            let piece = piece.unwrap_or_else(|| {
                let message = "the engine ended its response without an end event";
                Err(ApiError::new(ErrorKind::Upstream, message))
            });
            match piece.map_err(failed)? {
                Generated::Cached { tokens } => {
                    // A first stream tells it once, either before its output or after it.
                    if tells_cached {
                        *is_first = false;
                        chunk.running.tally.found_in_cache(tokens);
                    }
                    self.engine_works();
                }
                Generated::Weights { version } => {
                    told_version = Some(version);
                    self.shared.orders.set_weight_version(version);
                }
                Generated::Tokens {
                    mut tokens,
                    mut logprobs,
                } => {
                    *is_first = false;
                    let verdict = phase.judge(&tokens);
                    match verdict {
                        PhaseTokens::Go => {}
                        PhaseTokens::EndAfter(len) => truncate(&mut tokens, &mut logprobs, len),
                        PhaseTokens::NoReasoning => return Ok(NextCall::WithoutReasoning),
                    }
                    phase = phase.begun();
                    let now = Instant::now();
                    if !std::mem::replace(&mut timeout.has_output, true) {
                        self.engine_works();
                    }
                    self.count_step(&mut clock, now);
                    chunk.watch.reader.note_held(false, now);
                    let version =
                        told_version.unwrap_or_else(|| self.shared.orders.weight_version());
                    let absorbed = chunk
                        .running
                        .absorb_generated(tokens, logprobs, version, now);
                    let absorbed = absorbed.map_err(failed)?;
                    if let Some(reason) = self.relay(chunk, interrupts, absorbed).await? {
                        read_last_event(stream);
                        return Err(ChunkEnding::Ended(reason));
                    }
                    if let PhaseTokens::EndAfter(_) = verdict {
                        read_last_event(stream);
                        return Ok(NextCall::WithForm);
                    }
                    // The time that the reader took does not count as the engine's.
                    timeout.restart(self.config().idle_ms_max, self.moment());
                }
                Generated::End(end) => {
                    read_last_event(stream);
                    let is_held = chunk.watch.fate(&self.shared.orders.gate()) == Fate::Held;
                    if matches!(end, GeneratedEnd::Aborted) && is_held {
                        return Ok(NextCall::Again);
                    }
                    return Err(self.engine_ended(&chunk.running, end, timeout.has_output));
                }
            }
        }
    }

    /// Measures the engine's steps by the gaps between its events.
    fn count_step(&self, clock: &mut StreamClock, now: Instant) {
        let batch = clock.batch();
        let mut gaps = self.step_gaps.lock();
        if let Some(gap) = gaps.record(&mut clock.last, now, batch) {
            self.shared.metrics.engine_step(gap.share_s, 0.0);
            if let Some((batch, seconds)) = gap.median {
                self.shared.metrics.streamed_step(batch, seconds);
            }
        }
    }
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
