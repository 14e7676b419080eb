//! The decode loop: one task owns the batch and drives a verifying engine step by step.
//!
//! Read [`DecodeLoop::run`] first. Each turn takes the commands that arrived, ends chunks that are over, composes a
//! step out of every request that can move, awaits the engine, and hands the tokens out. Besides the engine, the loop
//! awaits only remote look-ups, for a small share of a step. Drafting takes microseconds, and the uploader and the
//! readers have queues of their own.
//!
//! The engine is idle between two steps, so only the work that the next step needs is done there: the tokens go into
//! the index and to the readers, and drafts are found and chosen. Learning, uploading and metrics wait until the
//! engine computes the next step ([`DecodeLoop::catch_up`]). So a draft is chosen by what was learnt up to the step
//! before the last one.

mod compose;
mod learn;
mod step;

use std::sync::Arc;
use std::time::{Duration, Instant};

use refrain_protocol::chunk::{ChunkCut, ChunkEndReason, ChunkEvent};
use refrain_protocol::engine::{CloseRequest, StepResponse};
use refrain_protocol::{ApiError, ErrorKind};
use tokio::sync::mpsc;
use tracing::Instrument;

use self::step::Part;
use crate::chunk::{ActiveChunk, Command, OutputSink, serve_cuts};
use crate::engine::VerifyingEngine;
use crate::metrics::ChunkOutcome;
use crate::orders::{Fate, Gate};
use crate::routing::{Proposers, Routing};
use crate::running::Absorbed;
use crate::shared::Shared;

/// The loop and everything that it works with.
pub(crate) struct DecodeLoop {
    pub(crate) shared: Arc<Shared>,
    pub(crate) engine: Arc<dyn VerifyingEngine>,
    pub(crate) routing: Routing,
    pub(crate) proposers: Proposers,
    /// The version of the weights of the last step.
    pub(crate) weight_version: u64,
}

/// How often stalled readers are checked while nothing else happens.
const STALL_CHECK: Duration = Duration::from_secs(1);
/// Pause after a failed step.
const ENGINE_FAILURE_PAUSE: Duration = Duration::from_millis(200);
/// Pause after the engine refused for lack of room without a hint how long.
const ENGINE_FULL_PAUSE: Duration = Duration::from_millis(20);
/// Number of consecutive refusals of whole steps before the requests of the step fail.
const ENGINE_REFUSALS_MAX: u32 = 50;

impl DecodeLoop {
    /// Runs until it receives [`Command::End`] or all senders are gone, and the last chunk has ended.
    pub(crate) async fn run(mut self, mut commands: mpsc::Receiver<Command>) {
        let mut batch: Vec<ActiveChunk> = Vec::new();
        let mut is_open = true;
        // The request that comes first in the next step. It rotates, so that a full step starves no request.
        let mut first = 0usize;
        // Consecutive steps that the engine refused as a whole.
        let mut refusals = 0u32;
        while is_open || !batch.is_empty() {
            while is_open && let Ok(command) = commands.try_recv() {
                is_open = self.command(command, &mut batch);
            }
            let gate = self.shared.orders.gate();
            self.obey(&gate, &mut batch);
            self.end_abandoned(&gate, &mut batch);
            first = if batch.is_empty() {
                0
            } else {
                (first + 1) % batch.len()
            };
            let began = Instant::now();
            let movers = self.movers(&gate, &batch, first);
            let (request, propose_seconds) = self.compose(&mut batch, &movers);
            let compose_seconds = began.elapsed().as_secs_f64();
            if request.items.is_empty() {
                self.catch_up(&mut batch);
                is_open = self.idle(&gate, &mut commands, is_open, &mut batch).await;
                continue;
            }
            let metrics = &self.shared.metrics.families;
            metrics.step_batch.observe(request.items.len() as f64);
            let engine = self.engine.clone();
            let span = step_span(&movers.parts, &batch);
            let step = engine.step(request).instrument(span);
            let beside = async {
                // The call to the engine may need this thread first.
                tokio::task::yield_now().await;
                self.count(&movers.parts, &propose_seconds, &batch);
                self.catch_up(&mut batch);
            };
            // `join` polls in this order: the call begins before the work beside it.
            let (answer, ()) = futures_util::future::join(step, beside).await;
            match answer {
                Ok(response) if response.results.len() == movers.parts.len() => {
                    refusals = 0;
                    self.shared.set_engine_ready(true);
                    self.observe(&response, &movers, compose_seconds, &batch);
                    self.take(response, &movers.parts, &mut batch);
                }
                Ok(_) => {
                    let error = ApiError::new(ErrorKind::Upstream, "the engine broke its contract")
                        .with_detail("the number of results differs from the number of items");
                    self.fail(error, &movers.parts, &mut batch);
                }
                Err(error)
                    if error.kind == ErrorKind::Overloaded && refusals < ENGINE_REFUSALS_MAX =>
                {
                    refusals += 1;
                    let pause = error
                        .retry_after_ms
                        .map_or(ENGINE_FULL_PAUSE, Duration::from_millis);
                    tokio::time::sleep(pause.min(Duration::from_secs(1))).await;
                }
                Err(error) => {
                    self.shared.metrics.families.engine_failures.inc();
                    self.shared.metrics.gain.restart();
                    let is_ready = error.kind == ErrorKind::InvalidRequest;
                    self.shared.set_engine_ready(is_ready);
                    self.fail(error, &movers.parts, &mut batch);
                    tokio::time::sleep(ENGINE_FAILURE_PAUSE).await;
                }
            }
        }
        self.shared.orders.follow(u64::MAX);
        serve_cuts(commands, &self.shared, self.routing.finish()).await;
    }

    /// Follows the orders of a trainer: ends the chunks that it aborts, and notes those that are held. No step is
    /// under way here.
    fn obey(&mut self, gate: &Gate, batch: &mut Vec<ActiveChunk>) {
        let now = Instant::now();
        let working_time = gate.working_time(now);
        let is_aborted = |chunk: &ActiveChunk| chunk.fate(gate) == Fate::Aborted;
        while let Some(place) = batch.iter().position(is_aborted) {
            self.end(place, batch, |sink, chunk| {
                let end = chunk.running.end(ChunkEndReason::Aborted);
                sink.end(chunk, end)
            });
        }
        for chunk in batch {
            let is_held = chunk.fate(gate) == Fate::Held;
            chunk.note_held(is_held, now);
            if is_held {
                // An order may have ended all sessions, so that says nothing about the engine.
                chunk.running.session.forgive_losses();
            } else {
                chunk.begin_time(working_time);
            }
        }
        self.shared.orders.follow(gate.changes());
    }

    /// Waits while no request can move: for a command, for a reader that catches up or leaves, or for the end of a
    /// pause. Returns whether more commands may come.
    async fn idle(
        &mut self,
        gate: &Gate,
        commands: &mut mpsc::Receiver<Command>,
        is_open: bool,
        batch: &mut Vec<ActiveChunk>,
    ) -> bool {
        let orders = self.shared.orders.clone();
        let movable = wait_until_movable(gate, batch);
        tokio::select! {
            command = commands.recv(), if is_open => {
                return command.is_some_and(|command| self.command(command, batch));
            }
            () = movable, if !batch.is_empty() => {}
            () = orders.changed_since(gate.changes()) => {}
            () = self.routing.statistics.wait() => {}
            // The next turn ends the chunks of stalled readers.
            () = tokio::time::sleep(STALL_CHECK), if !batch.is_empty() => {}
        }
        is_open
    }

    /// Carries out a command. Returns whether more commands may come.
    fn command(&mut self, command: Command, batch: &mut Vec<ActiveChunk>) -> bool {
        match command {
            Command::Start(chunk) => self.start(*chunk, batch),
            Command::Cut(cut, done) => {
                self.cut(cut, batch);
                // An error means that the caller no longer waits.
                let _ = done.send(());
            }
            Command::Evacuate => {
                while !batch.is_empty() {
                    self.end(0, batch, |sink, chunk| {
                        let end = chunk.running.end(ChunkEndReason::Draining);
                        sink.end(chunk, end)
                    });
                }
            }
            // A held chunk is in nobody's way: another one would be held in its place.
            Command::GiveWay(_) if self.shared.orders.gate().is_shut() => {}
            Command::GiveWay(leases) => {
                for lease in leases {
                    let place = batch.iter().position(|chunk| chunk.lease == lease);
                    if let Some(place) = place {
                        self.give_way(place, batch);
                    }
                }
            }
            Command::End => return false,
        }
        true
    }

    /// Ends a chunk whose request goes on under another lease.
    fn give_way(&mut self, place: usize, batch: &mut Vec<ActiveChunk>) {
        self.end(place, batch, |sink, chunk| {
            let end = chunk.running.end(ChunkEndReason::GaveWay);
            sink.end(chunk, end)
        });
    }

    /// Ends a chunk in the way of `how`.
    fn end(
        &mut self,
        place: usize,
        batch: &mut Vec<ActiveChunk>,
        how: impl FnOnce(&OutputSink, &mut ActiveChunk) -> ChunkOutcome,
    ) {
        let mut chunk = self.remove(place, batch);
        let outcome = how(&self.shared.sink, &mut chunk);
        self.close(chunk, outcome, true);
    }

    /// Shortens an output to the part that its reader kept, whether its chunk still runs or has just ended.
    fn cut(&mut self, cut: ChunkCut, batch: &mut Vec<ActiveChunk>) {
        let place = batch.iter().position(|chunk| chunk.lease == cut.lease);
        match place {
            Some(place) => self.end(place, batch, |sink, chunk| sink.cut(chunk, &cut)),
            None => self.shared.cut_ended(cut),
        }
    }

    fn start(&mut self, mut chunk: ActiveChunk, batch: &mut Vec<ActiveChunk>) {
        let running = &chunk.running;
        // An older attempt at the same request has lost its lease, so it must not go on beside this one.
        let same = |other: &ActiveChunk| other.running.document.id == running.document.id;
        if let Some(place) = batch.iter().position(same) {
            self.end(place, batch, OutputSink::take_over);
        }
        self.shared.sink.adopt(running);
        self.routing.request_begins(running);
        // Checked before the engine reads the prompt for nothing.
        if let Some(end) = self.routing.transfer(running) {
            let outcome = self.shared.sink.end(&mut chunk, end);
            self.close(chunk, outcome, true);
        } else {
            batch.push(chunk);
        }
    }

    /// Ends the chunks that timed out or whose readers left. Chunks of stalled readers end for now.
    fn end_abandoned(&mut self, gate: &Gate, batch: &mut Vec<ActiveChunk>) {
        let now = Instant::now();
        let working_time = gate.working_time(now);
        for chunk in batch.iter_mut() {
            if chunk.events.capacity() > 0 {
                chunk.stalled_since = None;
            } else {
                chunk.stalled_since.get_or_insert(now);
            }
        }
        let stall_max = self.shared.reader_stall_max();
        let is_stalled = |chunk: &ActiveChunk| {
            chunk
                .stalled_since
                .is_some_and(|since| now - since > stall_max)
        };
        while let Some((place, error)) = batch
            .iter()
            .enumerate()
            .find_map(|(place, chunk)| Some((place, chunk.overdue(working_time)?)))
        {
            self.end(place, batch, |sink, chunk| sink.time_out(chunk, error));
        }
        while let Some(place) = batch.iter().position(|chunk| chunk.events.is_closed()) {
            self.end(place, batch, |sink, chunk| sink.cancel(&chunk.running));
        }
        // Other requests can use the slot. The reader finds its tokens in the queue, and continues once it has read
        // them.
        while let Some(place) = batch.iter().position(is_stalled) {
            self.shared.sink.count_stalled_reader();
            self.give_way(place, batch);
        }
    }

    /// Hands out the results of a step.
    fn take(&mut self, response: StepResponse, parts: &[Part], batch: &mut Vec<ActiveChunk>) {
        let metrics = &self.shared.metrics;
        metrics.engine_step(response.step_s, response.draft_s);
        let weight_version = response.weight_version;
        self.shared.orders.set_weight_version(weight_version);
        if std::mem::replace(&mut self.weight_version, weight_version) != weight_version {
            // New weights end all sessions, so that says nothing about the engine.
            for chunk in batch.iter_mut() {
                chunk.running.session.forgive_losses();
            }
        }
        let now = Instant::now();
        let mut over: Vec<(usize, Result<ChunkOutcome, ApiError>)> = Vec::new();
        for (result, Part { place, .. }) in response.results.into_iter().zip(parts.iter().copied())
        {
            let chunk = &mut batch[place];
            let absorbed = match result {
                Ok(output) => {
                    chunk.wait_until = None;
                    chunk.waits_since = None;
                    chunk.running.absorb(output, weight_version, now)
                }
                Err(error) => chunk.postpone(error, ENGINE_FULL_PAUSE, now).map(|()| None),
            };
            match absorbed {
                Ok(None) => {}
                Ok(Some(absorbed)) => {
                    if let Some(outcome) = self.emit(chunk, absorbed) {
                        over.push((place, Ok(outcome)));
                    }
                }
                Err(error) => over.push((place, Err(error))),
            }
        }
        // From the back, so that the places of the others stay valid.
        over.sort_unstable_by_key(|(place, _)| std::cmp::Reverse(*place));
        for (place, outcome) in over {
            let chunk = self.remove(place, batch);
            match outcome {
                Ok(outcome) => self.close(chunk, outcome, true),
                Err(error) => self.close_failed(chunk, error),
            }
        }
    }

    /// Removes a chunk from the batch after settling its last step, so that its end comes last in store and metrics.
    fn remove(&mut self, place: usize, batch: &mut Vec<ActiveChunk>) -> ActiveChunk {
        let mut chunk = batch.remove(place);
        self.settle(&mut chunk);
        chunk
    }

    /// Sends a step's tokens to the index and to the reader. Returns the outcome of the chunk if it has ended.
    fn emit(&mut self, chunk: &mut ActiveChunk, absorbed: Absorbed) -> Option<ChunkOutcome> {
        let Absorbed {
            message,
            record,
            end,
        } = absorbed;
        chunk
            .running
            .remember(chunk.running.document.piece_of(&record));
        chunk.unsettled = Some(record);
        let end = end.or_else(|| self.routing.transfer(&chunk.running));
        if end.is_some() {
            // A reader that has read everything must find everything counted and stored.
            self.settle(chunk);
        }
        // There was room when the step was composed, and this loop is the only sender. If the reader has left
        // meanwhile, the next turn ends the chunk.
        let _ = chunk.events.try_send(Ok(ChunkEvent::Step(message)));
        Some(self.shared.sink.end(chunk, end?))
    }

    /// Fails the requests of a step that failed as a whole. The gateway continues them, here or at another worker.
    fn fail(&mut self, mut error: ApiError, parts: &[Part], batch: &mut Vec<ActiveChunk>) {
        if error.kind == ErrorKind::InvalidRequest {
            // The engine refused the whole step, so this worker composed it wrongly, and no client is to blame.
            error.kind = ErrorKind::Upstream;
        }
        tracing::warn!(%error, requests = parts.len(), "engine step failed");
        let mut places: Vec<usize> = parts.iter().map(|part| part.place).collect();
        places.sort_unstable_by(|a, b| b.cmp(a));
        for place in places {
            let chunk = self.remove(place, batch);
            self.close_failed(chunk, error.clone());
        }
    }

    fn close_failed(&mut self, mut chunk: ActiveChunk, error: ApiError) {
        let outcome = self.shared.sink.fail(&mut chunk, error);
        self.close(chunk, outcome, false);
    }

    /// Closes a chunk that has ended, and its session in the engine unless that is parked.
    fn close(&mut self, chunk: ActiveChunk, outcome: ChunkOutcome, keep_kv: bool) {
        self.routing.request_ended(&chunk.running);
        let Some(running) = self.shared.close(chunk, outcome) else {
            return;
        };
        let close = CloseRequest {
            sessions: vec![running.session.id],
            keep_kv,
            parks: false,
        };
        let engine = self.engine.clone();
        // Not awaited, so that the batch goes on meanwhile.
        tokio::spawn(async move {
            if let Err(error) = engine.close(close).await {
                // The session expires by itself.
                tracing::debug!(%error, "engine session was not closed");
            }
        });
    }
}

/// The span of a step: a child of its first request, linked to the others.
fn step_span(parts: &[Part], batch: &[ActiveChunk]) -> tracing::Span {
    let parent = &batch[parts[0].place].span;
    let span = tracing::info_span!(parent: parent, "engine_step", batch = parts.len());
    for part in &parts[1..] {
        span.follows_from(&batch[part.place].span);
    }
    span
}

/// Waits until a paused request may move again: its pause is over, or its reader has read something or has left.
async fn wait_until_movable(gate: &Gate, batch: &[ActiveChunk]) {
    let now = Instant::now();
    let waits = batch.iter().map(|chunk| {
        Box::pin(async move {
            match chunk.wait_until {
                // Only its reader can end it.
                _ if chunk.fate(gate) != Fate::Runs => chunk.events.closed().await,
                Some(until) if until > now => tokio::time::sleep(until - now).await,
                _ => {
                    // Completes with room in the queue, or with the reader's departure.
                    let _ = chunk.events.reserve().await;
                }
            }
        })
    });
    if batch.is_empty() {
        return;
    }
    futures_util::future::select_all(waits).await;
}
