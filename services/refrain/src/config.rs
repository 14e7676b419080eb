//! One configuration file for the whole mesh: each process reads the sections of its role, `refrain up` reads all.

use std::path::Path;
use std::time::Duration;

use refrain_draft_store::DraftStoreConfig;
use refrain_gateway::{GatewayConfig, KeyConfig, ModelConfig};
use refrain_reference_engine::{EngineConfig, SHIPPED_MODEL};
use refrain_scheduler::SchedulerConfig;
use refrain_service_kit::config::{EnvRule, Validate, load};
use refrain_service_kit::mesh::MeshConfig;
use refrain_service_kit::telemetry::TelemetryConfig;
use refrain_worker::WorkerConfig;
use schemars::JsonSchema;
use serde::Deserialize;

/// Environment variables such as `REFRAIN_WORKER__RUNNING_MAX=8`, and `REFRAIN_DRAIN_GRACE_MS`.
const ENV_RULE: EnvRule = EnvRule {
    prefix: "REFRAIN_",
    top_level: &["DRAIN_GRACE_MS"],
};

/// The whole file. Every section has defaults; unknown keys are refused.
#[derive(Clone, Debug, Deserialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
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
    /// How long a stopping process lets requests run before it cuts them off.
    pub drain_grace_ms: u64,
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
            drain_grace_ms: 30_000,
        }
    }
}

/// Base URLs of services, such as `http://scheduler:8201`.
#[derive(Clone, Debug, Deserialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct Urls {
    /// The scheduler, for gateways and workers.
    pub scheduler: String,
    /// The draft store, for workers.
    pub draft_store: String,
    /// The engine, for workers.
    pub engine: String,
    /// Deadline of a call between services. An engine step is one call.
    pub timeout_ms: u64,
}

impl Default for Urls {
    fn default() -> Self {
        Urls {
            scheduler: String::new(),
            draft_store: String::new(),
            engine: String::new(),
            timeout_ms: 30_000,
        }
    }
}

/// The services that a process runs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Role {
    /// All of them, in one process.
    Up,
    /// The OpenAI-compatible gateway.
    Gateway,
    /// The scheduler, which grants leases.
    Scheduler,
    /// A worker, which decodes on one engine.
    Worker,
    /// The draft store, which keeps outputs.
    DraftStore,
    /// The CPU engine that ships with Refrain.
    ReferenceEngine,
}

impl Role {
    /// The role's name on the command line, in logs and in traces.
    pub fn name(self) -> &'static str {
        match self {
            Role::Up => "refrain",
            Role::Gateway => "gateway",
            Role::Scheduler => "scheduler",
            Role::Worker => "worker",
            Role::DraftStore => "draft-store",
            Role::ReferenceEngine => "reference-engine",
        }
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

impl MeshFile {
    /// Reads the configuration of a process that runs `role`.
    ///
    /// # Errors
    /// All faults of the sections that the role reads.
    pub fn load(role: Role, file: Option<&Path>) -> anyhow::Result<Self> {
        load(file, ENV_RULE, std::env::vars_os(), |config: &MeshFile| {
            config.faults(role)
        })
    }

    /// Reads the sections that are needed to sign namespaces: the mesh's keys and the gateway's section.
    ///
    /// # Errors
    /// All faults of these sections.
    pub fn load_to_sign(file: &Path) -> anyhow::Result<Self> {
        load(Some(file), ENV_RULE, std::env::vars_os(), |config| {
            MeshFile::signing_faults(config)
        })
    }

    /// The embedded default of `refrain up`: a few tenants with keys for development, and the shipped model.
    pub fn embedded() -> Self {
        let mut file = MeshFile::default();
        file.fill_in_for_up();
        file
    }

    /// Adds what `refrain up` needs where the file says nothing.
    pub fn fill_in_for_up(&mut self) {
        if self.gateway.keys.is_empty() && self.gateway.anonymous_tenant.is_none() {
            self.gateway.keys = dev_keys()
                .into_iter()
                .map(|key| KeyConfig {
                    tenant: key.trim_start_matches("refrain-").into(),
                    key: Some(key),
                    ..KeyConfig::default()
                })
                .collect();
        }
        if self.gateway.models.is_empty() {
            self.gateway.models = vec![ModelConfig {
                id: "refrain-tiny".into(),
                files: SHIPPED_MODEL.into(),
                ..ModelConfig::default()
            }];
        }
        if self.worker.advertise_url.is_empty() {
            // Nobody calls this URL, but a lease has to name one.
            self.worker.advertise_url = "local:".into();
        }
    }

    /// Whether the file has any mesh key. With some keys and not all, `refrain up` reports the missing ones instead
    /// of making up others.
    pub fn has_mesh_keys(&self) -> bool {
        self.mesh.has_keys()
    }

    fn signing_faults(&self) -> Vec<String> {
        let mut faults = self.mesh.faults(true);
        faults.extend(within("gateway", self.gateway.faults()));
        faults
    }

    fn faults(&self, role: Role) -> Vec<String> {
        let url = |key: &str, url: &str| -> Vec<String> {
            if url.starts_with("http://") || url.starts_with("https://") {
                Vec::new()
            } else {
                vec![format!("urls.{key}: must be an http:// or https:// URL")]
            }
        };
        let listens = |section: &str, listens: bool| -> Vec<String> {
            if listens {
                Vec::new()
            } else {
                vec![format!(
                    "{section}.listen: missing, such as \"0.0.0.0:8200\""
                )]
            }
        };
        let mut faults = Vec::new();
        if matches!(role, Role::Gateway | Role::Worker) && self.urls.timeout_ms == 0 {
            faults.push("urls.timeout_ms: at least 1".to_owned());
        }
        match role {
            Role::Up => {
                if self.has_mesh_keys() {
                    faults.extend(self.mesh.faults(true));
                }
                let mut filled = self.clone();
                filled.fill_in_for_up();
                faults.extend(within("gateway", filled.gateway.faults()));
                faults.extend(within("scheduler", self.scheduler.faults()));
                faults.extend(within("worker", self.worker.faults()));
                faults.extend(within("draft_store", self.draft_store.faults()));
                if self.worker.engine.is_external() {
                    faults.extend(url("engine", &self.urls.engine));
                    let silence_max = self.gateway.tuning.worker_silence_max;
                    let first_token = Duration::from_millis(self.worker.engine.first_token_ms_max);
                    if first_token >= silence_max {
                        faults.push(format!(
                            "worker.engine.first_token_ms_max: must be less than {}, or the gateway gives up the worker first",
                            silence_max.as_millis()
                        ));
                    }
                } else {
                    faults.extend(within("engine", self.engine.faults()));
                }
            }
            Role::Gateway => {
                faults.extend(self.signing_faults());
                faults.extend(url("scheduler", &self.urls.scheduler));
            }
            Role::Scheduler => {
                faults.extend(self.mesh.faults(false));
                faults.extend(within("scheduler", self.scheduler.faults()));
                faults.extend(listens("scheduler", self.scheduler.listen.is_some()));
            }
            Role::Worker => {
                faults.extend(self.mesh.faults(false));
                faults.extend(within("worker", self.worker.faults()));
                faults.extend(listens("worker", self.worker.listen.is_some()));
                faults.extend(url("scheduler", &self.urls.scheduler));
                faults.extend(url("draft_store", &self.urls.draft_store));
                faults.extend(url("engine", &self.urls.engine));
            }
            Role::DraftStore => {
                faults.extend(self.mesh.faults(false));
                faults.extend(within("draft_store", self.draft_store.faults()));
                faults.extend(listens("draft_store", self.draft_store.listen.is_some()));
            }
            Role::ReferenceEngine => {
                faults.extend(self.mesh.faults(false));
                faults.extend(within("engine", self.engine.faults()));
                faults.extend(listens("engine", self.engine.listen.is_some()));
            }
        }
        faults
    }
}

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
