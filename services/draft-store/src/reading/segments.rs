//! Segments for workers: their list, their bytes, and the documents in no segment.
//!
//! Segments are read from their memory map, outside the lock. A reader of a segment that is being merged away keeps
//! its file until it is done.

use std::collections::HashSet;
use std::sync::Arc;

use refrain_protocol::document::FeedCursor;
use refrain_protocol::segment::{
    DocumentsReply, SegmentInfo, SegmentPiece, SegmentPieceRequest, SegmentsReply,
};
use refrain_protocol::{ApiError, DocumentId, ErrorKind, NamespaceId};

use crate::reading::document_text::{TextError, read_document};
use crate::record::DocumentKey;
use crate::segments::SegmentFile;
use crate::shared_store::{OpenStore, SharedStore, unavailable};

/// The segments of a namespace, its other documents, and the cursor from which the feed goes on.
pub(crate) fn list(
    shared: &SharedStore,
    namespace: NamespaceId,
) -> Result<SegmentsReply, ApiError> {
    let open = shared.read()?;
    let OpenStore { catalog, .. } = &*open;
    let (sealed, unsealed) = catalog.sealed_and_others(namespace);
    let segments = sealed.into_iter().map(|(mounted, masked)| SegmentInfo {
        segment: mounted.file.manifest().checksum,
        words: mounted.file.index_words(),
        tokens: mounted.live_tokens,
        masked,
    });
    Ok(SegmentsReply {
        cursor: FeedCursor {
            seen: catalog.seen(namespace),
            ..catalog.cursor(namespace, catalog.last_change(namespace))
        },
        segments: segments.collect(),
        unsealed,
    })
}

/// A piece of the index of a segment.
pub(crate) fn piece(
    shared: &SharedStore,
    namespace: NamespaceId,
    request: &SegmentPieceRequest,
    words_max: usize,
) -> Result<SegmentPiece, ApiError> {
    let sealed = file(shared, namespace, request.segment)?;
    Ok(SegmentPiece {
        words: sealed.index_piece(request.offset, words_max),
    })
}

/// The file of a segment by its checksum. A segment of another namespace is reported as missing.
pub(super) fn file(
    shared: &SharedStore,
    namespace: NamespaceId,
    checksum: u64,
) -> Result<Arc<SegmentFile>, ApiError> {
    let open = shared.read()?;
    let mut files = open.catalog.segments().files();
    let found =
        files.find(|file| file.namespace == namespace && file.manifest().checksum == checksum);
    found.cloned().ok_or_else(|| {
        ApiError::new(
            ErrorKind::NotFound,
            "no such segment; it may have been merged, so list the segments again",
        )
    })
}

/// Documents as they are now, and those that turned out to be damaged. The lock is taken for each of them.
pub(crate) fn documents(
    shared: &SharedStore,
    namespace: NamespaceId,
    documents: &[DocumentId],
    tokens_max: usize,
) -> Result<(DocumentsReply, HashSet<DocumentKey>), ApiError> {
    let (mut reply, mut damaged) = (DocumentsReply::default(), HashSet::new());
    let mut tokens = 0;
    for &document in documents {
        let key = DocumentKey::new(namespace, document);
        let open = shared.read()?;
        if open.catalog.document(key).is_some() {
            match read_document(&open, key) {
                Ok(update) => {
                    tokens += update.tokens.len();
                    if tokens > tokens_max && !reply.updates.is_empty() {
                        break;
                    }
                    reply.updates.push(update);
                }
                Err(TextError::Damaged(_)) => {
                    damaged.insert(key);
                }
                Err(TextError::Log(error)) => return Err(unavailable().with_detail(error)),
            }
        }
        reply.covered += 1;
    }
    Ok((reply, damaged))
}
