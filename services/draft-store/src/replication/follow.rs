//! Applying the messages of the stream, in order and without gaps.

use std::sync::Arc;
use std::time::Duration;

use async_nats::jetstream::consumer::{PullConsumer, pull};
use futures_util::{FutureExt as _, StreamExt as _};
use refrain_service_kit::clock::unix_ms;
use tokio::sync::{mpsc, watch};

use crate::message::{MessageError, decode};
use crate::record::replication::PositionRecord;
use crate::replication::erasures;
use crate::replication::session::Session;
use crate::replication::stream::{
    SessionError, ShardStream, check_first, checksum, consumer_after,
};
use crate::writer::replication::{AppliedMessages, ReceivedMessage};

/// Most messages of one commit. One `fdatasync` serves all of them.
const BATCH_MESSAGES: usize = 512;

/// Messages that the broker sends ahead. One with several documents may have some hundred kilobytes.
const MESSAGES_AHEAD: usize = 128;

/// Most bytes of the messages of one commit.
const BATCH_BYTES: usize = 8 << 20;

/// Batches that are received while one is applied.
const BATCHES_AHEAD: usize = 2;

/// A broker that says nothing for twice this long is away.
const HEARTBEAT: Duration = Duration::from_secs(2);

/// How long one request for messages lasts.
const EXPIRES: Duration = Duration::from_secs(30);

/// How long messages may be missing that the stream has. After that another session finds another copy of the stream:
/// the one of a broker that crashed may end too early, and not notice it.
const MISSING_MAX: Duration = Duration::from_secs(10);

/// Messages that were received together.
struct Received {
    messages: Vec<ReceivedMessage>,
    bytes: usize,
    /// Messages of the stream after these.
    pending: u64,
    /// When the broker got the last of them, in Unix milliseconds.
    published_ms: u64,
    /// Checksums of the first and of the last of them.
    first_checksum: u64,
    last_checksum: u64,
}

/// Applies messages for as long as the session lasts. `beginning` is before the first message of the stream.
/// `caught_up` learns when everything up to `until` is applied.
pub(super) async fn follow(
    session: &Arc<Session>,
    stream: &ShardStream,
    beginning: PositionRecord,
    until: u64,
    caught_up: watch::Sender<bool>,
) -> Result<(), SessionError> {
    let position = session.position().await?;
    let mut sequence = position.sequence;
    // The last message that was applied comes once more, to see that it is the same. Copies of a stream on brokers
    // that crashed may differ in how they count.
    let from = sequence - u64::from(position.checksum != 0).min(sequence);
    let consumer: PullConsumer = stream
        .stream
        .create_consumer(consumer_after(from))
        .await
        .map_err(|error| SessionError::broker("the stream cannot be read", error))?;
    let mut is_checked = position.checksum == 0 || consumer.cached_info().num_pending == 0;
    let mut is_first = true;
    let mut messages = consumer
        .stream()
        .max_messages_per_batch(MESSAGES_AHEAD)
        .expires(EXPIRES)
        .heartbeat(HEARTBEAT)
        .messages()
        .await
        .map_err(|error| SessionError::broker("the stream cannot be read", error))?;
    // The next messages are received and decoded while the writer commits.
    let (tell, mut received) = mpsc::channel::<Received>(BATCHES_AHEAD);
    let receive = async {
        let mut delivered = 0;
        loop {
            let next = next(session, &mut messages, &mut delivered).await?;
            if tell.send(next).await.is_err() {
                return Ok::<(), SessionError>(());
            }
        }
    };
    let apply = async {
        loop {
            if is_checked && sequence >= until && !*caught_up.borrow() {
                erasures::finish(session, stream).await?;
                session.note_end_of_stream().await?;
                session.status.caught_up();
                let _ = caught_up.send(true);
            }
            let Ok(next) = tokio::time::timeout(MISSING_MAX, received.recv()).await else {
                let lag = session.status.state().lag();
                if lag > 0 {
                    return Err(SessionError::Broker(format!(
                        "the broker's copy of the stream ends at {sequence}, {lag} messages too early"
                    )));
                }
                continue;
            };
            let Some(mut batch) = next else {
                return Ok(());
            };
            while batch.messages.len() < BATCH_MESSAGES
                && batch.bytes < BATCH_BYTES
                && let Ok(more) = received.try_recv()
            {
                batch.messages.extend(more.messages);
                batch.bytes += more.bytes;
                batch.last_checksum = more.last_checksum;
                (batch.pending, batch.published_ms) = (more.pending, more.published_ms);
            }
            if std::mem::take(&mut is_first)
                && let Some((first, _)) = batch.messages.first()
            {
                check_first(position, beginning, *first, batch.first_checksum)?;
                is_checked = true;
            }
            let last = batch.messages.last().map_or(sequence, |(last, _)| *last);
            apply(session, stream, beginning.stream, batch).await?;
            sequence = sequence.max(last);
        }
    };
    tokio::try_join!(receive, apply)?;
    Ok(())
}

/// Applies messages that were received together.
async fn apply(
    session: &Arc<Session>,
    stream: &ShardStream,
    stream_created: u64,
    received: Received,
) -> Result<(), SessionError> {
    let Received {
        messages,
        pending,
        published_ms,
        last_checksum,
        ..
    } = received;
    let last = messages.last().map_or(0, |(last, _)| *last);
    let count = messages.len() as u64;
    let AppliedMessages {
        repeated,
        has_erasures,
    } = session
        .apply(stream_created, last_checksum, messages)
        .await?;
    let applied = count - repeated.min(count);
    session.metrics.feed_applied.inc_by(applied);
    session.metrics.feed_repeated.inc_by(repeated);
    session.status.applied(last, pending);
    let lag_ms = match pending {
        0 => 0,
        _ => unix_ms().saturating_sub(published_ms),
    };
    session
        .metrics
        .feed_lag_seconds
        .set(lag_ms as f64 / 1_000.0);
    session.observe();
    if has_erasures {
        erasures::begin_if_caught_up(session, stream);
    }
    Ok(())
}

/// The next messages: at least one, and those that are there already.
async fn next(
    session: &Session,
    stream: &mut pull::Stream,
    delivered: &mut u64,
) -> Result<Received, SessionError> {
    let mut received = Received {
        messages: Vec::new(),
        bytes: 0,
        pending: 0,
        published_ms: 0,
        first_checksum: 0,
        last_checksum: 0,
    };
    while received.messages.len() < BATCH_MESSAGES && received.bytes < BATCH_BYTES {
        let next = match received.messages.is_empty() {
            true => stream.next().await,
            false => match stream.next().now_or_never() {
                Some(next) => next,
                None => break,
            },
        };
        let message = next
            .ok_or_else(|| SessionError::Broker("the broker ended the stream of messages".into()))?
            .map_err(|error| SessionError::broker("the stream of messages broke off", error))?;
        let info = message
            .info()
            .map_err(|error| SessionError::broker("a message without a sequence", error))?;
        *delivered += 1;
        if info.consumer_sequence != *delivered {
            return Err(SessionError::Broker(format!(
                "{} messages were lost on the way from the broker",
                info.consumer_sequence.saturating_sub(*delivered)
            )));
        }
        received.bytes += message.payload.len();
        received.pending = info.pending;
        received.published_ms =
            u64::try_from(info.published.unix_timestamp_nanos() / 1_000_000).unwrap_or(0);
        let sequence = info.stream_sequence;
        let change = match decode(&message.payload) {
            Ok(change) => Some(change),
            Err(error @ MessageError::Later(_)) => {
                return Err(SessionError::Operator(format!(
                    "message {sequence} of the stream: {error}; update this replica"
                )));
            }
            Err(error @ MessageError::Damaged(_)) => {
                session.metrics.feed_unreadable.inc();
                tracing::warn!(sequence, %error, "draft store skipped a message of the stream");
                None
            }
        };
        received.last_checksum = checksum(&message.payload);
        if received.messages.is_empty() {
            received.first_checksum = received.last_checksum;
        }
        received.messages.push((sequence, change));
    }
    Ok(received)
}
