//! The documents that a replica hands over to one that joins, as they are now.
//!
//! There is no snapshot. The one that joins notes the sequence that this replica has applied, reads all documents
//! while they go on changing, and then applies the stream from that sequence. It may meet a change twice, which is
//! harmless, and it misses none. A snapshot was rejected: it would have to be kept for as long as the slowest reader
//! takes.
//!
//! Documents in segments can be taken over as files. A file has all that replicas agree on, except for the revision,
//! and it does not say whether a document is still to be sent. So documents with either travel by their text, as
//! those in no segment do.

use std::collections::{BTreeMap, HashSet};

use refrain_protocol::ApiError;
use refrain_protocol::join::{
    JoinDocuments, JoinDocumentsRequest, JoinList, JoinListRequest, JoinOffer, JoinPiece,
    JoinPieceRequest, JoinSegment, JoinedDocument, JoinedErasure,
};
use xxhash_rust::xxh3::xxh3_64;

use crate::message::{PART_TOKENS_MAX, StreamChange, StreamMessage, encode};
use crate::reading::document_text::TextError;
use crate::reading::outbox::whole_document;
use crate::reading::segments;
use crate::record::{DocumentKey, SegmentId};
use crate::segments::{ActiveSegment, mark_of};
use crate::shared_store::{SharedStore, unavailable};

/// Most documents of one page of a list. They take 16 MB.
const LISTED_MAX: usize = 1 << 20;

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
    let totals = catalog.totals();
    Ok(Some(JoinOffer {
        documents: totals.documents,
        tokens: totals.tokens,
        generation: catalog.generation(),
        stream: position.stream,
        sequence: position.sequence,
        namespaces: filled
            .filter(|id| catalog.documents(*id).next().is_some())
            .collect(),
        erasures: erasures.collect(),
    }))
}

/// A page of the documents of a namespace, and at first the files that have the others.
///
/// A document that changes between two pages may be on both, or on none. In the second case the stream brings it, as
/// all that the replica had not applied when it made its offer.
pub(crate) fn list(shared: &SharedStore, request: &JoinListRequest) -> Result<JoinList, ApiError> {
    let namespace = request.namespace;
    let is_first = request.after.is_none();
    let open = shared.read()?;
    let catalog = &open.catalog;
    let replication = &catalog.replication;
    let mut segments: BTreeMap<SegmentId, JoinSegment> = BTreeMap::new();
    // The one that joins takes the names from the file.
    if request.with_segments && catalog.names(namespace).is_some() {
        let mounted = catalog.segments().iter();
        let mounted = mounted.filter(|(_, mounted)| {
            let checksum = mounted.file.manifest().checksum;
            mounted.file.namespace == namespace
                && mounted.file.names.is_some()
                && (is_first || request.handed_over.contains(&checksum))
        });
        segments.extend(mounted.map(|(id, mounted)| (id, listed(mounted))));
    }
    let mut documents = Vec::new();
    for (document, known) in catalog.documents(namespace) {
        let key = DocumentKey::new(namespace, document);
        let slot = known.slot;
        let segment = slot.and_then(|slot| Some((segments.get_mut(&slot.segment)?, slot.number)));
        let Some((segment, number)) = segment else {
            documents.push(document);
            continue;
        };
        if replication.revision(key) != 0 || replication.outbox.has(key) {
            segment.gone.push(number);
            segment.tokens = segment.tokens.saturating_sub(u64::from(known.state.len));
            documents.push(document);
        } else if let Some(used_s) = segment.used_s.get_mut(number as usize) {
            *used_s = mark_of(known.state.used_ms);
        }
    }
    documents.retain(|document| request.after.is_none_or(|after| *document > after));
    documents.sort_unstable();
    let page = (request.documents_max as usize).clamp(1, LISTED_MAX);
    let has_more = documents.len() > page;
    documents.truncate(page);
    let mut segments: Vec<JoinSegment> = match is_first {
        true => segments.into_values().collect(),
        false => Vec::new(),
    };
    segments.retain(|segment| segment.gone.len() < segment.used_s.len());
    for segment in &mut segments {
        segment.gone.sort_unstable();
    }
    Ok(JoinList {
        seen: replication.seen(),
        segments,
        documents,
        has_more,
    })
}

fn listed(mounted: &ActiveSegment) -> JoinSegment {
    JoinSegment {
        checksum: mounted.file.manifest().checksum,
        bytes: mounted.file.file_bytes(),
        tokens: mounted.live_tokens,
        gone: mounted.gone(),
        used_s: vec![0; mounted.file.documents() as usize],
    }
}

/// A piece of a segment's file. It is read outside the lock; files are only ever deleted.
pub(crate) fn piece(
    shared: &SharedStore,
    request: &JoinPieceRequest,
    bytes_max: usize,
) -> Result<JoinPiece, ApiError> {
    let file = segments::file(shared, request.namespace, request.segment)?;
    let bytes = file.piece(request.offset, bytes_max).to_vec();
    let checksum = xxh3_64(&bytes);
    Ok(JoinPiece { bytes, checksum })
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
