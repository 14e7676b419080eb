//! The decode loop: one task owns the batch and drives the engine step by step.
//!
//! Each turn takes in what arrived, drops what nobody reads any more, composes a step out of every request
//! that can move, waits for the engine, and hands the tokens out. Beside the engine it awaits the store's look-ups
//! alone, for a small share of a step: drafting takes microseconds, the harvest and the readers have queues of their
//! own.
//!
//! Between two steps the engine has nothing to do, so only that stands there which the next step needs: the tokens go
//! into the index and to the readers, and drafts are found and chosen. What the router learns from a step, the store's
//! share and the figures are seen to while the engine computes the next one ([`DecodeLoop::catch_up`]). So a draft goes by
//! what was learnt up to the step before the last.

mod compose;
mod entry;
mod lessons;
mod outlet;
mod stream;

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use refrain_protocol::chunk::{ChunkCut, ChunkEndReason, ChunkEvent};
use refrain_protocol::engine::{CloseRequest, StepResponse};
use refrain_protocol::{ApiError, ErrorKind, LeaseId};
use refrain_speculation::StepTaken;
use tokio::sync::{mpsc, oneshot};
use tracing::Instrument;

use self::compose::{Composed, Member};
use self::entry::{ENGINE_ROOM_PAUSE, Entry, Over, wait_for_room};
use crate::engine::Engine;
use crate::fallback::FallbackWatch;
use crate::goodput::Goodput;
use crate::guard::Guard;
use crate::metrics::WorkerMetrics;
use crate::proposers::Proposers;
use crate::router::Router;
use crate::running::Absorbed;
use refrain_draft_replica::RemoteLookup;

pub(crate) use self::entry::{Slot, Start};
pub(crate) use self::outlet::Outlet;
pub(crate) use self::stream::{SharedHelpers, StreamDriver};

/// What the loop is told.
pub(crate) enum Command {
    /// A chunk to decode.
    Start(Box<Start>),
    /// A reader has seen enough.
    Cut(ChunkCut, oneshot::Sender<()>),
    /// Hand over what still runs.
    HandOver,
    /// End these chunks for now: others have a turn.
    GiveWay(Vec<LeaseId>),
    /// Nothing begins any more: end with what still runs.
    End,
}

/// The loop's fixed surroundings.
pub(crate) struct DecodeLoop {
    pub(crate) engine: Arc<dyn Engine>,
    pub(crate) router: Arc<Router>,
    pub(crate) fallback: FallbackWatch,
    pub(crate) guard: Guard,
    pub(crate) goodput: Goodput,
    pub(crate) elsewhere: RemoteLookup,
    pub(crate) proposers: Proposers,
    pub(crate) step_tokens_max: u32,
    pub(crate) prefill_chunk_tokens: u32,
    pub(crate) outlet: Outlet,
    pub(crate) metrics: WorkerMetrics,
    pub(crate) engine_ready: Arc<AtomicBool>,
    pub(crate) reader_stall_max: Duration,
}

/// How a step was composed.
#[derive(Clone, Copy, Debug)]
struct HowComposed {
    /// Drafts were held back.
    withholds: bool,
    /// What it took, the wait for drafts of the store included.
    seconds: f64,
}

/// How often stalled readers are looked at when nothing else happens.
const STALL_CHECK: Duration = Duration::from_secs(1);
/// Pauses after failed steps.
const ENGINE_FAILURE_PAUSE: Duration = Duration::from_millis(200);
/// Whole-step refusals in a row that are waited out.
const ENGINE_REFUSALS_MAX: u32 = 50;

impl DecodeLoop {
    /// Runs until it is told to end, or nobody can tell it anything any more, and nothing is left to decode.
    pub(crate) async fn run(mut self, mut commands: mpsc::Receiver<Command>) {
        let mut batch: Vec<Entry> = Vec::new();
        let mut open = true;
        // The request whose turn it is to be first, so that a full step starves nobody.
        let mut first = 0usize;
        let mut refusals = 0u32;
        // The last step, until it was learnt from.
        let mut taken: Option<StepTaken> = None;
        while open || !batch.is_empty() {
            while open && let Ok(command) = commands.try_recv() {
                open = self.command(command, &mut batch);
            }
            self.reap(&mut batch);
            first = if batch.is_empty() {
                0
            } else {
                (first + 1) % batch.len()
            };
            let began = Instant::now();
            let movers = self.movers(&batch, first);
            let withholds = movers.withholds;
            let wanted = self.wanted_elsewhere(&batch, &movers);
            let found = self.elsewhere.look_up(wanted).await;
            let Composed {
                request,
                members,
                propose_seconds,
            } = self.compose(&mut batch, movers, &found);
            let compose_seconds = began.elapsed().as_secs_f64();
            if request.items.is_empty() {
                self.catch_up(&mut batch, taken.take());
                // Nothing can move: a command, a reader that catches up or leaves, or the end of a pause.
                let wait = wait_for_room(&batch);
                tokio::select! {
                    command = commands.recv(), if open => {
                        open = command.is_some_and(|command| self.command(command, &mut batch));
                    }
                    () = wait, if !batch.is_empty() => {}
                    () = self.goodput.wait_to_exchange() => {}
                    // Readers that stand still too long are noticed by the next turn.
                    () = tokio::time::sleep(STALL_CHECK), if !batch.is_empty() => {}
                }
                continue;
            }
            self.metrics.step_batch.observe(request.items.len() as f64);
            let span = tracing::info_span!(parent: &batch[members[0].place].span, "engine_step", batch = members.len());
            for member in &members[1..] {
                span.follows_from(&batch[member.place].span);
            }
            let engine = self.engine.clone();
            let step = engine.step(request).instrument(span);
            let beside = async {
                // Whoever carries the call to the engine may need this thread first.
                tokio::task::yield_now().await;
                self.count(&members, &propose_seconds);
                self.catch_up(&mut batch, taken.take());
            };
            // In this order: the call is begun first.
            let (answer, ()) = futures_util::future::join(step, beside).await;
            match answer {
                Ok(response) if response.results.len() == members.len() => {
                    refusals = 0;
                    self.engine_ready.store(true, Ordering::Relaxed);
                    let composed = HowComposed {
                        withholds,
                        seconds: compose_seconds,
                    };
                    taken = Some(self.observe(&response, &members, composed, &batch));
                    self.take(response, &members, &mut batch);
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
        serve_cuts(commands, &self.outlet, self.goodput.finish()).await;
    }

    /// Does what it is told. Says whether more may come.
    fn command(&mut self, command: Command, batch: &mut Vec<Entry>) -> bool {
        match command {
            Command::Start(start) => self.start(*start, batch),
            Command::Cut(cut, done) => {
                self.cut(cut, batch);
                // Nobody waits any more: then nobody needs to know.
                let _ = done.send(());
            }
            Command::HandOver => {
                for mut entry in std::mem::take(batch) {
                    self.settle(&mut entry);
                    let end = entry.running.end(ChunkEndReason::Draining);
                    let outcome = self.outlet.end(&mut entry, end);
                    self.leave(entry, outcome, true);
                }
            }
            Command::GiveWay(leases) => {
                for lease in leases {
                    let place = batch.iter().position(|entry| entry.lease == lease);
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
    fn give_way(&mut self, place: usize, batch: &mut Vec<Entry>) {
        let mut entry = self.take_out(place, batch);
        let end = entry.running.end(ChunkEndReason::GaveWay);
        let outcome = self.outlet.end(&mut entry, end);
        self.leave(entry, outcome, true);
    }

    /// Shortens an output to what its reader kept, whether its chunk still runs or has just ended.
    fn cut(&mut self, cut: ChunkCut, batch: &mut Vec<Entry>) {
        let place = batch.iter().position(|entry| entry.lease == cut.lease);
        match place {
            Some(place) => {
                let entry = self.take_out(place, batch);
                self.outlet.shorten(entry.ended(cut.output_len));
                self.leave(entry, "cut", true);
            }
            None => self.outlet.cut_ended(cut),
        }
    }

    fn start(&mut self, start: Start, batch: &mut Vec<Entry>) {
        let mut entry = Entry::new(start);
        let running = &entry.running;
        // An older attempt at the same request lost its lease: it must not go on beside this one.
        let same = |entry: &Entry| entry.running.document() == running.document();
        if let Some(place) = batch.iter().position(same) {
            let mut old = self.take_out(place, batch);
            let taken_over = "a newer lease has taken this request over";
            old.send_last(Err(ApiError::new(ErrorKind::Conflict, taken_over)));
            self.leave(old, "taken_over", true);
        }
        self.outlet.adopt(running);
        self.goodput
            .meet(running.namespace, &running.request.namespace);
        // What the store answered while nothing was decoded is known to the first step; what is new here, it is asked
        // before that.
        self.goodput.exchange();
        // Before the prompt is read for nothing.
        if let Some(end) = self.fallback.hand_over(running) {
            let outcome = self.outlet.end(&mut entry, end);
            self.leave(entry, outcome, true);
        } else {
            batch.push(entry);
        }
    }

    /// Ends the chunks that nobody waits for any more, and for now those whose readers stand still.
    fn reap(&mut self, batch: &mut Vec<Entry>) {
        let now = Instant::now();
        for entry in batch.iter_mut() {
            if entry.events.capacity() > 0 {
                entry.stalled_since = None;
            } else {
                entry.stalled_since.get_or_insert(now);
            }
        }
        let stall_max = self.reader_stall_max;
        let stalled = |entry: &Entry| {
            entry
                .stalled_since
                .is_some_and(|since| now - since > stall_max)
        };
        while let Some((place, error)) = batch
            .iter()
            .enumerate()
            .find_map(|(place, entry)| Some((place, entry.overdue(now)?)))
        {
            let mut entry = self.take_out(place, batch);
            let outcome = self.outlet.overdue(&mut entry, error);
            self.leave(entry, outcome, true);
        }
        while let Some(place) = batch.iter().position(|entry| entry.events.is_closed()) {
            let entry = self.take_out(place, batch);
            self.outlet.cancelled(&entry.running);
            self.leave(entry, "cancelled", true);
        }
        // Others can use what such a reader does not: it finds what was said, and asks for more once it has read
        // that.
        while let Some(place) = batch.iter().position(stalled) {
            self.outlet.reader_stalled();
            self.give_way(place, batch);
        }
    }

    /// Hands out what the engine answered.
    fn take(&mut self, response: StepResponse, members: &[Member], batch: &mut Vec<Entry>) {
        self.metrics.engine_step(response.step_s, response.draft_s);
        let limits = self.limits();
        let now = Instant::now();
        let mut over: HashMap<usize, Over> = HashMap::new();
        for (result, member) in response.results.into_iter().zip(members) {
            let place = member.place;
            let entry = &mut batch[place];
            let outcome = match result {
                Ok(output) => {
                    entry.wait_until = None;
                    entry.waits_since = None;
                    entry.running.absorb(
                        output,
                        member.sampled,
                        response.weight_version,
                        limits,
                        now,
                    )
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
            let entry = self.take_out(place, batch);
            match over.remove(&place) {
                Some(Over::Ended(outcome)) => self.leave(entry, outcome, true),
                Some(Over::Failed(error)) => self.leave_failed(entry, error),
                None => {}
            }
        }
    }

    /// Takes a chunk out of the batch, with nothing left to be done of its last step: what comes after that in store and
    /// figures is its end.
    fn take_out(&mut self, place: usize, batch: &mut Vec<Entry>) -> Entry {
        let mut entry = batch.remove(place);
        self.settle(&mut entry);
        entry
    }

    /// Sends a step's tokens to the index and the reader. Returns how the chunk ended, if it did.
    fn emit(&mut self, entry: &mut Entry, absorbed: Absorbed) -> Option<&'static str> {
        let Absorbed {
            message,
            heard,
            end,
        } = absorbed;
        entry.running.remember(entry.running.piece_of(&heard));
        entry.heard = Some(heard);
        let end = end.or_else(|| self.fallback.hand_over(&entry.running));
        if end.is_some() {
            // Whoever has read all of it finds all of it counted and kept.
            self.settle(entry);
        }
        // There was room when the step was composed, and this loop is the only sender; a reader that left
        // meanwhile is noticed by the next reap.
        let _ = entry.events.try_send(Ok(ChunkEvent::Step(message)));
        Some(self.outlet.end(entry, end?))
    }

    /// A step that failed as a whole fails its requests: the gateway continues them, here or elsewhere.
    fn fail(&mut self, mut error: ApiError, members: &[Member], batch: &mut Vec<Entry>) {
        if error.kind == ErrorKind::InvalidRequest {
            // The step was refused as a whole, so it was composed wrongly: no client is to blame.
            error.kind = ErrorKind::Upstream;
        }
        tracing::warn!(%error, requests = members.len(), "engine step failed");
        let mut places: Vec<usize> = members.iter().map(|member| member.place).collect();
        places.sort_unstable_by(|a, b| b.cmp(a));
        for place in places {
            let entry = self.take_out(place, batch);
            self.leave_failed(entry, error.clone());
        }
    }

    fn leave_failed(&mut self, mut entry: Entry, error: ApiError) {
        self.outlet.fail(&mut entry, error);
        self.leave(entry, "failed", false);
    }

    fn leave(&mut self, entry: Entry, outcome: &str, keep_kv: bool) {
        self.fallback.request_ended(&entry.running);
        self.outlet.left(&entry.running, outcome);
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

/// All that a loop still does whose chunks have ended, until `last` is over: readers shorten what they were sent.
async fn serve_cuts(
    mut commands: mpsc::Receiver<Command>,
    outlet: &Outlet,
    last: impl Future<Output = ()>,
) {
    let serve = |command| {
        if let Command::Cut(cut, done) = command {
            outlet.cut_ended(cut);
            let _ = done.send(());
        }
    };
    let mut last = std::pin::pin!(last);
    loop {
        tokio::select! {
            () = &mut last => break,
            Some(command) = commands.recv() => serve(command),
        }
    }
    // Who comes from now on is told that nobody is here.
    commands.close();
    while let Ok(command) = commands.try_recv() {
        serve(command);
    }
}
