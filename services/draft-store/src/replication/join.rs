//! Taking the documents of another replica over, and only then following the stream.
//!
//! A replica joins when it is new, or when the stream has lost what it missed. It keeps what it has not sent itself:
//! that goes to the others afterwards. All else that the other replica does not have was removed meanwhile.
//!
//! A namespace of which nothing is here comes as files, as far as it is in segments there. All other documents come
//! by their text, each joined with what is here.

use std::collections::HashSet;
use std::time::Duration;

use futures_util::{StreamExt as _, TryStreamExt as _};
use refrain_protocol::join::{
    JoinDocumentsRequest, JoinListRequest, JoinOffer, JoinOfferRequest, JoinedDocument,
};
use refrain_protocol::{DocumentId, NamespaceId};
use refrain_rpc::{HttpReplicaPeer, ReplicaPeer as _};
use refrain_service_kit::http::MeshClient;
use tokio::sync::mpsc;

use crate::message::{DocumentPart, StreamChange, decode};
use crate::record::DocumentKey;
use crate::record::replication::{PositionRecord, StreamErasureRecord};
use crate::replication::adopted_files::AdoptedFiles;
use crate::replication::erasures::clear_replica;
use crate::replication::join_files;
use crate::replication::joining::{Joining, joining, repeated};
use crate::replication::pace::Pace;
use crate::replication::session::{Session, stopped};
use crate::replication::stream::SessionError;
use crate::segments::clear_received;
use crate::writer::replication::JoinedParts;

/// Timeout of the first call to a peer.
const OFFER_TIMEOUT: Duration = Duration::from_secs(5);

/// Documents of one call, unless the limit of tokens ends it earlier.
const DOCUMENTS_PER_CALL: usize = 1_024;

/// Tokens of one call.
const TOKENS_PER_CALL: u32 = 512 << 10;

/// Calls that are under way while documents are stored.
const CALLS_AT_ONCE: usize = 2;

/// How often the files of a namespace are listed. Each time some were merged while the others were read.
const LISTS_MAX: usize = 5;

/// Documents that are removed in one commit.
const REMOVALS_PER_COMMIT: usize = 256;

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
    let begun = session.writer.ask(|writer| writer.begin_joining());
    begun.await.map_err(|_| stopped())?.map_err(joining)?;
    let noted = session
        .writer
        .ask(move |writer| writer.note_erasures(&erasures));
    noted.await.map_err(|_| stopped())?.map_err(joining)?;
    // They are about what this replica has now. All else was stored by those who knew them.
    clear_replica(session, session.open_erasures().await?).await?;
    begin(session, &offer).await?;
    let under_way = Joining {
        session,
        peer,
        origin: offer.generation,
        pace: Pace::new(session.feed.join_bytes_s_max),
    };
    let mut kept: HashSet<DocumentKey> = HashSet::new();
    for namespace in &offer.namespaces {
        take_over(&under_way, *namespace, &mut kept).await?;
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
    AdoptedFiles::of(&session.adopted, offer.generation).clear();
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
        let credentials = session.credentials.clone();
        let client = MeshClient::with_credentials(url, credentials, OFFER_TIMEOUT);
        let client = client.map_err(joining)?;
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

/// Deletes leftovers of an earlier attempt, and begins to show the progress.
async fn begin(session: &Session, offer: &JoinOffer) -> Result<(), SessionError> {
    let metrics = &session.metrics;
    let gauge = |count: u64| i64::try_from(count).unwrap_or(i64::MAX);
    metrics
        .feed_join_documents_wanted
        .set(gauge(offer.documents));
    metrics.feed_join_tokens_wanted.set(gauge(offer.tokens));
    metrics.feed_join_documents.set(0);
    metrics.feed_join_tokens.set(0);
    let dir = session.data_dir.clone();
    let cleared = tokio::task::spawn_blocking(move || clear_received(&dir)).await;
    cleared
        .map_err(|error| SessionError::Store(error.to_string()))?
        .map_err(|error| SessionError::Store(error.to_string()))
}

/// Takes a namespace over: what is in segments as files, if nothing of it is here, and all else by its text.
async fn take_over(
    under_way: &Joining<'_>,
    namespace: NamespaceId,
    kept: &mut HashSet<DocumentKey>,
) -> Result<(), SessionError> {
    let session = under_way.session;
    let is_empty = session.look(move |open| open.catalog.documents(namespace).next().is_none());
    let goes_on = AdoptedFiles::of(&session.adopted, under_way.origin).has(namespace);
    let with_segments = is_empty.await? || goes_on;
    let first_page = JoinListRequest {
        namespace,
        with_segments,
        after: None,
        handed_over: Vec::new(),
        documents_max: u32::MAX,
    };
    for _ in 0..LISTS_MAX {
        let mut list = repeated(|| under_way.peer.join_list(first_page.clone())).await?;
        let files = join_files::take_over(under_way, namespace, &list, kept).await?;
        let Some(by_text) = files else {
            continue;
        };
        take_over_texts(under_way, namespace, &by_text).await?;
        let segments = list.segments.iter();
        let handed_over: Vec<u64> = segments.map(|segment| segment.checksum).collect();
        loop {
            let keys = list.documents.iter();
            kept.extend(keys.map(|document| DocumentKey::new(namespace, *document)));
            take_over_texts(under_way, namespace, &list.documents).await?;
            let Some(last) = list.documents.last().filter(|_| list.has_more) else {
                return Ok(());
            };
            let next_page = JoinListRequest {
                after: Some(*last),
                handed_over: handed_over.clone(),
                ..first_page.clone()
            };
            list = repeated(|| under_way.peer.join_list(next_page.clone())).await?;
        }
    }
    Err(joining(
        "the other replica merges its segments faster than they can be read",
    ))
}

/// Takes documents over by their text.
async fn take_over_texts(
    under_way: &Joining<'_>,
    namespace: NamespaceId,
    documents: &[DocumentId],
) -> Result<(), SessionError> {
    let chunks = documents.chunks(DOCUMENTS_PER_CALL).map(<[_]>::to_vec);
    let calls = futures_util::stream::iter(chunks.collect::<Vec<_>>())
        .map(|chunk| fetch(under_way, namespace, chunk))
        .buffered(CALLS_AT_ONCE);
    // The calls go on while the writer stores what came before.
    let (tell, mut fetched) = mpsc::channel::<Vec<Texts>>(CALLS_AT_ONCE);
    let read = async move {
        let mut calls = std::pin::pin!(calls);
        while let Some(texts) = calls.try_next().await? {
            if tell.send(texts).await.is_err() {
                break;
            }
        }
        Ok::<(), SessionError>(())
    };
    let store = async {
        while let Some(calls) = fetched.recv().await {
            for texts in calls {
                store(under_way.session, texts).await?;
            }
        }
        Ok(())
    };
    tokio::try_join!(read, store)?;
    Ok(())
}

async fn store(session: &Session, texts: Texts) -> Result<(), SessionError> {
    let Texts { parts, tokens } = texts;
    let count = parts.len();
    let stored = session
        .writer
        .ask(move |writer| writer.store_joined(&parts));
    stored.await.map_err(|_| stopped())?.map_err(joining)?;
    let metrics = &session.metrics;
    metrics.feed_joined_documents.inc_by(count as u64);
    metrics.feed_join_documents.add(count as i64);
    metrics.feed_join_tokens.add(tokens as i64);
    Ok(())
}

/// The documents of one call.
struct Texts {
    parts: Vec<JoinedParts>,
    tokens: usize,
}

/// Reads documents, with as many calls as their length needs.
async fn fetch(
    under_way: &Joining<'_>,
    namespace: NamespaceId,
    documents: Vec<DocumentId>,
) -> Result<Vec<Texts>, SessionError> {
    let (mut read, mut left) = (Vec::new(), &documents[..]);
    while !left.is_empty() {
        let request = JoinDocumentsRequest {
            namespace,
            documents: left.to_vec(),
            max_tokens: TOKENS_PER_CALL,
        };
        let reply = repeated(|| under_way.peer.join_documents(request.clone())).await?;
        let covered = (reply.covered as usize).clamp(1, left.len());
        left = &left[covered..];
        let messages = reply.documents.iter().flat_map(|joined| &joined.messages);
        let bytes: usize = messages.map(Vec::len).sum();
        under_way
            .session
            .metrics
            .feed_joined_bytes
            .inc_by(bytes as u64);
        under_way.pace.pass(bytes).await;
        let decoded = tokio::task::spawn_blocking(move || texts(&reply.documents)).await;
        read.push(decoded.map_err(joining)??);
    }
    Ok(read)
}

/// Decodes documents, and checks them.
fn texts(documents: &[JoinedDocument]) -> Result<Texts, SessionError> {
    let (mut parts, mut tokens) = (Vec::with_capacity(documents.len()), 0);
    for document in documents {
        let messages = document.messages.iter().map(|message| decode(message));
        let messages = messages.collect::<Result<Vec<_>, _>>().map_err(joining)?;
        let changes = messages.iter().map(|message| &message.change);
        let found = changes.flat_map(StreamChange::documents);
        tokens += found.map(DocumentPart::token_count).sum::<usize>();
        parts.push((messages, document.is_unsent));
    }
    Ok(Texts { parts, tokens })
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
