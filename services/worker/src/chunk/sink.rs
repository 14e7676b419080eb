//! The destination of a chunk's output: the indexes, the store and the metrics.

use std::num::NonZeroUsize;
use std::sync::{Arc, Weak};

use lru::LruCache;
use parking_lot::Mutex;
use refrain_draft_replica::{DocumentUpdateRef, GroupReplica, NamespaceReplica, Uploader};
use refrain_protocol::chunk::ChunkCut;
use refrain_protocol::document::{DocumentUpdate, FinishReason};
use refrain_protocol::{LeaseId, NamespaceId, SignedNamespace};

use super::active::ActiveChunk;
use super::ending::ChunkEnding;
use crate::metrics::{RejectionLimit, WorkerMetrics};
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
    /// Shortens the output of a request to `output_len` tokens.
    fn new(running: &ActiveRequest, output_len: u32, finish: FinishReason) -> Self {
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
    pub(crate) fn record_finish(&self, running: &ActiveRequest, finish: FinishReason) {
        let len = running.text.output_len();
        let piece = running.document.piece(len, &[], Some(finish));
        running.remember(piece);
        self.push(running, piece);
    }

    /// Records how a chunk ends: in its output, in the metrics, and for a cut that may follow.
    pub(crate) fn record_ending(&self, chunk: &ActiveChunk, ending: &ChunkEnding) {
        let running = &chunk.running;
        if let Some(finish) = ending.finish() {
            self.record_finish(running, finish);
        }
        if running.is_remembered() {
            if let ChunkEnding::Cut(cut, _) = ending {
                self.shorten(OutputCut::new(running, cut.output_len, finish_of(cut)));
            } else if ending.may_be_cut() {
                let cut = OutputCut::new(running, u32::MAX, FinishReason::Stop);
                self.ended.lock().put(chunk.permit.lease(), cut);
            }
        }
        if let ChunkEnding::ReaderStalled = ending {
            self.metrics.reject(RejectionLimit::ReaderStall);
        }
        self.metrics.chunk_ended(ending.outcome());
        self.metrics.request_length(running.tally.counts());
    }

    /// Notes that no more output of a request comes from here.
    pub(crate) fn release(&self, running: &ActiveRequest) {
        self.uploader
            .release(running.namespace, running.document.id);
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

/// The finish reason of a document that a cut shortens.
fn finish_of(cut: &ChunkCut) -> FinishReason {
    match cut.aborted {
        true => FinishReason::Cancelled,
        false => FinishReason::Stop,
    }
}
