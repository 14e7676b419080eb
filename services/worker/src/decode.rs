//! The decode loop: one task owns the batch and drives the engine step by step.
//!
//! Each turn takes in what arrived, drops what nobody reads any more, composes a step out of every request
//! that can move, waits for the engine, and hands the tokens out. Nothing else awaits here: drafting takes
//! microseconds, the harvest and the readers have queues of their own.

use std::collections::HashMap;
use std::num::NonZeroUsize;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use lru::LruCache;

use refrain_protocol::chunk::{ChunkCut, ChunkEndReason, ChunkEvent, StepCounts};
use refrain_protocol::document::{DocumentUpdate, FinishReason};
use refrain_protocol::engine::{CloseRequest, StepRequest, StepResponse};
use refrain_protocol::{ApiError, ErrorKind, LeaseId, SignedNamespace};
use refrain_service_kit::drain::Running as DrainToken;
use tokio::sync::{mpsc, oneshot};
use tracing::Instrument;

use crate::engine::Engine;
use crate::harvest::Harvest;
use crate::memory::NamespaceMemory;
use crate::metrics::WorkerMetrics;
use crate::running::{Absorbed, EngineLimits, Room, Router, Running};

/// What the loop is told.
pub(crate) enum Command {
    /// A chunk to decode.
    Start(Box<Start>),
    /// A reader has seen enough.
    Cut(ChunkCut, oneshot::Sender<()>),
    /// Hand over what still runs.
    HandOver,
}

/// A chunk and where its events go.
pub(crate) struct Start {
    pub(crate) running: Running,
    pub(crate) events: mpsc::Sender<Result<ChunkEvent, ApiError>>,
    pub(crate) slot: Slot,
    pub(crate) span: tracing::Span,
}

/// A chunk's place: given back when the chunk is over.
pub(crate) struct Slot {
    pub(crate) lease: LeaseId,
    pub(crate) slots: Arc<crate::slots::Slots>,
    pub(crate) _running: DrainToken,
}

impl Drop for Slot {
    fn drop(&mut self) {
        self.slots.release(self.lease);
    }
}

struct Entry {
    running: Running,
    events: mpsc::Sender<Result<ChunkEvent, ApiError>>,
    lease: LeaseId,
    /// Given back before the last event is sent: whoever hears of the end may count on the slot.
    slot: Option<Slot>,
    span: tracing::Span,
    /// Since when its reader has had no room for more.
    stalled_since: Option<Instant>,
    /// Not before then: the engine had no room for it.
    wait_until: Option<Instant>,
    waits_since: Option<Instant>,
}

/// The loop's fixed surroundings.
pub(crate) struct DecodeLoop {
    pub(crate) engine: Arc<dyn Engine>,
    pub(crate) router: Router,
    pub(crate) step_tokens_max: u32,
    pub(crate) prefill_chunk_tokens: u32,
    pub(crate) harvest: Harvest,
    pub(crate) metrics: WorkerMetrics,
    pub(crate) engine_ready: Arc<AtomicBool>,
    pub(crate) reader_stall_max: Duration,
    /// Chunks that ended a moment ago, and how to shorten their outputs: a stop string may end in the very
    /// step that ends the chunk.
    pub(crate) ended: LruCache<LeaseId, EndedChunk>,
}

/// What is needed to shorten an output after its chunk has ended.
pub(crate) type EndedChunk = (Arc<NamespaceMemory>, SignedNamespace, DocumentUpdate);

/// Ended chunks that are remembered. A cut follows within milliseconds.
pub(crate) const ENDED_REMEMBERED: NonZeroUsize = NonZeroUsize::new(1024).unwrap();

/// How long the engine may refuse a request for want of room before the request fails.
const ENGINE_ROOM_WAIT: Duration = Duration::from_secs(20);
/// Pause after a refusal without a hint.
const ENGINE_ROOM_PAUSE: Duration = Duration::from_millis(20);
/// How often stalled readers are looked at when nothing else happens.
const STALL_CHECK: Duration = Duration::from_secs(1);
/// Pauses after failed steps.
const ENGINE_FAILURE_PAUSE: Duration = Duration::from_millis(200);
/// Whole-step refusals in a row that are waited out.
const ENGINE_REFUSALS_MAX: u32 = 50;

impl DecodeLoop {
    /// Runs until every sender of commands is gone and nothing is left to decode.
    pub(crate) async fn run(mut self, mut commands: mpsc::Receiver<Command>) {
        let mut batch: Vec<Entry> = Vec::new();
        let mut open = true;
        // The request whose turn it is to be first, so that a full step starves nobody.
        let mut first = 0usize;
        let mut refusals = 0u32;
        while open || !batch.is_empty() {
            while let Ok(command) = commands.try_recv() {
                self.command(command, &mut batch);
            }
            self.reap(&mut batch);
            first = if batch.is_empty() {
                0
            } else {
                (first + 1) % batch.len()
            };
            let (request, members) = self.compose(&mut batch, first);
            if request.items.is_empty() {
                // Nothing can move: a command, a reader that catches up or leaves, or the end of a pause.
                let wait = wait_for_room(&batch);
                tokio::select! {
                    command = commands.recv() => match command {
                        Some(command) => self.command(command, &mut batch),
                        None => open = false,
                    },
                    () = wait, if !batch.is_empty() => {}
                    // Readers that stand still too long are noticed by the next turn.
                    () = tokio::time::sleep(STALL_CHECK), if !batch.is_empty() => {}
                }
                continue;
            }
            self.metrics.step_batch.observe(request.items.len() as f64);
            let span = tracing::info_span!(parent: &batch[members[0]].span, "engine_step", batch = members.len());
            for member in &members[1..] {
                span.follows_from(&batch[*member].span);
            }
            let sampled: Vec<bool> = request.items.iter().map(|item| item.sample).collect();
            match self.engine.step(request).instrument(span).await {
                Ok(response) if response.results.len() == members.len() => {
                    refusals = 0;
                    self.engine_ready.store(true, Ordering::Relaxed);
                    self.take(response, &members, &sampled, &mut batch);
                }
                Ok(_) => {
                    let error = ApiError::new(ErrorKind::Upstream, "the engine broke its contract")
                        .with_detail("another number of results than of items");
                    self.fail(error, &members, &mut batch);
                }
                Err(error)
                    if error.kind == ErrorKind::Overloaded && refusals < ENGINE_REFUSALS_MAX =>
                {
                    refusals += 1;
                    let pause = error
                        .retry_after_ms
                        .map_or(ENGINE_ROOM_PAUSE, Duration::from_millis);
                    tokio::time::sleep(pause.min(Duration::from_secs(1))).await;
                }
                Err(error) => {
                    self.metrics.engine_failures.inc();
                    self.engine_ready
                        .store(error.kind == ErrorKind::InvalidRequest, Ordering::Relaxed);
                    self.fail(error, &members, &mut batch);
                    tokio::time::sleep(ENGINE_FAILURE_PAUSE).await;
                }
            }
        }
    }

    fn limits(&self) -> EngineLimits {
        let capabilities = self.engine.capabilities();
        EngineLimits {
            max_context: capabilities.max_context,
            max_draft_tokens: capabilities.max_draft_tokens,
            tree_drafts: capabilities.tree_drafts,
        }
    }

    fn command(&mut self, command: Command, batch: &mut Vec<Entry>) {
        match command {
            Command::Start(start) => self.start(*start, batch),
            Command::Cut(cut, done) => {
                self.cut(cut, batch);
                // Nobody waits any more: then nobody needs to know.
                let _ = done.send(());
            }
            Command::HandOver => {
                for mut entry in std::mem::take(batch) {
                    let end = ChunkEvent::End(entry.running.end(ChunkEndReason::Draining));
                    entry.send_last(Ok(end));
                    self.harvest
                        .release(entry.running.memory.id, entry.running.document());
                    self.leave(entry, "handed_over", true);
                }
            }
        }
    }

    /// Shortens an output to what its reader kept, whether its chunk still runs or has just ended.
    fn cut(&mut self, cut: ChunkCut, batch: &mut Vec<Entry>) {
        let place = batch.iter().position(|entry| entry.lease == cut.lease);
        let (memory, namespace, update) = match place {
            Some(place) => {
                let entry = batch.remove(place);
                let ended = entry.ended(cut.output_len);
                self.leave(entry, "cut", true);
                ended
            }
            None => match self.ended.pop(&cut.lease) {
                Some((memory, namespace, mut update)) => {
                    update.prev_len = update.prev_len.min(cut.output_len);
                    (memory, namespace, update)
                }
                None => return,
            },
        };
        memory.merge(&update);
        self.harvest.push(memory.id, &namespace, update);
    }

    fn start(&self, start: Start, batch: &mut Vec<Entry>) {
        let Start {
            running,
            events,
            slot,
            span,
        } = start;
        // An older attempt at the same request lost its lease: it must not go on beside this one.
        let same = |entry: &Entry| entry.running.document() == running.document();
        if let Some(place) = batch.iter().position(same) {
            let mut old = batch.remove(place);
            let taken_over = "a newer lease has taken this request over";
            old.send_last(Err(ApiError::new(ErrorKind::Conflict, taken_over)));
            self.leave(old, "taken_over", true);
        }
        if !running.output().is_empty() {
            let said = running.update(0, running.output().to_vec(), None);
            self.harvest
                .adopt(running.memory.id, &running.request.namespace, said);
        }
        batch.push(Entry {
            running,
            events,
            lease: slot.lease,
            slot: Some(slot),
            span,
            stalled_since: None,
            wait_until: None,
            waits_since: None,
        });
    }

    /// Ends the chunks that nobody reads any more.
    fn reap(&self, batch: &mut Vec<Entry>) {
        let now = Instant::now();
        for entry in batch.iter_mut() {
            if entry.events.capacity() > 0 {
                entry.stalled_since = None;
            } else {
                entry.stalled_since.get_or_insert(now);
            }
        }
        let stalled = |entry: &Entry| {
            entry
                .stalled_since
                .is_some_and(|since| now - since > self.reader_stall_max)
        };
        while let Some(place) = batch
            .iter()
            .position(|entry| entry.events.is_closed() || stalled(entry))
        {
            let entry = batch.remove(place);
            if stalled(&entry) {
                self.metrics
                    .rejections
                    .with_label_values(&["reader_stall_ms_max"])
                    .inc();
            }
            let len = entry.running.output().len() as u32;
            let update = entry
                .running
                .update(len, Vec::new(), Some(FinishReason::Cancelled));
            self.harvest.push(
                entry.running.memory.id,
                &entry.running.request.namespace,
                update,
            );
            self.leave(entry, "cancelled", true);
        }
    }

    /// One step out of every request that can move.
    fn compose(&self, batch: &mut [Entry], first: usize) -> (StepRequest, Vec<usize>) {
        let limits = self.limits();
        let capabilities = self.engine.capabilities();
        let now = Instant::now();
        let order = (0..batch.len()).map(|place| (place + first) % batch.len().max(1));
        let total = self.step_tokens_max.min(capabilities.max_step_tokens);
        let movable: Vec<usize> = order
            .filter(|&place| {
                let entry = &batch[place];
                entry.events.capacity() > 0 && entry.wait_until.is_none_or(|until| until <= now)
            })
            .take(capabilities.max_batch.min(total) as usize)
            .collect();
        // Decoding requests first: each is sure of its one token, drafts come out of what is left over.
        let (decoding, prefilling): (Vec<usize>, Vec<usize>) = movable
            .into_iter()
            .partition(|&place| batch[place].running.is_decoding());
        let mut left = total.saturating_sub(decoding.len() as u32);
        // One prompt moves in every step, however many drafts there are.
        let reserve = if prefilling.is_empty() {
            0
        } else {
            self.prefill_chunk_tokens.min(left)
        };
        left -= reserve;
        let mut request = StepRequest::default();
        let mut members = Vec::new();
        for place in decoding {
            let (item, routed) = {
                let started = Instant::now();
                let step = batch[place].running.item(
                    Room {
                        context: 1,
                        draft: left,
                    },
                    limits,
                    &self.router,
                );
                self.metrics
                    .propose_seconds
                    .observe(started.elapsed().as_secs_f64());
                step
            };
            self.metrics.decision(routed.decision, routed.reason);
            left -= item
                .draft
                .as_ref()
                .map_or(0, |draft| draft.tokens.len() as u32)
                .min(left);
            request.items.push(item);
            members.push(place);
        }
        left += reserve;
        for place in prefilling {
            let context = left.min(self.prefill_chunk_tokens);
            if context == 0 {
                break;
            }
            // The piece that ends the prompt samples, so it can verify a draft as well.
            let draft = left - context;
            let room = Room { context, draft };
            let (item, routed) = batch[place].running.item(room, limits, &self.router);
            self.metrics.decision(routed.decision, routed.reason);
            let drafted = item.draft.as_ref().map_or(0, |draft| draft.tokens.len());
            left -= ((item.tokens.len() + drafted) as u32).min(left);
            request.items.push(item);
            members.push(place);
        }
        (request, members)
    }

    /// Hands out what the engine answered.
    fn take(
        &mut self,
        response: StepResponse,
        members: &[usize],
        sampled: &[bool],
        batch: &mut Vec<Entry>,
    ) {
        self.metrics.engine_step(response.step_s);
        let limits = self.limits();
        let now = Instant::now();
        let mut over: HashMap<usize, Over> = HashMap::new();
        for ((result, &place), &sampled) in response.results.into_iter().zip(members).zip(sampled) {
            let entry = &mut batch[place];
            let outcome = match result {
                Ok(output) => {
                    entry.wait_until = None;
                    entry.waits_since = None;
                    entry
                        .running
                        .absorb(output, sampled, response.weight_version, limits, now)
                }
                Err(error) => entry.postpone(error, now).map(|()| None),
            };
            match outcome {
                Ok(None) => {}
                Ok(Some(absorbed)) => {
                    if let Some(end) = self.emit(entry, absorbed) {
                        over.insert(place, Over::Ended(end));
                    }
                }
                Err(error) => {
                    over.insert(place, Over::Failed(error));
                }
            }
        }
        let mut places: Vec<usize> = over.keys().copied().collect();
        places.sort_unstable_by(|a, b| b.cmp(a));
        for place in places {
            let entry = batch.remove(place);
            match over.remove(&place) {
                Some(Over::Ended(outcome)) => self.leave(entry, outcome, true),
                Some(Over::Failed(error)) => self.leave_failed(entry, error),
                None => {}
            }
        }
    }

    /// Sends a step's tokens to the reader, the index and the store. Returns how the chunk ended, if it did.
    fn emit(&mut self, entry: &mut Entry, absorbed: Absorbed) -> Option<&'static str> {
        let Absorbed {
            message,
            update,
            credited,
            end,
        } = absorbed;
        self.metrics.step(
            message.source,
            message.scope,
            StepCounts {
                steps: 1,
                drafted: u64::from(message.drafted),
                accepted: u64::from(message.accepted),
                emitted: message.tokens.len() as u64,
            },
        );
        let memory = &entry.running.memory;
        memory.merge(&update);
        let namespace = &entry.running.request.namespace;
        for document in credited {
            self.harvest.touch(memory.id, namespace, document);
        }
        self.harvest.push(memory.id, namespace, update);
        // There was room when the step was composed, and this loop is the only sender; a reader that left
        // meanwhile is noticed by the next reap.
        let _ = entry.events.try_send(Ok(ChunkEvent::Step(message)));
        let end = end?;
        let outcome = match end.reason {
            ChunkEndReason::Stop => "stop",
            ChunkEndReason::Length => "length",
            ChunkEndReason::ChunkLimit | ChunkEndReason::Draining | ChunkEndReason::HandOver => {
                self.harvest.release(memory.id, entry.running.document());
                "chunk_limit"
            }
        };
        self.ended.put(entry.lease, entry.ended(u32::MAX));
        entry.send_last(Ok(ChunkEvent::End(end)));
        Some(outcome)
    }

    /// A step that failed as a whole fails its requests: the gateway continues them, here or elsewhere.
    fn fail(&self, mut error: ApiError, members: &[usize], batch: &mut Vec<Entry>) {
        if error.kind == ErrorKind::InvalidRequest {
            // The step was refused as a whole, so it was composed wrongly: no client is to blame.
            error.kind = ErrorKind::Upstream;
        }
        tracing::warn!(%error, requests = members.len(), "engine step failed");
        let mut places = members.to_vec();
        places.sort_unstable_by(|a, b| b.cmp(a));
        for place in places {
            let entry = batch.remove(place);
            self.leave_failed(entry, error.clone());
        }
    }

    fn leave_failed(&self, mut entry: Entry, error: ApiError) {
        // The output so far stays as an unfinished document: whoever continues the request continues it.
        self.harvest
            .release(entry.running.memory.id, entry.running.document());
        entry.send_last(Err(error));
        self.leave(entry, "failed", false);
    }

    fn leave(&self, entry: Entry, outcome: &str, keep_kv: bool) {
        self.metrics.chunks.with_label_values(&[outcome]).inc();
        let counts = entry.running.counts();
        self.metrics.request_length(counts.emitted, counts.steps);
        let close = CloseRequest {
            sessions: vec![entry.running.session],
            keep_kv,
        };
        let engine = self.engine.clone();
        // Not awaited: the batch goes on meanwhile.
        tokio::spawn(async move {
            if let Err(error) = engine.close(close).await {
                // It expires by itself.
                tracing::debug!(%error, "engine session was not closed");
            }
        });
    }
}

enum Over {
    Ended(&'static str),
    Failed(ApiError),
}

impl Entry {
    /// What an item's error means: try again later, open a new session, or the end.
    fn postpone(&mut self, error: ApiError, now: Instant) -> Result<(), ApiError> {
        match error.kind {
            ErrorKind::NotFound => self.running.reopen(),
            ErrorKind::Overloaded => {
                let since = *self.waits_since.get_or_insert(now);
                if now - since > ENGINE_ROOM_WAIT {
                    return Err(error);
                }
                let pause = error
                    .retry_after_ms
                    .map_or(ENGINE_ROOM_PAUSE, Duration::from_millis);
                self.wait_until = Some(now + pause.min(Duration::from_secs(1)));
                Ok(())
            }
            _ => Err(error),
        }
    }

    /// How to shorten the output to `output_len`.
    fn ended(&self, output_len: u32) -> EndedChunk {
        let running = &self.running;
        (
            running.memory.clone(),
            running.request.namespace.clone(),
            running.cut(output_len),
        )
    }

    /// The last event must arrive even if the reader lags: a task of its own waits for room.
    fn send_last(&mut self, event: Result<ChunkEvent, ApiError>) {
        self.slot = None;
        if let Err(mpsc::error::TrySendError::Full(event)) = self.events.try_send(event) {
            let events = self.events.clone();
            tokio::spawn(async move {
                // The reader left: nothing to tell it.
                let _ = events.send(event).await;
            });
        }
    }
}

/// Waits until a paused request may move again.
async fn wait_for_room(batch: &[Entry]) {
    let now = Instant::now();
    let waits = batch.iter().map(|entry| {
        Box::pin(async move {
            match entry.wait_until {
                Some(until) if until > now => tokio::time::sleep(until - now).await,
                _ => {
                    // Ends with room in the queue, or with the reader's departure.
                    let _ = entry.events.reserve().await;
                }
            }
        })
    });
    if batch.is_empty() {
        return;
    }
    futures_util::future::select_all(waits).await;
}
