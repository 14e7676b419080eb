//! [`Proposer`]: what an engine calls.

use std::collections::HashMap;
use std::net::SocketAddr;
use std::num::NonZeroUsize;
use std::path::Path;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, mpsc};
use std::time::Duration;

use anyhow::Context as _;
use lru::LruCache;
use refrain_clients::{DraftStore, HttpDraftStore};
use refrain_draft_memory::{Harvest, Memory};
use refrain_protocol::document::{DocumentHead, FinishReason};
use refrain_protocol::{ApiError, DocumentId, NamespaceId, SignedNamespace};
use refrain_service_kit::http::{MeshClient, Server};
use refrain_service_kit::mesh::MeshAuth;
use refrain_service_kit::telemetry::{self, Metrics, TelemetryConfig};
use refrain_service_kit::{clock, random};
use refrain_speculation::{Calibration, Expansion, ProposeParams};
use refrain_tokenization::ModelFiles;
use tokio::runtime::Runtime;
use tokio::sync::oneshot;

use crate::background::{Background, Event};
use crate::config::InEngineConfig;
use crate::listen::listen;
use crate::metrics::{FIELDS, InEngineMetrics, QUEUED_TOKENS_MAX, TOKEN};
use crate::own::Reader;
use crate::paused::PausedRequests;
use crate::place::{Place, Placed};
use crate::request::{Output, Paused, Request};
use crate::standing::Standing;

/// A copy of the drafts, which follows a mesh's draft store and hands outputs back.
pub struct Proposer {
    config: InEngineConfig,
    runtime: Option<Runtime>,
    pub(crate) memory: Arc<Memory>,
    harvest: Harvest,
    standing: Arc<Standing>,
    events: mpsc::Sender<Event>,
    reader: Reader,
    /// The engine's own: the threads here never hold it.
    requests: Mutex<Requests>,
    pub(crate) metrics: InEngineMetrics,
    registry: Metrics,
    listener: Option<Server>,
}

struct Requests {
    running: HashMap<String, Request>,
    /// What drafts are worth, by namespace; the least used goes first.
    calibrations: LruCache<Option<NamespaceId>, Calibration>,
    paused: PausedRequests,
    /// The namespace of requests that bring none, as it was last seen.
    standing: Option<SignedNamespace>,
}

/// What a request brings along.
#[derive(Clone, Debug, Default)]
pub struct Begin<'a> {
    /// The engine's name for it.
    pub request: String,
    /// Its text, token ids.
    pub prompt: Vec<u32>,
    /// A token of its namespace; without one the configured namespace holds.
    pub namespace: Option<&'a str>,
    /// Its group of samples.
    pub group: Option<String>,
    /// Its output in the store, 32 hex digits. Whoever names it also writes it there; one without a name is written from here.
    pub document: Option<&'a str>,
    /// The epoch of that output.
    pub epoch: u64,
    /// So many tokens at the end of the prompt are output already.
    pub written: usize,
}

/// A step of a request whose engine has drafts of its own.
#[derive(Clone, Debug)]
pub struct Step {
    /// The engine's name for it.
    pub request: String,
    /// What it said since the last step, token ids.
    pub said: Vec<u32>,
    /// Most tokens of a draft.
    pub room: usize,
    /// The engine's own draft, token ids.
    pub rival: Vec<u32>,
}

/// A draft: its tokens, its score, the length of the match.
pub type Draft = (Vec<u32>, f32, u32);

/// How an engine's word for an output's end is kept. What it did not end by a rule of its own is partial.
fn finish_of(reason: Option<&str>) -> FinishReason {
    match reason {
        Some("stop") => FinishReason::Stop,
        // An engine that ends an output because it repeats itself cuts it short.
        Some("length" | "repetition") => FinishReason::Length,
        Some("error") => FinishReason::Failed,
        _ => FinishReason::Cancelled,
    }
}

impl Proposer {
    /// Reads the tokenizer's files from the configured folder, or else from `tokenizer`, and follows the configured store.
    ///
    /// # Errors
    /// The files cannot be read, the keys or the token are refused, or the system has no more threads.
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
    /// The keys or the token are refused, or the system has no more threads.
    pub(crate) fn start(
        config: InEngineConfig,
        tokenizer: &str,
        store: Arc<dyn DraftStore>,
    ) -> anyhow::Result<Self> {
        let auth = MeshAuth::new(&config.mesh)?;
        let standing = Standing::new(config.token_file.clone(), auth, tokenizer.to_owned());
        let standing = Arc::new(standing);
        let signed = match &config.token {
            Some(token) => Some(standing.check(token)?),
            None => standing.read()?,
        };
        let runtime = tokio::runtime::Builder::new_multi_thread()
            .worker_threads(1)
            .thread_name("refrain-client")
            .enable_all()
            .build()?;
        let entered = runtime.enter();
        let registry = Metrics::new()?;
        let metrics = InEngineMetrics::new(&registry)?;
        let memory = Arc::new(Memory::new(
            config.memory.clone(),
            config.pattern_tokens_max,
            store.clone(),
            metrics.memory.clone(),
        ));
        let harvest = Harvest::start(config.harvest.clone(), store, metrics.harvest.clone());
        let (events, inbox) = mpsc::channel();
        let background = Background {
            memory: memory.clone(),
            harvest: harvest.clone(),
            metrics: metrics.clone(),
        };
        runtime.spawn(background.run(inbox));
        if let Some(signed) = &signed {
            // From here on it is followed: the first request finds what there was before.
            memory.namespace(signed.namespace.id(), signed);
            standing.set(signed.clone());
            runtime.spawn(standing.clone().renew(memory.clone()));
        }
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
            events,
            reader,
            requests: Mutex::new(requests),
            metrics,
            registry,
            listener,
        })
    }

    /// A request begins, or goes on after the engine made room. Returns how many tokens behind its prompt are known, from
    /// before: the next ones that it says stand behind those.
    ///
    /// # Errors
    /// Its token is refused, or its document is no name of one. With a token that is refused it runs all the same, is
    /// drafted for from its own text alone, is not kept, and begins with its prompt.
    pub fn begin(&self, begin: Begin<'_>) -> Result<usize, ApiError> {
        let document = match begin.document {
            Some(document) => document.parse().map_err(|error: String| {
                self.refuse();
                ApiError::invalid("document", error)
            })?,
            None => DocumentId(random::u128()?),
        };
        let (signed, refused) = match begin.namespace.map(|token| self.standing.check(token)) {
            None => (self.standing(), Ok(())),
            Some(Ok(signed)) => (Some(signed), Ok(())),
            Some(Err(error)) => {
                self.metrics.rejected(TOKEN);
                (None, Err(error))
            }
        };
        let head = DocumentHead {
            group: begin.group.clone(),
            created_ms: clock::unix_ms(),
            ..DocumentHead::default()
        };
        let output = Output {
            document,
            epoch: begin.epoch,
            written: begin.written,
            is_named: begin.document.is_some(),
        };
        let namespace = signed.as_ref().map(|signed| signed.namespace.id());
        let is = Paused::new(begin.prompt, &output, namespace, head);
        let prompt_len = is.tokens();
        let paused = self.take_paused(&begin.request);
        // Who is told of a refusal is told of no length.
        let paused = paused.filter(|paused| refused.is_ok() && paused.began_as(&is));
        let is = paused.map_or(is, Paused::again);
        let known = is.tokens() - prompt_len;
        self.run(begin.request, is, signed, begin.group);
        refused.map(|()| known)
    }

    /// Counts a request that brought what cannot be read, and is not begun here.
    pub fn refuse(&self) {
        self.metrics.rejected(FIELDS);
    }

    /// The engine said so. Others can draft from it at once. Unknown requests are ignored.
    pub fn extend(&self, request: &str, said: &[u32]) {
        if let Some(request) = self.lock().running.get_mut(request) {
            request.extend(said, None, &self.metrics);
            self.tell_if_due(request);
        }
    }

    /// A chain for each request, of at most so many tokens. Not more than factor * match length + offset, none less likely
    /// than `min_token_prob`. The score is the number of tokens that the step is expected to bring by the counts.
    pub fn propose(
        &self,
        requests: Vec<(String, usize)>,
        factor: f32,
        offset: f32,
        min_token_prob: f32,
    ) -> Vec<Draft> {
        let params = self.params(factor, offset, min_token_prob);
        let mut requests_here = self.lock();
        let draft = |(id, room): (String, usize)| {
            let request = requests_here.running.get_mut(&id)?;
            request.propose(&params, room, &self.metrics)?;
            let found = request.offer(&self.metrics)?;
            Some((found.tree.tokens().collect(), found.score, found.match_len))
        };
        let drafts = requests.into_iter().map(draft);
        drafts.map(Option::unwrap_or_default).collect()
    }

    /// For each request a chain that is expected to bring more than the engine's own, or `None`: keep that. What drafts of
    /// both kinds bring is learnt from what is said, by namespace.
    pub fn step(
        &self,
        requests: Vec<Step>,
        factor: f32,
        offset: f32,
        min_token_prob: f32,
    ) -> Vec<Option<Vec<u32>>> {
        let params = self.params(factor, offset, min_token_prob);
        let Requests {
            running,
            calibrations,
            ..
        } = &mut *self.lock();
        let draft = |step: Step| {
            let request = running.get_mut(&step.request)?;
            let table = calibrations.get_or_insert_mut(request.namespace(), Calibration::new);
            request.extend(&step.said, Some(table), &self.metrics);
            self.tell_if_due(request);
            request.propose(&params, step.room, &self.metrics);
            if !request.beats(step.rival, table) {
                return None;
            }
            let offered = request.offer(&self.metrics)?;
            Some(offered.tree.tokens().collect())
        };
        requests.into_iter().map(draft).collect()
    }

    /// It runs no more, maybe only for now: `reason` is the engine's word for it, `None` where it has none. Unknown requests
    /// are ignored.
    pub fn finish(&self, request: String, reason: Option<&str>) {
        let mut requests = self.lock();
        let Some(ended) = requests.running.remove(&request) else {
            return;
        };
        self.metrics.requests.set(requests.running.len() as i64);
        let finish = finish_of(reason);
        let paused = self.end(ended, finish);
        if finish != FinishReason::Cancelled {
            // It has come to its end, and nothing goes on from there.
            return;
        }
        let gone = requests.paused.put(request, paused);
        let tokens = requests.paused.tokens();
        self.metrics.paused_tokens.set(tokens as i64);
        self.metrics.forgotten.inc_by(gone);
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
        self.say(Event::Flush(done));
        let drained = async { is_done.await.is_ok() && self.harvest.drain(grace).await };
        // One deadline for both: `grace` is all the time there is.
        let drained = runtime.block_on(async { tokio::time::timeout(grace, drained).await });
        drained.unwrap_or(false)
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

    /// The configured namespace, as it is now or was a moment ago.
    fn standing(&self) -> Option<SignedNamespace> {
        let mut requests = self.lock();
        self.standing.refresh(&mut requests.standing);
        requests.standing.clone()
    }

    fn run(&self, id: String, is: Paused, signed: Option<SignedNamespace>, group: Option<String>) {
        let placed = match signed {
            Some(signed) => self.place(signed, group, is.document()),
            None => Placed::Nowhere,
        };
        let own = self.reader.read(is.text());
        let mut requests = self.lock();
        let unfinished = requests.running.insert(id, Request::new(is, placed, own));
        self.metrics.requests.set(requests.running.len() as i64);
        if let Some(unfinished) = unfinished {
            self.end(unfinished, FinishReason::Cancelled);
        }
    }

    fn take_paused(&self, id: &str) -> Option<Paused> {
        let mut requests = self.lock();
        let paused = requests.paused.take(id);
        let tokens = requests.paused.tokens();
        self.metrics.paused_tokens.set(tokens as i64);
        paused
    }

    /// Finds a request its place, now if nobody has to be waited for.
    fn place(
        &self,
        signed: SignedNamespace,
        group: Option<String>,
        document: DocumentId,
    ) -> Placed {
        let id = signed.namespace.id();
        let at_once = || {
            let memory = self.memory.try_namespace(id, &signed)?;
            let group = match &group {
                Some(group) => Some(self.memory.try_group(id, group, document)?),
                None => None,
            };
            Some(Place { memory, group })
        };
        if let Some(place) = at_once() {
            self.say(Event::Began(place.memory.clone(), document));
            return Placed::At(place);
        }
        let (reply, coming) = oneshot::channel();
        self.say(Event::Place {
            signed,
            group,
            document,
            reply,
        });
        Placed::Coming(coming)
    }

    fn end(&self, request: Request, finish: FinishReason) -> Paused {
        let (paused, ended) = request.end(finish);
        if let Some(mut ended) = ended {
            // The end of an output always reaches the store. Without it others draft less, no more.
            let lacking = ended.lacking_tokens();
            if lacking > 0 && !self.has_room(lacking) {
                ended.drop_lacking();
            }
            self.say(Event::Ended(ended));
        }
        paused
    }

    fn tell_if_due(&self, request: &mut Request) {
        let untold = request.untold();
        if untold < self.config.piece_tokens as usize {
            return;
        }
        if self.has_room(untold)
            && let Some(event) = request.tell()
        {
            self.say(event);
        }
    }

    /// Whether the background thread may be given so many tokens more.
    fn has_room(&self, tokens: usize) -> bool {
        let queued = self.metrics.queued_tokens.get().max(0) as usize;
        let has_room = queued + tokens <= self.config.queued_tokens_max;
        if !has_room {
            self.metrics.rejected(QUEUED_TOKENS_MAX);
        }
        has_room
    }

    fn say(&self, event: Event) {
        self.metrics.queued_tokens.add(event.tokens() as i64);
        // Nobody listens once the client is being closed.
        let _ = self.events.send(event);
    }

    fn lock(&self) -> MutexGuard<'_, Requests> {
        self.requests.lock().unwrap_or_else(PoisonError::into_inner)
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
