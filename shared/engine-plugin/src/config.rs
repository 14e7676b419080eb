//! The configuration of the plugin: variables `REFRAIN_CLIENT_...` of the engine's process, over a file if there is
//! one.

use std::net::SocketAddr;
use std::path::PathBuf;

use refrain_draft_replica::{ReplicaConfig, UploaderConfig};
use refrain_service_kit::config::{EnvRule, is_http_url, load};
use refrain_service_kit::mesh::MeshConfig;
use serde::Deserialize;

use crate::device::DeviceConfig;
use crate::speculation::SpeculationConfig;

/// Variables such as `REFRAIN_CLIENT_STORE_URL` and `REFRAIN_CLIENT_REPLICA__BYTES_MAX`.
const ENV_RULE: EnvRule = EnvRule {
    prefix: "REFRAIN_CLIENT_",
    top_level: &[
        "STORE_URL",
        "STORE_URLS",
        "TOKEN",
        "TOKEN_FILE",
        "TOKENIZER",
        "LOG",
        "METRICS_LISTEN",
    ],
    // The name of the file, which the Python package reads.
    others: &["CONFIG"],
};

/// The configuration of the plugin. Everything has a default but the store, the mesh's keys and the tokenizer.
///
/// The last fields are not read from the configuration: no deployment needs other values, but tests do.
#[derive(Clone, Deserialize, schemars::JsonSchema)]
#[serde(default)]
pub struct PluginConfig {
    /// URL of the draft store.
    pub store_url: String,
    /// In place of `store_url`: some replicas of draft stores with a feed. They name the others.
    pub store_urls: Vec<String>,
    /// The mesh's keys, without the gateway's private one.
    pub mesh: PluginMeshConfig,
    /// The namespace of requests that bring none, as a token that `refrain store sign` prints. It is valid for a day.
    pub token: Option<String>,
    /// A file with that token. It is read again every minute, so that the token can be renewed while the engine runs.
    pub token_file: Option<PathBuf>,
    /// Folder of the model's `tokenizer.json`.
    pub tokenizer: Option<PathBuf>,
    /// Filter of the log on standard error, as in the mesh's configuration.
    pub log: String,
    /// Address at which `/metrics` is served for Prometheus; without one it is not served. Each process needs its
    /// own.
    pub metrics_listen: Option<SocketAddr>,
    /// How drafts are made.
    pub speculation: SpeculationConfig,
    /// The replica of the drafts.
    pub replica: ReplicaConfig,
    /// The index on the devices of an engine that drafts there.
    pub device: DeviceConfig,

    /// The upload to the draft store.
    #[serde(skip)]
    pub uploader: UploaderConfig,
    /// Longest prompt that is indexed in the call that begins its request, tokens: a millisecond or less. A longer
    /// one is indexed on a thread beside the engine's, and drafted from once that is done.
    #[serde(skip)]
    pub prompt_tokens_at_once: usize,
    /// Most prompt tokens that wait for that thread; further prompts are not drafted from.
    #[serde(skip)]
    pub reading_tokens_max: usize,
    /// Output tokens of a request that are uploaded together, so that the step path queues few events.
    #[serde(skip)]
    pub piece_tokens: u32,
    /// Most output tokens queued for the background thread; further ones wait with their request. If that request
    /// ends meanwhile, they are not drafted from here, but the store gets them all the same.
    #[serde(skip)]
    pub queued_tokens_max: usize,
    /// Most interrupted requests that are remembered, in case the engine only made room.
    #[serde(skip)]
    pub paused_requests_max: usize,
    /// Most tokens of their texts.
    #[serde(skip)]
    pub paused_tokens_max: usize,
}

/// The keys of the mesh that an engine may have: all but the gateway's private one.
#[derive(Clone, Deserialize, schemars::JsonSchema)]
#[serde(default)]
pub struct PluginMeshConfig {
    /// The secret that all services share, at least 32 characters.
    pub secret: String,
    /// In place of `secret`: a file with it in its first line, which is read again when it changes.
    pub secret_file: Option<PathBuf>,
    /// In place of the secret: a file with the engine's credential, as `refrain mesh credential --role engine` prints
    /// it. It is read again when it changes.
    pub credential_file: Option<PathBuf>,
    /// Keys that verify that credential, 32 bytes in hex each.
    pub issuer_public_keys: Vec<String>,
    /// The key that verifies namespaces, 32 bytes in hex.
    pub namespace_public_key: String,
    /// Keys that verify namespaces besides, while the signing key is being replaced.
    pub namespace_public_keys: Vec<String>,
    /// PEM file with the authorities of the services' certificates, for a store at an `https://` URL. Without it,
    /// those of the system are trusted. It is read again when it changes.
    pub ca: Option<PathBuf>,
    /// PEM file with the certificate that calls present to a store with `http.tls.client_ca`. It is read again when
    /// it changes.
    pub certificate: Option<PathBuf>,
    /// PEM file with the private key of that certificate.
    pub key: Option<PathBuf>,
    /// Seconds by which the clocks of the mesh may differ. A namespace that is signed further in the future is
    /// refused.
    pub clock_skew_s_max: u64,
}

impl Default for PluginMeshConfig {
    fn default() -> Self {
        MeshConfig::default().into()
    }
}

impl From<MeshConfig> for PluginMeshConfig {
    fn from(mesh: MeshConfig) -> Self {
        PluginMeshConfig {
            secret: mesh.secret,
            secret_file: mesh.secret_file,
            credential_file: mesh.credential_file,
            issuer_public_keys: mesh.issuer_public_keys,
            namespace_public_key: mesh.namespace_public_key,
            namespace_public_keys: mesh.namespace_public_keys,
            ca: mesh.ca,
            certificate: mesh.certificate,
            key: mesh.key,
            clock_skew_s_max: mesh.clock_skew_s_max,
        }
    }
}

impl From<PluginMeshConfig> for MeshConfig {
    fn from(mesh: PluginMeshConfig) -> Self {
        MeshConfig {
            secret: mesh.secret,
            secret_file: mesh.secret_file,
            credential_file: mesh.credential_file,
            issuer_public_keys: mesh.issuer_public_keys,
            namespace_public_key: mesh.namespace_public_key,
            namespace_public_keys: mesh.namespace_public_keys,
            ca: mesh.ca,
            certificate: mesh.certificate,
            key: mesh.key,
            clock_skew_s_max: mesh.clock_skew_s_max,
            ..MeshConfig::default()
        }
    }
}

impl Default for PluginConfig {
    fn default() -> Self {
        PluginConfig {
            store_url: String::new(),
            store_urls: Vec::new(),
            mesh: PluginMeshConfig::default(),
            token: None,
            token_file: None,
            tokenizer: None,
            log: "warn".into(),
            metrics_listen: None,
            speculation: SpeculationConfig::default(),
            replica: ReplicaConfig::default(),
            device: DeviceConfig::default(),
            uploader: UploaderConfig::default(),
            prompt_tokens_at_once: 1_024,
            reading_tokens_max: 4_194_304,
            piece_tokens: 32,
            queued_tokens_max: 1_048_576,
            paused_requests_max: 1_024,
            paused_tokens_max: 4_194_304,
        }
    }
}

impl PluginConfig {
    /// Reads the environment, over a file.
    ///
    /// # Errors
    /// The file cannot be read, a key is unknown, or a value is out of range; the error lists all faults.
    pub fn load(file: Option<PathBuf>) -> anyhow::Result<Self> {
        load(
            file.as_deref(),
            ENV_RULE,
            std::env::vars_os(),
            PluginConfig::faults,
        )
    }

    fn faults(&self) -> Vec<String> {
        let mut faults = MeshConfig::from(self.mesh.clone()).faults(false);
        let mut check = |holds: bool, fault: &str| {
            if !holds {
                faults.push(fault.to_owned());
            }
        };
        check(
            is_http_url(&self.store_url)
                || self.store_url.is_empty() && !self.store_urls.is_empty(),
            "store_url: must be an http:// or https:// URL",
        );
        check(
            self.store_urls.iter().all(|url| is_http_url(url)),
            "store_urls: each must be an http:// or https:// URL",
        );
        check(
            self.store_url.is_empty() || self.store_urls.is_empty(),
            "store_url and store_urls: set only one of them",
        );
        check(
            self.token.is_none() || self.token_file.is_none(),
            "token and token_file: set only one of them",
        );
        self.speculation.rules().check(&mut check);
        self.replica.check(&mut check);
        faults
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_store_or_several_replicas_are_named() {
        let mesh = MeshConfig::generate().unwrap();
        let faults = |store_url: &str, store_urls: &[&str]| {
            let config = PluginConfig {
                store_url: store_url.into(),
                store_urls: store_urls.iter().map(|url| (*url).into()).collect(),
                mesh: mesh.clone().into(),
                ..PluginConfig::default()
            };
            config.faults().join("; ")
        };
        assert_eq!(faults("http://a", &[]), "");
        assert_eq!(faults("", &["http://a", "https://b"]), "");
        assert!(faults("", &[]).starts_with("store_url: must be"));
        assert!(faults("", &["http://a", "b"]).starts_with("store_urls: each"));
        assert!(faults("http://a", &["http://b"]).contains("set only one"));
    }

    #[test]
    fn keys_without_an_effect_are_refused() {
        let dir = tempfile::tempdir().unwrap();
        for text in [
            "[mesh]\nnamespace_signing_key = \"\"",
            "[replica]\nlookup_wait_us_max = 0",
            "[remote_lookup]\nwait_us_max = 0",
        ] {
            let file = dir.path().join("client.toml");
            std::fs::write(&file, text).unwrap();
            let Err(refused) = PluginConfig::load(Some(file)) else {
                panic!("{text} is read");
            };
            let refused = format!("{refused:#}");
            assert!(refused.contains("unknown key"), "{refused}");
        }
    }
}
