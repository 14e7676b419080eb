//! The state that the driver, the handle and the heartbeats of a worker share.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use refrain_service_kit::actors::Inbox;

use crate::chunk::{ActiveChunk, ChunkEnding, Command, OutputSink};
use crate::config::WorkerConfig;
use crate::metrics::WorkerMetrics;
use crate::orders::Orders;
use crate::parking::Parking;

/// The state that the driver, the handle and the heartbeats of a worker share.
pub(crate) struct Shared {
    pub(crate) config: WorkerConfig,
    pub(crate) metrics: Arc<WorkerMetrics>,
    pub(crate) sink: OutputSink,
    pub(crate) parking: Arc<Parking>,
    pub(crate) orders: Arc<Orders>,
    /// Whether the engine answered last time.
    pub(crate) engine_ready: AtomicBool,
}

impl Shared {
    /// Records whether the engine answers.
    pub(crate) fn set_engine_ready(&self, is_ready: bool) {
        self.engine_ready.store(is_ready, Ordering::Relaxed);
    }

    /// Carries out what is left of an ending that came after the chunk had ended: a cut shortens the output, whose
    /// request does not go on.
    pub(crate) fn end_late(&self, ending: ChunkEnding) {
        if let ChunkEnding::Cut(cut, done) = ending {
            self.parking.forget_lease(cut.lease);
            self.sink.cut_ended(cut);
            // An error means that the caller no longer waits.
            let _ = done.send(());
        }
    }

    /// Ends a chunk: records how it ended, parks its request if that goes on here, frees its slot, and sends its last
    /// event. A reader that has seen the end finds all of this done, and may rely on the slot.
    pub(crate) fn end(&self, chunk: ActiveChunk, ending: ChunkEnding) {
        self.sink.record_ending(&chunk, &ending);
        let ActiveChunk {
            running,
            watch,
            permit,
            ..
        } = chunk;
        let last = ending.last_event(&running.tally);
        let left = match ending.parks() {
            true => self.parking.park(running, permit.lease()).err(),
            false => Some(running),
        };
        if let Some(running) = left {
            if ending.goes_on() {
                self.sink.release(&running);
            }
            // The KV of an engine that failed may be wrong.
            let keep_kv = !matches!(ending, ChunkEnding::Failed(_));
            self.parking.close_session(running.session.id, keep_kv);
        }
        drop(permit);
        watch.finish(last);
        if let ChunkEnding::Cut(_, done) = ending {
            // An error means that the caller no longer waits.
            let _ = done.send(());
        }
    }

    /// After the last chunk has ended, keeps answering [`Command::Cut`] until `last` completes: readers may still
    /// shorten the outputs that they received last.
    pub(crate) async fn serve_cuts(
        &self,
        mut commands: Inbox<Command>,
        last: impl Future<Output = ()>,
    ) {
        let serve = |command| {
            if let Command::Cut(cut, done) = command {
                self.end_late(ChunkEnding::Cut(cut, done));
            }
        };
        let mut last = std::pin::pin!(last);
        loop {
            tokio::select! {
                () = &mut last => break,
                Some(command) = commands.recv() => serve(command),
            }
        }
        // Later senders receive an error.
        commands.close();
        while let Ok(command) = commands.try_recv() {
            serve(command);
        }
    }

    /// How long a reader may stall before its chunk ends.
    pub(crate) fn reader_stall_max(&self) -> Duration {
        Duration::from_millis(self.config.reader_stall_ms_max)
    }
}
