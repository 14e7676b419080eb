//! [`Proposer`]: what an engine calls.

mod life;

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use lru::LruCache;
use refrain_draft_replica::{Harvest, Memory};
use refrain_protocol::document::{DocumentHead, FinishReason};
use refrain_protocol::{ApiError, DocumentId, NamespaceId, SignedNamespace};
use refrain_service_kit::http::Server;
use refrain_service_kit::telemetry::Metrics;
use refrain_service_kit::{clock, random};
use refrain_speculation::{Calibration, Expansion, ProposeParams};
use tokio::runtime::Runtime;
use tokio::sync::oneshot;

use crate::background::Event;
use crate::config::InEngineConfig;
use crate::metrics::{FIELDS, InEngineMetrics, TOKEN};
use crate::outbox::Outbox;
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
    pub(crate) standing: Arc<Standing>,
    outbox: Outbox,
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
            self.outbox.tell_if_due(request);
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
            self.outbox.tell_if_due(request);
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
        let paused = self.outbox.end(ended, finish);
        if finish != FinishReason::Cancelled {
            // It has come to its end, and nothing goes on from there.
            return;
        }
        let gone = requests.paused.put(request, paused);
        let tokens = requests.paused.tokens();
        self.metrics.paused_tokens.set(tokens as i64);
        self.metrics.forgotten.inc_by(gone);
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
            self.outbox.end(unfinished, FinishReason::Cancelled);
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
            self.outbox
                .say(Event::Began(place.memory.clone(), document));
            return Placed::At(place);
        }
        let (reply, coming) = oneshot::channel();
        self.outbox.say(Event::Place {
            signed,
            group,
            document,
            reply,
        });
        Placed::Coming(coming)
    }

    fn lock(&self) -> MutexGuard<'_, Requests> {
        self.requests.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
