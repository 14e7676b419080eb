//! Sending the outbox, in order, with many messages on the way at once.

use std::collections::HashSet;
use std::time::Duration;

use async_nats::jetstream::Context;
use async_nats::jetstream::context::{PublishAckFuture, PublishErrorKind};
use async_nats::jetstream::message::PublishMessage;
use futures_util::future::BoxFuture;
use futures_util::stream::FuturesUnordered;
use futures_util::{FutureExt as _, StreamExt as _};

use crate::catalog::EntryVersion;
use crate::message::{PART_TOKENS_MAX, StreamChange, StreamMessage, Uses, encode, message_id};
use crate::reading::outbox::{NextOutgoing, Outgoing, next_outgoing};
use crate::replication::session::Session;
use crate::replication::stream::{SessionError, ShardNames};
use crate::writer::replication::{SentDocument, SentEntry};

/// How often the outbox is looked at when nobody says that it has something, and how often uses are sent.
const INTERVAL: Duration = Duration::from_secs(2);

/// Entries that are read under one lock.
const ENTRIES_PER_LOCK: usize = 64;

/// An entry with its messages taken by the broker.
struct Sent {
    entries: Vec<EntryVersion>,
    document: Option<SentDocument>,
    /// The last sequence that the broker gave to one of its messages.
    sequence: u64,
}

type OnTheWay = FuturesUnordered<BoxFuture<'static, Result<Sent, SessionError>>>;

/// Begins a stream that is still empty. Erasures delete messages of documents, and this one is none. So a replica
/// that finds it knows that all other gaps are erasures.
pub(super) async fn start_stream(session: &Session, context: &Context) -> Result<(), SessionError> {
    let names = ShardNames::new(&session.feed);
    let publish = PublishMessage::build()
        .message_id("start")
        .expected_last_sequence(0)
        .expected_stream(names.stream())
        .payload(encode(&session.message(StreamChange::Start).await?).into());
    let sent = context.send_publish(names.subject(None), publish).await;
    let sent = sent.map_err(|error| SessionError::broker("the stream cannot be begun", error))?;
    match sent.await {
        Ok(_) => Ok(()),
        // Another replica was faster.
        Err(error) if error.kind() == PublishErrorKind::WrongLastSequence => Ok(()),
        Err(error) => Err(SessionError::broker("the stream cannot be begun", error)),
    }
}

/// Sends the outbox for as long as the session lasts.
pub(super) async fn publish(session: &Session, context: &Context) -> Result<(), SessionError> {
    let names = ShardNames::new(&session.feed);
    let mut on_the_way: OnTheWay = FuturesUnordered::new();
    let mut numbers: HashSet<u64> = HashSet::new();
    let mut interval = tokio::time::interval(INTERVAL);
    loop {
        while numbers.len() < session.feed.in_flight_max {
            let room = session.feed.in_flight_max - numbers.len();
            let NextOutgoing { outgoing, damaged } = read(session, room, &numbers).await?;
            session.report_damaged(damaged);
            if outgoing.is_empty() {
                break;
            }
            for outgoing in outgoing {
                numbers.extend(outgoing.entries.iter().map(|entry| entry.number));
                let sending = send(context.clone(), names.clone(), outgoing).await?;
                on_the_way.push(sending);
            }
        }
        session.metrics.feed_in_flight.set(numbers.len() as i64);
        tokio::select! {
            Some(sent) = on_the_way.next() => {
                let mut all = vec![sent?];
                while let Some(Some(sent)) = on_the_way.next().now_or_never() {
                    all.push(sent?);
                }
                note_taken(session, all, &mut numbers).await?;
            }
            () = session.shared.outbox_changed.notified() => {}
            _ = interval.tick() => send_uses(session, context, &names).await?,
        }
    }
}

async fn read(
    session: &Session,
    room: usize,
    numbers: &HashSet<u64>,
) -> Result<NextOutgoing, SessionError> {
    let busy = numbers.clone();
    let entries_max = room.min(ENTRIES_PER_LOCK);
    let read = session.look(move |open| {
        next_outgoing(open, entries_max, PART_TOKENS_MAX, |number| {
            busy.contains(&number)
        })
    });
    read.await?
        .map_err(|error| SessionError::Store(error.to_string()))
}

/// Sends what an entry has to say. A single message is handed to the connection at once, so that entries keep their
/// order. The parts of a long document follow one another: a part that arrived without the one before it would be
/// lost, and its repetition dropped.
async fn send(
    context: Context,
    names: ShardNames,
    outgoing: Outgoing,
) -> Result<BoxFuture<'static, Result<Sent, SessionError>>, SessionError> {
    let Outgoing {
        entries,
        mut messages,
        sent,
        document,
    } = outgoing;
    let document = document.map(|(key, sequence)| SentDocument {
        key,
        sequence,
        text: sent.map(|(_, text)| text),
    });
    if messages.len() == 1
        && let Some(message) = messages.pop()
    {
        let acknowledged = hand_over(&context, &names, &message).await?;
        return Ok(async move {
            let sequence = acknowledgement(acknowledged).await?;
            Ok(Sent {
                entries,
                document,
                sequence,
            })
        }
        .boxed());
    }
    Ok(async move {
        let mut sequence = 0;
        for message in messages {
            let acknowledged = hand_over(&context, &names, &message).await?;
            sequence = acknowledgement(acknowledged).await?;
        }
        Ok(Sent {
            entries,
            document,
            sequence,
        })
    }
    .boxed())
}

async fn hand_over(
    context: &Context,
    names: &ShardNames,
    message: &StreamMessage,
) -> Result<PublishAckFuture, SessionError> {
    let publish = PublishMessage::build()
        .message_id(message_id(message))
        .expected_stream(names.stream())
        .payload(encode(message).into());
    context
        .send_publish(names.subject(message.namespace()), publish)
        .await
        .map_err(|error| SessionError::broker("a message cannot be sent", error))
}

async fn acknowledgement(sent: PublishAckFuture) -> Result<u64, SessionError> {
    let acknowledged = sent.await;
    let acknowledged = acknowledged
        .map_err(|error| SessionError::broker("the broker did not take a message", error))?;
    Ok(acknowledged.sequence)
}

async fn note_taken(
    session: &Session,
    sent: Vec<Sent>,
    numbers: &mut HashSet<u64>,
) -> Result<(), SessionError> {
    let mut taken: Vec<SentEntry> = Vec::new();
    for sent in &sent {
        session.status.sent(sent.sequence);
        taken.extend(sent.entries.iter().map(|entry| SentEntry {
            entry: *entry,
            document: sent.document,
            last: sent.sequence,
        }));
    }
    session.metrics.feed_sent.inc_by(taken.len() as u64);
    session.note_taken(taken).await?;
    for entry in sent.iter().flat_map(|sent| &sent.entries) {
        numbers.remove(&entry.number);
    }
    session.observe();
    Ok(())
}

/// Sends the uses since the last time. Nobody waits for them, and a lost one makes the order of use a little older.
async fn send_uses(
    session: &Session,
    context: &Context,
    names: &ShardNames,
) -> Result<(), SessionError> {
    for (namespace, documents) in session.take_uses().await? {
        let uses = Uses {
            namespace: namespace.0,
            documents,
        };
        let message = session.message(StreamChange::Uses(uses)).await?;
        acknowledgement(hand_over(context, names, &message).await?).await?;
    }
    Ok(())
}
