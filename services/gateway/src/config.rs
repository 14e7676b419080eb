//! Every limit and every key of the gateway, with its default.

use std::collections::BTreeSet;
use std::net::IpAddr;

use ipnet::IpNet;
use refrain_service_kit::config::Validate;
use refrain_service_kit::http::AddressLimit;
use serde::Deserialize;

/// The gateway's section of the configuration.
#[derive(Clone, Debug, PartialEq, Deserialize, schemars::JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct GatewayConfig {
    /// Address of the HTTP listener, such as `127.0.0.1:8080`; port 0 takes a free one.
    pub listen: String,
    /// Threads that serve requests.
    pub threads: usize,
    /// Connections at once, of all callers; less where the process may not open twice as many files. Past it one that
    /// is idle gives way, and if none is: 503.
    pub connections_max: usize,
    /// Connections at once of one address, or of one network of IPv6. Past it one that is idle gives way, and if none
    /// is: 429.
    pub address_connections_max: usize,
    /// Addresses and networks, such as `10.0.0.7` and `10.1.0.0/16`, that this does not hold for: proxies.
    pub proxies: Vec<String>,
    /// API keys. Without any, `anonymous_tenant` must be set.
    pub keys: Vec<KeyConfig>,
    /// Tenant of callers without a key; if no keys are configured, of all callers, whatever key they send.
    pub anonymous_tenant: Option<String>,
    /// The models offered.
    pub models: Vec<ModelConfig>,
    /// Largest request body. Past it: 413.
    pub body_bytes_max: usize,
    /// Bytes of bodies that are parsed and tokenized at once, of those that are done on threads of their own (from
    /// 32 KiB on). A single larger one runs alone. Past it: they wait.
    pub tokenizing_bytes_max: usize,
    /// Bytes of bodies that wait for that, and as many of those that are on their way. A tenant may have half of
    /// either. Past it: 429.
    pub tokenizing_waiting_bytes_max: usize,
    /// How long a request's body may take to arrive. Past it: 408.
    pub body_ms_max: u64,
    /// Requests in flight, all tenants together; one of several choices counts as so many. Past it: 429. As many
    /// bodies may be on their way besides.
    pub requests_in_flight_max: usize,
    /// Requests in flight of one tenant, counted likewise. Past it: 429, for that tenant only; but one request alone
    /// may have as many choices as it may. As many of its bodies may be on their way besides; past it, the oldest one
    /// gives way.
    pub tenant_requests_in_flight_max: usize,
    /// Choices (prompts times `n`) of one request. Past it: 400.
    pub choices_max: u32,
    /// Chunk size of requests with a `group`, tokens; 0: one chunk.
    pub rollout_chunk_tokens: u32,
    /// Chunk size of all others, tokens; 0: one chunk.
    pub chunk_tokens: u32,
    /// Failures in a row, without a token between them, after which a request gives up. Before its first token, a worker's
    /// attempts at its engine are among them.
    pub failures_max: u32,
    /// Retries that all requests together may make, per chunk that is begun; 100 at most. One that continues an output is
    /// none. Past it: the error that would have been retried.
    pub retry_share: f64,
    /// Retries that they may make beside those, per second; 1e6 at most.
    pub retries_per_s_min: f64,
    /// Pause after the first failure; it doubles with each, up to two seconds.
    pub retry_backoff_ms: u64,
    /// A chunk of which nothing comes for this long is given up though its worker lives: an engine takes long over a long
    /// prompt. A worker that gives no sign of life is left after its lease's time (`scheduler.lease_ttl_ms`).
    pub worker_idle_ms_max: u64,
    /// How long a request waits for a scheduler that cannot be reached, from when that is noticed. Past it: 503. A call that
    /// is under way by then may take four seconds more.
    pub scheduler_wait_ms: u64,
    /// Longest life of a request, from its head to its last token. Past it: 504. One whose answer nobody reads ends two
    /// seconds later at most.
    pub request_ms_max: u64,
    /// How long a streaming answer waits for its first event before it sends its head, so that early errors
    /// still have a status of their own.
    pub stream_head_wait_ms: u64,
    /// Comments that keep an idle stream alive are this far apart.
    pub stream_keep_alive_ms: u64,
    /// Events of one stream that wait for a slow reader; past it the worker's stream is read no further.
    pub stream_events_max: usize,
    /// How often the scheduler is asked which models are served.
    pub models_poll_ms: u64,
}

/// Above this a share of retries holds nothing back.
const RETRY_SHARE_MAX: f64 = 100.0;
/// Above this retries per second hold nothing back.
const RETRIES_PER_S_MAX: f64 = 1e6;

/// One API key, in clear or as a hash.
#[derive(Clone, Default, PartialEq, Eq, Deserialize, schemars::JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct KeyConfig {
    /// The key itself.
    pub key: Option<String>,
    /// Hex SHA-256 of it: for files that others may read.
    pub key_sha256: Option<String>,
    /// Whose it is.
    pub tenant: String,
}

impl std::fmt::Debug for KeyConfig {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("KeyConfig")
            .field("tenant", &self.tenant)
            .finish_non_exhaustive()
    }
}

/// One model.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize, schemars::JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct ModelConfig {
    /// Public name; workers serve it under the same.
    pub id: String,
    /// Where its tokenizer and template are: a folder, or `builtin:` and a name.
    pub files: String,
    /// Shown in the list of models.
    pub owned_by: String,
    /// Output limit of chat requests that give none; otherwise what the context leaves.
    pub default_max_tokens: Option<u32>,
    /// Longest text, tokens; otherwise what `config.json` and the workers say.
    pub max_context: Option<u32>,
    /// Its engine speaks text only (`worker.engine.kind = "openai"`), so what it says is kept apart from what engines say
    /// in token ids.
    pub text_only: bool,
    /// Ids that end an output, besides those that the model's files name.
    pub stop_token_ids: Vec<u32>,
    /// Tenants that may use it; empty: all.
    pub tenants: Vec<String>,
}

impl Default for ModelConfig {
    fn default() -> Self {
        ModelConfig {
            id: String::new(),
            files: String::new(),
            owned_by: "refrain".into(),
            default_max_tokens: None,
            max_context: None,
            text_only: false,
            stop_token_ids: Vec::new(),
            tenants: Vec::new(),
        }
    }
}

impl Default for GatewayConfig {
    fn default() -> Self {
        GatewayConfig {
            listen: "127.0.0.1:8080".into(),
            threads: 2,
            connections_max: 16_384,
            address_connections_max: 1_024,
            proxies: vec!["127.0.0.0/8".into(), "::1".into()],
            keys: Vec::new(),
            anonymous_tenant: None,
            models: Vec::new(),
            body_bytes_max: 8 << 20,
            tokenizing_bytes_max: 8 << 20,
            tokenizing_waiting_bytes_max: 64 << 20,
            body_ms_max: 60_000,
            requests_in_flight_max: 4_096,
            tenant_requests_in_flight_max: 512,
            choices_max: 128,
            rollout_chunk_tokens: 2_048,
            chunk_tokens: 0,
            failures_max: 5,
            retry_share: 0.2,
            retries_per_s_min: 10.0,
            retry_backoff_ms: 50,
            worker_idle_ms_max: 600_000,
            scheduler_wait_ms: 10_000,
            request_ms_max: 3_600_000,
            stream_head_wait_ms: 10_000,
            stream_keep_alive_ms: 15_000,
            stream_events_max: 64,
            models_poll_ms: 1_000,
        }
    }
}

fn network(text: &str) -> Option<IpNet> {
    let address = text.parse::<IpAddr>().map(IpNet::from);
    text.parse().or(address).ok()
}

impl GatewayConfig {
    /// How many connections an address may hold.
    pub(crate) fn address_limit(&self) -> AddressLimit {
        AddressLimit {
            connections_max: Some(self.address_connections_max),
            exempt: self
                .proxies
                .iter()
                .filter_map(|proxy| network(proxy))
                .collect(),
        }
    }
}

impl Validate for GatewayConfig {
    fn faults(&self) -> Vec<String> {
        let mut faults = Vec::new();
        let mut require = |holds: bool, fault: &str| {
            if !holds {
                faults.push(fault.to_owned());
            }
        };
        require(
            self.listen.parse::<std::net::SocketAddr>().is_ok(),
            "listen: an address and a port, such as 127.0.0.1:8080",
        );
        require(
            !self.keys.is_empty() || self.anonymous_tenant.is_some(),
            "keys: at least one, or set anonymous_tenant to serve callers without",
        );
        require(
            self.anonymous_tenant.as_deref() != Some(""),
            "anonymous_tenant: a name, or leave it out",
        );
        require(!self.models.is_empty(), "models: at least one");
        for (name, value) in [
            ("threads", self.threads),
            ("connections_max", self.connections_max),
            ("address_connections_max", self.address_connections_max),
            ("requests_in_flight_max", self.requests_in_flight_max),
            (
                "tenant_requests_in_flight_max",
                self.tenant_requests_in_flight_max,
            ),
            ("choices_max", self.choices_max as usize),
            ("failures_max", self.failures_max as usize),
            ("stream_events_max", self.stream_events_max),
            ("body_bytes_max", self.body_bytes_max),
            ("tokenizing_bytes_max", self.tokenizing_bytes_max),
        ] {
            require(value > 0, &format!("{name}: at least 1"));
        }
        for (name, value) in [
            ("worker_idle_ms_max", self.worker_idle_ms_max),
            ("request_ms_max", self.request_ms_max),
            ("body_ms_max", self.body_ms_max),
            ("stream_keep_alive_ms", self.stream_keep_alive_ms),
            ("models_poll_ms", self.models_poll_ms),
        ] {
            require(value >= 10, &format!("{name}: at least 10"));
        }
        for (name, value, most) in [
            ("retry_share", self.retry_share, RETRY_SHARE_MAX),
            (
                "retries_per_s_min",
                self.retries_per_s_min,
                RETRIES_PER_S_MAX,
            ),
        ] {
            require(
                (0.0..=most).contains(&value),
                &format!("{name}: between 0 and {most}"),
            );
        }
        require(
            self.tokenizing_waiting_bytes_max >= self.body_bytes_max,
            "tokenizing_waiting_bytes_max: at least body_bytes_max, so that any request can wait",
        );
        for (place, proxy) in self.proxies.iter().enumerate() {
            require(
                network(proxy).is_some(),
                &format!(
                    "proxies[{place}]: an address or a network, such as 10.0.0.7 or 10.1.0.0/16"
                ),
            );
        }
        for (place, key) in self.keys.iter().enumerate() {
            require(
                !key.tenant.is_empty(),
                &format!("keys[{place}].tenant: a name"),
            );
            let is_hash = |text: &String| hex::decode(text).is_ok_and(|bytes| bytes.len() == 32);
            match (&key.key, &key.key_sha256) {
                (Some(key), None) => {
                    require(!key.is_empty(), &format!("keys[{place}].key: is empty"))
                }
                (None, Some(hash)) => {
                    require(
                        is_hash(hash),
                        &format!("keys[{place}].key_sha256: 64 hex digits"),
                    );
                }
                _ => require(false, &format!("keys[{place}]: either key or key_sha256")),
            }
        }
        let mut ids = BTreeSet::new();
        for (place, model) in self.models.iter().enumerate() {
            require(!model.id.is_empty(), &format!("models[{place}].id: a name"));
            require(
                !model.files.is_empty(),
                &format!("models[{place}].files: a folder, or builtin:name"),
            );
            require(
                ids.insert(&model.id),
                &format!("models[{place}].id: {} is there twice", model.id),
            );
        }
        faults
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn faults_name_their_keys() {
        let config = GatewayConfig {
            listen: "nowhere".into(),
            threads: 0,
            tokenizing_bytes_max: 0,
            tokenizing_waiting_bytes_max: 1000,
            proxies: vec!["10.0.0.7".into(), "10.1.0.0/16".into(), "nobody".into()],
            keys: vec![KeyConfig {
                key_sha256: Some("ab".into()),
                ..KeyConfig::default()
            }],
            models: vec![
                ModelConfig {
                    id: "m".into(),
                    ..ModelConfig::default()
                };
                2
            ],
            ..GatewayConfig::default()
        };
        let faults = config.faults().join("\n");
        for part in [
            "listen",
            "threads",
            "tokenizing_bytes_max",
            "tokenizing_waiting_bytes_max",
            "proxies[2]",
            "keys[0].tenant",
            "keys[0].key_sha256",
            "models[0].files",
            "m is there twice",
        ] {
            assert!(faults.contains(part), "{part} is missing in:\n{faults}");
        }
        assert!(
            GatewayConfig::default()
                .faults()
                .join("\n")
                .contains("anonymous_tenant")
        );
    }

    #[test]
    fn a_budget_of_retries_is_a_number_that_can_be_reckoned_with() {
        let told = |share, per_s| {
            let config = GatewayConfig {
                retry_share: share,
                retries_per_s_min: per_s,
                ..GatewayConfig::default()
            };
            let faults = config.faults().join("\n");
            ["retry_share", "retries_per_s_min"].map(|name| faults.contains(name))
        };
        assert_eq!(told(0.0, 0.0), [false, false]);
        assert_eq!(told(100.0, 1e6), [false, false]);
        assert_eq!(told(1e308, 1e308), [true, true]);
        assert_eq!(told(-0.1, f64::NAN), [true, true]);
    }

    #[test]
    fn keys_do_not_show_in_debug_output() {
        let key = KeyConfig {
            key: Some("sk-secret".into()),
            key_sha256: None,
            tenant: "acme".into(),
        };
        assert!(!format!("{key:?}").contains("secret"));
    }
}
