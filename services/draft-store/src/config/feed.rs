//! The section of the feed: how this store keeps itself equal to the other replicas of its shard.

use async_nats::ServerAddr;
use refrain_protocol::document::Acknowledgement;
use refrain_service_kit::config::is_http_url;
use serde::Deserialize;

/// The feed between the replicas of a shard, a stream of NATS JetStream. All replicas need the same values.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize, schemars::JsonSchema)]
#[serde(default)]
pub struct FeedConfig {
    /// URLs of the NATS servers, such as `nats://nats-0:4222` or `tls://user:password@nats.example:4222`.
    pub servers: Vec<String>,
    /// URLs of the other replicas' listeners, such as `http://draft-store-1:7430`. A replica that is new, or was away
    /// for longer than the stream goes back, takes over the documents of the first one that answers. The own URL may
    /// be among them.
    pub peers: Vec<String>,
    /// URL under which workers and gateways reach this replica, such as `http://draft-store-0:7430`. Replicas tell it
    /// each other. Without it this replica is in no directory.
    pub advertise_url: String,
    /// Number of shards. Each namespace belongs to one of them, and each shard has replicas of its own.
    pub shards: u32,
    /// Number of this replica's shard, from 0. Its stream is `refrain-<shard>`, with subjects `refrain.<shard>.>`.
    pub shard: u32,
    /// Copies of each message that the brokers keep: 1, or 3 with at least three brokers.
    pub stream_replicas: usize,
    /// How long the stream keeps messages, in seconds. A replica that was away for longer has to join anew.
    pub max_age_s: u64,
    /// Most bytes of the stream. Beyond it the oldest messages go, whatever their age.
    pub max_bytes: u64,
    /// When appends are answered that do not say it themselves: `local` once they are on this replica's disk,
    /// `replicated` once the brokers have them as well.
    #[schemars(with = "String")]
    pub acknowledgement: Acknowledgement,
    /// Documents and removals that may wait for the broker. Beyond it appends get 503.
    pub outbox_max: usize,
    /// Messages that may wait for the broker's acknowledgement at once.
    pub in_flight_max: usize,
    /// A document that does not end is sent once it has been silent for this long, in seconds.
    pub silent_s: u64,
    /// How long an append with the level `replicated` waits for the brokers, in milliseconds. After that it gets 503.
    pub acknowledgement_wait_ms: u64,
    /// Whether samples of groups are sent while they grow, so that workers at different replicas draft from each
    /// other's. Other outputs are sent once they have ended, or were silent.
    pub groups: bool,
    /// Messages that a replica may be behind the stream and still be ready.
    pub lag_max: u64,
    /// Most bytes per second that a replica takes over from another one while it joins.
    pub join_bytes_s_max: u64,
}

impl Default for FeedConfig {
    fn default() -> Self {
        FeedConfig {
            servers: vec!["nats://127.0.0.1:4222".into()],
            peers: Vec::new(),
            advertise_url: String::new(),
            shards: 1,
            shard: 0,
            stream_replicas: 1,
            max_age_s: 31 * 24 * 3_600,
            max_bytes: 8 << 30,
            acknowledgement: Acknowledgement::Local,
            outbox_max: 1_000_000,
            in_flight_max: 1_024,
            silent_s: 60,
            acknowledgement_wait_ms: 5_000,
            groups: false,
            lag_max: 10_000,
            join_bytes_s_max: 128 << 20,
        }
    }
}

impl FeedConfig {
    /// Whether a text can be the URL of a replica.
    pub(crate) fn is_url(text: &str) -> bool {
        text.len() <= 1_024 && is_http_url(text)
    }

    pub(super) fn faults(&self) -> Vec<String> {
        let mut faults = Vec::new();
        if self.servers.is_empty() {
            faults.push("feed.servers: name at least one NATS server".to_owned());
        }
        if !(1..=5).contains(&self.stream_replicas) {
            faults.push("feed.stream_replicas: from 1 to 5".to_owned());
        }
        if self.shard >= self.shards {
            faults.push(format!(
                "feed.shard: from 0 to {}, since feed.shards is {}",
                self.shards.saturating_sub(1),
                self.shards
            ));
        }
        let is_server = |url: &String| url.parse::<ServerAddr>().is_ok();
        if !self.servers.iter().all(is_server) {
            faults.push("feed.servers: must be URLs such as nats://nats-0:4222".to_owned());
        }
        if !self.peers.iter().all(|url| Self::is_url(url)) {
            faults.push("feed.peers: must be http:// or https:// URLs".to_owned());
        }
        if !self.advertise_url.is_empty() && !Self::is_url(&self.advertise_url) {
            faults.push("feed.advertise_url: must be an http:// or https:// URL".to_owned());
        }
        let mut at_least = |key: &str, value: u64, least: u64| {
            if value < least {
                faults.push(format!("feed.{key}: at least {least}"));
            }
        };
        // Erasures and repetitions are remembered in windows of minutes, so the stream must reach further back.
        at_least("max_age_s", self.max_age_s, 600);
        at_least("max_bytes", self.max_bytes, 16 << 20);
        at_least("outbox_max", self.outbox_max as u64, 1);
        at_least("in_flight_max", self.in_flight_max as u64, 1);
        at_least("acknowledgement_wait_ms", self.acknowledgement_wait_ms, 1);
        at_least("lag_max", self.lag_max, 1);
        at_least("join_bytes_s_max", self.join_bytes_s_max, 64 << 10);
        faults
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_defaults_are_valid_and_faults_name_their_keys() {
        assert_eq!(FeedConfig::default().faults(), Vec::<String>::new());
        let config = FeedConfig {
            servers: Vec::new(),
            stream_replicas: 7,
            max_age_s: 5,
            peers: vec!["draft-store-1:7430".into()],
            ..FeedConfig::default()
        };
        let faults = config.faults();
        assert_eq!(faults.len(), 4, "{faults:?}");
        assert!(faults[2].starts_with("feed.peers: must be http://"));
        assert!(faults[3].starts_with("feed.max_age_s: at least 600"));
        let of_no_broker = FeedConfig {
            servers: vec!["http://nats:4222/".into(), "nats://".into()],
            ..FeedConfig::default()
        };
        assert_eq!(of_no_broker.faults().len(), 1);
    }
}
