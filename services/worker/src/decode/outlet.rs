//! Where what a chunk says goes, whoever decodes it: the index, the store, the figures, and in the end its reader.

use std::num::NonZeroUsize;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use lru::LruCache;
use refrain_protocol::chunk::{ChunkCut, ChunkEnd, ChunkEndReason, ChunkEvent};
use refrain_protocol::document::FinishReason;
use refrain_protocol::{ApiError, LeaseId};

use super::entry::{EndedChunk, Entry};
use crate::metrics::WorkerMetrics;
use crate::running::{Heard, Running};
use refrain_draft_replica::Harvest;

/// Ended chunks that are remembered. A cut follows within milliseconds.
const ENDED_REMEMBERED: NonZeroUsize = NonZeroUsize::new(1024).unwrap();

/// The one way out of a chunk. Cheap to clone.
#[derive(Clone)]
pub(crate) struct Outlet {
    harvest: Harvest,
    metrics: WorkerMetrics,
    /// Chunks that ended a moment ago, and how to shorten their outputs: a stop string may end in the very
    /// step that ends the chunk.
    ended: Arc<Mutex<LruCache<LeaseId, EndedChunk>>>,
}

impl Outlet {
    pub(crate) fn new(harvest: Harvest, metrics: WorkerMetrics) -> Self {
        Outlet {
            harvest,
            metrics,
            ended: Arc::new(Mutex::new(LruCache::new(ENDED_REMEMBERED))),
        }
    }

    /// Takes over what a continued request has said so far.
    pub(super) fn adopt(&self, running: &Running) {
        if !running.output().is_empty() {
            let said = running.piece(0, running.output(), None);
            self.harvest
                .adopt(running.namespace, &running.request.namespace, said);
        }
    }

    /// Lets store and figures have a step's tokens. Nobody drafts from there, so it may wait; a document's pieces come in their
    /// order.
    pub(super) fn keep(&self, running: &Running, heard: Heard) {
        for (source, scope, counts) in heard.counts() {
            self.metrics.step(source, scope, counts);
        }
        let namespace = &running.request.namespace;
        for document in &heard.credited {
            self.harvest.touch(running.namespace, namespace, *document);
        }
        self.harvest
            .push(running.namespace, namespace, running.piece_of(&heard));
    }

    /// Sends the last event of a chunk that did not fail. Returns the outcome's label.
    pub(super) fn end(&self, entry: &mut Entry, end: ChunkEnd) -> &'static str {
        let (outcome, goes_on) = match end.reason {
            ChunkEndReason::Stop => ("stop", false),
            ChunkEndReason::Length => ("length", false),
            ChunkEndReason::ChunkLimit => ("chunk_limit", true),
            ChunkEndReason::GaveWay => ("gave_way", true),
            ChunkEndReason::Draining => ("handed_over", true),
            ChunkEndReason::Transfer => ("to_fallback", true),
        };
        if goes_on {
            let running = &entry.running;
            self.harvest.release(running.namespace, running.document());
        }
        self.ended().put(entry.lease, entry.ended(u32::MAX));
        entry.send_last(Ok(ChunkEvent::End(end)));
        outcome
    }

    /// Lets index and store know of an end that came without a token.
    pub(super) fn finish(&self, running: &Running, reason: ChunkEndReason) {
        let finish = match reason {
            ChunkEndReason::Stop => FinishReason::Stop,
            ChunkEndReason::Length => FinishReason::Length,
            ChunkEndReason::ChunkLimit
            | ChunkEndReason::GaveWay
            | ChunkEndReason::Draining
            | ChunkEndReason::Transfer => {
                return;
            }
        };
        let piece = running.piece(running.output().len() as u32, &[], Some(finish));
        running.remember(piece);
        self.harvest
            .push(running.namespace, &running.request.namespace, piece);
    }

    /// Tells the reader of an error. The output so far stays as an unfinished document: whoever continues the
    /// request continues it.
    pub(super) fn fail(&self, entry: &mut Entry, error: ApiError) {
        self.harvest
            .release(entry.running.namespace, entry.running.document());
        entry.send_last(Err(error));
    }

    /// Tells the reader that the request's time is up, whose output ends here. Returns the outcome's label.
    pub(super) fn overdue(&self, entry: &mut Entry, error: ApiError) -> &'static str {
        self.cancelled(&entry.running);
        entry.send_last(Err(error));
        "overdue"
    }

    /// Nobody reads on: the output so far is all there is of it.
    pub(super) fn cancelled(&self, running: &Running) {
        let len = running.output().len() as u32;
        let piece = running.piece(len, &[], Some(FinishReason::Cancelled));
        self.harvest
            .push(running.namespace, &running.request.namespace, piece);
    }

    /// A reader stood still for too long.
    pub(super) fn reader_stalled(&self) {
        self.metrics
            .rejections
            .with_label_values(&["reader_stall_ms_max"])
            .inc();
    }

    /// The figures of a chunk that is over.
    pub(super) fn left(&self, running: &Running, outcome: &str) {
        self.metrics.chunks.with_label_values(&[outcome]).inc();
        let counts = running.counts();
        self.metrics.request_length(counts.emitted, counts.steps);
    }

    /// Shortens an output whose chunk has just ended.
    pub(super) fn cut_ended(&self, cut: ChunkCut) {
        if let Some(mut ended) = self.ended().pop(&cut.lease) {
            let update = &mut ended.update;
            update.prev_len = update.prev_len.min(cut.output_len);
            self.shorten(ended);
        }
    }

    /// Shortens an output in index and store.
    pub(super) fn shorten(&self, ended: EndedChunk) {
        let EndedChunk {
            namespace_id,
            memory,
            group,
            namespace,
            update,
        } = ended;
        if let Some(memory) = memory {
            memory.merge(&update);
        }
        if let Some(group) = group.and_then(|group| group.upgrade()) {
            group.merge(&update);
        }
        self.harvest
            .push(namespace_id, &namespace, (&update).into());
    }

    fn ended(&self) -> MutexGuard<'_, LruCache<LeaseId, EndedChunk>> {
        self.ended.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
