//! Taking the documents of another replica over, and only then following the stream.
//!
//! A replica joins when it is new, or when the stream has lost what it missed. It keeps what it has not sent itself:
//! that goes to the others afterwards. All else that the other replica does not have was removed meanwhile.

use std::collections::HashSet;
use std::time::Duration;

use futures_util::{StreamExt as _, TryStreamExt as _};
use refrain_protocol::join::{
    JoinDocumentsRequest, JoinListRequest, JoinOffer, JoinOfferRequest, JoinedDocument,
};
use refrain_protocol::{ApiError, DocumentId, NamespaceId};
use refrain_rpc::{HttpReplicaPeer, ReplicaPeer};
use refrain_service_kit::http::MeshClient;

use crate::message::{StreamChange, StreamMessage, decode};
use crate::record::DocumentKey;
use crate::record::replication::{PositionRecord, StreamErasureRecord};
use crate::replication::erasures::clear_replica;
use crate::replication::session::{Session, stopped};
use crate::replication::stream::SessionError;
use crate::writer::replication::JoinedParts;

/// Timeout of the first call to a peer.
const OFFER_TIMEOUT: Duration = Duration::from_secs(5);

/// Documents of one call, unless the limit of tokens ends it earlier.
const DOCUMENTS_PER_CALL: usize = 1_024;

/// Tokens of one call.
const TOKENS_PER_CALL: u32 = 512 << 10;

/// Calls that are under way while documents are stored.
const CALLS_AT_ONCE: usize = 2;

/// How often a call is repeated before another session begins anew.
const REPEATS_MAX: usize = 5;

/// Documents that are removed in one commit.
const REMOVALS_PER_COMMIT: usize = 256;

fn joining(error: impl std::fmt::Display) -> SessionError {
    SessionError::broker("documents of another replica cannot be taken over", error)
}

/// Takes over everything from the first peer that follows the stream created at `stream`, and has what the stream has
/// lost before `first`. Returns the position from which the stream goes on.
pub(super) async fn join(
    session: &Session,
    stream: u64,
    first: u64,
) -> Result<PositionRecord, SessionError> {
    let (peer, offer) = find(session, stream, first).await?;
    tracing::info!(
        sequence = offer.sequence,
        namespaces = offer.namespaces.len(),
        "draft store joins: it takes over the documents of another replica"
    );
    session.metrics.feed_joins.inc();
    let erasures = offer.erasures.iter().filter_map(|erasure| {
        let StreamChange::Erasure(mark) = decode(&erasure.message).ok()?.change else {
            return None;
        };
        Some(StreamErasureRecord {
            sequence: erasure.sequence,
            mark,
            applied_ms: 0,
            is_own: false,
            is_done: false,
        })
    });
    let erasures: Vec<StreamErasureRecord> = erasures.collect();
    let noted = session
        .writer
        .ask(move |writer| writer.note_erasures(&erasures));
    noted.await.map_err(|_| stopped())?.map_err(joining)?;
    // They are about what this replica has now. All else was stored by those who knew them.
    for erasure in session.open_erasures().await? {
        clear_replica(session, &erasure).await?;
    }
    let mut kept: HashSet<DocumentKey> = HashSet::new();
    for namespace in &offer.namespaces {
        take_over(session, &peer, *namespace, &mut kept).await?;
    }
    drop_others(session, kept).await?;
    let position = PositionRecord {
        stream,
        sequence: offer.sequence,
        checksum: 0,
    };
    let set = session
        .writer
        .ask(move |writer| writer.set_position(position));
    set.await.map_err(|_| stopped())?.map_err(joining)?;
    tracing::info!(
        sequence = position.sequence,
        "draft store has joined, and follows the stream from here"
    );
    Ok(position)
}

/// The first peer that can hand over what this replica needs.
async fn find(
    session: &Session,
    stream: u64,
    first: u64,
) -> Result<(HttpReplicaPeer, JoinOffer), SessionError> {
    let own = session.look(|open| open.catalog.generation()).await?;
    let mut refusals = Vec::new();
    for url in &session.feed.peers {
        let client = MeshClient::new(url, &session.secret, OFFER_TIMEOUT).map_err(joining)?;
        let peer = HttpReplicaPeer::new(client);
        let request = JoinOfferRequest {
            shard: session.feed.shard,
        };
        match peer.join_offer(request).await {
            Ok(offer) if offer.generation == own => {}
            Ok(offer) if offer.stream != stream => {
                refusals.push(format!("{url} follows another stream"));
            }
            Ok(offer) if offer.sequence + 1 < first => {
                refusals.push(format!("{url} has missed messages itself"));
            }
            Ok(offer) => return Ok((peer, offer)),
            Err(error) => refusals.push(format!("{url}: {error}")),
        }
    }
    Err(SessionError::Operator(format!(
        "this replica has to join anew, and none of feed.peers can hand its documents over: {}",
        match refusals.is_empty() {
            true => "no other replica is named".to_owned(),
            false => refusals.join("; "),
        }
    )))
}

async fn take_over(
    session: &Session,
    peer: &HttpReplicaPeer,
    namespace: NamespaceId,
    kept: &mut HashSet<DocumentKey>,
) -> Result<(), SessionError> {
    let list = repeated(|| peer.join_list(JoinListRequest { namespace })).await?;
    let documents = list.documents;
    kept.extend(
        documents
            .iter()
            .map(|document| DocumentKey::new(namespace, *document)),
    );
    let chunks = documents.chunks(DOCUMENTS_PER_CALL).map(<[_]>::to_vec);
    let calls = futures_util::stream::iter(chunks.collect::<Vec<_>>())
        .map(|chunk| fetch(peer, namespace, chunk))
        .buffered(CALLS_AT_ONCE);
    let mut calls = std::pin::pin!(calls);
    while let Some(documents) = calls.try_next().await? {
        let mut parts: Vec<JoinedParts> = Vec::with_capacity(documents.len());
        for document in documents {
            let messages: Result<Vec<StreamMessage>, _> = document
                .messages
                .iter()
                .map(|message| decode(message))
                .collect();
            parts.push((messages.map_err(joining)?, document.is_unsent));
        }
        session
            .metrics
            .feed_joined_documents
            .inc_by(parts.len() as u64);
        let stored = session
            .writer
            .ask(move |writer| writer.store_joined(&parts));
        stored.await.map_err(|_| stopped())?.map_err(joining)?;
    }
    Ok(())
}

/// Reads documents, with as many calls as their length needs.
async fn fetch(
    peer: &HttpReplicaPeer,
    namespace: NamespaceId,
    documents: Vec<DocumentId>,
) -> Result<Vec<JoinedDocument>, SessionError> {
    let (mut read, mut left) = (Vec::new(), &documents[..]);
    while !left.is_empty() {
        let request = JoinDocumentsRequest {
            namespace,
            documents: left.to_vec(),
            max_tokens: TOKENS_PER_CALL,
        };
        let reply = repeated(|| peer.join_documents(request.clone())).await?;
        let covered = (reply.covered as usize).clamp(1, left.len());
        left = &left[covered..];
        read.extend(reply.documents);
    }
    Ok(read)
}

/// Makes a call, and repeats it after errors. Earlier answers stay.
async fn repeated<T, F: Future<Output = Result<T, ApiError>>>(
    call: impl Fn() -> F,
) -> Result<T, SessionError> {
    let mut failures = 0;
    loop {
        match call().await {
            Ok(answer) => return Ok(answer),
            Err(error) if failures == REPEATS_MAX => return Err(joining(error)),
            Err(_) => failures += 1,
        }
        tokio::time::sleep(Duration::from_millis(200 << failures)).await;
    }
}

/// Removes the documents that the other replica does not have, unless they are still to be sent.
async fn drop_others(session: &Session, kept: HashSet<DocumentKey>) -> Result<(), SessionError> {
    let others = session.look(move |open| {
        let catalog = &open.catalog;
        let all = catalog.namespaces().into_iter().flat_map(|(namespace, _)| {
            catalog
                .documents(namespace)
                .map(move |(document, _)| DocumentKey::new(namespace, document))
        });
        all.filter(|key| !kept.contains(key)).collect::<Vec<_>>()
    });
    let others = others.await?;
    for keys in others.chunks(REMOVALS_PER_COMMIT) {
        let keys = keys.to_vec();
        let dropped = session.writer.ask(move |writer| writer.drop_missing(&keys));
        dropped.await.map_err(|_| stopped())?.map_err(joining)?;
    }
    Ok(())
}
