//! The state of the feed, for readiness and for callers that wait for replication.

use std::time::{Duration, Instant};

use parking_lot::Mutex;
use refrain_protocol::shard::ReplicaEntry;
use serde::Serialize;

use crate::config::FeedConfig;
use crate::replicas::directory::Directory;

/// How far the feed is.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct FeedState {
    /// Whether there is a connection to the broker, with the stream open.
    pub connected: bool,
    /// Whether the replica has had everything of the stream once since its start.
    pub caught_up: bool,
    /// Sequence of the last message that was applied.
    pub sequence: u64,
    /// Sequence of the last message of the stream, as far as it is known.
    pub stream_sequence: u64,
}

impl FeedState {
    /// Messages of the stream that are not applied.
    pub fn lag(&self) -> u64 {
        self.stream_sequence.saturating_sub(self.sequence)
    }
}

#[derive(Default)]
struct Inner {
    state: FeedState,
    /// Why there is no session, or why the last one ended.
    trouble: Option<String>,
    /// Since when the stream ends before the replica's position.
    short_since: Option<Instant>,
}

/// The state of the feed, shared by its task and those who look at it.
#[derive(Default)]
pub(crate) struct FeedStatus {
    inner: Mutex<Inner>,
    /// The other replicas.
    pub(crate) directory: Directory,
}

impl FeedStatus {
    pub(crate) fn state(&self) -> FeedState {
        self.inner.lock().state
    }

    /// The entry of this replica in directories.
    pub(crate) fn entry(&self, config: &FeedConfig) -> ReplicaEntry {
        let state = self.state();
        ReplicaEntry {
            url: config.advertise_url.trim_end_matches('/').to_owned(),
            shard: config.shard,
            is_ready: self.readiness(config.lag_max).is_ok(),
            sequence: state.sequence,
            lag: state.lag(),
        }
    }

    /// The stream is open.
    pub(crate) fn connected(&self, sequence: u64, stream_sequence: u64) {
        let mut inner = self.inner.lock();
        inner.trouble = None;
        inner.short_since = None;
        inner.state = FeedState {
            connected: true,
            sequence,
            stream_sequence,
            ..inner.state
        };
    }

    /// Messages up to `sequence` are applied. `pending` follow in the stream.
    pub(crate) fn applied(&self, sequence: u64, pending: u64) {
        let mut inner = self.inner.lock();
        inner.state.sequence = sequence;
        inner.state.stream_sequence = inner.state.stream_sequence.max(sequence + pending);
    }

    /// The broker has taken a message with this sequence.
    pub(crate) fn sent(&self, sequence: u64) {
        let mut inner = self.inner.lock();
        inner.state.stream_sequence = inner.state.stream_sequence.max(sequence);
    }

    /// Everything is applied that was in the stream when the session began.
    pub(crate) fn caught_up(&self) {
        self.inner.lock().state.caught_up = true;
    }

    /// The stream ends before the replica's position. Returns for how long it has been like that.
    pub(crate) fn short_for(&self) -> Duration {
        let mut inner = self.inner.lock();
        inner.short_since.get_or_insert_with(Instant::now).elapsed()
    }

    /// The stream is applied once more from its beginning.
    pub(crate) fn begins_anew(&self) {
        let mut inner = self.inner.lock();
        inner.state.caught_up = false;
        inner.short_since = None;
    }

    /// The session ended.
    pub(crate) fn disconnected(&self, trouble: String) {
        let mut inner = self.inner.lock();
        inner.state.connected = false;
        inner.trouble = Some(trouble);
    }

    /// Whether the replica may serve. Once it has caught up it goes on while the broker is away: its drafts are good,
    /// and what others erase meanwhile cannot be in the stream either.
    pub(crate) fn readiness(&self, lag_max: u64) -> Result<(), String> {
        let inner = self.inner.lock();
        let FeedState {
            connected,
            caught_up,
            ..
        } = inner.state;
        let lag = inner.state.lag();
        let trouble = inner.trouble.as_deref().unwrap_or("no trouble so far");
        if !caught_up {
            return Err(match connected {
                true => format!("the replica applies what it missed: {lag} messages are left"),
                false => format!("the replica has not reached its stream yet: {trouble}"),
            });
        }
        if connected && lag > lag_max {
            return Err(format!(
                "the replica is {lag} messages behind its stream, which is more than feed.lag_max ({lag_max})"
            ));
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_replica_is_ready_once_it_has_caught_up_and_while_its_lag_is_small() {
        let status = FeedStatus::default();
        assert!(status.readiness(10).is_err());
        status.disconnected("connection refused".into());
        let refused = status.readiness(10).unwrap_err();
        assert!(refused.ends_with("connection refused"), "{refused}");
        status.connected(5, 20);
        let behind = status.readiness(10).unwrap_err();
        assert!(behind.contains("15 messages"), "{behind}");
        status.applied(12, 8);
        assert!(status.readiness(10).is_err(), "it has not caught up so far");
        status.applied(20, 0);
        status.caught_up();
        assert_eq!(status.readiness(10), Ok(()));
        status.applied(21, 30);
        assert!(status.readiness(10).is_err());
        status.disconnected("gone".into());
        assert_eq!(status.readiness(10), Ok(()), "drafts go on");
    }
}
