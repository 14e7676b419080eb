//! Schedulers of which one leads and the others stand by.

use std::path::PathBuf;

use refrain_service_kit::cluster_api::is_object_name;
use serde::{Deserialize, Serialize};

/// Where schedulers of one mesh find out which of them leads: at a broker or in a Kubernetes cluster. They have the
/// same settings here but for their ids, and `urls.schedulers` of gateways and workers names them all.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, schemars::JsonSchema)]
#[serde(default)]
pub struct StandbyConfig {
    /// Name of this scheduler among them, for logs. Each has another one.
    pub id: String,
    /// URLs of NATS servers with JetStream, such as `nats://nats-0:4222`, that keep which scheduler leads.
    pub servers: Vec<String>,
    /// The bucket there, which is made if it is missing.
    pub bucket: String,
    /// Copies of it that the brokers keep: 1, or 3 with at least three brokers.
    pub bucket_replicas: usize,
    /// In place of `servers`: name of a Kubernetes Lease in the namespace of this process, which needs the rights to
    /// get, create and update Leases.
    pub kubernetes_lease: Option<String>,
    /// Silence of the leader after which another one takes over, milliseconds. It writes four times within it. Nobody
    /// leads for 1.6 times as long at most.
    pub lease_ms: u64,
    /// The URL of the cluster's API and the folder with a pod's files, for tests.
    #[serde(skip)]
    pub cluster: Option<(String, PathBuf)>,
}

impl Default for StandbyConfig {
    fn default() -> Self {
        StandbyConfig {
            id: String::new(),
            servers: Vec::new(),
            bucket: "refrain-scheduler".into(),
            bucket_replicas: 1,
            kubernetes_lease: None,
            lease_ms: 1_200,
            cluster: None,
        }
    }
}

impl StandbyConfig {
    pub(super) fn faults(&self) -> Vec<String> {
        let is_bucket = |byte: u8| byte.is_ascii_alphanumeric() || b"-_".contains(&byte);
        let lease = self.kubernetes_lease.as_deref();
        let is_server = |server: &String| {
            server.contains("://") && server.parse::<async_nats::ServerAddr>().is_ok()
        };
        let faults = [
            (
                self.id.is_empty() || self.id.len() > 200,
                "standby.id: must be a name that no other scheduler of this mesh has",
            ),
            (
                self.servers.is_empty() == lease.is_none(),
                "standby: give servers or kubernetes_lease, and not both",
            ),
            (
                !self.servers.iter().all(is_server),
                "standby.servers: must be URLs such as nats://nats-0:4222",
            ),
            (
                self.bucket.is_empty() || !self.bucket.bytes().all(is_bucket),
                "standby.bucket: must be letters, digits, `-` and `_`",
            ),
            (
                lease.is_some_and(|name| !is_object_name(name)),
                "standby.kubernetes_lease: must be the name of an object of Kubernetes",
            ),
            (
                ![1, 3, 5].contains(&self.bucket_replicas),
                "standby.bucket_replicas: must be 1, 3 or 5",
            ),
            (self.lease_ms < 400, "standby.lease_ms: at least 400"),
        ];
        let faults = faults.into_iter().filter(|(is_fault, _)| *is_fault);
        faults.map(|(_, fault)| fault.to_owned()).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_standby_has_a_name_and_one_place_to_meet_the_others() {
        let faults = |json: &str| {
            let config: StandbyConfig = serde_json::from_str(json).unwrap();
            config.faults().join("\n")
        };
        assert_eq!(faults(r#"{"id": "a", "servers": ["nats://n"]}"#), "");
        assert_eq!(faults(r#"{"id": "a", "kubernetes_lease": "refrain"}"#), "");
        let none = faults("{}");
        assert!(
            none.contains("standby.id") && none.contains("servers or"),
            "{none}"
        );
        let both = faults(
            r#"{"id": "a", "servers": ["n"], "kubernetes_lease": "A/b", "bucket": "a.b", "lease_ms": 9}"#,
        );
        for key in [
            "servers or",
            "standby.servers",
            "kubernetes_lease:",
            "bucket",
            "lease_ms",
        ] {
            assert!(both.contains(key), "{key}: {both}");
        }
    }
}
