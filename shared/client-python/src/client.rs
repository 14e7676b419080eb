//! [`Client`]: what Python calls.

use std::collections::HashMap;
use std::num::NonZeroUsize;
use std::path::PathBuf;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, mpsc};
use std::time::Duration;

use lru::LruCache;
use pyo3::exceptions::{PyRuntimeError, PyValueError};
use pyo3::prelude::*;
use refrain_clients::HttpDraftStore;
use refrain_draft_memory::{Harvest, Memory, NamespaceMemory};
use refrain_protocol::document::DocumentHead;
use refrain_protocol::{DocumentId, NamespaceId, SignedNamespace};
use refrain_service_kit::http::MeshClient;
use refrain_service_kit::mesh::MeshAuth;
use refrain_service_kit::telemetry::{self, Metrics, TelemetryConfig};
use refrain_service_kit::{clock, random};
use refrain_speculation::{Calibration, Expansion, ProposeParams};
use refrain_suffix_index::IndexConfig;
use refrain_tokenization::ModelFiles;
use tokio::runtime::Runtime;
use tokio::sync::oneshot;

use crate::background::{Event, Standing, hand_on};
use crate::config::ClientConfig;
use crate::metrics::{ClientMetrics, FIELDS, QUEUED_TOKENS_MAX, TOKEN};
use crate::paused::PausedRequests;
use crate::request::{Paused, Request};
use crate::tokens::Tokens;

/// A copy of the drafts, which follows a mesh's draft store and hands outputs back.
///
/// Client(config=None, tokenizer=None): `config` is the path of a TOML file, which variables REFRAIN_CLIENT_... override;
/// `tokenizer` the folder of the engine's tokenizer.json, where the configuration names none. Raises ValueError for a
/// faulty configuration, a tokenizer that cannot be read, and a token that is refused.
#[pyclass(frozen)]
pub(crate) struct Client {
    config: ClientConfig,
    runtime: Option<Runtime>,
    memory: Arc<Memory>,
    harvest: Harvest,
    standing: Arc<Standing>,
    events: mpsc::Sender<Event>,
    requests: Mutex<Requests>,
    metrics: ClientMetrics,
    registry: Metrics,
}

struct Requests {
    running: HashMap<String, Request>,
    /// What drafts are worth, by namespace; the least used goes first.
    calibrations: LruCache<Option<NamespaceId>, Calibration>,
    paused: PausedRequests,
}

/// A draft: its tokens, its score, the length of the match.
type Draft = (Vec<u32>, f32, u32);

fn invalid(error: impl std::fmt::Display) -> PyErr {
    PyValueError::new_err(error.to_string())
}

fn failed(error: impl std::fmt::Display) -> PyErr {
    PyRuntimeError::new_err(error.to_string())
}

#[pymethods]
impl Client {
    #[new]
    #[pyo3(signature = (config=None, tokenizer=None))]
    fn new(py: Python<'_>, config: Option<PathBuf>, tokenizer: Option<PathBuf>) -> PyResult<Self> {
        py.detach(|| Client::connect(config, tokenizer))
    }

    /// start(request_id, prompt, namespace=None, group=None, document=None, epoch=1, written=0): a request
    /// begins, or goes on after the engine made room. `namespace` is a token; without it the configured one holds; a request that has neither, or
    /// whose token is refused (ValueError), is drafted for from its own text alone, and is not kept. `document` and `epoch`
    /// name its output in the store, as 32 hex digits and a number; the last `written` tokens of the prompt are of it.
    #[pyo3(signature = (request_id, prompt, namespace=None, group=None, document=None, epoch=1, written=0))]
    #[expect(clippy::too_many_arguments, reason = "a Python call with names")]
    fn start(
        &self,
        py: Python<'_>,
        request_id: String,
        prompt: Tokens,
        namespace: Option<&str>,
        group: Option<String>,
        document: Option<&str>,
        epoch: u64,
        written: usize,
    ) -> PyResult<()> {
        py.detach(|| {
            let document = match document {
                Some(document) => document.parse().map_err(|error| {
                    self.metrics.rejections.with_label_values(&[FIELDS]).inc();
                    invalid(error)
                })?,
                None => DocumentId(random::u128().map_err(failed)?),
            };
            let signed = match namespace {
                None => Ok(self.standing.signed()),
                Some(token) => self.standing.check(token).map(Some),
            };
            let (signed, refused) = match signed {
                Ok(signed) => (signed, None),
                Err(error) => (None, Some(error)),
            };
            let is = |memory, head| Paused::new(prompt.0, written, document, epoch, memory, head);
            self.begin(request_id, signed, group, is);
            match refused {
                None => Ok(()),
                Some(error) => {
                    self.metrics.rejections.with_label_values(&[TOKEN]).inc();
                    Err(invalid(error))
                }
            }
        })
    }

    /// refuse(): counts a request that brought what cannot be read, and is not begun here.
    fn refuse(&self) {
        self.metrics.rejections.with_label_values(&[FIELDS]).inc();
    }

    /// extend(request_id, tokens): the engine said so. Others can draft from it at once. Unknown requests are ignored.
    fn extend(&self, py: Python<'_>, request_id: &str, tokens: Tokens) {
        py.detach(|| {
            let mut requests = self.lock();
            if let Some(request) = requests.running.get_mut(request_id) {
                request.extend(&tokens.0, None, &self.metrics);
                self.tell_if_due(request);
            }
        });
    }

    /// propose(requests, factor=1.0, offset=0.0, min_token_prob=0.1): a chain for each (request id, most tokens), as
    /// (tokens, score, match length). Not more than factor * match length + offset tokens, none less likely than
    /// `min_token_prob`. The score is the number of tokens that the step is expected to bring by the counts.
    #[pyo3(signature = (requests, factor=1.0, offset=0.0, min_token_prob=0.1))]
    fn propose(
        &self,
        py: Python<'_>,
        requests: Vec<(String, usize)>,
        factor: f32,
        offset: f32,
        min_token_prob: f32,
    ) -> Vec<Draft> {
        let params = self.params(factor, offset, min_token_prob);
        py.detach(|| {
            let mut running = self.lock();
            let draft = |(id, room): (String, usize)| {
                let request = running.running.get_mut(&id);
                let found = request.and_then(|request| {
                    request.propose(&params, room, &self.metrics)?;
                    let found = request.offer(&self.metrics)?;
                    Some((found.tree.tokens().collect(), found.score, found.match_len))
                });
                found.unwrap_or_default()
            };
            requests.into_iter().map(draft).collect()
        })
    }

    /// step(requests, factor=1.0, offset=0.0, min_token_prob=0.1): for each (request id, what it said since the last time,
    /// most tokens, the engine's own draft) a chain that is expected to bring more than the engine's own, or None: keep
    /// that. What drafts of both kinds bring is learnt from what is said, by namespace.
    #[pyo3(signature = (requests, factor=1.0, offset=0.0, min_token_prob=0.1))]
    fn step(
        &self,
        py: Python<'_>,
        requests: Vec<(String, Tokens, usize, Vec<u32>)>,
        factor: f32,
        offset: f32,
        min_token_prob: f32,
    ) -> Vec<Option<Vec<u32>>> {
        let params = self.params(factor, offset, min_token_prob);
        py.detach(|| {
            let Requests {
                running,
                calibrations,
                ..
            } = &mut *self.lock();
            let draft = |(id, said, room, rival): (String, Tokens, usize, Vec<u32>)| {
                let request = running.get_mut(&id)?;
                let table = calibrations.get_or_insert_mut(request.namespace(), Calibration::new);
                request.extend(&said.0, Some(table), &self.metrics);
                self.tell_if_due(request);
                request.propose(&params, room, &self.metrics);
                if !request.beats(rival, table) {
                    return None;
                }
                let offered = request.offer(&self.metrics)?;
                Some(offered.tree.tokens().collect())
            };
            requests.into_iter().map(draft).collect()
        })
    }

    /// finish(request_id): it runs no more, maybe only for now. Unknown requests are ignored.
    fn finish(&self, py: Python<'_>, request_id: String) {
        py.detach(|| {
            let mut requests = self.lock();
            let Some(request) = requests.running.remove(&request_id) else {
                return;
            };
            self.metrics.requests.set(requests.running.len() as i64);
            let paused = self.end(request);
            let gone = requests.paused.put(request_id, paused);
            let tokens = requests.paused.tokens();
            self.metrics.paused_tokens.set(tokens as i64);
            self.metrics.forgotten.inc_by(gone);
        });
    }

    /// stats(): what was done, and what is in the memory.
    fn stats(&self, py: Python<'_>) -> HashMap<&'static str, u64> {
        let counted = |value: i64| value.max(0) as u64;
        py.detach(|| {
            let signed = self.standing.signed();
            let memory = signed.map(|signed| self.memory.namespace(signed.namespace.id(), &signed));
            let (documents, tokens) = memory.as_ref().map_or((0, 0), |memory| {
                let drafts = memory.lock();
                (drafts.index().documents() as u64, drafts.index().tokens())
            });
            let metrics = &self.metrics;
            HashMap::from([
                ("requests", counted(metrics.requests.get())),
                ("drafts", metrics.drafts.get()),
                ("drafted_tokens", metrics.drafted.get()),
                ("accepted_tokens", metrics.accepted.get()),
                ("said_tokens", metrics.said.get()),
                ("busy", metrics.busy.get()),
                (
                    "refused_tokens",
                    metrics.rejections.with_label_values(&[TOKEN]).get(),
                ),
                (
                    "refused_fields",
                    metrics.rejections.with_label_values(&[FIELDS]).get(),
                ),
                ("paused_tokens", counted(metrics.paused_tokens.get())),
                ("documents", documents),
                ("tokens", tokens),
                // Whether all that the store has of the engine's own namespace is here.
                (
                    "is_caught_up",
                    u64::from(memory.is_some_and(|memory| !memory.is_partial())),
                ),
            ])
        })
    }

    /// metrics(): the same and more, as Prometheus reads it.
    fn metrics(&self, py: Python<'_>) -> String {
        py.detach(|| {
            self.memory.observe();
            String::from_utf8_lossy(&self.registry.render()).into_owned()
        })
    }

    /// drain(seconds): waits until the store has all outputs, so long at most. Returns whether it has. Not for the
    /// engine's thread.
    fn drain(&self, py: Python<'_>, seconds: f64) -> PyResult<bool> {
        let grace = Duration::try_from_secs_f64(seconds).map_err(invalid)?;
        py.detach(|| {
            let Some(runtime) = &self.runtime else {
                return Ok(false);
            };
            let (done, is_done) = oneshot::channel();
            self.events.send(Event::Flush(done)).map_err(failed)?;
            runtime.block_on(async {
                let handed_on = tokio::time::timeout(grace, is_done).await;
                Ok(handed_on.is_ok() && self.harvest.drain(grace).await)
            })
        })
    }
}

impl Client {
    fn connect(config: Option<PathBuf>, tokenizer: Option<PathBuf>) -> PyResult<Self> {
        let config = ClientConfig::load(config).map_err(invalid)?;
        let files = config.tokenizer.clone().or(tokenizer).ok_or_else(|| {
            PyValueError::new_err(
                "tokenizer: missing; REFRAIN_CLIENT_TOKENIZER names the folder of tokenizer.json",
            )
        })?;
        let tokenizer = ModelFiles::from_dir(files)
            .and_then(|files| files.tokenizer())
            .map_err(invalid)?;
        let telemetry = TelemetryConfig {
            log: config.log.clone(),
            ..TelemetryConfig::default()
        };
        // The second client of a process logs as the first one does.
        let _ = telemetry::init(&telemetry, "refrain-client");
        let auth = MeshAuth::new(&config.mesh).map_err(invalid)?;
        let identity = tokenizer.identity().to_owned();
        let standing = Arc::new(Standing::new(config.token_file.clone(), auth, identity));
        let signed = match &config.token {
            Some(token) => Some(standing.check(token).map_err(invalid)?),
            None => standing.read().map_err(invalid)?,
        };

        let runtime = tokio::runtime::Builder::new_multi_thread()
            .worker_threads(1)
            .thread_name("refrain-client")
            .enable_all()
            .build()
            .map_err(failed)?;
        let _entered = runtime.enter();
        let registry = Metrics::new().map_err(failed)?;
        let metrics = ClientMetrics::new(&registry).map_err(failed)?;
        let timeout = Duration::from_millis(config.timeout_ms);
        let client =
            MeshClient::new(&config.store_url, &config.mesh.secret, timeout).map_err(failed)?;
        let store = Arc::new(HttpDraftStore::new(client));
        let memory = Arc::new(Memory::new(
            config.memory.clone(),
            config.pattern_tokens_max,
            store.clone(),
            metrics.memory.clone(),
        ));
        let harvest = Harvest::start(config.harvest.clone(), store, metrics.harvest.clone());
        let (events, inbox) = mpsc::channel();
        runtime.spawn(hand_on(inbox, harvest.clone(), metrics.clone()));
        if let Some(signed) = signed {
            // From here on it is followed: the first request finds what there was before.
            memory.namespace(signed.namespace.id(), &signed);
            standing.set(signed);
            runtime.spawn(standing.clone().renew(memory.clone()));
        }
        let namespaces_max = config.memory.namespaces_max;
        let namespaces_max = NonZeroUsize::new(namespaces_max).unwrap_or(NonZeroUsize::MIN);
        let paused_max = NonZeroUsize::new(config.paused_requests_max).unwrap_or(NonZeroUsize::MIN);
        let paused = PausedRequests::new(paused_max, config.paused_tokens_max);
        drop(_entered);
        Ok(Client {
            config,
            runtime: Some(runtime),
            memory,
            harvest,
            standing,
            events,
            requests: Mutex::new(Requests {
                running: HashMap::new(),
                calibrations: LruCache::new(namespaces_max),
                paused,
            }),
            metrics,
            registry,
        })
    }

    fn params(&self, factor: f32, offset: f32, min_token_prob: f32) -> ProposeParams {
        ProposeParams {
            expansion: Expansion::Linear,
            alpha: factor,
            offset,
            min_token_prob,
            max_spec_tokens: usize::MAX,
            max_pattern: self.config.pattern_tokens_max,
            ..ProposeParams::default()
        }
    }

    fn begin(
        &self,
        id: String,
        signed: Option<SignedNamespace>,
        group: Option<String>,
        is: impl FnOnce(Option<Arc<NamespaceMemory>>, DocumentHead) -> Paused,
    ) {
        let index = IndexConfig {
            pattern_tokens_max: self.config.pattern_tokens_max,
            ..IndexConfig::default()
        };
        let memory = signed.map(|signed| self.memory.namespace(signed.namespace.id(), &signed));
        let head = DocumentHead {
            group: group.clone(),
            created_ms: clock::unix_ms(),
            ..DocumentHead::default()
        };
        let is = is(memory.clone(), head);
        let paused = {
            let mut requests = self.lock();
            let paused = requests.paused.take(&id);
            let tokens = requests.paused.tokens();
            self.metrics.paused_tokens.set(tokens as i64);
            paused
        };
        let is = match paused.filter(|paused| paused.began_as(&is)) {
            Some(paused) => paused.again(),
            None => is,
        };
        let group = group
            .zip(memory)
            .and_then(|(group, memory)| self.memory.group(memory.id(), &group, is.document()));
        let request = Request::new(is, group, index);
        if let Some(began) = request.began() {
            // Nobody listens once the client is being closed.
            let _ = self.events.send(began);
        }
        let mut requests = self.lock();
        let unfinished = requests.running.insert(id, request);
        self.metrics.requests.set(requests.running.len() as i64);
        if let Some(unfinished) = unfinished {
            self.end(unfinished);
        }
    }

    fn end(&self, request: Request) -> Paused {
        self.metrics.queued_tokens.add(request.untold() as i64);
        let (paused, events) = request.end();
        for event in events.into_iter().flatten() {
            // Nobody listens once the client is being closed.
            let _ = self.events.send(event);
        }
        paused
    }

    fn tell_if_due(&self, request: &mut Request) {
        let untold = request.untold();
        if untold < self.config.piece_tokens as usize {
            return;
        }
        let queued = self.metrics.queued_tokens.get().max(0) as usize;
        if queued + untold > self.config.queued_tokens_max {
            let rejections = self
                .metrics
                .rejections
                .with_label_values(&[QUEUED_TOKENS_MAX]);
            rejections.inc();
            return;
        }
        if let Some(event) = request.tell() {
            self.metrics.queued_tokens.add(untold as i64);
            // Nobody listens once the client is being closed.
            let _ = self.events.send(event);
        }
    }

    fn lock(&self) -> MutexGuard<'_, Requests> {
        self.requests.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for Client {
    fn drop(&mut self) {
        self.memory.stop();
        if let Some(runtime) = self.runtime.take() {
            runtime.shutdown_background();
        }
    }
}
