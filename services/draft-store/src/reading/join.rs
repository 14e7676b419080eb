//! The documents that a replica hands over to one that joins, as they are now.
//!
//! There is no snapshot. The one that joins notes the sequence that this replica has applied, reads all documents
//! while they go on changing, and then applies the stream from that sequence. It may meet a change twice, which is
//! harmless, and it misses none. A snapshot was rejected: it would have to be kept for as long as the slowest reader
//! takes.

use std::collections::HashSet;

use refrain_protocol::join::{
    JoinDocuments, JoinDocumentsRequest, JoinList, JoinOffer, JoinedDocument, JoinedErasure,
};
use refrain_protocol::{ApiError, DocumentId, NamespaceId};

use crate::message::{PART_TOKENS_MAX, StreamChange, StreamMessage, encode};
use crate::reading::document_text::TextError;
use crate::reading::outbox::whole_document;
use crate::record::DocumentKey;
use crate::shared_store::{SharedStore, unavailable};

/// The offer of this replica. `None` if it follows no stream, or still has documents that were erased.
pub(crate) fn offer(shared: &SharedStore) -> Result<Option<JoinOffer>, ApiError> {
    let open = shared.read()?;
    let catalog = &open.catalog;
    let Some(position) = catalog.replication.position else {
        return Ok(None);
    };
    if !catalog.replication.open_erasures().is_empty() {
        return Ok(None);
    }
    let filled = catalog.namespaces().into_iter().map(|(id, _)| id);
    let erasures = catalog.replication.erasures().map(|erasure| JoinedErasure {
        sequence: erasure.sequence,
        message: encode(&StreamMessage {
            origin: catalog.generation(),
            seen: position.sequence,
            change: StreamChange::Erasure(erasure.mark.clone()),
        }),
    });
    Ok(Some(JoinOffer {
        generation: catalog.generation(),
        stream: position.stream,
        sequence: position.sequence,
        namespaces: filled
            .filter(|id| catalog.documents(*id).next().is_some())
            .collect(),
        erasures: erasures.collect(),
    }))
}

/// The documents of a namespace.
pub(crate) fn list(shared: &SharedStore, namespace: NamespaceId) -> Result<JoinList, ApiError> {
    let open = shared.read()?;
    let documents = open.catalog.documents(namespace);
    let documents: Vec<DocumentId> = documents.map(|(id, _)| id).collect();
    Ok(JoinList { documents })
}

/// Documents as they are now, and those that turned out to be damaged. The lock is taken for each of them.
pub(crate) fn documents(
    shared: &SharedStore,
    request: &JoinDocumentsRequest,
    tokens_max: usize,
) -> Result<(JoinDocuments, HashSet<DocumentKey>), ApiError> {
    let (mut reply, mut damaged) = (JoinDocuments::default(), HashSet::new());
    let mut tokens = 0;
    for &document in &request.documents {
        let key = DocumentKey::new(request.namespace, document);
        let open = shared.read()?;
        let len = open.catalog.document(key).map(|known| known.state.len);
        tokens += len.unwrap_or(0) as usize;
        if tokens > tokens_max && !reply.documents.is_empty() {
            break;
        }
        match whole_document(&open, key, PART_TOKENS_MAX) {
            Ok(messages) if messages.is_empty() => {}
            Ok(messages) => reply.documents.push(JoinedDocument {
                messages: messages.iter().map(encode).collect(),
                is_unsent: open.catalog.replication.outbox.has(key),
            }),
            Err(TextError::Damaged(_)) => {
                damaged.insert(key);
            }
            Err(TextError::Log(error)) => return Err(unavailable().with_detail(error)),
        }
        reply.covered += 1;
    }
    Ok((reply, damaged))
}
