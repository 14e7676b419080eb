//! Every replica says where it is and how far, and hears that of the others.
//!
//! This travels beside the streams, on a subject that no stream keeps. A store of one shard so knows the replicas of
//! all shards, and a worker has to be told only one of them.

use std::time::{Duration, Instant};

use async_nats::Client;
use futures_util::StreamExt as _;
use refrain_protocol::shard::ReplicaEntry;

use crate::config::FeedConfig;
use crate::replication::session::Session;
use crate::replication::stream::SessionError;

/// The subject of the directory.
const SUBJECT: &str = "refrain.directory";

/// How often a replica speaks.
const INTERVAL: Duration = Duration::from_secs(2);

/// Speaks and hears for as long as the session lasts.
pub(super) async fn announce(session: &Session, client: &Client) -> Result<(), SessionError> {
    let failed = |error: &dyn std::fmt::Display| {
        SessionError::broker("the directory of replicas cannot be kept", error)
    };
    let mut heard = client
        .subscribe(SUBJECT)
        .await
        .map_err(|error| failed(&error))?;
    let mut interval = tokio::time::interval(INTERVAL);
    loop {
        tokio::select! {
            message = heard.next() => {
                let Some(message) = message else {
                    return Err(failed(&"the subscription ended"));
                };
                // A later version may say something else, and that is no harm.
                if let Ok(entry) = serde_json::from_slice::<ReplicaEntry>(&message.payload)
                    && FeedConfig::is_url(&entry.url)
                {
                    session.status.directory.hear(entry, Instant::now());
                }
            }
            _ = interval.tick() => {
                let own = session.status.entry(&session.feed);
                if own.url.is_empty() {
                    continue;
                }
                let payload = serde_json::to_vec(&own).map_err(|error| failed(&error))?;
                client
                    .publish(SUBJECT, payload.into())
                    .await
                    .map_err(|error| failed(&error))?;
            }
        }
    }
}
