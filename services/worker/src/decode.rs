//! The decode loop: one task owns the batch and drives a verifying engine step by step.
//!
//! Read [`DecodeLoop::run`] first. Each turn takes the commands that arrived, ends chunks that are over, composes a
//! step out of every request that can move, awaits the engine, and hands the tokens out. The loop awaits nothing but
//! the engine. Drafting takes microseconds, and the uploader and the readers have queues of their own.
//!
//! The engine is idle between two steps, so only the work that the next step needs is done there: the tokens go into
//! the index and to the readers, and drafts are found and chosen. Learning, uploading and metrics wait until the
//! engine computes the next step ([`DecodeLoop::catch_up`]). So a draft is chosen by what was learnt up to the step
//! before the last one.

mod compose;
mod learn;
mod member;
mod step;

use std::sync::Arc;
use std::time::{Duration, Instant};

use refrain_protocol::chunk::{ChunkCut, ChunkEvent};
use refrain_protocol::engine::StepResponse;
use refrain_protocol::{ApiError, ErrorKind};
use refrain_service_kit::actors::Inbox;
use tokio::sync::oneshot;
use tracing::Instrument;

use self::member::{ENGINE_FULL_PAUSE, ENGINE_FULL_PAUSE_MAX, EngineRoom, Member};
use self::step::Part;
use crate::chunk::{ActiveChunk, ChunkEnding, Command, EndOrder};
use crate::engine::VerifyingEngine;
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
/// Number of consecutive refusals of whole steps before the requests of the step fail.
const ENGINE_REFUSALS_MAX: u32 = 50;

impl DecodeLoop {
    /// Runs until it receives [`Command::Stop`] or all senders are gone, and the last chunk has ended.
    ///
    /// A batch that is not empty is left of a run that panicked. Its requests go on at once, here or elsewhere.
    pub(crate) async fn run(&mut self, mut commands: Inbox<Command>, batch: &mut Vec<Member>) {
        while !batch.is_empty() {
            let message = "the decode loop of this worker panicked";
            let error = ApiError::new(ErrorKind::Upstream, message);
            self.end(0, batch, ChunkEnding::Failed(error));
        }
        let mut is_open = true;
        // The request that comes first in the next step. It rotates, so that a full step starves no request.
        let mut first = 0usize;
        // Consecutive steps that the engine refused as a whole.
        let mut refusals = 0u32;
        while is_open || !batch.is_empty() {
            while is_open && let Ok(command) = commands.try_recv() {
                is_open = self.command(command, batch);
            }
            let gate = self.shared.orders.gate();
            self.look(&gate, batch);
            first = if batch.is_empty() {
                0
            } else {
                (first + 1) % batch.len()
            };
            let began = Instant::now();
            let movers = self.movers(&gate, batch, first);
            let (request, propose_seconds) = self.compose(batch, &movers);
            let compose_seconds = began.elapsed().as_secs_f64();
            if request.items.is_empty() {
                self.catch_up(batch);
                is_open = self.idle(&gate, &mut commands, is_open, batch).await;
                continue;
            }
            let metrics = &self.shared.metrics.families;
            metrics.step_batch.observe(request.items.len() as f64);
            let engine = self.engine.clone();
            let span = step_span(&movers.parts, batch);
            let step = engine.step(request).instrument(span);
            let beside = async {
                // The call to the engine may need this thread first.
                tokio::task::yield_now().await;
                self.count(&movers.parts, &propose_seconds, batch);
                self.catch_up(batch);
            };
            // `join` polls in this order: the call begins before the work beside it.
            let (answer, ()) = futures_util::future::join(step, beside).await;
            match answer {
                Ok(response) if response.results.len() == movers.parts.len() => {
                    refusals = 0;
                    self.shared.set_engine_ready(true);
                    self.observe(&response, &movers, compose_seconds, batch);
                    self.take(response, &movers.parts, batch);
                }
                Ok(_) => {
                    let error = ApiError::new(ErrorKind::Upstream, "the engine broke its contract")
                        .with_detail("the number of results differs from the number of items");
                    self.fail(error, &movers.parts, batch);
                }
                Err(error)
                    if error.kind == ErrorKind::Overloaded && refusals < ENGINE_REFUSALS_MAX =>
                {
                    refusals += 1;
                    let pause = error
                        .retry_after_ms
                        .map_or(ENGINE_FULL_PAUSE, Duration::from_millis);
                    tokio::time::sleep(pause.min(ENGINE_FULL_PAUSE_MAX)).await;
                }
                Err(error) => {
                    self.shared.metrics.families.engine_failures.inc();
                    self.shared.metrics.gain.restart();
                    let is_ready = error.kind == ErrorKind::InvalidRequest;
                    self.shared.set_engine_ready(is_ready);
                    self.fail(error, &movers.parts, batch);
                    tokio::time::sleep(ENGINE_FAILURE_PAUSE).await;
                }
            }
        }
        self.shared.orders.follow(u64::MAX);
        let last = self.routing.finish();
        self.shared.serve_cuts(commands, last).await;
    }

    /// Looks after all chunks: ends those that have to end, and notes those that a trainer's order holds. No step is
    /// under way here.
    fn look(&mut self, gate: &Gate, batch: &mut Vec<Member>) {
        let now = Instant::now();
        let stall_max = self.shared.reader_stall_max();
        let mut place = 0;
        while let Some(member) = batch.get_mut(place) {
            let watch = &mut member.chunk.watch;
            // A step needs room for its result.
            watch.reader.needs_room(now);
            match watch.look(gate, now, stall_max) {
                Err(ending) => {
                    self.end(place, batch, ending);
                    continue;
                }
                // An order may have ended all sessions, so that says nothing about the engine.
                Ok(true) => member.chunk.running.session.forgive_losses(),
                Ok(false) => {}
            }
            place += 1;
        }
        self.shared.orders.follow(gate.changes());
    }

    /// Waits while no request can move: for a command, for a reader that catches up or leaves, or for the end of a
    /// pause. Returns whether more commands may come.
    async fn idle(
        &mut self,
        gate: &Gate,
        commands: &mut Inbox<Command>,
        is_open: bool,
        batch: &mut Vec<Member>,
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
    fn command(&mut self, command: Command, batch: &mut Vec<Member>) -> bool {
        match command {
            Command::Start(chunk) => self.start(*chunk, batch),
            Command::Cut(cut, done) => self.cut(cut, done, batch),
            Command::EndChunks(order) => self.end_ordered(&order, batch),
            Command::Stop => return false,
        }
        true
    }

    /// Shortens an output to the part that its reader kept, whether its chunk still runs or has just ended.
    fn cut(&mut self, cut: ChunkCut, done: oneshot::Sender<()>, batch: &mut Vec<Member>) {
        let is_meant = |member: &Member| member.chunk.key().lease == cut.lease;
        let place = batch.iter().position(is_meant);
        let ending = ChunkEnding::Cut(cut, done);
        match place {
            Some(place) => self.end(place, batch, ending),
            None => self.shared.end_late(ending),
        }
    }

    fn start(&mut self, chunk: ActiveChunk, batch: &mut Vec<Member>) {
        let running = &chunk.running;
        self.end_ordered(&EndOrder::TakeOver(running.document.id), batch);
        self.shared.sink.adopt(running);
        self.routing.request_begins(running);
        // Checked before the engine reads the prompt for nothing.
        match self.routing.transfer(running) {
            Some(worker) => self.close(chunk, ChunkEnding::Transferred(worker)),
            None => batch.push(Member::new(chunk)),
        }
    }

    /// Ends the chunks that an order is about.
    fn end_ordered(&mut self, order: &EndOrder, batch: &mut Vec<Member>) {
        let gate = self.shared.orders.gate();
        let is_meant = |member: &Member| order.ends(&member.chunk.key(), &gate);
        while let Some(place) = batch.iter().position(is_meant) {
            self.end(place, batch, order.ending());
        }
    }

    /// Ends a chunk after settling its last step, so that its end comes last in store and metrics.
    fn end(&mut self, place: usize, batch: &mut Vec<Member>, ending: ChunkEnding) {
        let mut member = batch.remove(place);
        self.settle(&mut member);
        self.close(member.chunk, ending);
    }

    fn close(&mut self, chunk: ActiveChunk, ending: ChunkEnding) {
        self.routing.request_ended(&chunk.running);
        self.shared.end(chunk, ending);
    }

    /// Hands out the results of a step.
    fn take(&mut self, response: StepResponse, parts: &[Part], batch: &mut Vec<Member>) {
        let metrics = &self.shared.metrics;
        metrics.engine_step(response.step_s, response.draft_s);
        let weight_version = response.weight_version;
        self.shared.orders.set_weight_version(weight_version);
        if std::mem::replace(&mut self.weight_version, weight_version) != weight_version {
            // New weights end all sessions, so that says nothing about the engine.
            for member in batch.iter_mut() {
                member.chunk.running.session.forgive_losses();
            }
        }
        let now = Instant::now();
        let mut over: Vec<(usize, ChunkEnding)> = Vec::new();
        for (result, Part { place, .. }) in response.results.into_iter().zip(parts.iter().copied())
        {
            let member = &mut batch[place];
            let absorbed = match result {
                Ok(output) => {
                    member.room = EngineRoom::default();
                    member.chunk.running.absorb(output, weight_version, now)
                }
                Err(error) => member.postpone(error, now).map(|()| None),
            };
            let ending = match absorbed {
                Ok(absorbed) => absorbed.and_then(|absorbed| self.emit(member, absorbed)),
                Err(error) => Some(ChunkEnding::Failed(error)),
            };
            over.extend(ending.map(|ending| (place, ending)));
        }
        // From the back, so that the places of the others stay valid.
        over.sort_unstable_by_key(|(place, _)| std::cmp::Reverse(*place));
        for (place, ending) in over {
            self.end(place, batch, ending);
        }
    }

    /// Sends a step's tokens to the index and to the reader. Returns how the chunk ends, if it does.
    fn emit(&mut self, member: &mut Member, absorbed: Absorbed) -> Option<ChunkEnding> {
        let Absorbed {
            message,
            record,
            end,
        } = absorbed;
        let running = &member.chunk.running;
        running.remember(running.document.piece_of(&record));
        let ending = match end {
            Some(reason) => Some(ChunkEnding::Ended(reason)),
            None => self.routing.transfer(running).map(ChunkEnding::Transferred),
        };
        member.unsettled = Some(record);
        if ending.is_some() {
            // A reader that has read everything must find everything counted and stored.
            self.settle(member);
        }
        // There was room when the step was composed, and this loop is the only sender.
        member.chunk.watch.reader.send(ChunkEvent::Step(message));
        ending
    }

    /// Fails the requests of a step that failed as a whole. The gateway continues them, here or at another worker.
    fn fail(&mut self, mut error: ApiError, parts: &[Part], batch: &mut Vec<Member>) {
        if error.kind == ErrorKind::InvalidRequest {
            // The engine refused the whole step, so this worker composed it wrongly, and no client is to blame.
            error.kind = ErrorKind::Upstream;
        }
        tracing::warn!(%error, requests = parts.len(), "engine step failed");
        let mut places: Vec<usize> = parts.iter().map(|part| part.place).collect();
        places.sort_unstable_by(|a, b| b.cmp(a));
        for place in places {
            self.end(place, batch, ChunkEnding::Failed(error.clone()));
        }
    }
}

/// The span of a step: a child of its first request, linked to the others.
fn step_span(parts: &[Part], batch: &[Member]) -> tracing::Span {
    let parent = &batch[parts[0].place].chunk.span;
    let span = tracing::info_span!(parent: parent, "engine_step", batch = parts.len());
    for part in &parts[1..] {
        span.follows_from(&batch[part.place].chunk.span);
    }
    span
}

/// Waits until a paused request may move again: its pause is over, or its reader has read something or has left.
async fn wait_until_movable(gate: &Gate, batch: &[Member]) {
    let now = Instant::now();
    let waits = batch.iter().map(|member| {
        let watch = &member.chunk.watch;
        let events = watch.reader.events();
        Box::pin(async move {
            match member.room.paused_until(now) {
                // Only its reader can end it.
                _ if watch.fate(gate) != Fate::Runs => events.closed().await,
                Some(until) => tokio::time::sleep(until - now).await,
                None => {
                    // Completes with room in the queue, or with the reader's departure.
                    let _ = events.reserve().await;
                }
            }
        })
    });
    if batch.is_empty() {
        return;
    }
    futures_util::future::select_all(waits).await;
}
