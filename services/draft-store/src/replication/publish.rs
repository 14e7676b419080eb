//! Sending the outbox, in order, with many messages on the way at once.

use std::collections::{HashSet, VecDeque};
use std::time::Duration;

use async_nats::jetstream::Context;
use async_nats::jetstream::context::{PublishAckFuture, PublishErrorKind};
use async_nats::jetstream::message::PublishMessage;
use futures_util::future::BoxFuture;
use futures_util::stream::FuturesUnordered;
use futures_util::{FutureExt as _, StreamExt as _};
use refrain_service_kit::clock::unix_ms;

use crate::catalog::EntryVersion;
use crate::message::{PART_TOKENS_MAX, StreamChange, StreamMessage, Uses, encode, encode_with_id};
use crate::reading::outbox::{NextOutgoing, Outgoing, SentDocument, next_outgoing, whole_document};
use crate::record::DocumentKey;
use crate::replication::session::Session;
use crate::replication::stream::{SessionError, ShardNames};
use crate::writer::replication::SentEntry;

/// How often the outbox is looked at when nobody says that it has something, and how often uses are sent.
const INTERVAL: Duration = Duration::from_secs(2);

/// Entries that are read under one lock. A busy store commits between any two reads, and a commit takes longer than a
/// read: fewer entries would be sent more slowly than they are stored.
const ENTRIES_PER_LOCK: usize = 1_024;

/// Documents that are read at once to be sent once more.
const WHOLE_AT_ONCE: usize = 64;

/// Entries that the broker has taken may wait for the writer beside those that are on the way, so many times as many.
const SETTLING_FACTOR: usize = 2;

/// Entries with their messages taken by the broker.
struct Sent {
    entries: Vec<(EntryVersion, Option<SentDocument>)>,
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

/// A message as it is sent.
struct Encoded {
    subject: String,
    id: String,
    payload: Vec<u8>,
}

/// The messages of an entry, or one message of several.
struct ToSend {
    messages: VecDeque<Encoded>,
    entries: Vec<(EntryVersion, Option<SentDocument>)>,
}

/// Sends the outbox for as long as the session lasts. While the writer settles what the broker has taken, the next
/// entries are read and sent.
pub(super) async fn publish(session: &Session, context: &Context) -> Result<(), SessionError> {
    let names = ShardNames::new(&session.feed);
    let in_flight_max = session.feed.in_flight_max;
    let mut on_the_way: OnTheWay = FuturesUnordered::new();
    // Entries on the way, and those that are not settled.
    let mut numbers: HashSet<u64> = HashSet::new();
    let mut taken: Vec<Sent> = Vec::new();
    let mut settling: FuturesUnordered<BoxFuture<'_, Result<Vec<Sent>, SessionError>>> =
        FuturesUnordered::new();
    let mut interval = tokio::time::interval(INTERVAL);
    loop {
        while on_the_way.len() < in_flight_max && numbers.len() < SETTLING_FACTOR * in_flight_max {
            let room = in_flight_max - on_the_way.len();
            let (outgoing, damaged) = read(session, &names, room, &numbers).await?;
            session.report_damaged(damaged);
            if outgoing.is_empty() {
                break;
            }
            for outgoing in outgoing {
                numbers.extend(outgoing.entries.iter().map(|(entry, _)| entry.number));
                let sending = send(context.clone(), names.clone(), outgoing).await?;
                on_the_way.push(sending);
            }
            // Entries that the broker has taken meanwhile go to the writer before more is read.
            gather(&mut on_the_way, &mut taken)?;
            if settling.is_empty() && !taken.is_empty() {
                settling.push(note_taken(session, std::mem::take(&mut taken)).boxed());
            }
        }
        session.metrics.feed_in_flight.set(on_the_way.len() as i64);
        tokio::select! {
            Some(sent) = on_the_way.next() => {
                taken.push(sent?);
                gather(&mut on_the_way, &mut taken)?;
            }
            Some(settled) = settling.next() => {
                for (entry, _) in settled?.iter().flat_map(|sent| &sent.entries) {
                    numbers.remove(&entry.number);
                }
                session.observe();
            }
            () = session.shared.outbox_changed.notified() => {}
            _ = interval.tick() => send_uses(session, context, &names).await?,
        }
        if settling.is_empty() && !taken.is_empty() {
            settling.push(note_taken(session, std::mem::take(&mut taken)).boxed());
        }
    }
}

/// Adds what the broker has acknowledged by now.
fn gather(on_the_way: &mut OnTheWay, taken: &mut Vec<Sent>) -> Result<(), SessionError> {
    while let Some(Some(sent)) = on_the_way.next().now_or_never() {
        taken.push(sent?);
    }
    Ok(())
}

/// Reads the next entries, and encodes them after the lock is given back.
async fn read(
    session: &Session,
    names: &ShardNames,
    room: usize,
    numbers: &HashSet<u64>,
) -> Result<(Vec<ToSend>, Vec<DocumentKey>), SessionError> {
    let (shared, names, busy) = (session.shared.clone(), names.clone(), numbers.clone());
    let entries_max = room.min(ENTRIES_PER_LOCK);
    let read = tokio::task::spawn_blocking(move || {
        let next = {
            let open = shared.read().map_err(|error| error.to_string())?;
            next_outgoing(&open, entries_max, PART_TOKENS_MAX, |number| {
                busy.contains(&number)
            })
        };
        let NextOutgoing { outgoing, damaged } = next.map_err(|error| error.to_string())?;
        let encoded = outgoing
            .into_iter()
            .map(|outgoing| encoded(&names, outgoing));
        Ok::<_, String>((encoded.collect(), damaged))
    });
    let read = read.await;
    read.map_err(|error| SessionError::Store(error.to_string()))?
        .map_err(SessionError::Store)
}

fn encoded(names: &ShardNames, outgoing: Outgoing) -> ToSend {
    let Outgoing { entries, messages } = outgoing;
    ToSend {
        messages: messages
            .iter()
            .map(|message| as_sent(names, message))
            .collect(),
        entries,
    }
}

/// Sends documents once more as they are now, apart from the outbox. Returns once the broker has them.
pub(super) async fn send_whole(
    session: &Session,
    context: &Context,
    keys: Vec<DocumentKey>,
) -> Result<(), SessionError> {
    let names = ShardNames::new(&session.feed);
    for keys in keys.chunks(WHOLE_AT_ONCE) {
        let keys = keys.to_vec();
        let read = session.look(move |open| {
            let documents = keys.iter();
            documents
                .map(|key| whole_document(open, *key, PART_TOKENS_MAX))
                .collect::<Vec<_>>()
        });
        for messages in read.await? {
            // Nobody can send a damaged document.
            for message in messages.unwrap_or_default() {
                let mut sent = as_sent(&names, &message);
                // The broker may remember another message with this document, which is deleted by now.
                sent.id = format!("{}.{}", unix_ms(), sent.id);
                acknowledgement(hand_over(context, &names, sent).await?).await?;
            }
        }
    }
    Ok(())
}

fn as_sent(names: &ShardNames, message: &StreamMessage) -> Encoded {
    let (id, payload) = encode_with_id(message);
    Encoded {
        subject: names.subject(message.namespace()),
        id,
        payload,
    }
}

/// Sends what an entry has to say. A single message is handed to the connection at once, so that entries keep their
/// order. The parts of a long document follow one another: a part that arrived without the one before it would be
/// lost, and its repetition dropped.
async fn send(
    context: Context,
    names: ShardNames,
    to_send: ToSend,
) -> Result<BoxFuture<'static, Result<Sent, SessionError>>, SessionError> {
    let ToSend {
        mut messages,
        entries,
    } = to_send;
    if messages.len() == 1
        && let Some(message) = messages.pop_front()
    {
        let acknowledged = hand_over(&context, &names, message).await?;
        return Ok(async move {
            let sequence = acknowledgement(acknowledged).await?;
            Ok(Sent { entries, sequence })
        }
        .boxed());
    }
    Ok(async move {
        let mut sequence = 0;
        for message in messages {
            let acknowledged = hand_over(&context, &names, message).await?;
            sequence = acknowledgement(acknowledged).await?;
        }
        Ok(Sent { entries, sequence })
    }
    .boxed())
}

async fn hand_over(
    context: &Context,
    names: &ShardNames,
    message: Encoded,
) -> Result<PublishAckFuture, SessionError> {
    let publish = PublishMessage::build()
        .message_id(message.id)
        .expected_stream(names.stream())
        .payload(message.payload.into());
    context
        .send_publish(message.subject, publish)
        .await
        .map_err(|error| SessionError::broker("a message cannot be sent", error))
}

async fn acknowledgement(sent: PublishAckFuture) -> Result<u64, SessionError> {
    let acknowledged = sent.await;
    let acknowledged = acknowledged
        .map_err(|error| SessionError::broker("the broker did not take a message", error))?;
    Ok(acknowledged.sequence)
}

/// Tells the writer which entries the broker has taken.
async fn note_taken(session: &Session, sent: Vec<Sent>) -> Result<Vec<Sent>, SessionError> {
    let mut taken: Vec<SentEntry> = Vec::new();
    for sent in &sent {
        session.status.sent(sent.sequence);
        taken.extend(sent.entries.iter().map(|(entry, document)| SentEntry {
            entry: *entry,
            document: *document,
            last: sent.sequence,
        }));
    }
    session.metrics.feed_sent.inc_by(taken.len() as u64);
    session.note_taken(taken).await?;
    Ok(sent)
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
        acknowledgement(hand_over(context, names, as_sent(names, &message)).await?).await?;
    }
    Ok(())
}
