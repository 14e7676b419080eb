//! The destination of a chunk's output: the store, the metrics, and at last the reader.

use std::num::NonZeroUsize;
use std::sync::{Arc, Weak};

use lru::LruCache;
use parking_lot::Mutex;
use refrain_draft_replica::{DocumentUpdateRef, GroupReplica, NamespaceReplica, Uploader};
use refrain_protocol::chunk::{ChunkCut, ChunkEnd, ChunkEndReason, ChunkEvent};
use refrain_protocol::document::{DocumentUpdate, FinishReason};
use refrain_protocol::{ApiError, ErrorKind, LeaseId, NamespaceId, SignedNamespace};

use super::active::ActiveChunk;
use crate::metrics::{ChunkOutcome, RejectionLimit, WorkerMetrics};
use crate::running::{ActiveRequest, StepRecord};

/// Number of ended chunks that are remembered. A cut follows the end within milliseconds.
const ENDED_MAX: NonZeroUsize = NonZeroUsize::new(1024).unwrap();

/// The destination of all output. Cheap to clone.
#[derive(Clone)]
pub(crate) struct OutputSink {
    uploader: Uploader,
    metrics: Arc<WorkerMetrics>,
    /// Chunks that ended a moment ago, and how to shorten their outputs: a stop string may end in the same step as
    /// the chunk.
    ended: Arc<Mutex<LruCache<LeaseId, OutputCut>>>,
}

/// Everything needed to shorten an output, also after its chunk has ended.
struct OutputCut {
    namespace_id: NamespaceId,
    /// Weak references: many chunks are remembered, and evicted namespaces and ended groups must be freed.
    replica: Option<Weak<NamespaceReplica>>,
    group: Option<Weak<GroupReplica>>,
    namespace: SignedNamespace,
    update: DocumentUpdate,
}

impl OutputCut {
    /// Shortens the output of a chunk to `output_len` tokens.
    fn new(chunk: &ActiveChunk, output_len: u32, finish: FinishReason) -> Self {
        let running = &chunk.running;
        let sources = running.sources.as_ref();
        OutputCut {
            namespace_id: running.namespace,
            replica: sources.map(|sources| Arc::downgrade(&sources.replica)),
            group: sources
                .and_then(|sources| sources.group.as_ref())
                .map(|member| Arc::downgrade(member.group())),
            namespace: running.request.namespace.clone(),
            update: running.cut(output_len, finish),
        }
    }
}

impl OutputSink {
    pub(crate) fn new(uploader: Uploader, metrics: Arc<WorkerMetrics>) -> Self {
        OutputSink {
            uploader,
            metrics,
            ended: Arc::new(Mutex::new(LruCache::new(ENDED_MAX))),
        }
    }

    /// Takes over the earlier output of a continued request. That of a parked one is here already.
    pub(crate) fn adopt(&self, running: &ActiveRequest) {
        let output = running.text.output();
        if !running.was_parked && running.is_remembered() && !output.is_empty() {
            let earlier = running.document.piece(0, output, None);
            self.uploader
                .adopt(running.namespace, &running.request.namespace, earlier);
        }
    }

    /// Sends the tokens of a step to the store, and counts them. No draft depends on this, so it may wait, but the
    /// pieces of a document must come in order.
    pub(crate) fn record_step(&self, running: &ActiveRequest, record: StepRecord) {
        for (source, scope, counts) in record.counts() {
            self.metrics.step(source, scope, counts);
        }
        let namespace = &running.request.namespace;
        for document in &record.credited {
            self.uploader.touch(running.namespace, namespace, *document);
        }
        self.push(running, running.document.piece_of(&record));
    }

    /// Records the end of an output that came without a token.
    pub(crate) fn record_end(&self, running: &ActiveRequest, reason: ChunkEndReason) {
        let finish = match reason {
            ChunkEndReason::Stop => FinishReason::Stop,
            ChunkEndReason::Length => FinishReason::Length,
            ChunkEndReason::Aborted => FinishReason::Cancelled,
            ChunkEndReason::ChunkLimit
            | ChunkEndReason::GaveWay
            | ChunkEndReason::Draining
            | ChunkEndReason::Transfer => {
                return;
            }
        };
        let piece = running
            .document
            .piece(running.text.output_len(), &[], Some(finish));
        running.remember(piece);
        self.push(running, piece);
    }

    /// Records that the reader has left, so that the output stays as it is.
    pub(crate) fn cancel(&self, running: &ActiveRequest) -> ChunkOutcome {
        let len = running.text.output_len();
        let piece = running
            .document
            .piece(len, &[], Some(FinishReason::Cancelled));
        self.push(running, piece);
        ChunkOutcome::Cancelled
    }

    /// Notes that no more output of a request comes from here.
    pub(crate) fn release(&self, running: &ActiveRequest) {
        self.uploader
            .release(running.namespace, running.document.id);
    }

    /// Sets the last event of a chunk that did not fail.
    pub(crate) fn end(&self, chunk: &mut ActiveChunk, end: ChunkEnd) -> ChunkOutcome {
        let outcome = match end.reason {
            ChunkEndReason::Stop => ChunkOutcome::Stop,
            ChunkEndReason::Length => ChunkOutcome::Length,
            ChunkEndReason::ChunkLimit => ChunkOutcome::ChunkLimit,
            ChunkEndReason::GaveWay => ChunkOutcome::GaveWay,
            ChunkEndReason::Draining => ChunkOutcome::Evacuated,
            ChunkEndReason::Transfer => ChunkOutcome::Transferred,
            ChunkEndReason::Aborted => {
                self.record_end(&chunk.running, end.reason);
                ChunkOutcome::Aborted
            }
        };
        if chunk.running.is_remembered() {
            let cut = OutputCut::new(chunk, u32::MAX, FinishReason::Stop);
            self.ended.lock().put(chunk.lease, cut);
        }
        chunk.set_last(Ok(ChunkEvent::End(end)));
        outcome
    }

    /// Fails a chunk. The output so far remains an unfinished document, for the request's next chunk.
    pub(crate) fn fail(&self, chunk: &mut ActiveChunk, error: ApiError) -> ChunkOutcome {
        chunk.set_last(Err(error));
        ChunkOutcome::Failed
    }

    /// Fails a chunk whose time is up, and ends the output.
    pub(crate) fn time_out(&self, chunk: &mut ActiveChunk, error: ApiError) -> ChunkOutcome {
        self.cancel(&chunk.running);
        chunk.set_last(Err(error));
        ChunkOutcome::Overdue
    }

    /// Tells the reader that a newer lease continues the request elsewhere.
    pub(crate) fn take_over(&self, chunk: &mut ActiveChunk) -> ChunkOutcome {
        let message = "a newer lease has taken this request over";
        chunk.set_last(Err(ApiError::new(ErrorKind::Conflict, message)));
        ChunkOutcome::TakenOver
    }

    /// Shortens the output of a running chunk.
    pub(crate) fn cut(&self, chunk: &ActiveChunk, cut: &ChunkCut) -> ChunkOutcome {
        if chunk.running.is_remembered() {
            self.shorten(OutputCut::new(chunk, cut.output_len, finish_of(cut)));
        }
        ChunkOutcome::Cut
    }

    /// Shortens the output of a chunk that has just ended.
    pub(crate) fn cut_ended(&self, cut: ChunkCut) {
        let ended = self.ended.lock().pop(&cut.lease);
        if let Some(mut ended) = ended {
            let update = &mut ended.update;
            update.prev_len = update.prev_len.min(cut.output_len);
            update.finish = Some(finish_of(&cut));
            self.shorten(ended);
        }
    }

    /// Counts a reader that stalled for too long.
    pub(crate) fn count_stalled_reader(&self) {
        self.metrics.reject(RejectionLimit::ReaderStall);
    }

    /// Counts a chunk that is over.
    pub(crate) fn count_chunk(&self, running: &ActiveRequest, outcome: ChunkOutcome) {
        self.metrics.chunk_ended(outcome);
        self.metrics.request_length(running.tally.counts());
    }

    /// Sends a piece of an output to the store.
    fn push(&self, running: &ActiveRequest, piece: DocumentUpdateRef<'_>) {
        if running.is_remembered() {
            let namespace = &running.request.namespace;
            self.uploader.push(running.namespace, namespace, piece);
        }
    }

    /// Shortens an output in the index and in the store.
    fn shorten(&self, cut: OutputCut) {
        let OutputCut {
            namespace_id,
            replica,
            group,
            namespace,
            update,
        } = cut;
        if let Some(replica) = replica.and_then(|replica| replica.upgrade()) {
            replica.merge((&update).into());
        }
        if let Some(group) = group.and_then(|group| group.upgrade()) {
            group.merge((&update).into());
        }
        self.uploader
            .push(namespace_id, &namespace, (&update).into());
    }
}

/// The reason for which a document ends at a cut.
fn finish_of(cut: &ChunkCut) -> FinishReason {
    match cut.aborted {
        true => FinishReason::Cancelled,
        false => FinishReason::Stop,
    }
}
