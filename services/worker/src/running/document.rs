//! The document that a request's output becomes in the indexes and in the store.

use refrain_draft_replica::DocumentUpdateRef;
use refrain_protocol::DocumentId;
use refrain_protocol::chunk::ChunkRequest;
use refrain_protocol::document::{DocumentHead, FinishReason};
use refrain_protocol::history::PromptHash;
use refrain_service_kit::trace::TraceLink;

use super::sources::{prompt, prompt_end};
use super::step_record::StepRecord;

/// The document of a request's output.
pub(crate) struct OutputDocument {
    pub(crate) id: DocumentId,
    /// The epoch of the chunk.
    pub(super) epoch: u64,
    pub(super) head: DocumentHead,
    /// The request in its trace.
    trace: Option<TraceLink>,
}

impl OutputDocument {
    /// The document of a request whose text is complete.
    pub(super) fn new(request: &ChunkRequest, created_ms: u64) -> Self {
        OutputDocument {
            id: request.request.into(),
            epoch: request.epoch,
            head: DocumentHead {
                session: request.session.clone(),
                group: request.group.clone(),
                choice: request.sampling.choice,
                weight_version: 0,
                created_ms,
                left_context: prompt_end(request).to_vec(),
                prompt_hash: Some(PromptHash::of(prompt(request))),
            },
            trace: TraceLink::current(),
        }
    }

    /// A piece of the output for the index and the store.
    pub(crate) fn piece<'a>(
        &'a self,
        prev_len: u32,
        tokens: &'a [u32],
        finish: Option<FinishReason>,
    ) -> DocumentUpdateRef<'a> {
        DocumentUpdateRef {
            document: self.id,
            epoch: self.epoch,
            prev_len,
            tokens,
            head: &self.head,
            finish,
            trace: self.trace.as_ref(),
        }
    }

    /// The piece of the output that a step emitted.
    pub(crate) fn piece_of<'a>(&'a self, record: &'a StepRecord) -> DocumentUpdateRef<'a> {
        self.piece(record.prev_len, &record.step.tokens, record.finish)
    }
}
