//! [`Proposer`], the calls of an engine.

mod lifecycle;
mod padded;

use std::collections::HashMap;
use std::sync::Arc;

use lru::LruCache;
use parking_lot::Mutex;
use refrain_draft_replica::{DraftReplica, Uploader};
use refrain_protocol::chunk::DraftRules;
use refrain_protocol::document::{DocumentHead, DocumentUpdate, FinishReason};
use refrain_protocol::{ApiError, DocumentId, NamespaceId, SignedNamespace};
use refrain_service_kit::http::Server;
use refrain_service_kit::telemetry::Metrics;
use refrain_service_kit::{clock, random};
use refrain_speculation::draft::ProposeRules;
use refrain_speculation::statistics::AcceptanceStatistics;
use tokio::runtime::Runtime;
use tokio::sync::oneshot;

use crate::background::BackgroundEvent;
use crate::default_namespace::DefaultNamespace;
use crate::device::DeviceIndex;
use crate::lengths::Lengths;
use crate::metrics::{FIELDS, PluginMetrics, TOKEN};
use crate::outbox::Outbox;
use crate::own_index::PromptReader;
use crate::paused::PausedRequests;
use crate::request::{DraftChain, Request};
use crate::request_state::RequestState;
use crate::sources::{AwaitedSources, DraftSources};
use crate::speculation::{EngineRules, check_of_request};

/// A replica of the drafts inside an engine, which follows a mesh's draft store and uploads the engine's outputs.
pub struct Proposer {
    /// The configured rules of drafts.
    rules: ProposeRules,
    runtime: Option<Runtime>,
    pub(crate) replica: Arc<DraftReplica>,
    uploader: Uploader,
    pub(crate) default_namespace: Arc<DefaultNamespace>,
    outbox: Outbox,
    reader: PromptReader,
    /// Taken by the engine's threads only, never by those of this crate.
    requests: Mutex<Requests>,
    /// The texts on the engine's devices, if it drafts there.
    device: Option<Arc<DeviceIndex>>,
    pub(crate) metrics: PluginMetrics,
    registry: Metrics,
    server: Option<Server>,
}

/// As many as namespaces have replicas.
type StatisticsByNamespace = LruCache<Option<NamespaceId>, AcceptanceStatistics>;

struct Requests {
    running: HashMap<String, Request>,
    /// Acceptance statistics by namespace; the least recently used is dropped first.
    statistics: StatisticsByNamespace,
    paused: PausedRequests,
    /// A copy of the namespace of requests that bring none.
    default_namespace: Option<SignedNamespace>,
    /// The choice of how long drafts are, for an engine that drafts on its devices.
    lengths: Lengths,
    /// Observations of each namespace's statistics when the devices got its votes.
    told: HashMap<NamespaceId, u64>,
}

/// A request that begins.
#[derive(Clone, Debug, Default)]
pub struct RequestStart<'a> {
    /// The engine's id of the request.
    pub request: String,
    /// The prompt, token ids.
    pub prompt: Vec<u32>,
    /// A token of its namespace; without one the configured namespace applies.
    pub namespace: Option<&'a str>,
    /// Its group of samples.
    pub group: Option<String>,
    /// The document of its output in the store, 32 hex digits. A caller that names it also writes it there. An output
    /// without a name is uploaded from here.
    pub document: Option<&'a str>,
    /// The fencing epoch of the output.
    pub epoch: u64,
    /// Tokens at the end of the prompt that are output already.
    pub written: usize,
    /// The rules of its drafts. The configuration and the engine decide what is missing.
    pub drafts: DraftRules,
}

/// A step of a request whose engine has drafts of its own.
#[derive(Clone, Debug)]
pub struct RequestStep {
    /// The engine's id of the request.
    pub request: String,
    /// Tokens emitted since the last step.
    pub emitted: Vec<u32>,
    /// Most tokens of a draft.
    pub draft_tokens_max: usize,
    /// The engine's own draft, token ids.
    pub engine_draft: Vec<u32>,
}

pub use self::padded::RequestPlace;

/// The acceptance statistics of a request's namespace, empty ones if it is new.
fn of_namespace<'a>(
    statistics: &'a mut StatisticsByNamespace,
    request: &Request,
) -> &'a mut AcceptanceStatistics {
    statistics.get_or_insert_mut(request.namespace(), AcceptanceStatistics::default)
}

/// The finish reason that stands for the engine's one. An output that the engine did not end by a rule is partial.
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
    /// Begins a request, or resumes one after the engine made room. Returns how many output tokens are known from
    /// before the interruption: the next ones that the engine emits follow these.
    ///
    /// # Errors
    /// The token of the namespace is refused, the document's name cannot be read, or a rule of drafts has no valid
    /// value. With a refused token the request runs all the same. It then drafts from its own text alone, its output
    /// is not kept, and it begins with its prompt.
    pub fn begin(&self, start: RequestStart<'_>) -> Result<usize, ApiError> {
        check_of_request(&start.drafts).inspect_err(|_| self.refuse())?;
        let document = match start.document {
            Some(document) => document.parse().map_err(|error: String| {
                self.refuse();
                ApiError::invalid("document", error)
            })?,
            None => DocumentId(random::u128()?),
        };
        let check = |token| self.default_namespace.check(token);
        let (signed, refused) = match start.namespace.map(check) {
            None => (self.default_namespace(), Ok(())),
            Some(Ok(signed)) => (Some(signed), Ok(())),
            Some(Err(error)) => {
                self.metrics.rejected(TOKEN);
                (None, Err(error))
            }
        };
        let update = DocumentUpdate {
            document,
            epoch: start.epoch,
            prev_len: 0,
            tokens: Vec::new(),
            head: DocumentHead {
                group: start.group.clone(),
                created_ms: clock::unix_ms(),
                ..DocumentHead::default()
            },
            finish: None,
        };
        let namespace = signed.as_ref().map(|signed| signed.namespace.id());
        let is_named = start.document.is_some();
        let state = RequestState::new(start.prompt, start.written, namespace, update, is_named);
        let prompt_len = state.tokens();
        // The caller of a refused request gets no length, so it is never resumed from a paused state.
        let paused = self.requests.lock().paused.take(&start.request);
        let paused = paused.filter(|paused| refused.is_ok() && paused.is_resumed_by(&state));
        let state = paused.map_or(state, RequestState::resume);
        let known = state.tokens() - prompt_len;
        self.run(start.request, state, start.drafts, signed, start.group);
        refused.map(|()| known)
    }

    /// Counts a request whose fields cannot be read, and which is not begun here.
    pub fn refuse(&self) {
        self.metrics.rejected(FIELDS);
    }

    /// Takes the tokens that the engine emitted. Other requests can draft from them at once, and the acceptance
    /// statistics of the namespace learn from them. Unknown requests are ignored.
    pub fn extend(&self, request: &str, emitted: &[u32]) {
        let all = &mut *self.requests.lock();
        if let Some(request) = all.running.get_mut(request) {
            let statistics = of_namespace(&mut all.statistics, request);
            request.extend(emitted, statistics, &self.metrics);
            self.outbox.upload_if_due(request);
        }
    }

    /// A draft for each request, given with its most tokens.
    pub fn propose(&self, requests: Vec<(String, usize)>, engine: &EngineRules) -> Vec<DraftChain> {
        let all = &mut *self.requests.lock();
        let running = all.running.len();
        let draft = |(id, tokens_max): (String, usize)| {
            let request = all.running.get_mut(&id)?;
            let params = engine.params(&self.rules, request.rules(), running);
            let statistics = of_namespace(&mut all.statistics, request);
            request.propose(&params, statistics, tokens_max, &self.metrics);
            request.offer(&self.metrics)
        };
        let drafts = requests.into_iter().map(draft);
        drafts.map(Option::unwrap_or_default).collect()
    }

    /// For each request the tokens of a draft that is expected to bring more than the engine's own, or `None` to keep
    /// the engine's. An engine's draft that is longer than the request's rules allow is cut, even to nothing. The
    /// acceptance statistics of both kinds are learnt from the emitted tokens, by namespace.
    pub fn step(&self, requests: Vec<RequestStep>) -> Vec<Option<Vec<u32>>> {
        let Requests {
            running,
            statistics,
            ..
        } = &mut *self.requests.lock();
        let all = running.len();
        let draft = |mut step: RequestStep| {
            let request = running.get_mut(&step.request)?;
            let params = EngineRules::default().params(&self.rules, request.rules(), all);
            let statistics = of_namespace(statistics, request);
            request.extend(&step.emitted, statistics, &self.metrics);
            self.outbox.upload_if_due(request);
            request.propose(&params, statistics, step.draft_tokens_max, &self.metrics);
            let cut = request.cut(&mut step.engine_draft);
            if !request.beats(step.engine_draft, statistics) {
                return cut;
            }
            let offered = request.offer(&self.metrics)?;
            Some(offered.tokens)
        };
        requests.into_iter().map(draft).collect()
    }

    /// Ends a request, maybe only for now. `reason` is the engine's finish reason, if it has one. Unknown requests
    /// are ignored.
    pub fn finish(&self, request: String, reason: Option<&str>) {
        let mut requests = self.requests.lock();
        let Some(ended) = requests.running.remove(&request) else {
            return;
        };
        self.metrics.requests.set(requests.running.len() as i64);
        let finish = finish_of(reason);
        let paused = self.outbox.end(ended, finish);
        // Otherwise the output is complete, so the request is not resumed.
        if finish == FinishReason::Cancelled {
            requests.paused.put(request, paused);
        }
    }

    /// The configured namespace, as it is now or was a moment ago.
    fn default_namespace(&self) -> Option<SignedNamespace> {
        let mut requests = self.requests.lock();
        self.default_namespace
            .refresh(&mut requests.default_namespace);
        requests.default_namespace.clone()
    }

    fn run(
        &self,
        id: String,
        state: RequestState,
        rules: DraftRules,
        signed: Option<SignedNamespace>,
        group: Option<String>,
    ) {
        let sources = match signed {
            Some(signed) => self.find_sources(signed, group, state.update.document),
            None => AwaitedSources::Missing,
        };
        let own = self.reader.read(&state.text);
        let mut requests = self.requests.lock();
        let unfinished = requests
            .running
            .insert(id, Request::new(state, rules, sources, own));
        self.metrics.requests.set(requests.running.len() as i64);
        if let Some(unfinished) = unfinished {
            self.outbox.end(unfinished, FinishReason::Cancelled);
        }
    }

    /// Finds the sources of a request: now, if that takes no wait, or else on the background thread.
    fn find_sources(
        &self,
        signed: SignedNamespace,
        group: Option<String>,
        document: DocumentId,
    ) -> AwaitedSources {
        let id = signed.namespace.id();
        let at_once = || {
            let namespace = self.replica.try_namespace(id, &signed)?;
            let group = match &group {
                Some(group) => Some(self.replica.try_join_group(id, group, document)?),
                None => None,
            };
            Some(DraftSources { namespace, group })
        };
        if let Some(sources) = at_once() {
            let pin = BackgroundEvent::Pin(sources.namespace.clone(), document);
            self.outbox.send(pin);
            return AwaitedSources::Ready(sources);
        }
        let (reply, pending) = oneshot::channel();
        self.outbox.send(BackgroundEvent::FindSources {
            signed,
            group,
            document,
            reply,
        });
        AwaitedSources::Pending(pending)
    }
}
