//! Segments for workers: their list, their bytes, and the documents in no segment.
//!
//! Segments are read from their memory map, outside the lock. A reader of a segment that is being merged away keeps
//! its file until it is done.

use std::collections::HashSet;

use refrain_protocol::document::{DocumentUpdate, FeedEvent};
use refrain_protocol::segment::{
    DocumentsReply, DocumentsRequest, SegmentInfo, SegmentPiece, SegmentPieceRequest,
    SegmentsReply, SegmentsRequest,
};
use refrain_protocol::{ApiError, DocumentId, ErrorKind, NamespaceId};

use crate::catalog::FeedChange;
use crate::reading::document_text::TextError;
use crate::reading::feed::event;
use crate::record::DocumentKey;
use crate::service::handle::{DraftStoreHandle, REPLY_TOKENS_MAX};
use crate::shared_store::{OpenStore, SharedStore, unavailable};

/// Most words of a segment, of four bytes each, in one answer. Each answer in progress holds this much memory.
const SEGMENT_WORDS_MAX: u32 = 1 << 20;

impl DraftStoreHandle {
    pub(super) async fn list_segments(
        &self,
        request: SegmentsRequest,
    ) -> Result<SegmentsReply, ApiError> {
        let _running = self.enter()?;
        let namespace = self.inner.mesh.verify(&request.namespace)?;
        self.read_blocking(move |shared| list(shared, namespace))
            .await
    }

    pub(super) async fn read_piece(
        &self,
        request: SegmentPieceRequest,
    ) -> Result<SegmentPiece, ApiError> {
        let _running = self.enter()?;
        let namespace = self.inner.mesh.verify(&request.namespace)?;
        let words_max = request.max_words.min(SEGMENT_WORDS_MAX);
        let piece = self
            .read_blocking(move |shared| piece(shared, namespace, &request, words_max as usize))
            .await?;
        self.inner
            .metrics
            .sent_segment_bytes
            .inc_by(piece.words.len() as u64 * 4);
        Ok(piece)
    }

    pub(super) async fn read_documents(
        &self,
        mut request: DocumentsRequest,
    ) -> Result<DocumentsReply, ApiError> {
        let _running = self.enter()?;
        let namespace = self.inner.mesh.verify(&request.namespace)?;
        // `covered` tells the caller to ask for the rest.
        request
            .documents
            .truncate(self.inner.config.tuning.updates_max);
        let tokens_max = request.max_tokens.min(REPLY_TOKENS_MAX);
        let (reply, damaged) = self
            .read_blocking(move |shared| {
                documents(shared, namespace, &request.documents, tokens_max as usize)
            })
            .await?;
        self.report(damaged);
        Ok(reply)
    }
}

fn list(shared: &SharedStore, namespace: NamespaceId) -> Result<SegmentsReply, ApiError> {
    let open = shared.read();
    let OpenStore { catalog, .. } = open.as_ref().ok_or_else(unavailable)?;
    let (sealed, unsealed) = catalog.sealed_and_others(namespace);
    let segments = sealed.into_iter().map(|(mounted, masked)| SegmentInfo {
        segment: mounted.file.manifest().checksum,
        words: mounted.file.index_words(),
        tokens: mounted.live_tokens,
        masked,
    });
    Ok(SegmentsReply {
        cursor: catalog.cursor(namespace, catalog.last_change(namespace)),
        segments: segments.collect(),
        unsealed,
    })
}

fn piece(
    shared: &SharedStore,
    namespace: NamespaceId,
    request: &SegmentPieceRequest,
    words_max: usize,
) -> Result<SegmentPiece, ApiError> {
    let sealed = {
        let open = shared.read();
        let OpenStore { catalog, .. } = open.as_ref().ok_or_else(unavailable)?;
        // A segment of another namespace is reported as missing.
        let mut of_namespace = catalog
            .segments()
            .files()
            .filter(|sealed| sealed.namespace() == namespace);
        of_namespace
            .find(|sealed| sealed.manifest().checksum == request.segment)
            .cloned()
    };
    let sealed = sealed.ok_or_else(|| {
        ApiError::new(
            ErrorKind::NotFound,
            "no such segment; it may have been merged, so list the segments again",
        )
    })?;
    Ok(SegmentPiece {
        words: sealed.index_piece(request.offset, words_max),
    })
}

/// Documents as they are now, and those that turned out to be damaged. The lock is taken for each of them.
fn documents(
    shared: &SharedStore,
    namespace: NamespaceId,
    documents: &[DocumentId],
    tokens_max: usize,
) -> Result<(DocumentsReply, HashSet<DocumentKey>), ApiError> {
    let (mut reply, mut damaged) = (DocumentsReply::default(), HashSet::new());
    let mut tokens = 0;
    for &document in documents {
        let key = DocumentKey::new(namespace, document);
        let open = shared.read();
        match full_update(open.as_ref().ok_or_else(unavailable)?, key) {
            Ok(Some(update)) => {
                tokens += update.tokens.len();
                if tokens > tokens_max && !reply.updates.is_empty() {
                    break;
                }
                reply.updates.push(update);
            }
            Ok(None) => {}
            Err(TextError::Damaged(_)) => {
                damaged.insert(key);
            }
            Err(TextError::Log(error)) => return Err(unavailable().with_detail(error)),
        }
        reply.covered += 1;
    }
    Ok((reply, damaged))
}

/// The complete document as the feed would describe it.
fn full_update(open: &OpenStore, key: DocumentKey) -> Result<Option<DocumentUpdate>, TextError> {
    let OpenStore { catalog, log } = open;
    let Some(known) = catalog.document(key) else {
        return Ok(None);
    };
    let all = FeedChange::Range {
        document: key.document,
        start: 0,
        end: known.state.len,
        last: true,
    };
    Ok(match event(catalog, &**log, key.namespace, all)? {
        Some(FeedEvent::Update(update)) => Some(update),
        _ => None,
    })
}
