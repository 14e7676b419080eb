//! Going on at another replica of the draft store, when the one that was followed has gone.
//!
//! The new store knows where its feed goes on, so nothing is fetched twice. But the old one may have had documents
//! that it had not sent to the others yet. If it never comes back, an erasure of their tenant would not reach them
//! here. So documents that the new store does not have are dropped. If they reach it later, its feed brings them.
//!
//! The new store may have an earlier state of a document than the old one had. The later state stays here. It only
//! makes drafts, and goes once the document is removed.

use refrain_protocol::document::{FeedCursor, FeedDelta, UnknownDocumentsRequest};

use super::ingest::Ingest;

/// Documents that are compared with one call.
const DOCUMENTS_AT_ONCE: usize = 4_096;

/// Whether the changes for a reader at `before` come from another store, which lets the reader go on.
pub(super) fn has_moved(before: FeedCursor, delta: &FeedDelta) -> bool {
    before != FeedCursor::default() && !delta.reset && delta.cursor.generation != before.generation
}

impl Ingest {
    /// Drops what the store does not have. If the store cannot be asked, drops everything. Returns whether the feed
    /// goes on where it was.
    pub(super) async fn drop_unknown(&self) -> bool {
        self.shared.metrics.moves.inc();
        let documents = self.namespace.read().unpinned();
        let mut dropped = 0;
        for documents in documents.chunks(DOCUMENTS_AT_ONCE) {
            let unknown = || {
                self.shared
                    .store
                    .unknown_documents(UnknownDocumentsRequest {
                        namespace: self.namespace.signed(),
                        documents: documents.to_vec(),
                    })
            };
            match self.persist(unknown).await {
                Ok(reply) => {
                    dropped += reply.documents.len();
                    self.remove_unless_pinned(&reply.documents);
                }
                Err(error) => {
                    tracing::warn!(
                        %error,
                        "another draft store cannot say what it lacks; its documents are read anew"
                    );
                    self.reset();
                    return false;
                }
            }
        }
        tracing::info!(
            dropped,
            kept = documents.len() - dropped,
            "another draft store is followed"
        );
        true
    }
}
