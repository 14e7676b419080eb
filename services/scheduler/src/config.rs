//! Every limit of the scheduler, with its default.

use std::net::SocketAddr;

use refrain_service_kit::config::Validate;
use serde::{Deserialize, Serialize};

/// The scheduler's section of the configuration.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, schemars::JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct SchedulerConfig {
    /// Address of the HTTP listener; none when the callers live in the same process.
    pub listen: Option<SocketAddr>,
    /// Requests that wait for a lease at most, all tenants together. Past it: 429.
    pub queue_max: usize,
    /// Requests of one tenant that wait at most. Past it: 429, for that tenant only.
    pub tenant_queue_max: usize,
    /// Longest wait for a free worker. Past it: 429.
    pub queue_wait_ms_max: u64,
    /// How long a request waits for a worker of its model to appear (a restart, a rolling update). Past it: 503.
    pub worker_wait_ms: u64,
    /// Live workers at most. Past it new ones are refused.
    pub workers_max: usize,
    /// Chunks at once that a worker may claim to take.
    pub worker_running_max: u32,
    /// A worker silent for this long is forgotten and its leases end.
    pub worker_ttl_ms: u64,
    /// How often workers report.
    pub heartbeat_interval_ms: u64,
    /// A lease that no heartbeat names for this long ends.
    pub lease_ttl_ms: u64,
    /// How long a heartbeat may disagree with the lease table before it is believed: the time a granted chunk
    /// needs to reach its worker, and a finished one to leave it.
    pub lease_grace_ms: u64,
    /// Ended leases remembered, so that a late `finish` still counts its tokens and a heartbeat sent before
    /// the end does not revive them.
    pub ended_leases_max: usize,
    /// Tenants whose share of each model is remembered while they are idle.
    pub tenants_tracked_max: usize,
    /// How much busier (share of its slots) the worker that holds the KV may be than the least busy one, and
    /// still be preferred.
    pub prefer_load_slack: f64,
    /// Workers that one request may exclude.
    pub exclude_max: usize,
    /// Longest retry hint.
    pub retry_after_ms_max: u64,
    /// Messages that the dispatcher's mailbox holds. It only absorbs bursts: past it, 503.
    pub mailbox_max: usize,
    /// How often deadlines are looked at while requests wait.
    pub tick_ms: u64,
    /// Largest request body.
    pub body_bytes_max: usize,
    /// Connections at most. Each waiting call holds one.
    pub connections_max: usize,
}

impl Default for SchedulerConfig {
    fn default() -> Self {
        SchedulerConfig {
            listen: None,
            queue_max: 10_000,
            tenant_queue_max: 2_000,
            queue_wait_ms_max: 120_000,
            worker_wait_ms: 10_000,
            workers_max: 1_024,
            worker_running_max: 4_096,
            worker_ttl_ms: 5_000,
            heartbeat_interval_ms: 1_000,
            lease_ttl_ms: 10_000,
            lease_grace_ms: 3_000,
            ended_leases_max: 16_384,
            tenants_tracked_max: 1_000,
            prefer_load_slack: 0.25,
            exclude_max: 64,
            retry_after_ms_max: 30_000,
            mailbox_max: 4_096,
            tick_ms: 100,
            body_bytes_max: 1 << 20,
            connections_max: 16_384,
        }
    }
}

impl Validate for SchedulerConfig {
    fn faults(&self) -> Vec<String> {
        let mut faults = Vec::new();
        let positive: [(&str, u64); 12] = [
            ("queue_max", self.queue_max as u64),
            ("tenant_queue_max", self.tenant_queue_max as u64),
            ("queue_wait_ms_max", self.queue_wait_ms_max),
            ("workers_max", self.workers_max as u64),
            ("worker_running_max", u64::from(self.worker_running_max)),
            ("heartbeat_interval_ms", self.heartbeat_interval_ms),
            ("ended_leases_max", self.ended_leases_max as u64),
            ("tenants_tracked_max", self.tenants_tracked_max as u64),
            ("retry_after_ms_max", self.retry_after_ms_max),
            ("mailbox_max", self.mailbox_max as u64),
            ("tick_ms", self.tick_ms),
            ("body_bytes_max", self.body_bytes_max as u64),
        ];
        for (name, value) in positive {
            if value == 0 {
                faults.push(format!("{name} is 0; it must be at least 1"));
            }
        }
        // One heartbeat may be late without anything being given up.
        let two_intervals_ms = self.heartbeat_interval_ms.saturating_mul(2);
        for (name, value) in [
            ("worker_ttl_ms", self.worker_ttl_ms),
            ("lease_ttl_ms", self.lease_ttl_ms),
            ("lease_grace_ms", self.lease_grace_ms),
        ] {
            if value < two_intervals_ms {
                faults.push(format!(
                    "{name} is {value}; it must be at least twice heartbeat_interval_ms ({two_intervals_ms})"
                ));
            }
        }
        if self.lease_ttl_ms < self.lease_grace_ms {
            faults.push(format!(
                "lease_ttl_ms is {}; it must be at least lease_grace_ms ({})",
                self.lease_ttl_ms, self.lease_grace_ms
            ));
        }
        if self.connections_max <= self.queue_max {
            faults.push(format!(
                "connections_max is {}; it must be above queue_max ({}), since each waiting call holds one",
                self.connections_max, self.queue_max
            ));
        }
        if !(0.0..=1.0).contains(&self.prefer_load_slack) {
            faults.push(format!(
                "prefer_load_slack is {}; it must be from 0 to 1",
                self.prefer_load_slack
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
            queue_max: 0,
            lease_ttl_ms: 1_000,
            prefer_load_slack: f64::NAN,
            ..SchedulerConfig::default()
        };
        expect_test::expect![[r#"
            queue_max is 0; it must be at least 1
            lease_ttl_ms is 1000; it must be at least twice heartbeat_interval_ms (2000)
            lease_ttl_ms is 1000; it must be at least lease_grace_ms (3000)
            prefer_load_slack is NaN; it must be from 0 to 1"#]]
        .assert_eq(&config.faults().join("\n"));
    }
}
