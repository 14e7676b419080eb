//! Carrying out erasures that came by the stream: on this replica, and in the stream itself.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use async_nats::jetstream::consumer::{DeliverPolicy, PullConsumer, pull};
use futures_util::StreamExt as _;

use crate::message::{DocumentPart, StreamMessage, decode};
use crate::record::ErasureRecord;
use crate::record::replication::StreamErasureRecord;
use crate::replication::publish::send_whole;
use crate::replication::session::{Session, stopped, store_error};
use crate::replication::stream::{SessionError, ShardNames, ShardStream, consumer_after};

/// Messages that are deleted from the stream at once.
const DELETIONS_AT_ONCE: usize = 32;

/// How long the broker may take for the next message of the search.
const SEARCH_WAIT: Duration = Duration::from_secs(5);

/// Pause of one who waits for erasures.
const PAUSE: Duration = Duration::from_millis(100);

/// Begins to carry out the erasures of the stream that are open, unless that is going on. A replica that has not
/// caught up does so at the end of its replay: with each erasure its files would be rewritten anew.
pub(super) fn begin_if_caught_up(session: &Arc<Session>, stream: &ShardStream) {
    if session.status.state().caught_up {
        begin(session, stream);
    }
}

fn begin(session: &Arc<Session>, stream: &ShardStream) {
    if session.is_erasing.swap(true, Ordering::Relaxed) {
        return;
    }
    let (session, stream) = (session.clone(), stream.clone());
    tokio::spawn(async move {
        let _erasing = Erasing(&session);
        if let Err(error) = all(&session, &stream).await {
            tracing::warn!(%error, "draft store erasure of the stream is not complete; it is tried again");
        }
    });
}

/// Erasures that are being carried out, until this is dropped.
struct Erasing<'a>(&'a Session);

impl Drop for Erasing<'_> {
    fn drop(&mut self) {
        self.0.is_erasing.store(false, Ordering::Relaxed);
    }
}

/// Removes what the erasures hit from all files of this replica. If this replica was asked for one, it also deletes
/// the messages of the erased documents from the stream. An erasure that was interrupted begins again.
async fn all(session: &Session, stream: &ShardStream) -> Result<(), SessionError> {
    let (mut ready, mut failed) = (Vec::new(), Ok(()));
    for erasure in session.open_erasures().await? {
        match clear_stream(session, stream, &erasure).await {
            Ok(()) => ready.push(erasure),
            error => failed = error,
        }
    }
    clear_replica(session, ready).await?;
    failed
}

/// Carries out all open erasures, before this replica serves.
pub(super) async fn finish(
    session: &Arc<Session>,
    stream: &ShardStream,
) -> Result<(), SessionError> {
    while !session.open_erasures().await?.is_empty() {
        begin(session, stream);
        tokio::time::sleep(PAUSE).await;
    }
    Ok(())
}

/// Removes what erasures hit from all files of this replica.
pub(super) async fn clear_replica(
    session: &Session,
    erasures: Vec<StreamErasureRecord>,
) -> Result<(), SessionError> {
    if erasures.is_empty() {
        return Ok(());
    }
    let carried_out = session.handle.carry_out(&erasures).await;
    carried_out.map_err(store_error)?;
    let completed = session.writer.ask(move |writer| {
        erasures
            .iter()
            .try_for_each(|of| writer.complete_erasure(of.mark.id(), of.sequence))
    });
    completed.await.map_err(|_| stopped())?.map_err(store_error)
}

/// If this replica was asked for an erasure, deletes the messages before it that have text of its scope. The other
/// documents of such a message are sent again first, so that a replica that has not read it does not miss them.
///
/// A purge of the whole subject was rejected. A namespace has documents that an erasure of a session or of a time
/// range does not hit, and replicas that are behind still need their messages.
async fn clear_stream(
    session: &Session,
    stream: &ShardStream,
    erasure: &StreamErasureRecord,
) -> Result<(), SessionError> {
    if !erasure.is_own {
        return Ok(());
    }
    let namespaces = session.look(|open| open.catalog.namespaces()).await?;
    let names = ShardNames::new(&session.feed);
    let mut deleted = 0;
    for (namespace, known) in namespaces {
        if erasure.mark.hits_namespace(known.as_ref()) {
            let subject = names.subject(Some(namespace));
            deleted += clear_subject(session, stream, subject, erasure).await?;
        }
    }
    session.metrics.feed_erased_messages.inc_by(deleted);
    tracing::info!(deleted, "draft store messages of an erasure deleted");
    Ok(())
}

async fn clear_subject(
    session: &Session,
    stream: &ShardStream,
    subject: String,
    erasure: &StreamErasureRecord,
) -> Result<u64, SessionError> {
    let failed = |error: &dyn std::fmt::Display| {
        SessionError::broker("messages of an erasure cannot be deleted", error)
    };
    let config = pull::Config {
        deliver_policy: DeliverPolicy::All,
        filter_subject: subject,
        ..consumer_after(0)
    };
    let consumer: PullConsumer = stream
        .stream
        .create_consumer(config)
        .await
        .map_err(|error| failed(&error))?;
    let mut left = consumer.cached_info().num_pending;
    let mut messages = consumer.messages().await.map_err(|error| failed(&error))?;
    let (mut hits, mut others) = (Vec::new(), BTreeSet::new());
    while left > 0 {
        let next = tokio::time::timeout(SEARCH_WAIT, messages.next()).await;
        let Some(message) = next.map_err(|error| failed(&error))? else {
            break;
        };
        let message = message.map_err(|error| failed(&error))?;
        let info = message.info().map_err(|error| failed(&error))?;
        if info.stream_sequence >= erasure.sequence {
            break;
        }
        if let Ok(StreamMessage { change, .. }) = decode(&message.payload) {
            let documents = change.documents().iter();
            let (hit, rest): (Vec<_>, Vec<_>) =
                documents.partition(|part| is_hit(&erasure.mark, part));
            if !hit.is_empty() {
                hits.push(info.stream_sequence);
                others.extend(rest.into_iter().map(DocumentPart::key));
            }
        }
        left = info.pending;
    }
    send_whole(session, &stream.context, others.into_iter().collect()).await?;
    let deletions = futures_util::stream::iter(hits.clone());
    let mut deletions = deletions
        .map(|sequence| stream.stream.delete_message(sequence))
        .buffer_unordered(DELETIONS_AT_ONCE);
    while let Some(deletion) = deletions.next().await {
        deletion.map_err(|error| failed(&error))?;
    }
    Ok(hits.len() as u64)
}

/// Whether a document or a part of one is in the scope of an erasure.
fn is_hit(mark: &ErasureRecord, part: &DocumentPart) -> bool {
    let head = part.head();
    mark.hits_namespace(Some(&part.names))
        && mark.hits_session(head.session.as_deref())
        && mark.hits_begin(part.stored_ms, head.created_ms)
}
