//! The streaming driver: one task per chunk listens to an engine that generates by itself.
//!
//! What is said goes to the reader and to the store, as in the decode loop. Where the engine is driven (`verify.rs`), it is
//! indexed as well, and a stream is given up for a verify call now and then; else nothing is drafted. A chunk's task ends,
//! and with it the engine's work, as soon as the reader leaves.

mod ask;
mod listen;
mod outside;
mod patience;
mod say;
mod steps;
mod verify;

use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, AtomicU32};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use refrain_protocol::chunk::ChunkCut;
use refrain_protocol::{DocumentId, LeaseId};
use tokio::sync::{mpsc, oneshot};
use tokio::task::{Id, JoinSet};
use tracing::Instrument;

use self::steps::Steps;
use super::entry::Entry;
use super::{Command, Outlet, Start, serve_cuts};
use crate::config::EngineConfig;
use crate::drive::SharedDrive;
use crate::engine::{Breaker, StreamingEngine};
use crate::metrics::WorkerMetrics;

/// The driver and its fixed surroundings.
pub(crate) struct StreamDriver {
    chunks: Arc<Chunks>,
}

/// What all chunks share.
struct Chunks {
    engine: Arc<dyn StreamingEngine>,
    outlet: Outlet,
    metrics: WorkerMetrics,
    engine_ready: Arc<AtomicBool>,
    breaker: Mutex<Breaker>,
    steps: Mutex<Steps>,
    /// Chunks that the engine is sending tokens to.
    sent_to: Arc<AtomicU32>,
    /// Drive mode, if the engine is driven.
    drive: Option<SharedDrive>,
    config: EngineConfig,
    reader_stall_max: Duration,
}

/// A chunk that runs.
struct Listed {
    lease: LeaseId,
    document: DocumentId,
    control: mpsc::Sender<Control>,
}

/// What a running chunk is told.
enum Control {
    /// Its reader has seen enough.
    Cut(ChunkCut, oneshot::Sender<()>),
    /// Another worker goes on.
    HandOver,
    /// Others have a turn.
    GiveWay,
    /// A newer lease of the same request is here.
    TakenOver,
}

impl StreamDriver {
    pub(crate) fn new(
        engine: Arc<dyn StreamingEngine>,
        outlet: Outlet,
        metrics: WorkerMetrics,
        engine_ready: Arc<AtomicBool>,
        config: EngineConfig,
        drive: Option<SharedDrive>,
        reader_stall_max: Duration,
    ) -> Self {
        let breaker = Breaker::new(
            config.breaker_failures_max,
            Duration::from_millis(config.breaker_open_ms),
        );
        StreamDriver {
            chunks: Arc::new(Chunks {
                engine,
                outlet,
                metrics,
                engine_ready,
                breaker: Mutex::new(breaker),
                steps: Mutex::default(),
                sent_to: Arc::default(),
                drive,
                config,
                reader_stall_max,
            }),
        }
    }

    /// Runs until it is told to end, or nobody can tell it anything any more, and nothing is left to listen to.
    pub(crate) async fn run(self, mut commands: mpsc::Receiver<Command>) {
        let mut tasks: JoinSet<()> = JoinSet::new();
        let mut listed: HashMap<Id, Listed> = HashMap::new();
        let mut ends = false;
        while !ends || !tasks.is_empty() {
            tokio::select! {
                Some(command) = commands.recv() => match command {
                    Command::Start(start) => self.start(*start, &mut tasks, &mut listed),
                    Command::Cut(cut, done) => self.cut(cut, done, &listed),
                    Command::HandOver => {
                        for chunk in listed.values() {
                            let _ = chunk.control.try_send(Control::HandOver);
                        }
                    }
                    Command::GiveWay(leases) => {
                        for chunk in listed.values().filter(|chunk| leases.contains(&chunk.lease)) {
                            let _ = chunk.control.try_send(Control::GiveWay);
                        }
                    }
                    Command::End => ends = true,
                },
                Some(ended) = tasks.join_next_with_id() => {
                    let id = match ended {
                        Ok((id, ())) => id,
                        Err(error) => error.id(),
                    };
                    listed.remove(&id);
                }
                else => break,
            }
        }
        serve_cuts(commands, &self.chunks.outlet, std::future::ready(())).await;
    }

    fn start(&self, start: Start, tasks: &mut JoinSet<()>, listed: &mut HashMap<Id, Listed>) {
        let runtime = start.runtime.clone();
        let entry = Entry::new(start);
        let document = entry.running.document();
        for old in listed.values().filter(|old| old.document == document) {
            let _ = old.control.try_send(Control::TakenOver);
        }
        // A cut, a hand-over, a take-over and words to give way, of which one will do.
        let (control, told) = mpsc::channel(4);
        let lease = entry.lease;
        let span = entry.span.clone();
        let task = self.chunks.clone().chunk(entry, told).instrument(span);
        let id = tasks.spawn_on(task, &runtime).id();
        let chunk = Listed {
            lease,
            document,
            control,
        };
        listed.insert(id, chunk);
    }

    fn cut(&self, cut: ChunkCut, done: oneshot::Sender<()>, listed: &HashMap<Id, Listed>) {
        let running = listed.values().find(|chunk| chunk.lease == cut.lease);
        let control = Control::Cut(cut, done);
        let unsent = match running {
            Some(chunk) => match chunk.control.try_send(control) {
                Ok(()) => return,
                Err(error) => error.into_inner(),
            },
            None => control,
        };
        if let Control::Cut(cut, done) = unsent {
            self.chunks.outlet.cut_ended(cut);
            let _ = done.send(());
        }
    }
}
