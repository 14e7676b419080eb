//! The section `gateway.trainer` of the configuration.

use std::net::SocketAddr;
use std::path::PathBuf;

use refrain_protocol::TenantName;
use refrain_service_kit::config::is_http_url;
use refrain_service_kit::http::ListenerConfig;
use serde::Deserialize;

/// The listener for trainers, which speaks the native interfaces of SGLang and vLLM.
#[derive(Clone, Debug, PartialEq, Deserialize, schemars::JsonSchema)]
#[serde(default)]
pub struct TrainerConfig {
    /// Address of the listener, such as `127.0.0.1:8091`. Without it there is none. Its callers need no key, so
    /// another address than one of this machine needs `allows_other_machines` as well.
    pub listen: Option<SocketAddr>,
    /// Whether other machines may reach the listener. Whoever reaches it can abort rollouts, pause engines and
    /// replace weights, so let the network keep strangers away.
    pub allows_other_machines: bool,
    /// The certificate and the time limits of the listener.
    pub http: ListenerConfig,
    /// The tenant that all its requests belong to. Its limits, isolation and usage hold.
    #[schemars(with = "Option<String>")]
    pub tenant: Option<TenantName>,
    /// The model that is trained. It may be left out where the gateway offers one model.
    pub model: Option<String>,
    /// Base URLs of the worker processes with `worker.adoption`, to which engines go that register here. Without any,
    /// no engine can register. For `refrain up` it is the process itself.
    pub adopters: Vec<String>,
    /// Most connections at once. Each request that waits or runs holds one.
    pub connections_max: usize,
    /// Most rollouts that are asked of the scheduler at once, counted by their choices. Further ones are held back,
    /// in order of arrival. Keep it below `scheduler.tenant_rollout_queue_max`.
    pub in_flight_max: usize,
    /// Most requests that are held back. Further ones get a 429.
    pub held_max: usize,
    /// Bytes of the bodies of held requests. Further bodies are read when there is room.
    pub held_bytes_max: usize,
    /// The sessions of agents whose tokens are kept for the trainer.
    pub sessions: SessionsConfig,
}

/// The sessions of agents whose tokens are kept for a trainer.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize, schemars::JsonSchema)]
#[serde(default)]
pub struct SessionsConfig {
    /// Folder of their turns, which outlive the process. Without it they are in memory only. `refrain up` keeps them
    /// beside its drafts.
    pub folder: Option<PathBuf>,
    /// Most sessions. A turn of a further one gets a 429.
    pub sessions_max: usize,
    /// Most turns of a session. A further one gets a 429.
    pub turns_max: usize,
    /// Bytes of memory that the turns of all sessions take. A further turn gets a 429.
    pub bytes_max: u64,
    /// Time after its last use in which a session is erased, milliseconds.
    pub keep_ms: u64,
}

impl Default for SessionsConfig {
    fn default() -> Self {
        SessionsConfig {
            folder: None,
            sessions_max: 65_536,
            turns_max: 4_096,
            bytes_max: 1 << 30,
            keep_ms: 86_400_000,
        }
    }
}

impl Default for TrainerConfig {
    fn default() -> Self {
        TrainerConfig {
            listen: None,
            allows_other_machines: false,
            http: ListenerConfig::default(),
            tenant: None,
            model: None,
            adopters: Vec::new(),
            connections_max: 65_536,
            in_flight_max: 8_192,
            held_max: 65_536,
            held_bytes_max: 1 << 30,
            sessions: SessionsConfig::default(),
        }
    }
}

impl TrainerConfig {
    /// The faults of the values, one sentence each. `models` are those that the gateway offers.
    pub(crate) fn faults<'a>(&self, models: impl Iterator<Item = &'a str>) -> Vec<String> {
        let Some(listen) = self.listen else {
            return Vec::new();
        };
        let models: Vec<&str> = models.collect();
        let is_offered = |model: &String| models.contains(&model.as_str());
        let rules = [
            (
                !listen.ip().is_loopback() && !self.allows_other_machines,
                "listen: other machines could reach this address, and its callers need no key; set \
                 allows_other_machines = true if only trainers can, or listen on 127.0.0.1",
            ),
            (
                self.tenant.is_none(),
                "tenant: name the tenant that the rollouts belong to",
            ),
            (
                self.model.is_none() && models.len() > 1,
                "model: name the model that is trained, since the gateway offers several",
            ),
            (
                self.model.as_ref().is_some_and(|model| !is_offered(model)),
                "model: must be the id of one of gateway.models",
            ),
            (
                !self.adopters.iter().all(|url| is_http_url(url)),
                "adopters: must be http:// or https:// URLs",
            ),
            (
                self.connections_max == 0,
                "connections_max: must be at least 1",
            ),
            (self.in_flight_max == 0, "in_flight_max: must be at least 1"),
            (self.held_max == 0, "held_max: must be at least 1"),
            (
                self.held_bytes_max == 0,
                "held_bytes_max: must be at least 1",
            ),
            (
                self.sessions.keep_ms == 0,
                "sessions.keep_ms: must be at least 1",
            ),
        ];
        let broken = rules.into_iter().filter(|(is_broken, _)| *is_broken);
        let faults = broken.map(|(_, fault)| format!("trainer.{fault}"));
        faults.chain(self.http.faults("trainer.http")).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn faults(change: impl FnOnce(&mut TrainerConfig), models: &[&str]) -> String {
        let mut config = TrainerConfig {
            listen: Some(([127, 0, 0, 1], 0).into()),
            tenant: Some("lab".parse().unwrap()),
            ..TrainerConfig::default()
        };
        change(&mut config);
        config.faults(models.iter().copied()).join("\n")
    }

    #[test]
    fn a_listener_without_keys_is_for_this_machine_unless_the_configuration_says_otherwise() {
        assert_eq!(faults(|_| {}, &["m"]), "");
        let open = |config: &mut TrainerConfig| config.listen = Some(([0, 0, 0, 0], 0).into());
        assert!(faults(open, &["m"]).contains("allows_other_machines"));
        let meant = |config: &mut TrainerConfig| {
            open(config);
            config.allows_other_machines = true;
        };
        assert_eq!(faults(meant, &["m"]), "");
    }

    #[test]
    fn faults_name_their_keys_and_there_are_none_without_a_listener() {
        let all = |config: &mut TrainerConfig| {
            config.tenant = None;
            config.model = Some("x".into());
            config.adopters = vec!["worker:8202".into()];
            config.connections_max = 0;
            config.in_flight_max = 0;
            config.held_max = 0;
            config.held_bytes_max = 0;
            config.sessions.keep_ms = 0;
            config.http.head_ms_max = 0;
        };
        let found = faults(all, &["m"]);
        for key in [
            "trainer.tenant",
            "trainer.model",
            "trainer.adopters",
            "trainer.connections_max",
            "trainer.in_flight_max",
            "trainer.held_max",
            "trainer.held_bytes_max",
            "trainer.sessions.keep_ms",
            "trainer.http.head_ms_max",
        ] {
            assert!(found.contains(key), "{key} is missing in:\n{found}");
        }
        assert!(faults(|_| {}, &["m", "n"]).contains("trainer.model"));
        assert!(
            TrainerConfig::default()
                .faults(["m"].into_iter())
                .is_empty()
        );
    }
}
