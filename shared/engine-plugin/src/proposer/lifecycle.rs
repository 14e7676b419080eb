//! How a [`Proposer`] starts, reports and stops.

use std::collections::HashMap;
use std::net::SocketAddr;
use std::num::NonZeroUsize;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use anyhow::Context as _;
use lru::LruCache;
use parking_lot::Mutex;
use refrain_draft_replica::{DraftReplica, ReplicaMetrics, Uploader, UploaderMetrics};
use refrain_rpc::{DraftStore, draft_store};
use refrain_service_kit::actors;
use refrain_service_kit::http::{MeshClient, Server};
use refrain_service_kit::mesh::{MeshAuth, MeshCredentials, MeshRole, RoleCredential};
use refrain_service_kit::telemetry::{self, Metrics, TelemetryConfig};
use refrain_tokenization::ModelFiles;
use tokio::sync::oneshot;

use super::{Proposer, Requests};
use crate::background::{Background, BackgroundEvent};
use crate::config::PluginConfig;
use crate::default_namespace::DefaultNamespace;
use crate::device::{DeviceConfig, DeviceExport, DeviceIndex};
use crate::lengths::Lengths;
use crate::metrics::{FIELDS, PluginMetrics, TOKEN};
use crate::metrics_server::serve_metrics;
use crate::outbox::Outbox;
use crate::own_index::PromptReader;
use crate::paused::PausedRequests;

/// Deadline of ordinary calls to the store. No step of the engine waits for them.
const CALL_TIMEOUT: Duration = Duration::from_secs(10);

impl Proposer {
    /// Reads the tokenizer's files from the configured folder, or else from `tokenizer`, and follows the configured
    /// store.
    ///
    /// # Errors
    /// The files cannot be read, the keys or the token are wrong, or the system has no more threads. An expired
    /// token, or a token's file that cannot be read, is no error: there may be a valid one soon.
    pub fn connect(config: PluginConfig, tokenizer: Option<&Path>) -> anyhow::Result<Self> {
        let files = config.tokenizer.as_deref().or(tokenizer).context(
            "tokenizer: missing; set REFRAIN_CLIENT_TOKENIZER to the folder of tokenizer.json",
        )?;
        let tokenizer = ModelFiles::from_dir(files).and_then(|files| files.tokenizer())?;
        let telemetry = TelemetryConfig {
            log: config.log.clone(),
            ..TelemetryConfig::default()
        };
        // The first client of a process sets up the log, and further ones use it.
        let _ = telemetry::init(&telemetry, "refrain-client");
        Proposer::start(config, tokenizer.identity(), |config, credentials| {
            let client =
                MeshClient::with_credentials(&config.store_url, credentials, CALL_TIMEOUT)?;
            Ok(draft_store(&client, &config.store_url, &config.store_urls)?)
        })
    }

    /// Follows the store that `connect` returns, for an engine whose tokenizer has this identity. `connect` is called
    /// on the runtime of the client, with what calls carry.
    ///
    /// # Errors
    /// The keys or the token are wrong, or the system has no more threads.
    pub(crate) fn start(
        config: PluginConfig,
        tokenizer: &str,
        connect: impl FnOnce(&PluginConfig, MeshCredentials) -> anyhow::Result<Arc<dyn DraftStore>>,
    ) -> anyhow::Result<Self> {
        let registry = Metrics::new()?;
        let mesh = config.mesh.clone().into();
        let is_engines = |own: &RoleCredential| {
            let is_right = own.role == MeshRole::Engine;
            anyhow::ensure!(
                is_right,
                "the credential is of the role {}, not engine",
                own.role
            );
            Ok(())
        };
        let credentials = MeshCredentials::open_own(&mesh, &registry, is_engines)?;
        let auth = MeshAuth::with_credentials(&mesh, credentials.clone())?;
        let metrics = PluginMetrics::register(registry.registry())?;
        let default_namespace = Arc::new(DefaultNamespace {
            file: config.token_file.clone(),
            auth,
            tokenizer: tokenizer.to_owned(),
            failures: metrics.token_failures.clone(),
            signed: Mutex::default(),
        });
        let signed = default_namespace.first(config.token.as_deref())?;
        let runtime = tokio::runtime::Builder::new_multi_thread()
            .worker_threads(1)
            .thread_name("refrain-client")
            .enable_all()
            .build()?;
        let entered = runtime.enter();
        let store = connect(&config, credentials)?;
        let replica = Arc::new(DraftReplica::new(
            config.replica.clone(),
            config.speculation.match_tokens_max,
            store.clone(),
            ReplicaMetrics::register(registry.registry())?,
        ));
        let upload_metrics = UploaderMetrics::register(registry.registry())?;
        let uploader = Uploader::start(config.uploader.clone(), store, upload_metrics);
        replica.forget_erased_of(&uploader);
        let (outbox, inbox) = Outbox::new(&config, metrics.clone());
        let background = Background {
            replica: replica.clone(),
            uploader: uploader.clone(),
            metrics: metrics.clone(),
        };
        let inbox = Arc::new(inbox);
        let run = move || background.clone().run(inbox.clone());
        actors::start("background", run).detached();
        if let Some(signed) = &signed {
            default_namespace.set(signed.clone(), &replica);
        }
        let renew = {
            let (namespace, replica) = (default_namespace.clone(), replica.clone());
            move || namespace.clone().renew(replica.clone())
        };
        actors::start("token", renew).detached();
        let server = config.metrics_listen;
        let server = server.and_then(|addr| serve_metrics(addr, &registry, replica.clone()));
        let reader = PromptReader::start(&config, metrics.clone());
        drop(entered);
        let namespaces_max = NonZeroUsize::new(config.replica.namespaces_max);
        let requests = Requests {
            running: HashMap::new(),
            statistics: LruCache::new(namespaces_max.unwrap_or(NonZeroUsize::MIN)),
            paused: PausedRequests::new(&config, metrics.clone()),
            default_namespace: signed,
            lengths: Lengths::new(),
            told: HashMap::new(),
        };
        Ok(Proposer {
            rules: config.speculation.rules(),
            runtime: Some(runtime),
            replica,
            uploader,
            default_namespace,
            outbox,
            reader,
            requests: Mutex::new(requests),
            device: None,
            metrics,
            registry,
            server,
        })
    }

    /// Keeps the texts on the engine's devices from now on, whose runner drafts from them.
    ///
    /// # Errors
    /// The folder of files that carry them cannot be made.
    pub fn with_devices(
        mut self,
        config: &DeviceConfig,
        namespaces_max: usize,
    ) -> anyhow::Result<Self> {
        let device = Arc::new(DeviceIndex::new(config.clone(), namespaces_max)?);
        let runtime = self.runtime.as_ref().context("the client has stopped")?;
        let _entered = runtime.enter();
        let export = {
            let (device, replica) = (device.clone(), self.replica.clone());
            move || DeviceExport::new(device.clone(), replica.clone()).run()
        };
        actors::start("device index", export).detached();
        self.device = Some(device);
        Ok(self)
    }

    /// Counters of the work done, and the size of the replica.
    pub fn stats(&self) -> HashMap<&'static str, u64> {
        let counted = |value: i64| value.max(0) as u64;
        let signed = self.default_namespace.signed.lock().clone();
        let namespace = signed.map(|signed| self.replica.namespace(signed.namespace.id(), &signed));
        let (documents, tokens) = namespace.as_ref().map_or((0, 0), |namespace| {
            let index = namespace.read();
            (index.index().documents() as u64, index.index().tokens())
        });
        let metrics = &self.metrics;
        let refused = |limit| metrics.rejections.with_label_values(&[limit]).get();
        HashMap::from([
            ("requests", counted(metrics.requests.get())),
            ("drafts", metrics.drafts.get()),
            ("drafted_tokens", metrics.drafted.get()),
            ("accepted_tokens", metrics.accepted.get()),
            ("emitted_tokens", metrics.emitted.get()),
            ("busy", metrics.busy.get()),
            ("refused_tokens", refused(TOKEN)),
            ("refused_fields", refused(FIELDS)),
            ("paused_tokens", counted(metrics.paused_tokens.get())),
            ("reading_tokens", counted(metrics.reading_tokens.get())),
            ("device_tokens", counted(metrics.device_tokens.get())),
            ("documents", documents),
            ("tokens", tokens),
            // Whether everything that the store has of the configured namespace is here.
            (
                "is_caught_up",
                u64::from(namespace.is_some_and(|namespace| !namespace.is_partial())),
            ),
        ])
    }

    /// All metrics in the text format of Prometheus.
    pub fn metrics(&self) -> String {
        self.replica.observe();
        String::from_utf8_lossy(&self.registry.render()).into_owned()
    }

    /// The address at which metrics are served, if they are.
    pub fn metrics_addr(&self) -> Option<SocketAddr> {
        self.server.as_ref().map(Server::addr)
    }

    /// Waits until the store has all outputs, at most for `grace`. Returns whether it has. The engine's thread must
    /// not call this.
    pub fn drain(&self, grace: Duration) -> bool {
        let Some(runtime) = &self.runtime else {
            return false;
        };
        let (done, is_done) = oneshot::channel();
        self.outbox.send(BackgroundEvent::Flush(done));
        let drained = async { is_done.await.is_ok() && self.uploader.drain(grace).await };
        // One deadline for both, the flush and the drain.
        let drained = runtime.block_on(async { tokio::time::timeout(grace, drained).await });
        drained.unwrap_or(false)
    }
}

impl Drop for Proposer {
    fn drop(&mut self) {
        self.replica.stop();
        let Some(runtime) = self.runtime.take() else {
            return;
        };
        match self.server.take() {
            None => runtime.shutdown_background(),
            // The server has threads of its own. The caller may be on a runtime, and must not wait there.
            Some(server) => drop(std::thread::spawn(move || {
                runtime.block_on(server.stop(false));
                runtime.shutdown_background();
            })),
        }
    }
}
