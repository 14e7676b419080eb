//! The configuration of the gateway: what an operator sets, and the fixed values beside it.
//!
//! A section of the file is one struct, so the keys of accounts, operators and the listener for trainers are here as
//! well.

pub(crate) mod passthrough;
mod trainer;

use std::collections::BTreeSet;
use std::net::{IpAddr, SocketAddr};
use std::path::PathBuf;
use std::time::Duration;

use ipnet::IpNet;
use refrain_accounts::tenants::LimitsRedisConfig;
use refrain_accounts::tenants::jwt::JwtConfig;
use refrain_accounts::tenants::key::KeyConfig;
use refrain_accounts::{AccountsConfig, OperatorConfig, operator_faults};
use refrain_output_grammar::GrammarLimits;
use refrain_protocol::TenantName;
use refrain_protocol::names::name_fault;
use refrain_service_kit::config::Validate;
use refrain_service_kit::http::{AddressLimit, ListenerConfig, PageGuard, is_host_name};
use serde::Deserialize;

use crate::models::ModelConfig;

pub use passthrough::PassthroughConfig;
pub use trainer::{SessionsConfig, TrainerConfig};

/// The gateway's section of the configuration.
#[derive(Clone, Debug, PartialEq, Deserialize, schemars::JsonSchema)]
#[serde(default)]
pub struct GatewayConfig {
    /// Address of the HTTP listener, such as `127.0.0.1:8080`. Port 0 takes a free one.
    pub listen: String,
    /// The certificate and the time limits of that listener.
    pub http: ListenerConfig,
    /// Address of a second listener, for operators only, such as `127.0.0.1:8090`. It has `/metrics`, `/healthz` and
    /// `/readyz`. With it, the first listener has no `/metrics`, which name the tenants.
    pub operations_listen: Option<SocketAddr>,
    /// Whether the second listener has the console, a page for operators at `/console`. `refrain up` has it unless
    /// this is false.
    pub console: Option<bool>,
    /// Whether the second listener is only a convenience of `refrain up`: it takes any other port where its own is
    /// taken.
    #[serde(skip)]
    pub is_trial: bool,
    /// Whether the first listener has `/metrics` beside the second one. `refrain up` sets it where only this machine
    /// reaches both, and the keys of callers are well known.
    #[serde(skip)]
    pub shows_metrics: bool,
    /// The certificate and the time limits of the second listener.
    pub operations_http: ListenerConfig,
    /// Names by which callers reach the second listener and that for trainers, such as `refrain.example.com`. IP
    /// addresses and `localhost` need no entry. Calls to other names are refused, since web pages can make them.
    pub allowed_hosts: Vec<String>,
    /// Threads that serve requests.
    pub threads: usize,
    /// Most connections of all callers at once; fewer if the process may not open twice as many files. At the limit
    /// an idle connection is closed for a new one. If none is idle, the new one gets a 503.
    pub connections_max: usize,
    /// Most connections of one address, or of one IPv6 network of 64 bits. At the limit an idle connection is closed
    /// for a new one. If none is idle, the new one gets a 429.
    pub address_connections_max: usize,
    /// Addresses and networks without that limit, such as `10.0.0.7` and `10.1.0.0/16`: proxies, since many callers
    /// share one.
    pub proxies: Vec<String>,
    /// Origins whose web pages may call the API from a browser, such as `https://chat.example.com`, or `*` for all.
    /// Empty: browsers let no page of another origin read an answer.
    pub cors_origins: Vec<String>,
    /// API keys. Without any, `anonymous_tenant` must be set.
    pub keys: Vec<KeyConfig>,
    /// Tenant of callers without a key. If no keys are configured, it is the tenant of all callers.
    #[schemars(with = "Option<String>")]
    pub anonymous_tenant: Option<TenantName>,
    /// File of tenants, with their keys and limits, as `refrain tenants` writes it. The gateway follows its changes.
    pub tenants_file: Option<PathBuf>,
    /// Whether the draft store keeps the tenants, in place of a file. Operators change them by the admin API.
    pub tenants_in_store: bool,
    /// File in which the gateway keeps what the draft store said last, so that it can start while the store is away.
    pub tenants_cache_file: Option<PathBuf>,
    /// Callers with a token (JWT) of an identity provider, in place of an API key.
    pub jwt: Option<JwtConfig>,
    /// Operators, who may call `/admin` on the operations listener. Without any there is no such API.
    pub operators: Vec<OperatorConfig>,
    /// Credential of the role `operator`, by which the gateway carries out what its operators order at workers and at
    /// the draft store. A mesh with a secret needs none.
    pub operator_credential_file: Option<PathBuf>,
    /// File to which each administrative act is appended before it is carried out. Operators need one.
    pub audit_file: Option<PathBuf>,
    /// Directory of the usage journal: tokens of tenants, keys and models, for bills and for budgets per day and
    /// month. Each gateway needs one of its own. Without it usage is not kept, and budgets count from the gateway's
    /// start.
    pub usage_dir: Option<PathBuf>,
    /// The share of each limit per minute of that file that this gateway grants by itself (above 0, at most 1). With
    /// two gateways behind one address it should be 0.5. Redis counts whole limits while it answers.
    pub limit_share: f64,
    /// The Redis in which several gateways count these limits together. Without it, each gateway counts by itself.
    pub limits_redis: Option<LimitsRedisConfig>,
    /// The models on offer.
    pub models: Vec<ModelConfig>,
    /// Servers for routes that the gateway does not have itself.
    pub passthrough: Vec<PassthroughConfig>,
    /// Largest body of a request, bytes. A larger one gets a 413.
    pub body_bytes_max: usize,
    /// Most interactive requests in flight of all tenants together; one of n choices counts n times. Further ones get
    /// a 429. As many bodies may be arriving besides.
    pub requests_in_flight_max: usize,
    /// Most interactive requests in flight of one tenant, counted the same way. Further ones of that tenant get a
    /// 429. A tenant's only request may have more choices. As many of its bodies may be arriving besides. One more
    /// cuts off the oldest of them.
    pub tenant_requests_in_flight_max: usize,
    /// Most rollouts in flight of all tenants together, counted by their choices. Further ones get a 429.
    pub rollouts_in_flight_max: usize,
    /// Most rollouts in flight of one tenant, counted the same way. Further ones of that tenant get a 429.
    pub tenant_rollouts_in_flight_max: usize,
    /// Milliseconds from the head of an interactive request to its last token. A request that takes longer gets a
    /// 504. If nobody reads the answer, the request ends up to two seconds later.
    pub request_ms_max: u64,
    /// The same for rollouts. 0 means no limit.
    pub rollout_ms_max: u64,
    /// Milliseconds that an interactive request waits for a scheduler that cannot be reached, such as during its
    /// restart. It is then refused with 503. A call that is in flight then may take four seconds more.
    pub scheduler_wait_ms: u64,
    /// Milliseconds that a rollout waits for a scheduler that cannot be reached, or for a worker that can take it. It
    /// is then refused with 503.
    pub rollout_scheduler_wait_ms: u64,
    /// Requests with equal prompts that arrive within this time, milliseconds, are samples of one group: they share
    /// drafts. It counts from the first of them. 0 turns this off; the choices of one request are a group all the
    /// same.
    pub implicit_group_window_ms: u64,
    /// Most prompts that are remembered for that. The least recently used ones are forgotten.
    pub implicit_groups_max: usize,
    /// Retries of all requests together, per chunk that begins (0 to 100), beside ten per second. Further
    /// requests fail instead of being retried. To continue an output after a token is not a retry.
    pub retry_share: f64,
    /// Forms of outputs that are compiled at once, to be refused before a worker is asked. Each takes a core for some
    /// milliseconds, and at worst for seconds. A tenant may have half of them.
    pub forms_compiling_max: usize,
    /// Forms that wait to be compiled. Further ones get a 429. A tenant may have half of them.
    pub forms_waiting_max: usize,
    /// Largest form of an output, bytes of its schemas and texts. A larger one gets a 400. The project's own engine
    /// takes at most 262,144, which is the default.
    pub form_bytes_max: usize,
    /// Bytes of responses that `/v1/responses` keeps in memory, with their conversations, so that requests can
    /// continue them by `previous_response_id`. A tenant may have half, and at most 1,000 responses; each lives for
    /// an hour. 0 stores nothing. Gateways do not share them, so with several ones clients have to come back to the
    /// same one.
    pub responses_stored_bytes_max: usize,
    /// Whether a request with a field that nobody knows is refused. Otherwise the field is ignored, and its name is
    /// logged once. Fields that would change the output and are not supported are refused in any case.
    pub strict_fields: bool,
    /// The listener for trainers.
    pub trainer: TrainerConfig,
    /// Values that only tests change.
    #[serde(skip)]
    pub tuning: GatewayTuning,
}

/// Above this share the budget of retries limits nothing.
const RETRY_SHARE_MAX: f64 = 100.0;

/// Values that no operator needs to set. Tests change them.
#[derive(Clone, Debug, PartialEq)]
pub struct GatewayTuning {
    /// Bytes of large bodies that are parsed and tokenized at once. A larger body is processed alone. One body of the
    /// largest default size fits, and memory for its JSON and tokens is several times that.
    pub tokenizing_bytes_max: usize,
    /// Bytes of bodies that wait to be tokenized, and bytes of bodies that are arriving. A tenant may have half of
    /// either. At least one body of the largest size always fits.
    pub tokenizing_waiting_bytes_max: usize,
    /// Most choices (prompts times `n`) of one request: OpenAI's limit on `n`.
    pub choices_max: u32,
    /// Default of `chunk_tokens` of rollouts; 0 leaves the length of a chunk to the scheduler alone.
    pub rollout_chunk_tokens: u32,
    /// The same for interactive requests.
    pub chunk_tokens: u32,
    /// Failures in a row, without a token in between, that end a request. Before its first token, the attempts of its
    /// workers at their engines count as well.
    pub failures_max: u32,
    /// Retries of all requests together that are allowed per second, whatever their share: a mesh with few requests
    /// retries too.
    pub retries_per_s_min: f64,
    /// First pause after a failure, about. It doubles with each failure, up to two seconds.
    pub retry_backoff: Duration,
    /// How long a chunk may be silent although its worker lives. An engine takes long over a long prompt, so this is
    /// only the last resort behind `worker.engine.first_token_ms_max`.
    pub worker_silence_max: Duration,
    /// How long a streaming response waits for its first event before it sends its head, so that early errors still
    /// have their own status.
    pub stream_head_wait: Duration,
    /// Time between two comments that keep an idle stream open, shorter than the idle timeout of common proxies (60
    /// s).
    pub stream_keep_alive: Duration,
    /// Events of one request that wait for a slow reader. Past it the worker's stream is not read further.
    pub stream_events_max: usize,
    /// Most stored responses of one tenant.
    pub responses_tenant_max: usize,
    /// Time after which a stored response is forgotten.
    pub responses_age_max: Duration,
    /// Time between two questions to the scheduler which models are served, about.
    pub models_poll: Duration,
    /// How long a gateway with budgets is not ready after its start while the draft store does not tell what other
    /// gateways have counted. Then it serves those without budgets.
    pub usage_wait: Duration,
}

impl Default for GatewayTuning {
    fn default() -> Self {
        GatewayTuning {
            tokenizing_bytes_max: 8 << 20,
            tokenizing_waiting_bytes_max: 64 << 20,
            choices_max: 128,
            rollout_chunk_tokens: 0,
            chunk_tokens: 0,
            failures_max: 5,
            retries_per_s_min: 10.0,
            retry_backoff: Duration::from_millis(50),
            worker_silence_max: Duration::from_secs(600),
            stream_head_wait: Duration::from_secs(10),
            stream_keep_alive: Duration::from_secs(15),
            stream_events_max: 64,
            responses_tenant_max: 1_000,
            responses_age_max: Duration::from_secs(3_600),
            models_poll: Duration::from_secs(1),
            usage_wait: Duration::from_secs(10),
        }
    }
}

impl Default for GatewayConfig {
    fn default() -> Self {
        GatewayConfig {
            listen: "127.0.0.1:8080".into(),
            http: ListenerConfig::default(),
            operations_listen: None,
            console: None,
            is_trial: false,
            shows_metrics: false,
            operations_http: ListenerConfig::default(),
            allowed_hosts: Vec::new(),
            threads: 2,
            connections_max: 16_384,
            address_connections_max: 1_024,
            proxies: vec!["127.0.0.0/8".into(), "::1".into()],
            cors_origins: Vec::new(),
            keys: Vec::new(),
            anonymous_tenant: None,
            tenants_file: None,
            tenants_in_store: false,
            tenants_cache_file: None,
            jwt: None,
            operators: Vec::new(),
            operator_credential_file: None,
            audit_file: None,
            usage_dir: None,
            limit_share: 1.0,
            limits_redis: None,
            models: Vec::new(),
            passthrough: Vec::new(),
            body_bytes_max: 8 << 20,
            requests_in_flight_max: 4_096,
            tenant_requests_in_flight_max: 512,
            rollouts_in_flight_max: 65_536,
            tenant_rollouts_in_flight_max: 32_768,
            request_ms_max: 3_600_000,
            rollout_ms_max: 7 * 24 * 3_600_000,
            scheduler_wait_ms: 10_000,
            rollout_scheduler_wait_ms: 600_000,
            implicit_group_window_ms: 60_000,
            implicit_groups_max: 16_384,
            retry_share: 0.2,
            forms_compiling_max: 2,
            forms_waiting_max: 256,
            form_bytes_max: GrammarLimits::default().form_bytes_max,
            responses_stored_bytes_max: 64 << 20,
            strict_fields: false,
            trainer: TrainerConfig::default(),
            tuning: GatewayTuning::default(),
        }
    }
}

fn network(text: &str) -> Option<IpNet> {
    let address = text.parse::<IpAddr>().map(IpNet::from);
    text.parse().or(address).ok()
}

/// Whether a text is an origin as browsers write it, or `*`.
fn is_origin(text: &str) -> bool {
    let is_host = |host: &str| {
        let is_part = |byte: u8| byte.is_ascii_alphanumeric() || b".-:[]".contains(&byte);
        !host.is_empty() && host.bytes().all(is_part)
    };
    text == "*"
        || text
            .split_once("://")
            .is_some_and(|(scheme, host)| !scheme.is_empty() && is_host(host))
}

impl GatewayConfig {
    /// The part that is about accounts.
    pub(crate) fn accounts(&self) -> AccountsConfig {
        AccountsConfig {
            keys: self.keys.clone(),
            anonymous_tenant: self.anonymous_tenant.clone(),
            tenants_file: self.tenants_file.clone(),
            tenants_in_store: self.tenants_in_store,
            tenants_cache_file: self.tenants_cache_file.clone(),
            jwt: self.jwt.clone(),
            usage_dir: self.usage_dir.clone(),
            limit_share: self.limit_share,
            limits_redis: self.limits_redis.clone(),
        }
    }

    /// The faults of the keys about operators.
    fn operators_faults(&self) -> Vec<String> {
        let has_operators = !self.operators.is_empty();
        let rules = [
            (
                self.console == Some(true) && self.operations_listen.is_none(),
                "console: set operations_listen as well, since the console is on that listener",
            ),
            (
                has_operators && self.operations_listen.is_none(),
                "operators: set operations_listen as well, since the admin API is on that listener",
            ),
            (
                has_operators && self.audit_file.is_none(),
                "operators: set audit_file as well, since each act is logged there",
            ),
        ];
        let broken = rules.into_iter().filter(|(is_broken, _)| *is_broken);
        let faults = broken.map(|(_, fault)| fault.to_owned());
        faults.chain(operator_faults(&self.operators)).collect()
    }

    /// The guard of the listeners that no web page of others may call.
    pub fn page_guard(&self) -> PageGuard {
        PageGuard::new(&self.allowed_hosts)
    }

    /// The limit on connections of one address.
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
            self.listen.parse::<SocketAddr>().is_ok(),
            "listen: must be an address and a port, such as 127.0.0.1:8080",
        );
        require(!self.models.is_empty(), "models: add at least one");
        for (name, value) in [
            ("threads", self.threads),
            ("connections_max", self.connections_max),
            ("address_connections_max", self.address_connections_max),
            ("requests_in_flight_max", self.requests_in_flight_max),
            (
                "tenant_requests_in_flight_max",
                self.tenant_requests_in_flight_max,
            ),
            ("rollouts_in_flight_max", self.rollouts_in_flight_max),
            (
                "tenant_rollouts_in_flight_max",
                self.tenant_rollouts_in_flight_max,
            ),
            ("implicit_groups_max", self.implicit_groups_max),
            ("body_bytes_max", self.body_bytes_max),
            ("forms_compiling_max", self.forms_compiling_max),
            ("forms_waiting_max", self.forms_waiting_max),
            ("form_bytes_max", self.form_bytes_max),
        ] {
            require(value > 0, &format!("{name}: must be at least 1"));
        }
        let form_bytes_most = GrammarLimits::default().form_bytes_max;
        require(
            self.form_bytes_max <= form_bytes_most,
            &format!(
                "form_bytes_max: must be at most {form_bytes_most}, which is the engine's limit"
            ),
        );
        require(
            self.request_ms_max >= 10,
            "request_ms_max: must be at least 10",
        );
        require(
            self.rollout_ms_max == 0 || self.rollout_ms_max >= 10,
            "rollout_ms_max: must be at least 10, or 0 for no limit",
        );
        require(
            (0.0..=RETRY_SHARE_MAX).contains(&self.retry_share),
            &format!("retry_share: must be between 0 and {RETRY_SHARE_MAX}"),
        );
        for (place, proxy) in self.proxies.iter().enumerate() {
            let rule = "must be an address or a network, such as 10.0.0.7 or 10.1.0.0/16";
            require(
                network(proxy).is_some(),
                &format!("proxies[{place}]: {rule}"),
            );
        }
        for (place, origin) in self.cors_origins.iter().enumerate() {
            require(
                is_origin(origin),
                &format!(
                    "cors_origins[{place}]: must be an origin without a path, such as https://chat.example.com, or *"
                ),
            );
        }
        for (place, host) in self.allowed_hosts.iter().enumerate() {
            require(
                is_host_name(host),
                &format!(
                    "allowed_hosts[{place}]: must be a name without a port, such as refrain.example.com"
                ),
            );
        }
        let mut ids = BTreeSet::new();
        let names: BTreeSet<_> = self.models.iter().map(|model| &model.id).collect();
        let mut aliases = BTreeSet::new();
        for (place, model) in self.models.iter().enumerate() {
            let ModelConfig {
                id, files, also, ..
            } = model;
            let at = format!("models[{place}]");
            let fault = name_fault(id);
            require(
                fault.is_none(),
                &format!("{at}.id: {}", fault.unwrap_or_default()),
            );
            let fault = format!("{at}.files: must be a folder, or builtin:name");
            require(!files.is_empty(), &fault);
            require(ids.insert(id), &format!("{at}.id: {id} is listed twice"));
            for alias in also {
                let fault = name_fault(&alias.replacen('*', "", 1)).filter(|_| alias != "*");
                let fault = fault.or_else(|| {
                    (names.contains(alias) || !aliases.insert(alias))
                        .then(|| "is a name of another model".to_owned())
                });
                let fault = fault.map(|fault| format!("{at}.also: {alias}: {fault}"));
                require(fault.is_none(), &fault.unwrap_or_default());
            }
        }
        faults.extend(self.accounts().faults());
        faults.extend(self.operators_faults());
        faults.extend(self.http.faults("http"));
        faults.extend(self.operations_http.faults("operations_http"));
        faults.extend(PassthroughConfig::faults(&self.passthrough));
        let models = self.models.iter().map(|model| model.id.as_str());
        faults.extend(self.trainer.faults(models));
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
            body_bytes_max: 0,
            forms_waiting_max: 0,
            form_bytes_max: 1 << 30,
            request_ms_max: 9,
            rollout_ms_max: 9,
            rollouts_in_flight_max: 0,
            implicit_groups_max: 0,
            proxies: vec!["10.0.0.7".into(), "10.1.0.0/16".into(), "nobody".into()],
            cors_origins: vec!["*".into(), "https://a.b:8".into(), "https://a.b/c".into()],
            allowed_hosts: vec!["a.example".into(), "a.example:8090".into()],
            keys: vec![
                KeyConfig {
                    key: None,
                    key_sha256: Some("ab".into()),
                    tenant: "acme".parse().unwrap(),
                };
                2
            ],
            models: ["m", "m", "m\u{1b}"]
                .map(|id| ModelConfig {
                    id: id.into(),
                    ..ModelConfig::default()
                })
                .into(),
            ..GatewayConfig::default()
        };
        let faults = config.faults().join("\n");
        for part in [
            "listen",
            "threads",
            "body_bytes_max",
            "forms_waiting_max",
            "form_bytes_max",
            "request_ms_max",
            "rollout_ms_max",
            "rollouts_in_flight_max",
            "implicit_groups_max",
            "proxies[2]",
            "cors_origins[2]",
            "allowed_hosts[1]",
            "keys[0].key_sha256",
            "models[0].files",
            "models[2].id",
            "m is listed twice",
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
    fn the_share_of_retries_has_a_range() {
        let is_refused = |retry_share| {
            let config = GatewayConfig {
                retry_share,
                ..GatewayConfig::default()
            };
            config.faults().join("\n").contains("retry_share")
        };
        assert!(!is_refused(0.0) && !is_refused(100.0));
        assert!(is_refused(1e308) && is_refused(-0.1) && is_refused(f64::NAN));
    }

    #[test]
    fn fixed_values_are_no_keys() {
        let schema = schemars::schema_for!(GatewayConfig);
        let keys = &schema.as_value()["properties"];
        assert!(keys["retry_share"].is_object());
        for key in ["tuning", "failures_max", "retries_per_s_min"] {
            assert!(keys[key].is_null(), "{key}");
        }
    }

    #[test]
    fn names_of_tenants_are_checked_where_they_come_in() {
        use serde_json::json;
        let mark = "acme\u{1f}key:1f";
        for faulty in [
            json!({"keys": [{"key": "a", "tenant": mark}]}),
            json!({"keys": [{"key": "a"}]}),
            json!({"anonymous_tenant": ""}),
            json!({"models": [{"tenants": ["none"]}]}),
            json!({"trainer": {"tenant": " lab"}}),
        ] {
            let error = serde_json::from_value::<GatewayConfig>(faulty).unwrap_err();
            assert!(error.to_string().contains("tenant"), "{error}");
        }
    }
}
