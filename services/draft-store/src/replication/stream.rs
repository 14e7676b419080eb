//! The connection to the broker, and the stream with the limits that the configuration names.

use std::time::Duration;

use async_nats::jetstream::consumer::{AckPolicy, DeliverPolicy, ReplayPolicy, pull};
use async_nats::jetstream::context::{ContextBuilder, GetStreamErrorKind};
use async_nats::jetstream::stream::{self, DiscardPolicy, RetentionPolicy, StorageType, Stream};
use async_nats::jetstream::{Context, ErrorCode};
use async_nats::{Client, ConnectOptions, Event};
use tokio::sync::mpsc;

use crate::config::FeedConfig;
use crate::message::MESSAGE_BYTES_MAX;
use crate::record::replication::PositionRecord;

/// How long the broker may take for an answer.
const REQUEST_TIMEOUT: Duration = Duration::from_secs(5);

const CONNECT_TIMEOUT: Duration = Duration::from_secs(5);

/// How often the connection is tested. Two missed answers end it.
const PING_INTERVAL: Duration = Duration::from_secs(5);

/// How long the broker remembers the ids of messages. A repetition later than this is harmless, too.
const DUPLICATE_WINDOW: Duration = Duration::from_secs(120);

/// The broker forgets a consumer that nobody asks for this long.
const CONSUMER_IDLE: Duration = Duration::from_secs(30);

/// Largest message that the broker must take. The largest one of any document is smaller.
const PAYLOAD_BYTES_MIN: usize = MESSAGE_BYTES_MAX / 2;

/// Why there is no session with the broker, or no longer one.
#[derive(Debug, thiserror::Error)]
pub(super) enum SessionError {
    /// The broker is away, or does not do its work. It is tried again.
    #[error("{0}")]
    Broker(String),
    /// The store did not take messages. It is tried again.
    #[error("the store did not apply messages of the stream: {0}")]
    Store(String),
    /// The stream ends before the position of this replica. A broker that was cut off from the others says so, too.
    #[error("{0}")]
    Short(String, PositionRecord),
    /// The messages of the stream have other sequences than those that this replica has applied.
    #[error("{0}")]
    Renumbered(String, PositionRecord),
    /// The stream does not have any more what this replica has missed.
    #[error("{0}")]
    Missed(String),
    /// An operator has to do something.
    #[error("{0}")]
    Operator(String),
}

impl SessionError {
    pub(super) fn broker(what: &str, error: impl std::fmt::Display) -> Self {
        SessionError::Broker(format!("{what}: {error}"))
    }
}

/// The names of a shard's stream and subjects.
#[derive(Clone, Debug)]
pub(super) struct ShardNames(u32);

impl ShardNames {
    pub(super) fn new(config: &FeedConfig) -> Self {
        ShardNames(config.shard)
    }

    pub(super) fn stream(&self) -> String {
        format!("refrain-{}", self.0)
    }

    fn subjects(&self) -> String {
        format!("refrain.{}.>", self.0)
    }

    /// The subject of a namespace, or with `None` that of what concerns several.
    pub(super) fn subject(&self, namespace: Option<refrain_protocol::NamespaceId>) -> String {
        match namespace {
            Some(namespace) => format!("refrain.{}.{namespace}", self.0),
            None => format!("refrain.{}.control", self.0),
        }
    }
}

/// The stream, and what sends to it.
#[derive(Clone)]
pub(super) struct ShardStream {
    pub(super) stream: Stream,
    pub(super) context: Context,
}

/// A connection to the broker.
pub(super) struct Connection {
    pub(super) client: Client,
    pub(super) context: Context,
    lost: mpsc::UnboundedReceiver<()>,
}

impl Connection {
    pub(super) async fn open(config: &FeedConfig) -> Result<Self, SessionError> {
        let (tell, lost) = mpsc::unbounded_channel();
        let options = ConnectOptions::new()
            .name("refrain draft store")
            .connection_timeout(CONNECT_TIMEOUT)
            .request_timeout(Some(REQUEST_TIMEOUT))
            .ping_interval(PING_INTERVAL)
            .event_callback(move |event| {
                let tell = tell.clone();
                async move {
                    // A session is of one connection. The next session begins from what is on disk.
                    if let Event::Disconnected | Event::Closed = event {
                        let _ = tell.send(());
                    }
                }
            });
        let client = options
            .connect(&config.servers)
            .await
            .map_err(|error| SessionError::broker("no NATS server can be reached", error))?;
        let payload_max = client.server_info().max_payload;
        if payload_max < PAYLOAD_BYTES_MIN {
            return Err(SessionError::Operator(format!(
                "the NATS server takes messages of {payload_max} bytes; set its max_payload to {PAYLOAD_BYTES_MIN} or \
                 more"
            )));
        }
        let context = ContextBuilder::new()
            .timeout(REQUEST_TIMEOUT)
            .ack_timeout(REQUEST_TIMEOUT)
            .max_ack_inflight(config.in_flight_max.saturating_mul(2))
            .build(client.clone());
        Ok(Connection {
            client,
            context,
            lost,
        })
    }

    /// Waits until the connection is lost.
    pub(super) async fn lost(&mut self) -> SessionError {
        let _ = self.lost.recv().await;
        SessionError::Broker("the connection to the NATS server was lost".into())
    }

    /// Ends the connection, which would otherwise be opened again.
    pub(super) async fn close(self) {
        // A broker that is away does not answer, and need not.
        let _ = tokio::time::timeout(Duration::from_secs(1), self.client.drain()).await;
    }

    /// The stream, which is created if there is none.
    pub(super) async fn stream(&self, config: &FeedConfig) -> Result<Stream, SessionError> {
        let wanted = wanted(config);
        match self.context.get_stream(&wanted.name).await {
            Ok(stream) => {
                check(&wanted, &stream.cached_info().config)?;
                Ok(stream)
            }
            Err(error) => match error.kind() {
                GetStreamErrorKind::JetStream(error)
                    if error.error_code() == ErrorCode::STREAM_NOT_FOUND =>
                {
                    self.create(wanted).await
                }
                _ => Err(SessionError::broker("the stream cannot be opened", error)),
            },
        }
    }

    async fn create(&self, wanted: stream::Config) -> Result<Stream, SessionError> {
        let name = wanted.name.clone();
        match self.context.create_stream(wanted).await {
            Ok(stream) => {
                tracing::info!(stream = name, "draft store stream created");
                Ok(stream)
            }
            // Another replica was faster, the broker lacks space, or there are fewer brokers than copies. The next
            // session finds out.
            Err(error) => Err(SessionError::broker(
                &format!("the stream {name} cannot be created"),
                error,
            )),
        }
    }
}

fn wanted(config: &FeedConfig) -> stream::Config {
    let names = ShardNames::new(config);
    stream::Config {
        name: names.stream(),
        subjects: vec![names.subjects()],
        description: Some("Changes of a draft store".into()),
        retention: RetentionPolicy::Limits,
        discard: DiscardPolicy::Old,
        storage: StorageType::File,
        max_age: Duration::from_secs(config.max_age_s),
        max_bytes: i64::try_from(config.max_bytes).unwrap_or(i64::MAX),
        max_messages: -1,
        max_messages_per_subject: -1,
        max_consumers: -1,
        num_replicas: config.stream_replicas,
        duplicate_window: DUPLICATE_WINDOW,
        ..stream::Config::default()
    }
}

/// Checks that an existing stream keeps what the configuration says.
fn check(wanted: &stream::Config, found: &stream::Config) -> Result<(), SessionError> {
    let mut faults = Vec::new();
    let mut equal = |key: &str, found: String, wanted: String| {
        if found != wanted {
            faults.push(format!(
                "{key} is {found} and the configuration says {wanted}"
            ));
        }
    };
    equal(
        "subjects",
        found.subjects.join(" "),
        wanted.subjects.join(" "),
    );
    let seconds = |config: &stream::Config| format!("{} s", config.max_age.as_secs_f64());
    equal("max_age", seconds(found), seconds(wanted));
    let bytes = |config: &stream::Config| format!("{} bytes", config.max_bytes);
    equal("max_bytes", bytes(found), bytes(wanted));
    let copies = |config: &stream::Config| config.num_replicas.to_string();
    equal("the number of copies", copies(found), copies(wanted));
    equal(
        "retention",
        format!("{:?}", found.retention),
        format!("{:?}", wanted.retention),
    );
    equal(
        "discard",
        format!("{:?}", found.discard),
        format!("{:?}", wanted.discard),
    );
    if found.max_messages > 0 || found.max_messages_per_subject > 0 {
        faults.push("it has a limit of messages, and must not have one".into());
    }
    if faults.is_empty() {
        return Ok(());
    }
    Err(SessionError::Operator(format!(
        "the stream {} has other limits than the section draft_store.feed: {}. Correct the section on all replicas, \
         or the stream with `nats stream edit {}`",
        wanted.name,
        faults.join("; "),
        wanted.name
    )))
}

/// When a stream was created, in Unix nanoseconds.
pub(super) fn created(info: &stream::Info) -> u64 {
    u64::try_from(info.created.unix_timestamp_nanos()).unwrap_or(0)
}

/// The position before the first message of a stream.
pub(super) fn beginning(info: &stream::Info) -> PositionRecord {
    PositionRecord {
        stream: created(info),
        sequence: info.state.first_sequence.saturating_sub(1),
        checksum: 0,
    }
}

/// Checks that the stream goes on where the replica is. Returns the sequence of the last message of the stream.
pub(super) fn check_position(
    position: PositionRecord,
    info: &stream::Info,
) -> Result<u64, SessionError> {
    let (first, last) = (info.state.first_sequence, info.state.last_sequence);
    let name = &info.config.name;
    if position.stream != 0 && position.stream != created(info) {
        return Err(SessionError::Operator(format!(
            "the stream {name} was deleted and created anew, so nobody knows what this replica has missed; stop it, \
             move its data_dir away, and let it join anew"
        )));
    }
    if position.sequence > last {
        let why = format!(
            "this replica has applied message {} of the stream {name}, which ends at {last}",
            position.sequence
        );
        return Err(SessionError::Short(why, beginning(info)));
    }
    if position.sequence + 1 < first {
        return Err(SessionError::Missed(format!(
            "this replica has applied the stream {name} up to {}, and its oldest message is {first}: it was away for \
             longer than feed.max_age_s, or the stream has reached feed.max_bytes. It has to join anew; name the \
             other replicas in feed.peers",
            position.sequence
        )));
    }
    Ok(last)
}

/// The checksum of a message, which is never 0.
pub(super) fn checksum(payload: &[u8]) -> u64 {
    xxhash_rust::xxh3::xxh3_64(payload).max(1)
}

/// Checks that the first message that the stream gives, from the replica's position on, is the one that was applied
/// last. An erasure may have deleted that one.
pub(super) fn check_first(
    position: PositionRecord,
    beginning: PositionRecord,
    sequence: u64,
    checksum: u64,
) -> Result<(), SessionError> {
    let is_other = sequence == position.sequence && checksum != position.checksum;
    match is_other && position.checksum != 0 {
        true => Err(SessionError::Renumbered(
            format!(
                "message {sequence} of the stream is not the one that this replica has applied"
            ),
            beginning,
        )),
        false => Ok(()),
    }
}

/// A consumer of all messages after a sequence. The position is the replica's own, so nothing is acknowledged.
pub(super) fn consumer_after(sequence: u64) -> pull::Config {
    pull::Config {
        deliver_policy: DeliverPolicy::ByStartSequence {
            start_sequence: sequence + 1,
        },
        ack_policy: AckPolicy::None,
        replay_policy: ReplayPolicy::Instant,
        inactive_threshold: CONSUMER_IDLE,
        max_deliver: 1,
        num_replicas: 1,
        memory_storage: true,
        ..pull::Config::default()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn another_message_at_the_position_is_noticed() {
        let position = PositionRecord {
            stream: 1,
            sequence: 7,
            checksum: checksum(b"seven"),
        };
        let beginning = PositionRecord::default();
        let check = |position, sequence, text: &[u8]| {
            check_first(position, beginning, sequence, checksum(text)).is_ok()
        };
        assert!(check(position, 7, b"seven"));
        assert!(!check(position, 7, b"eight"));
        assert!(check(position, 8, b"eight"), "it was deleted");
        let unknown = PositionRecord {
            checksum: 0,
            ..position
        };
        assert!(check(unknown, 7, b"eight"));
    }

    #[test]
    fn an_existing_stream_with_other_limits_is_refused_with_what_to_do() {
        let config = FeedConfig::default();
        let ours = wanted(&config);
        assert!(check(&ours, &ours).is_ok());
        let theirs = stream::Config {
            max_age: Duration::from_secs(5),
            num_replicas: 3,
            ..ours.clone()
        };
        let refused = check(&ours, &theirs).unwrap_err().to_string();
        for part in [
            "max_age is 5 s and the configuration says 2678400 s",
            "the number of copies is 3 and the configuration says 1",
            "nats stream edit refrain-0",
        ] {
            assert!(refused.contains(part), "{refused}");
        }
        assert!(!refused.contains("max_bytes"), "{refused}");
    }
}
