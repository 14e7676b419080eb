//! One configuration file for the whole mesh: each process reads the sections of its role, `refrain up` reads all.

mod up_defaults;

use std::ffi::OsString;
use std::net::SocketAddr;
use std::path::Path;
use std::time::Duration;

use refrain_accounts::tenants::key::KeyConfig;
use refrain_draft_store::DraftStoreConfig;
use refrain_gateway::{GatewayConfig, ModelConfig};
use refrain_reference_engine::{EngineConfig, SHIPPED_MODEL};
use refrain_rpc::HttpScheduler;
use refrain_scheduler::SchedulerConfig;
use refrain_service_kit::config::{EnvRule, SetKey, Validate, is_http_url, load, set_keys};
use refrain_service_kit::http::MeshClient;
use refrain_service_kit::mesh::MeshConfig;
use refrain_service_kit::telemetry::TelemetryConfig;
use refrain_worker::WorkerConfig;
use schemars::JsonSchema;
use serde::Deserialize;

use crate::role::Role;
use crate::up_engines::{UpEngine, engine_faults};

/// Environment variables such as `REFRAIN_WORKER__RUNNING_MAX=8`, and `REFRAIN_DRAIN_GRACE_MS`. Those that others
/// read are no settings.
const ENV_RULE: EnvRule = EnvRule {
    prefix: "REFRAIN_",
    top_level: &["DRAIN_GRACE_MS"],
    others: &[
        // Options of commands.
        "CONFIG",
        "ISSUER_KEY_FILE",
        "OPERATOR_CREDENTIAL_FILE",
        "OPERATOR_TOKEN",
        "ROLE",
        // The client inside an engine, which may run beside this process.
        "CLIENT_",
        // Scripts of this repository: the program that they run, and settings of its tests and of a local Grafana.
        "BINARY",
        "DASHBOARDS",
        "TEST_",
    ],
};

/// The whole file. Every section has defaults; unknown keys are refused.
#[derive(Clone, Debug, Deserialize, JsonSchema)]
#[serde(default)]
pub struct MeshFile {
    /// Logs and traces.
    pub telemetry: TelemetryConfig,
    /// The keys of the mesh; `refrain keys` prints fresh ones. `refrain up` makes its own if the section is missing.
    pub mesh: MeshConfig,
    /// Addresses of the other services.
    pub urls: Urls,
    /// The gateway.
    pub gateway: GatewayConfig,
    /// The scheduler.
    pub scheduler: SchedulerConfig,
    /// The worker.
    pub worker: WorkerConfig,
    /// The draft store.
    pub draft_store: DraftStoreConfig,
    /// The reference engine.
    pub engine: EngineConfig,
    /// Several engines of `refrain up`, in place of `engine`, `worker.engine` and `urls.engine`.
    pub engines: Vec<UpEngine>,
    /// How long a stopping process lets requests run before it cuts them off.
    pub drain_grace_ms: u64,
    /// Whether `refrain up` adds an operator although other machines reach the operations listener.
    #[serde(skip)]
    pub has_operator_for_others: bool,
}

impl Default for MeshFile {
    fn default() -> Self {
        MeshFile {
            telemetry: TelemetryConfig::default(),
            mesh: MeshConfig::default(),
            urls: Urls::default(),
            gateway: GatewayConfig::default(),
            scheduler: SchedulerConfig::default(),
            worker: WorkerConfig::default(),
            draft_store: DraftStoreConfig::default(),
            engine: EngineConfig::default(),
            engines: Vec::new(),
            drain_grace_ms: 30_000,
            has_operator_for_others: false,
        }
    }
}

/// Base URLs of services, such as `http://scheduler:8201`.
#[derive(Clone, Debug, Deserialize, JsonSchema)]
#[serde(default)]
pub struct Urls {
    /// The scheduler, for gateways and workers.
    pub scheduler: String,
    /// In place of `scheduler`: several schedulers, of which one leads; see `scheduler.standby`.
    pub schedulers: Vec<String>,
    /// The draft store, for workers and gateways.
    pub draft_store: String,
    /// In place of `draft_store`: some replicas of draft stores with a feed. They name the others.
    pub draft_stores: Vec<String>,
    /// The engine, for workers. `/v1` at the end of a third-party engine's URL is left out.
    pub engine: String,
    /// Deadline of a call between services. An engine step is one call.
    pub timeout_ms: u64,
}

impl Default for Urls {
    fn default() -> Self {
        Urls {
            scheduler: String::new(),
            schedulers: Vec::new(),
            draft_store: String::new(),
            draft_stores: Vec::new(),
            engine: String::new(),
            timeout_ms: 30_000,
        }
    }
}

impl Urls {
    /// The schedulers, at least one.
    pub(crate) fn schedulers(&self) -> &[String] {
        match self.schedulers.is_empty() {
            true => std::slice::from_ref(&self.scheduler),
            false => &self.schedulers,
        }
    }

    /// A caller of the schedulers.
    pub(crate) fn scheduler(&self, client: &MeshClient) -> HttpScheduler {
        HttpScheduler::of(self.schedulers().iter().map(|url| client.at(url)).collect())
    }
}

/// The model in this binary, as a gateway serves it.
pub(crate) fn shipped_model() -> ModelConfig {
    ModelConfig {
        id: "refrain-tiny".into(),
        files: SHIPPED_MODEL.into(),
        ..ModelConfig::default()
    }
}

/// API keys of `refrain up` if the file has none: two tenants for each of the four modes that `refrain bench`
/// compares.
pub fn dev_keys() -> Vec<String> {
    let others = (2..=8).map(|number| format!("refrain-dev-{number}"));
    std::iter::once("refrain-dev".to_owned())
        .chain(others)
        .collect()
}

fn is_well_known(key: &str) -> bool {
    dev_keys().iter().any(|known| known == key)
}

impl MeshFile {
    /// Reads the configuration of a process that runs `role`.
    ///
    /// # Errors
    /// All faults of the sections that the role reads.
    pub(crate) fn load(role: Role, file: Option<&Path>) -> anyhow::Result<Self> {
        MeshFile::read(role, file, std::env::vars_os())
    }

    /// As [`MeshFile::load`], with these variables.
    pub(crate) fn read(
        role: Role,
        file: Option<&Path>,
        variables: impl Iterator<Item = (OsString, OsString)>,
    ) -> anyhow::Result<Self> {
        load(file, ENV_RULE, variables, |config: &MeshFile| {
            config.faults(role)
        })
    }

    /// Every key that has a value, without secrets, and who set it.
    ///
    /// # Errors
    /// The file cannot be read.
    pub(crate) fn set_keys(file: Option<&Path>) -> anyhow::Result<Vec<SetKey>> {
        set_keys::<MeshFile>(file, ENV_RULE, std::env::vars_os())
    }

    /// Reads the sections that are needed to sign namespaces: the mesh's keys and the gateway's section.
    ///
    /// # Errors
    /// All faults of these sections.
    pub(crate) fn load_to_sign(file: &Path) -> anyhow::Result<Self> {
        let faults = MeshFile::signing_faults;
        load(Some(file), ENV_RULE, std::env::vars_os(), faults)
    }

    /// Whether the file says who may call.
    pub(crate) fn has_callers(&self) -> bool {
        let gateway = &self.gateway;
        !gateway.keys.is_empty()
            || gateway.anonymous_tenant.is_some()
            || gateway.tenants_file.is_some()
            || gateway.tenants_in_store
            || gateway.jwt.is_some()
    }

    /// Lets those call who have one of these keys, and the tenants that are added later.
    pub(crate) fn add_callers(&mut self, keys: impl Iterator<Item = KeyConfig>) {
        self.gateway.tenants_in_store = self.draft_store.feed.is_none();
        self.gateway.keys = keys.collect();
    }

    /// The first of the keys that everybody knows, if callers may use one.
    pub(crate) fn well_known_key(&self) -> Option<&str> {
        let mut keys = self
            .gateway
            .keys
            .iter()
            .filter_map(|key| key.key.as_deref());
        keys.find(|key| is_well_known(key))
    }

    /// Whether nobody has a key of their own, and only this machine reaches the gateway.
    fn is_open_to_this_machine_alone(&self) -> bool {
        let gateway = &self.gateway;
        let mut keys = gateway.keys.iter();
        let is_known = |key: &KeyConfig| key.key.as_deref().is_some_and(is_well_known);
        let needs_no_own_key =
            self.well_known_key().is_some() || gateway.anonymous_tenant.is_some();
        needs_no_own_key
            && keys.all(is_known)
            && gateway.tenants_file.is_none()
            && gateway.jwt.is_none()
            && self.public_address().is_none()
    }

    /// The address of the gateway, if other machines reach it.
    fn public_address(&self) -> Option<SocketAddr> {
        let listen: SocketAddr = self.gateway.listen.parse().ok()?;
        (!listen.ip().to_canonical().is_loopback()).then_some(listen)
    }

    /// The fault of a listener that other machines reach, while everybody knows a key of its callers.
    pub(crate) fn door_fault(&self) -> Option<String> {
        let (listen, key) = (self.public_address()?, self.well_known_key()?);
        Some(format!(
            "gateway.listen: other machines reach {listen}, and everybody knows the key {key}: set gateway.keys in a \
             configuration file, have `refrain up --make-key` make one, or listen on 127.0.0.1"
        ))
    }

    /// Why the draft store cannot keep the tenants of the gateway.
    fn tenant_faults(&self, role: Role) -> Option<&'static str> {
        if !self.gateway.tenants_in_store {
            return None;
        }
        let (urls, has_feed) = (&self.urls, self.draft_store.feed.is_some());
        match role {
            Role::Up if has_feed => Some(REPLICAS_KEEP_NO_TENANTS),
            Role::Gateway if !urls.draft_stores.is_empty() => Some(REPLICAS_KEEP_NO_TENANTS),
            Role::Gateway if urls.draft_store.is_empty() => {
                Some("gateway.tenants_in_store: name the store in urls.draft_store as well")
            }
            _ => None,
        }
    }

    fn signing_faults(&self) -> Vec<String> {
        let mut faults = self.mesh.faults(true);
        faults.extend(within("gateway", self.gateway.faults()));
        faults
    }

    fn faults(&self, role: Role) -> Vec<String> {
        let is_up = role == Role::Up;
        let adopts = self.worker.adoption.is_on();
        let is_external = self.worker.engine.is_external();
        let mut faults = within("telemetry", self.telemetry.faults());
        if matches!(role, Role::Gateway | Role::Worker) && self.urls.timeout_ms == 0 {
            faults.push("urls.timeout_ms: at least 1".to_owned());
        }
        // `refrain up` makes its own keys if there are none. With some and not all, the missing ones are faults.
        if !is_up || self.mesh.has_keys() {
            faults.extend(self.mesh.faults(matches!(role, Role::Up | Role::Gateway)));
        }
        let mut filled = self.clone();
        if is_up {
            filled.fill_in_for_up();
            faults.extend(engine_faults(
                &self.engines,
                &self.worker,
                &self.urls.engine,
            ));
        }
        if matches!(role, Role::Up | Role::Gateway) {
            faults.extend(within("gateway", filled.gateway.faults()));
        }
        if role == Role::Gateway {
            faults.extend(self.door_fault());
        }
        let mut section =
            |owner: Role, key: &str, config: &dyn Validate, addr: Option<SocketAddr>| {
                let runs_in_up = owner != Role::ReferenceEngine || !is_external && !adopts;
                if role == owner || is_up && runs_in_up {
                    faults.extend(within(key, config.faults()));
                }
                if role == owner && addr.is_none() {
                    faults.push(format!("{key}.listen: missing, such as \"0.0.0.0:8200\""));
                }
            };
        let worker = &filled.worker;
        let MeshFile {
            scheduler,
            draft_store: store,
            engine,
            urls,
            ..
        } = self;
        section(Role::Scheduler, "scheduler", scheduler, scheduler.listen);
        section(Role::Worker, "worker", worker, worker.listen);
        section(Role::DraftStore, "draft_store", store, store.listen);
        section(Role::ReferenceEngine, "engine", engine, engine.listen);
        let needs_scheduler = matches!(role, Role::Gateway | Role::Worker);
        let needs_engine = role == Role::Worker && !adopts || is_up && is_external && !adopts;
        let needs_store = role == Role::Worker && urls.draft_stores.is_empty();
        let named = [
            (
                "scheduler",
                &urls.scheduler,
                needs_scheduler && urls.schedulers.is_empty(),
            ),
            ("engine", &urls.engine, needs_engine),
            ("draft_store", &urls.draft_store, needs_store),
        ];
        let stores = urls.draft_stores.iter();
        let stores = stores.map(|url| ("draft_stores", url, true));
        let schedulers = urls.schedulers.iter().map(|url| ("schedulers", url, true));
        if !urls.scheduler.is_empty() && !urls.schedulers.is_empty() {
            faults.push("urls: give scheduler or schedulers, not both".to_owned());
        }
        if !urls.draft_store.is_empty() && !urls.draft_stores.is_empty() {
            faults.push("urls: give draft_store or draft_stores, not both".to_owned());
        }
        if matches!(role, Role::Up | Role::Worker) && adopts && !urls.engine.is_empty() {
            let fault = "urls.engine: leave it out, since a process with worker.adoption has no engine of its own";
            faults.push(fault.to_owned());
        }
        faults.extend(self.tenant_faults(role).map(str::to_owned));
        let has_no_store = urls.draft_store.is_empty() && urls.draft_stores.is_empty();
        if role == Role::Gateway && self.gateway.usage_dir.is_some() && has_no_store {
            let fault = "gateway.usage_dir: name the store in urls.draft_store as well, since it adds usage up";
            faults.push(fault.to_owned());
        }
        for (key, url, is_needed) in named.into_iter().chain(stores).chain(schedulers) {
            // One that this role does not call is checked as well, where it is set.
            if (is_needed || !url.is_empty()) && !is_http_url(url) {
                faults.push(format!("urls.{key}: must be an http:// or https:// URL"));
            }
        }
        let silence_max = self.gateway.tuning.worker_silence_max;
        let first_token = Duration::from_millis(self.worker.engine.first_token_ms_max);
        if is_up && is_external && first_token >= silence_max {
            faults.push(format!(
                "worker.engine.first_token_ms_max: must be less than {}, or the gateway gives up the worker first",
                silence_max.as_millis()
            ));
        }
        faults
    }
}

const REPLICAS_KEEP_NO_TENANTS: &str = "gateway.tenants_in_store: replicas of a draft store keep no tenants; use \
                                         gateway.tenants_file in its place";

fn within(section: &str, faults: Vec<String>) -> Vec<String> {
    faults
        .into_iter()
        .map(|fault| format!("{section}.{fault}"))
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn faults(role: Role, toml: &str) -> String {
        let file: MeshFile = toml::from_str(toml).unwrap();
        file.faults(role).join("\n")
    }

    #[test]
    fn up_needs_no_keys_but_checks_those_it_is_given() {
        assert_eq!(faults(Role::Up, ""), "");
        assert!(faults(Role::Up, "[mesh]\nsecret = \"short\"").contains("mesh.secret"));
        let keys = MeshConfig::generate().unwrap();
        let mut file = MeshFile {
            mesh: keys,
            ..MeshFile::default()
        };
        assert_eq!(file.faults(Role::Up), Vec::<String>::new());
        file.mesh.namespace_signing_key.clear();
        assert_eq!(file.faults(Role::Up).len(), 1);
    }

    #[test]
    fn a_key_that_everybody_knows_opens_no_door_to_other_machines() {
        let fault = |toml: &str| {
            let mut file: MeshFile = toml::from_str(toml).unwrap();
            file.fill_in_for_up();
            assert!(!(file.door_fault().is_some() && file.gateway.shows_metrics));
            file.door_fault()
        };
        let at = |listen: &str, rest: &str| format!("[gateway]\nlisten = \"{listen}\"\n{rest}");
        for reached in ["0.0.0.0:8080", "10.0.0.7:0", "[::]:8080"] {
            let said = fault(&at(reached, "")).unwrap();
            for part in ["refrain-dev", "gateway.keys", "--make-key", "127.0.0.1"] {
                assert!(said.contains(part), "{part} in {said}");
            }
            let known = "keys = [{ key = \"refrain-dev-3\", tenant = \"a\" }]";
            assert!(fault(&at(reached, known)).is_some());
            assert!(faults(Role::Gateway, &at(reached, known)).contains("everybody knows"));
            let own = "keys = [{ key = \"sk-own\", tenant = \"a\" }]";
            assert_eq!(fault(&at(reached, own)), None);
            assert_eq!(fault(&at(reached, "anonymous_tenant = \"a\"")), None);
        }
        for local in ["127.0.0.1:8080", "[::1]:0", "[::ffff:127.0.0.1]:80"] {
            assert_eq!(fault(&at(local, "")), None);
        }
    }

    #[test]
    fn metrics_are_beside_the_apis_only_in_a_trial() {
        let shows = |toml: &str| {
            let mut file: MeshFile = toml::from_str(toml).unwrap();
            file.fill_in_for_up();
            file.gateway.shows_metrics
        };
        assert!(shows("") && shows("[gateway]\nanonymous_tenant = \"a\""));
        let both =
            "[gateway]\nanonymous_tenant = \"a\"\nkeys = [{ key = \"sk-own\", tenant = \"a\" }]";
        assert!(!shows(both));
        assert!(!shows(
            "[gateway]\nkeys = [{ key = \"sk-own\", tenant = \"a\" }]"
        ));
        assert!(!shows("[gateway]\noperations_listen = \"127.0.0.1:9000\""));
        assert!(!shows("[gateway]\nlisten = \"0.0.0.0:8080\""));
    }

    #[test]
    fn up_has_a_console_that_only_this_machine_reaches() {
        let filled = |toml: &str| {
            let mut file: MeshFile = toml::from_str(toml).unwrap();
            file.fill_in_for_up();
            // It is filled in once more when the services start.
            file.fill_in_for_up();
            let gateway = file.gateway;
            let listen = gateway.operations_listen.map(|listen| listen.to_string());
            (
                gateway.console,
                listen.unwrap_or_default(),
                gateway.is_trial,
            )
        };
        let shown = |listen: &str, is_trial| (Some(true), listen.to_owned(), is_trial);
        assert_eq!(filled(""), shown("127.0.0.1:8090", true));
        let public = "[gateway]\nlisten = \"0.0.0.0:8080\"";
        assert_eq!(filled(public), shown("127.0.0.1:8090", true));
        let any_port = "[gateway]\nlisten = \"127.0.0.1:0\"";
        assert_eq!(filled(any_port), shown("127.0.0.1:0", true));
        let named = "[gateway]\noperations_listen = \"10.0.0.5:9000\"";
        assert_eq!(filled(named), shown("10.0.0.5:9000", false));
        let without = "[gateway]\nconsole = false";
        assert_eq!(filled(without), (Some(false), String::new(), false));
    }

    #[test]
    fn a_worker_gives_up_on_its_engine_before_the_gateway_gives_up_on_the_worker() {
        let with = |first_token_ms_max: u64| {
            let engine = format!(
                "[urls]\nengine = \"http://127.0.0.1:1\"\n\
                 [worker.engine]\nkind = \"vllm\"\nfirst_token_ms_max = {first_token_ms_max}"
            );
            faults(Role::Up, &engine).contains("worker.engine.first_token_ms_max")
        };
        assert!(with(600_000) && !with(599_999));
        // The reference engine is driven step by step: nothing waits for its first token.
        assert_eq!(faults(Role::Up, ""), "");
        assert_eq!(
            faults(
                Role::Up,
                "[urls]\nengine = \"http://127.0.0.1:1\"\n[worker.engine]\nkind = \"vllm\"\nmodel = \"m\"\nfiles = \"builtin:refrain-tiny\""
            ),
            ""
        );
    }

    #[test]
    fn a_process_that_adopts_engines_has_none_of_its_own() {
        let adopts = "[worker.adoption]\nengines_max = 2";
        assert_eq!(faults(Role::Up, adopts), "");
        let mut file: MeshFile = toml::from_str(adopts).unwrap();
        file.fill_in_for_up();
        let engine = &file.worker.engine;
        assert_eq!(
            (&*engine.model, &*engine.files),
            ("refrain-tiny", SHIPPED_MODEL)
        );
        let own = format!("[urls]\nengine = \"http://127.0.0.1:1\"\n{adopts}");
        assert!(faults(Role::Up, &own).contains("urls.engine"));
        let found = faults(Role::Worker, adopts);
        assert!(found.contains("worker.engine.model"), "{found}");
        assert!(!found.contains("urls.engine"), "{found}");
    }

    #[test]
    fn tenants_can_be_kept_by_one_draft_store() {
        let with = |role, rest: &str| {
            let toml = format!("{rest}\n[gateway]\ntenants_in_store = true");
            faults(role, &toml).contains("tenants_in_store")
        };
        let (one, several) = (
            "[urls]\ndraft_store = \"http://127.0.0.1:1\"",
            "[urls]\ndraft_stores = [\"http://127.0.0.1:1\"]",
        );
        assert!(!with(Role::Gateway, one) && !with(Role::Up, ""));
        assert!(with(Role::Gateway, several) && with(Role::Gateway, ""));
        assert!(with(Role::Up, "[draft_store.feed]"));
    }

    #[test]
    fn usage_is_told_to_a_draft_store() {
        let with = |role, rest: &str| {
            let toml = format!("{rest}\n[gateway]\nusage_dir = \"usage\"");
            faults(role, &toml).contains("gateway.usage_dir")
        };
        assert!(with(Role::Gateway, ""));
        let store = "[urls]\ndraft_store = \"http://127.0.0.1:1\"";
        assert!(!with(Role::Gateway, store) && !with(Role::Up, ""));
    }

    #[test]
    fn urls_without_a_scheme_are_faults_wherever_they_are() {
        for (role, key, toml) in [
            (
                Role::Up,
                "telemetry.otlp_endpoint",
                "telemetry.otlp_endpoint = \"localhost:4317\"",
            ),
            (
                Role::Gateway,
                "urls.scheduler",
                "urls.scheduler = \"scheduler:8201\"",
            ),
            (
                Role::Gateway,
                "urls.draft_store",
                "urls.draft_store = \"localhost:7430\"",
            ),
            (
                Role::Gateway,
                "urls.draft_stores",
                "urls.draft_stores = [\"store:7430\"]",
            ),
            (Role::Up, "urls.engine", "urls.engine = \"10.0.0.1:8000\""),
            (
                Role::Up,
                "telemetry.log",
                "telemetry.log = \"refrain=loud\"",
            ),
        ] {
            let found = faults(role, toml);
            assert!(
                found.contains(&format!("{key}: ")),
                "{key} is missing in: {found}"
            );
        }
        let right = "telemetry.otlp_endpoint = \"http://localhost:4318/v1/traces\"\nurls.draft_store = \"http://s:1\"";
        assert_eq!(faults(Role::Up, right), "");
    }

    #[test]
    fn a_variable_of_one_underscore_is_refused_with_the_one_that_is_meant() {
        let read = |variables: &[(&str, &str)]| {
            let variables = variables
                .iter()
                .map(|(name, value)| (name.into(), value.into()));
            let read = MeshFile::read(Role::Up, None, variables);
            read.err()
                .map(|error| error.to_string())
                .unwrap_or_default()
        };
        for (wrong, meant) in [
            ("REFRAIN_WORKER_RUNNING_MAX", "REFRAIN_WORKER__RUNNING_MAX"),
            ("REFRAIN_WORKER_ENGINE_KIND", "REFRAIN_WORKER__ENGINE__KIND"),
            (
                "REFRAIN_DRAFT_STORE_DATA_DIR",
                "REFRAIN_DRAFT_STORE__DATA_DIR",
            ),
            (
                "REFRAIN_WORKER_ENGINE__KIND",
                "REFRAIN_WORKER__ENGINE__KIND",
            ),
            (
                "REFRAIN_GATEWAY_HTTP_TLS_KEY",
                "REFRAIN_GATEWAY__HTTP__TLS__KEY",
            ),
        ] {
            let error = read(&[(wrong, "8")]);
            assert!(error.contains(&format!("; {meant} is meant")), "{error}");
        }
        assert!(read(&[("REFRAIN_RUNNING", "8")]).contains("REFRAIN_RUNNING: is no setting"));
        let others = [
            "REFRAIN_OPERATOR_TOKEN",
            "REFRAIN_CLIENT_STORE_URL",
            "REFRAIN_ROLE",
        ];
        assert_eq!(read(&others.map(|name| (name, "a"))), "");
    }

    #[test]
    fn calls_need_a_deadline() {
        for (role, is_fault) in [
            (Role::Gateway, true),
            (Role::Worker, true),
            (Role::Scheduler, false),
        ] {
            let faults = faults(role, "[urls]\ntimeout_ms = 0");
            assert_eq!(faults.contains("urls.timeout_ms"), is_fault, "{faults}");
        }
    }

    #[test]
    fn outputs_are_stored_where_the_help_says() {
        let file = MeshFile::default();
        assert_eq!(file.draft_store.data_dir, Path::new("refrain-data"));
    }
}
