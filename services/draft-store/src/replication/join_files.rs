//! Taking segments of another replica over as files.
//!
//! A file comes in pieces, each with a checksum, and is checked as a whole before its documents are used. A call that
//! fails is repeated, and the pieces before it stay. A file that is in use here is not asked for again, also by a
//! later session, as long as this process runs.

use std::collections::{BTreeSet, HashSet};
use std::io::Write as _;

use futures_util::{StreamExt as _, TryStreamExt as _};
use refrain_protocol::join::{JoinList, JoinPiece, JoinPieceRequest, JoinSegment};
use refrain_protocol::{ApiError, DocumentId, ErrorKind, NamespaceId};
use refrain_rpc::ReplicaPeer as _;
use tokio::sync::mpsc;
use xxhash_rust::xxh3::xxh3_64;

use crate::directory::DiskSpace;
use crate::log::{LogError, refused};
use crate::record::DocumentKey;
use crate::replication::adopted_files::{AdoptedFile, AdoptedFiles};
use crate::replication::joining::{Joining, repeated};
use crate::replication::session::stopped;
use crate::replication::stream::SessionError;
use crate::segments::{self, ReceivedSegment, SegmentFile};

/// Bytes of one call.
const PIECE_BYTES: u64 = 4 << 20;

/// Calls for pieces of one file that are under way.
const PIECES_AT_ONCE: usize = 2;

/// Files that are received or checked while another one is put into use.
const FILES_AT_ONCE: usize = 2;

/// Takes the listed files over. Returns the documents that must be read one by one after all, or `None` if a file is
/// gone: the other replica has merged or rewritten it, and has to list its files again.
pub(super) async fn take_over(
    joining: &Joining<'_>,
    namespace: NamespaceId,
    list: &JoinList,
    kept: &mut HashSet<DocumentKey>,
) -> Result<Option<Vec<DocumentId>>, SessionError> {
    let mut by_text = Vec::new();
    let mut wanted = Vec::new();
    for segment in &list.segments {
        let adopted = AdoptedFiles::of(&joining.session.adopted, joining.origin)
            .get(namespace, segment.checksum);
        match adopted {
            Some(adopted) => {
                by_text.extend(adopted_before(joining, namespace, segment, adopted, kept).await?);
            }
            // Owned, since a future that borrows from a closure's argument is not `Send` for every lifetime.
            None => wanted.push(segment.clone()),
        }
    }
    let files = futures_util::stream::iter(wanted)
        .map(|segment| async move {
            let file = receive(joining, namespace, &segment).await?;
            Ok::<_, SessionError>(file.map(|file| (segment, file)))
        })
        .buffered(FILES_AT_ONCE);
    // The next file is received while the writer puts one into use.
    let (tell, mut received) = mpsc::channel(1);
    let receive = async move {
        let mut files = std::pin::pin!(files);
        while let Some(file) = files.try_next().await? {
            let is_gone = file.is_none();
            if tell.send(file).await.is_err() || is_gone {
                break;
            }
        }
        Ok::<(), SessionError>(())
    };
    let adopt = async {
        while let Some(received) = received.recv().await {
            let Some((segment, file)) = received else {
                return Ok(false);
            };
            adopt(joining, namespace, list.seen, segment, file, kept).await?;
        }
        Ok(true)
    };
    let ((), is_complete) = tokio::try_join!(receive, adopt)?;
    if !is_complete {
        return Ok(None);
    }
    Ok(Some(by_text))
}

/// Notes the documents of a file that is in use here already. Returns those that are not: the other replica had
/// changed them then, or they were removed here.
async fn adopted_before(
    joining: &Joining<'_>,
    namespace: NamespaceId,
    segment: &JoinSegment,
    adopted: AdoptedFile,
    kept: &mut HashSet<DocumentKey>,
) -> Result<Vec<DocumentId>, SessionError> {
    let gone: HashSet<u32> = segment.gone.iter().copied().collect();
    let documents = (0u32..).zip(&*adopted.documents);
    let documents = documents.filter(|(number, _)| !gone.contains(number));
    let live: Vec<(u32, DocumentKey)> = documents
        .map(|(number, document)| (number, DocumentKey::new(namespace, *document)))
        .collect();
    kept.extend(live.iter().map(|(_, key)| *key));
    let metrics = &joining.session.metrics;
    let tokens = i64::try_from(segment.tokens).unwrap_or(i64::MAX);
    metrics.feed_join_documents.add(live.len() as i64);
    metrics.feed_join_tokens.add(tokens);
    let look = joining.session.look(move |open| {
        let is_missing = |(number, key): &(u32, DocumentKey)| {
            adopted.gone.contains(number) || open.catalog.document(*key).is_none()
        };
        let missing = live.into_iter().filter(is_missing);
        missing.map(|(_, key)| key.document).collect()
    });
    look.await
}

/// Puts a file into use.
async fn adopt(
    joining: &Joining<'_>,
    namespace: NamespaceId,
    seen: u64,
    segment: JoinSegment,
    file: SegmentFile,
    kept: &mut HashSet<DocumentKey>,
) -> Result<(), SessionError> {
    let session = joining.session;
    let documents: Vec<DocumentId> = file.ids().collect();
    let gone: BTreeSet<u32> = segment.gone.iter().copied().collect();
    let received = ReceivedSegment {
        file,
        origin: joining.origin,
        seen,
        gone: segment.gone,
        used_s: segment.used_s,
    };
    let stored = session
        .writer
        .ask(move |writer| writer.adopt_segment(received));
    let stored = stored.await.map_err(|_| stopped())?;
    stored.map_err(|error| SessionError::Store(error.to_string()))?;
    let handed_over = (0..)
        .zip(&documents)
        .filter(|(number, _)| !gone.contains(number))
        .map(|(_, document)| DocumentKey::new(namespace, *document));
    let before = kept.len();
    kept.extend(handed_over);
    let metrics = &session.metrics;
    let tokens = i64::try_from(segment.tokens).unwrap_or(i64::MAX);
    metrics
        .feed_join_documents
        .add((kept.len() - before) as i64);
    metrics.feed_join_tokens.add(tokens);
    metrics.feed_joined_segments.inc();
    metrics
        .feed_joined_documents
        .inc_by((kept.len() - before) as u64);
    let adopted = AdoptedFile {
        documents: documents.into(),
        gone: gone.into(),
    };
    AdoptedFiles::of(&session.adopted, joining.origin).add(namespace, segment.checksum, adopted);
    Ok(())
}

fn store_error(error: LogError) -> SessionError {
    SessionError::Store(error.to_string())
}

async fn blocking<T: Send + 'static>(
    work: impl FnOnce() -> Result<T, LogError> + Send + 'static,
) -> Result<T, SessionError> {
    let done = tokio::task::spawn_blocking(work).await;
    done.map_err(|error| SessionError::Store(error.to_string()))?
        .map_err(store_error)
}

/// Receives a file and checks it. `None` if the other replica does not have it any more.
async fn receive(
    joining: &Joining<'_>,
    namespace: NamespaceId,
    segment: &JoinSegment,
) -> Result<Option<SegmentFile>, SessionError> {
    let session = joining.session;
    let (dir, reserve_bytes) = (session.data_dir.clone(), session.disk_reserve_bytes);
    let (checksum, bytes) = (segment.checksum, segment.bytes);
    let has_room = DiskSpace::of(&dir).is_none_or(|room| room.has_room_for(bytes, reserve_bytes));
    if !has_room {
        let why = format!("the disk has no space for {bytes} bytes of another replica");
        return Err(SessionError::Store(why));
    }
    let created = blocking(move || segments::create_received(&dir, checksum));
    let (mut file, path) = created.await?;
    let pieces = futures_util::stream::iter((0..bytes.div_ceil(PIECE_BYTES)).map(|number| {
        let offset = number * PIECE_BYTES;
        JoinPieceRequest {
            namespace,
            segment: checksum,
            offset,
            bytes_max: PIECE_BYTES.min(bytes - offset) as u32,
        }
    }))
    .map(|request| piece(joining, request))
    .buffered(PIECES_AT_ONCE);
    let mut pieces = std::pin::pin!(pieces);
    while let Some(piece) = pieces.try_next().await? {
        let Some(bytes) = piece else { return Ok(None) };
        let written = path.clone();
        file = blocking(move || {
            file.write_all(&bytes)
                .map_err(|error| refused("write", &written, &error))?;
            Ok(file)
        })
        .await?;
    }
    blocking(move || {
        file.sync_all()
            .map_err(|error| refused("write", &path, &error))?;
        segments::open_received(&path, namespace, checksum)
    })
    .await
    .map(Some)
}

/// A piece of a file. `None` if the file is gone.
async fn piece(
    joining: &Joining<'_>,
    request: JoinPieceRequest,
) -> Result<Option<Vec<u8>>, SessionError> {
    let peer = &joining.peer;
    // Before the call, so that nothing waits in memory.
    joining.pace.pass(request.bytes_max as usize).await;
    let piece = repeated(|| async {
        match peer.join_piece(request).await {
            Ok(piece) => checked(piece, request.bytes_max).map(Some),
            Err(error) if error.kind == ErrorKind::NotFound => Ok(None),
            Err(error) => Err(error),
        }
    });
    let piece = piece.await?;
    if let Some(bytes) = &piece {
        let received = &joining.session.metrics.feed_joined_bytes;
        received.inc_by(bytes.len() as u64);
    }
    Ok(piece)
}

/// The bytes of a piece, if they are those that were asked for.
fn checked(piece: JoinPiece, bytes: u32) -> Result<Vec<u8>, ApiError> {
    if piece.bytes.len() as u64 != u64::from(bytes) || xxh3_64(&piece.bytes) != piece.checksum {
        let message = "a piece of a segment was damaged on its way";
        return Err(ApiError::new(ErrorKind::Unavailable, message));
    }
    Ok(piece.bytes)
}
