//! Sessions with the broker, one after the other for as long as the store runs.

use std::sync::Arc;
use std::time::Duration;

use async_nats::jetstream::stream::{Info, Stream};
use refrain_service_kit::backoff::Backoff;
use tokio::sync::watch;

use crate::record::replication::PositionRecord;
use crate::replication::announce::announce;
use crate::replication::erasures::begin_if_caught_up;
use crate::replication::follow::follow;
use crate::replication::join::join;
use crate::replication::publish::{publish, start_stream};
use crate::replication::session::Session;
use crate::replication::stream::{
    Connection, SessionError, ShardStream, beginning, check_position, created,
};

/// Pauses between sessions.
const PAUSE_FIRST: Duration = Duration::from_millis(100);
const PAUSE_LONGEST: Duration = Duration::from_secs(5);

/// How long a stream has to end too early until it is believed. A broker that is cut off from the others may say so
/// for ten seconds.
const SHORT_FOR: Duration = Duration::from_secs(30);

/// Runs sessions, one after the other.
pub(crate) async fn run(session: Arc<Session>) {
    let mut backoff = Backoff::new(PAUSE_FIRST, PAUSE_LONGEST);
    loop {
        let began = tokio::time::Instant::now();
        let ended = one(&session).await;
        session.metrics.feed_connected.set(0);
        session.metrics.feed_sessions.inc();
        match &ended {
            SessionError::Operator(error) | SessionError::Missed(error) => {
                tracing::error!(%error, "draft store cannot follow its stream");
            }
            error => tracing::warn!(%error, "draft store lost its stream"),
        }
        session.status.disconnected(ended.to_string());
        match ended {
            SessionError::Renumbered(_, beginning) => begin_anew(&session, beginning).await,
            SessionError::Short(_, beginning) if session.status.short_for() > SHORT_FOR => {
                begin_anew(&session, beginning).await;
            }
            _ => {}
        }
        if began.elapsed() > PAUSE_LONGEST {
            backoff.reset();
        }
        tokio::time::sleep(backoff.pause()).await;
    }
}

/// Applies the stream once more, and sends all documents again, since the brokers have lost messages or count them in
/// another way.
async fn begin_anew(session: &Session, beginning: PositionRecord) {
    tracing::error!(
        "draft store applies its stream from the beginning, and sends all documents again"
    );
    if let Err(error) = session.begin_anew(beginning).await {
        tracing::warn!(%error, "draft store cannot begin its stream anew; it is tried again");
    }
}

/// One session. It ends by an error.
async fn one(session: &Arc<Session>) -> SessionError {
    let mut connection = match Connection::open(&session.feed).await {
        Ok(connection) => connection,
        Err(error) => return error,
    };
    let ended = within(session, &mut connection).await;
    connection.close().await;
    match ended {
        Ok(()) => SessionError::Broker("the session ended".into()),
        Err(error) => error,
    }
}

async fn within(session: &Arc<Session>, connection: &mut Connection) -> Result<(), SessionError> {
    if !session.shared.is_open() {
        return Err(SessionError::Store("it is opening its log".into()));
    }
    let stream = connection.stream(&session.feed).await?;
    let mut info = get_info(&stream).await?;
    if info.state.last_sequence == 0 {
        start_stream(session, &connection.context).await?;
    }
    let mut position = session.position().await?;
    let mut checked = check_position(position, &info);
    let last = info.state.last_sequence;
    let is_missed = matches!(checked, Err(SessionError::Missed(_)));
    // One that has nothing yet takes over sooner than the stream would give it everything.
    let is_empty = session.look(|open| open.catalog.totals().documents == 0);
    let is_new = position.sequence == 0 && last > session.feed.lag_max && is_empty.await?;
    if !session.feed.peers.is_empty() && (is_missed || is_new) {
        let first = info.state.first_sequence;
        match join(session, created(&info), first).await {
            Ok(joined) => position = joined,
            // The stream has everything, it only takes longer.
            Err(error) if is_new && !is_missed => {
                tracing::warn!(%error, "draft store reads the stream from its beginning");
            }
            Err(error) => return Err(error),
        }
        // The peer may have applied more meanwhile, and what came from it may have that.
        info = get_info(&stream).await?;
        checked = check_position(position, &info);
    }
    let until = checked?;
    session.status.connected(position.sequence, until);
    session.metrics.feed_connected.set(1);
    tracing::info!(
        stream = info.config.name,
        from = position.sequence,
        until,
        "draft store follows its stream"
    );
    let (tell, mut caught_up) = watch::channel(false);
    let (context, client) = (connection.context.clone(), connection.client.clone());
    let stream = ShardStream {
        stream,
        context: context.clone(),
    };
    let send = async {
        // Before that it might send what others have erased.
        let _ = caught_up.wait_for(|caught_up| *caught_up).await;
        publish(session, &context).await
    };
    tokio::select! {
        ended = follow(session, &stream, beginning(&info), until, tell) => ended,
        ended = send => ended,
        ended = announce(session, &client) => ended,
        () = retry_erasures(session, &stream) => Ok(()),
        lost = connection.lost() => Err(lost),
    }
}

async fn get_info(stream: &Stream) -> Result<Info, SessionError> {
    let info = stream.get_info().await;
    info.map_err(|error| SessionError::broker("the stream cannot be opened", error))
}

/// Begins erasures again that could not be completed. It goes on for as long as the session.
async fn retry_erasures(session: &Arc<Session>, stream: &ShardStream) {
    loop {
        tokio::time::sleep(PAUSE_LONGEST).await;
        if session
            .open_erasures()
            .await
            .is_ok_and(|open| !open.is_empty())
        {
            begin_if_caught_up(session, stream);
        }
    }
}
