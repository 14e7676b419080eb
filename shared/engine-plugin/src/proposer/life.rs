//! How a [`Proposer`] comes up, what it tells of itself, and how it goes.

use std::collections::HashMap;
use std::net::SocketAddr;
use std::num::NonZeroUsize;
use std::path::Path;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use anyhow::Context as _;
use lru::LruCache;
use refrain_draft_replica::{Harvest, Memory};
use refrain_rpc::{DraftStore, HttpDraftStore};
use refrain_service_kit::http::{MeshClient, Server};
use refrain_service_kit::mesh::MeshAuth;
use refrain_service_kit::telemetry::{self, Metrics, TelemetryConfig};
use refrain_tokenization::ModelFiles;
use tokio::sync::oneshot;

use super::{Proposer, Requests};
use crate::background::{Background, Event};
use crate::config::InEngineConfig;
use crate::listen::listen;
use crate::metrics::{FIELDS, InEngineMetrics, TOKEN};
use crate::outbox::Outbox;
use crate::own::Reader;
use crate::paused::PausedRequests;
use crate::standing::Standing;

impl Proposer {
    /// Reads the tokenizer's files from the configured folder, or else from `tokenizer`, and follows the configured store.
    ///
    /// # Errors
    /// The files cannot be read, the keys or the token are wrong, or the system has no more threads. A token that is too
    /// old, or a token's file that cannot be read, is none of these: there may be another one soon.
    pub fn connect(config: InEngineConfig, tokenizer: Option<&Path>) -> anyhow::Result<Self> {
        let files = config.tokenizer.as_deref().or(tokenizer).context(
            "tokenizer: missing; REFRAIN_CLIENT_TOKENIZER names the folder of tokenizer.json",
        )?;
        let tokenizer = ModelFiles::from_dir(files).and_then(|files| files.tokenizer())?;
        let telemetry = TelemetryConfig {
            log: config.log.clone(),
            ..TelemetryConfig::default()
        };
        // The second client of a process logs as the first one does.
        let _ = telemetry::init(&telemetry, "refrain-client");
        let timeout = Duration::from_millis(config.timeout_ms);
        let client = MeshClient::new(&config.store_url, &config.mesh.secret, timeout)?;
        let store = Arc::new(HttpDraftStore::new(client));
        Proposer::start(config, tokenizer.identity(), store)
    }

    /// Follows a store for an engine whose tokenizer has this identity.
    ///
    /// # Errors
    /// The keys or the token are wrong, or the system has no more threads.
    pub(crate) fn start(
        config: InEngineConfig,
        tokenizer: &str,
        store: Arc<dyn DraftStore>,
    ) -> anyhow::Result<Self> {
        let auth = MeshAuth::new(&config.mesh)?;
        let registry = Metrics::new()?;
        let metrics = InEngineMetrics::new(&registry)?;
        let standing = Arc::new(Standing::new(
            config.token_file.clone(),
            auth,
            tokenizer.to_owned(),
            metrics.token_failures.clone(),
        ));
        let signed = standing.first(config.token.as_deref())?;
        let runtime = tokio::runtime::Builder::new_multi_thread()
            .worker_threads(1)
            .thread_name("refrain-client")
            .enable_all()
            .build()?;
        let entered = runtime.enter();
        let memory = Arc::new(Memory::new(
            config.memory.clone(),
            config.pattern_tokens_max,
            store.clone(),
            metrics.memory.clone(),
        ));
        let harvest = Harvest::start(config.harvest.clone(), store, metrics.harvest.clone());
        let (outbox, inbox) = Outbox::new(&config, metrics.clone());
        let background = Background {
            memory: memory.clone(),
            harvest: harvest.clone(),
            metrics: metrics.clone(),
        };
        runtime.spawn(background.run(inbox));
        if let Some(signed) = &signed {
            standing.set(signed.clone(), &memory);
        }
        runtime.spawn(standing.clone().renew(memory.clone()));
        let listener = config.metrics_listen;
        let listener = listener.and_then(|addr| listen(addr, &registry, memory.clone()));
        drop(entered);
        let reader = Reader::start(&config, metrics.clone())?;
        let at_least_one = |most| NonZeroUsize::new(most).unwrap_or(NonZeroUsize::MIN);
        let paused_max = at_least_one(config.paused_requests_max);
        let requests = Requests {
            running: HashMap::new(),
            calibrations: LruCache::new(at_least_one(config.memory.namespaces_max)),
            paused: PausedRequests::new(paused_max, config.paused_tokens_max),
            standing: signed,
        };
        Ok(Proposer {
            config,
            runtime: Some(runtime),
            memory,
            harvest,
            standing,
            outbox,
            reader,
            requests: Mutex::new(requests),
            metrics,
            registry,
            listener,
        })
    }

    /// What was done, and what is in the memory.
    pub fn stats(&self) -> HashMap<&'static str, u64> {
        let counted = |value: i64| value.max(0) as u64;
        let signed = self.standing.signed();
        let memory = signed.map(|signed| self.memory.namespace(signed.namespace.id(), &signed));
        let (documents, tokens) = memory.as_ref().map_or((0, 0), |memory| {
            let drafts = memory.read();
            (drafts.index().documents() as u64, drafts.index().tokens())
        });
        let metrics = &self.metrics;
        let refused = |limit| metrics.rejections.with_label_values(&[limit]).get();
        HashMap::from([
            ("requests", counted(metrics.requests.get())),
            ("drafts", metrics.drafts.get()),
            ("drafted_tokens", metrics.drafted.get()),
            ("accepted_tokens", metrics.accepted.get()),
            ("said_tokens", metrics.said.get()),
            ("busy", metrics.busy.get()),
            ("refused_tokens", refused(TOKEN)),
            ("refused_fields", refused(FIELDS)),
            ("paused_tokens", counted(metrics.paused_tokens.get())),
            ("reading_tokens", counted(metrics.reading_tokens.get())),
            ("documents", documents),
            ("tokens", tokens),
            // Whether all that the store has of the engine's own namespace is here.
            (
                "is_caught_up",
                u64::from(memory.is_some_and(|memory| !memory.is_partial())),
            ),
        ])
    }

    /// The same and more, as Prometheus reads it.
    pub fn metrics(&self) -> String {
        self.memory.observe();
        String::from_utf8_lossy(&self.registry.render()).into_owned()
    }

    /// Where they are served, if anywhere.
    pub fn metrics_addr(&self) -> Option<SocketAddr> {
        self.listener.as_ref().map(Server::addr)
    }

    /// Waits until the store has all outputs, at most `grace`. Returns whether it has. Not for the engine's thread.
    pub fn drain(&self, grace: Duration) -> bool {
        let Some(runtime) = &self.runtime else {
            return false;
        };
        let (done, is_done) = oneshot::channel();
        self.outbox.say(Event::Flush(done));
        let drained = async { is_done.await.is_ok() && self.harvest.drain(grace).await };
        // One deadline for both: `grace` is all the time there is.
        let drained = runtime.block_on(async { tokio::time::timeout(grace, drained).await });
        drained.unwrap_or(false)
    }
}

impl Drop for Proposer {
    fn drop(&mut self) {
        self.memory.stop();
        let Some(runtime) = self.runtime.take() else {
            return;
        };
        match self.listener.take() {
            None => runtime.shutdown_background(),
            // It has threads of its own. Whoever drops this may be on a runtime, and must not wait there.
            Some(listener) => drop(std::thread::spawn(move || {
                runtime.block_on(listener.stop(false));
                runtime.shutdown_background();
            })),
        }
    }
}
