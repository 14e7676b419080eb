//! The `[scheduler]` section of the configuration: addresses and limits, with their defaults.

mod standby;

use std::net::SocketAddr;

use refrain_rpc::{HEARTBEAT_RETRY_PAUSE, HEARTBEAT_TIMEOUT};
use refrain_service_kit::config::Validate;
use refrain_service_kit::http::ListenerConfig;
use serde::{Deserialize, Serialize};

pub use self::standby::StandbyConfig;

/// Heartbeats that fit into `worker_ttl_ms`, so that a worker may miss some of them and still count as live.
const HEARTBEATS_PER_TTL: u64 = 5;
/// Longest pause between two heartbeats of a worker. A restarted scheduler knows the mesh after this time.
const HEARTBEAT_INTERVAL_MS_MAX: u64 = 1_000;
/// Time that a worker needs to send a heartbeat once more after one that was not answered.
const HEARTBEAT_REPEAT_MS: u64 =
    (HEARTBEAT_TIMEOUT.as_millis() + HEARTBEAT_RETRY_PAUSE.as_millis()) as u64;
/// Heartbeats that may disagree with the lease table before they are believed.
const HEARTBEATS_PER_LEASE_GRACE: u64 = 3;
/// Ended leases that are remembered: several seconds' worth at some thousand leases per second.
const ENDED_LEASES_MAX: usize = 16_384;
/// Idle tenants whose served tokens are remembered, per model.
const TENANTS_TRACKED_MAX: usize = 1_000;

/// The order in which the waiting rollouts of a tenant get slots. Interactive requests are served in order of
/// arrival.
#[derive(
    Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize, schemars::JsonSchema,
)]
#[serde(rename_all = "snake_case")]
pub enum OrderPolicy {
    /// First come, first served, chunk by chunk.
    Arrival,
    /// Seer's Algorithm 2. One probe of each group goes first, and probes by the fewest tokens so far. The others go
    /// by the longest estimate, which is the longest finished output of their group, or the limit until there is one.
    Context,
    /// As `context`, and `expected_tokens` of a request is an estimate from the start.
    History,
    /// The first members of all groups, then the second ones, and so on, while drafts gain by finished members. Where
    /// estimates of lengths have proved right, a longer group has more of its members served early. Arrival where
    /// neither pays. No started request waits behind one that has not started.
    #[default]
    Auto,
    /// The longest first, by true lengths. A simulator passes them as `expected_tokens`. No file can choose it.
    #[serde(skip)]
    Oracle,
}

/// How the worker for a chunk is chosen among those with a free slot.
#[derive(
    Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize, schemars::JsonSchema,
)]
#[serde(rename_all = "snake_case")]
pub enum PlacementPolicy {
    /// The lowest cost: the time to read what its KV cache lacks, plus its load.
    #[default]
    Kv,
    /// The lowest busy share of slots.
    LeastLoaded,
    /// Each in turn.
    RoundRobin,
    /// The rule of SGLang's gateway, for comparison: the longest known prefix while loads are even.
    CacheAware,
}

/// The scheduler's section of the configuration.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, schemars::JsonSchema)]
#[serde(default)]
pub struct SchedulerConfig {
    /// Address of the HTTP listener. Leave it out when all callers live in the same process.
    pub listen: Option<SocketAddr>,
    /// The certificate and the time limits of that listener.
    pub http: ListenerConfig,
    /// Other schedulers that stand by. Without it this one is alone.
    pub standby: Option<StandbyConfig>,
    /// Maximum number of requests that wait for a lease, of all tenants together. Further ones are refused with 429.
    pub queue_max: usize,
    /// Maximum number of requests of one tenant that wait for a lease. Further ones of that tenant are refused with
    /// 429.
    pub tenant_queue_max: usize,
    /// Maximum number of rollouts that wait for a lease, of all tenants together. Further ones are refused with 429.
    pub rollout_queue_max: usize,
    /// Maximum number of rollouts of one tenant that wait for a lease. Further ones of that tenant are refused with
    /// 429.
    pub tenant_rollout_queue_max: usize,
    /// Share of the slots that rollouts keep while interactive requests wait, at least 0 and below 1.
    pub rollout_share: f64,
    /// Tokens by which a tenant may be ahead of others whose rollouts wait, while its interactive requests go before
    /// these. Tokens are counted by their cost and the weight of the tenant. Past it they wait for the tenant's turn.
    pub interactive_lead_tokens: u64,
    /// Maximum number of tokens of a chunk of a rollout. After a chunk the slot goes to whoever is next. 0 means no
    /// limit.
    pub chunk_tokens: u32,
    /// The order of a tenant's waiting rollouts.
    pub order: OrderPolicy,
    /// A rollout is overtaken only by rollouts that arrived at most this long after it, milliseconds.
    pub overtake_ms_max: u64,
    /// Groups whose lengths are remembered. The least recently used ones are forgotten.
    pub groups_tracked_max: usize,
    /// The choice of a worker for a chunk.
    pub placement: PlacementPolicy,
    /// Prefixes that are remembered for each worker. The least recently used ones are forgotten.
    pub prefixes_tracked_max: usize,
    /// Named sessions whose worker is remembered, so that their turns stay there. 0 remembers none.
    pub sessions_tracked_max: usize,
    /// Milliseconds to read a thousand tokens of context, for workers that have not measured it.
    pub prefill_ms_per_1k: f32,
    /// A worker whose load would be above this multiple of the mean load gets no request for its KV cache's sake.
    pub load_imbalance_max: f64,
    /// Longest time that an interactive request waits for a free worker, milliseconds. It is then refused with 429.
    pub queue_wait_ms_max: u64,
    /// Longest time that a request waits for a worker of its model to appear, milliseconds, for instance during a
    /// rolling update. It is then refused with 503.
    pub worker_wait_ms: u64,
    /// Maximum number of live workers. Heartbeats of further ones are refused.
    pub workers_max: usize,
    /// A worker that has not reported for this many milliseconds is forgotten, and its leases end. Workers report
    /// about five times within this time, and at least once a second. It must be long enough for a report to be
    /// repeated that was not answered, which takes a worker 1.25 seconds.
    pub worker_ttl_ms: u64,
    /// A lease that no heartbeat has named for this many milliseconds ends. A gateway leaves a worker that has sent
    /// nothing for the same time.
    pub lease_ttl_ms: u64,
    /// Maximum number of connections at once. Each waiting call holds one.
    pub connections_max: usize,

    /// See [`HEARTBEAT_INTERVAL_MS_MAX`]. Tests shorten it.
    #[serde(skip)]
    pub(crate) heartbeat_interval_ms_max: u64,
    /// See [`HEARTBEAT_REPEAT_MS`]. Tests shorten it.
    #[serde(skip)]
    pub(crate) heartbeat_repeat_ms: u64,
    /// See [`ENDED_LEASES_MAX`]. Tests lower it.
    #[serde(skip)]
    pub(crate) ended_leases_max: usize,
    /// See [`TENANTS_TRACKED_MAX`]. Tests lower it.
    #[serde(skip)]
    pub(crate) tenants_tracked_max: usize,
}

impl SchedulerConfig {
    /// The pause between two heartbeats of a worker.
    pub(crate) fn heartbeat_interval_ms(&self) -> u64 {
        (self.worker_ttl_ms / HEARTBEATS_PER_TTL).clamp(1, self.heartbeat_interval_ms_max)
    }

    /// How long a heartbeat may disagree with the lease table before it is believed. A granted chunk needs this time
    /// to reach its worker, and a finished one to leave it.
    pub(crate) fn lease_grace_ms(&self) -> u64 {
        HEARTBEATS_PER_LEASE_GRACE * self.heartbeat_interval_ms()
    }
}

impl Default for SchedulerConfig {
    fn default() -> Self {
        SchedulerConfig {
            listen: None,
            http: ListenerConfig::default(),
            standby: None,
            queue_max: 10_000,
            tenant_queue_max: 2_000,
            rollout_queue_max: 20_000,
            tenant_rollout_queue_max: 10_000,
            rollout_share: 0.25,
            interactive_lead_tokens: 100_000,
            chunk_tokens: 2_048,
            order: OrderPolicy::default(),
            overtake_ms_max: 600_000,
            groups_tracked_max: 16_384,
            placement: PlacementPolicy::default(),
            prefixes_tracked_max: 8_192,
            sessions_tracked_max: 65_536,
            prefill_ms_per_1k: 100.0,
            load_imbalance_max: 1.3,
            queue_wait_ms_max: 120_000,
            worker_wait_ms: 10_000,
            workers_max: 1_024,
            worker_ttl_ms: 5_000,
            lease_ttl_ms: 10_000,
            connections_max: 32_768,
            heartbeat_interval_ms_max: HEARTBEAT_INTERVAL_MS_MAX,
            heartbeat_repeat_ms: HEARTBEAT_REPEAT_MS,
            ended_leases_max: ENDED_LEASES_MAX,
            tenants_tracked_max: TENANTS_TRACKED_MAX,
        }
    }
}

impl Validate for SchedulerConfig {
    fn faults(&self) -> Vec<String> {
        let mut faults = Vec::new();
        let positive: [(&str, u64); 8] = [
            ("queue_max", self.queue_max as u64),
            ("tenant_queue_max", self.tenant_queue_max as u64),
            ("rollout_queue_max", self.rollout_queue_max as u64),
            (
                "tenant_rollout_queue_max",
                self.tenant_rollout_queue_max as u64,
            ),
            ("groups_tracked_max", self.groups_tracked_max as u64),
            ("overtake_ms_max", self.overtake_ms_max),
            ("queue_wait_ms_max", self.queue_wait_ms_max),
            ("workers_max", self.workers_max as u64),
        ];
        for (name, value) in positive {
            if value == 0 {
                faults.push(format!("{name} is 0; it must be at least 1"));
            }
        }
        faults.extend(self.http.faults("http"));
        faults.extend(self.standby.iter().flat_map(StandbyConfig::faults));
        let interval_ms = self.heartbeat_interval_ms();
        let needed_ms = interval_ms.saturating_add(self.heartbeat_repeat_ms);
        if self.worker_ttl_ms <= needed_ms {
            faults.push(format!(
                "worker_ttl_ms is {}; it must be above {needed_ms}: reports are {interval_ms} ms apart, and one that is not answered is repeated after {} ms",
                self.worker_ttl_ms, self.heartbeat_repeat_ms
            ));
        }
        let grace_ms = self.lease_grace_ms();
        if self.lease_ttl_ms < grace_ms {
            faults.push(format!(
                "lease_ttl_ms is {}; it must be at least {grace_ms}, the time of {HEARTBEATS_PER_LEASE_GRACE} heartbeats",
                self.lease_ttl_ms
            ));
        }
        let waiting_max = self.queue_max.saturating_add(self.rollout_queue_max);
        if self.listen.is_some() && self.connections_max <= waiting_max {
            faults.push(format!(
                "connections_max is {}; it must be above queue_max + rollout_queue_max ({waiting_max}), since each waiting call holds a connection",
                self.connections_max
            ));
        }
        if !(0.0..1.0).contains(&self.rollout_share) {
            faults.push(format!(
                "rollout_share is {}; it must be at least 0 and below 1",
                self.rollout_share
            ));
        }
        if !(self.prefill_ms_per_1k.is_finite() && self.prefill_ms_per_1k > 0.0) {
            faults.push(format!(
                "prefill_ms_per_1k is {}; it must be above 0",
                self.prefill_ms_per_1k
            ));
        }
        if !(self.load_imbalance_max.is_finite() && self.load_imbalance_max >= 1.0) {
            faults.push(format!(
                "load_imbalance_max is {}; it must be at least 1",
                self.load_imbalance_max
            ));
        }
        faults
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn defaults_are_sound_and_faults_name_their_keys() {
        assert_eq!(SchedulerConfig::default().faults(), Vec::<String>::new());
        let config = SchedulerConfig {
            listen: Some("127.0.0.1:0".parse().unwrap()),
            queue_max: 0,
            worker_ttl_ms: 1_560,
            lease_ttl_ms: 900,
            connections_max: 0,
            rollout_share: 1.5,
            prefill_ms_per_1k: f32::NAN,
            load_imbalance_max: 0.9,
            ..SchedulerConfig::default()
        };
        expect_test::expect![[r#"
            queue_max is 0; it must be at least 1
            worker_ttl_ms is 1560; it must be above 1562: reports are 312 ms apart, and one that is not answered is repeated after 1250 ms
            lease_ttl_ms is 900; it must be at least 936, the time of 3 heartbeats
            connections_max is 0; it must be above queue_max + rollout_queue_max (20000), since each waiting call holds a connection
            rollout_share is 1.5; it must be at least 0 and below 1
            prefill_ms_per_1k is NaN; it must be above 0
            load_imbalance_max is 0.9; it must be at least 1"#]]
        .assert_eq(&config.faults().join("\n"));
    }

    #[test]
    fn heartbeats_come_several_times_within_the_life_of_a_worker() {
        let interval_ms = |worker_ttl_ms| {
            let config = SchedulerConfig {
                worker_ttl_ms,
                ..SchedulerConfig::default()
            };
            config.heartbeat_interval_ms()
        };
        assert_eq!(
            [1, 2_000, 5_000, 60_000].map(interval_ms),
            [1, 400, 1_000, 1_000]
        );
    }
}
