//! Look-ups in the draft store's own index, for requests of namespaces that are not all here.
//!
//! Before a step is composed the store is asked once for each such namespace, for all its requests together. The
//! decode loop waits for the answers, never longer than a small share of a step. A later answer is dropped, and until
//! it is there nothing more is asked of that namespace.

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use refrain_protocol::lookup::{FoundDraft, LookupContext, LookupRequest, LookupRules};
use refrain_protocol::{ApiError, DocumentId, ErrorKind, NamespaceId};
use refrain_rpc::DraftStore;
use refrain_speculation::draft::{
    Candidate, DraftNode, Expansion, Origin, ProposeParams, Scope, Source,
};
use refrain_suffix_index::{DocumentKey, Origin as IndexOrigin};
use tokio::task::JoinSet;
use tokio::time::Instant;
use tracing::{Instrument as _, Span};

use crate::config::RemoteLookupConfig;
use crate::metrics::ReplicaMetrics;
use crate::replica::NamespaceReplica;

/// A shorter wait than this is not worth a call.
const WAIT_MIN: Duration = Duration::from_micros(100);
/// Time for which nothing is asked of a namespace after a call that failed.
const PAUSE: Duration = Duration::from_secs(1);
/// The pause after a call that an overloaded store refused: such a load passes soon.
const PAUSE_OVERLOADED: Duration = Duration::from_millis(20);
/// Most contexts of one call. The store takes as many, unless it is configured to take fewer.
const CONTEXTS_MAX: usize = 256;
/// Weight of the latest step in the mean.
const STEP_WEIGHT: f64 = 0.1;

/// Drafts that the store found, by the document of the request.
pub type RemoteDrafts = HashMap<DocumentId, Candidate>;

/// A request that could use a draft.
pub struct DraftQuery {
    /// The replica of the request's namespace.
    pub replica: Arc<NamespaceReplica>,
    /// The request's output.
    pub document: DocumentId,
    /// The end of the request's text.
    pub context: Vec<u32>,
    /// The request in its trace.
    pub span: Span,
}

/// Asks the store for drafts, for one decode loop.
pub struct RemoteLookup {
    store: Arc<dyn DraftStore>,
    rules: LookupRules,
    draft_tokens_max: u32,
    wait_max: Duration,
    step_share_max: f64,
    metrics: ReplicaMetrics,
    /// Mean duration of a step, seconds; `None` before the first one.
    step_s: Option<f64>,
    /// Namespaces of which nothing is asked before an instant, since a call failed.
    paused_until: HashMap<NamespaceId, Instant>,
}

impl RemoteLookup {
    /// Makes drafts by the rules of `params`, within the waits of `config`.
    pub fn new(
        store: Arc<dyn DraftStore>,
        config: &RemoteLookupConfig,
        params: &ProposeParams,
        metrics: ReplicaMetrics,
    ) -> Self {
        RemoteLookup {
            store,
            rules: LookupRules {
                alpha: params.alpha,
                offset: params.offset,
                min_token_prob: params.min_token_prob,
                min_match_tokens: params.min_match_len,
                max_pattern_tokens: params.max_pattern,
                tree: params.expansion == Expansion::Tree,
            },
            draft_tokens_max: u32::try_from(params.max_spec_tokens).unwrap_or(u32::MAX),
            wait_max: Duration::from_micros(config.wait_us_max),
            step_share_max: config.step_share_max,
            metrics,
            step_s: None,
            paused_until: HashMap::new(),
        }
    }

    /// Learns how long a step of the engine took, seconds.
    pub fn record_step(&mut self, seconds: f64) {
        let mean = self.step_s.get_or_insert(seconds);
        *mean += STEP_WEIGHT * (seconds - *mean);
    }

    /// Most tokens of context that a query can use.
    pub fn context_tokens(&self) -> usize {
        self.rules.max_pattern_tokens as usize
    }

    /// How long a step may wait; `None` where that is not worth a call.
    fn wait(&self) -> Option<Duration> {
        let share = Duration::try_from_secs_f64(self.step_s? * self.step_share_max).ok()?;
        Some(share.min(self.wait_max)).filter(|wait| *wait >= WAIT_MIN)
    }

    /// Asks the store for drafts, and waits for them as long as a step may.
    pub async fn look_up(&mut self, mut queries: Vec<DraftQuery>) -> RemoteDrafts {
        let mut found = RemoteDrafts::new();
        let Some(wait) = self.wait().filter(|_| !queries.is_empty()) else {
            return found;
        };
        let now = Instant::now();
        self.paused_until.retain(|_, until| now < *until);
        let mut calls = JoinSet::new();
        queries.sort_by_key(|query| query.replica.id);
        for queries in queries.chunk_by(|one, next| one.replica.id == next.replica.id) {
            let replica = &queries[0].replica;
            let namespace = replica.id;
            if self.paused_until.contains_key(&namespace) {
                continue;
            }
            let Some(in_flight) = InFlight::begin(replica) else {
                continue;
            };
            let queries = &queries[..queries.len().min(CONTEXTS_MAX)];
            self.count("asked");
            let request = LookupRequest {
                namespace: replica.signed(),
                rules: self.rules,
                contexts: Vec::from_iter(queries.iter().map(|query| LookupContext {
                    tokens: query.context.clone(),
                    draft_tokens_max: self.draft_tokens_max,
                })),
            };
            let documents: Vec<DocumentId> = queries.iter().map(|query| query.document).collect();
            let store = self.store.clone();
            let call = async move {
                let reply = store.lookup(request).await;
                drop(in_flight);
                let reply = reply.map(|reply| (documents, reply.drafts));
                reply.map_err(|error| (namespace, error))
            };
            calls.spawn(call.instrument(lookup_span(queries)));
        }
        let deadline = Instant::now() + wait;
        while !calls.is_empty() {
            match tokio::time::timeout_at(deadline, calls.join_next()).await {
                Ok(Some(Ok(Ok((documents, drafts))))) => {
                    self.count("answered");
                    let drafts = documents.into_iter().zip(drafts);
                    found.extend(drafts.filter_map(|(document, draft)| {
                        Some((document, candidate(draft.as_ref()?)?))
                    }));
                }
                Ok(Some(Ok(Err((namespace, error))))) => self.pause(namespace, &error),
                Ok(_) => {}
                Err(_) => {
                    for _ in 0..calls.len() {
                        self.count("late");
                    }
                    // They end by themselves: aborting them would cost a connection each.
                    calls.detach_all();
                }
            }
        }
        found
    }

    /// Counts a look-up, or its outcome.
    fn count(&self, outcome: &str) {
        self.metrics.lookups.with_label_values(&[outcome]).inc();
    }

    /// Asks nothing more of a namespace for a while, since a call failed.
    fn pause(&mut self, namespace: NamespaceId, error: &ApiError) {
        self.count("failed");
        let pause = match error.kind {
            ErrorKind::Overloaded => PAUSE_OVERLOADED,
            _ => PAUSE,
        };
        self.paused_until.insert(namespace, Instant::now() + pause);
        tracing::debug!(%error, "a look-up in the draft store failed");
    }
}

/// The span of a call: a child of its first request, linked to the others.
fn lookup_span(queries: &[DraftQuery]) -> Span {
    let span = tracing::info_span!(parent: &queries[0].span, "lookup", contexts = queries.len());
    for query in &queries[1..] {
        span.follows_from(&query.span);
    }
    span
}

/// A call in flight for a namespace. The next call may begin when this is dropped.
struct InFlight(Arc<NamespaceReplica>);

impl InFlight {
    /// `None` where there is one already.
    fn begin(replica: &Arc<NamespaceReplica>) -> Option<Self> {
        let is_looking_up: &AtomicBool = &replica.is_looking_up;
        let was_looking_up = is_looking_up.swap(true, Ordering::Relaxed);
        (!was_looking_up).then(|| InFlight(replica.clone()))
    }
}

impl Drop for InFlight {
    fn drop(&mut self) {
        self.0.is_looking_up.store(false, Ordering::Relaxed);
    }
}

/// A draft of the store as if it had been found here; `None` for one that is no tree.
fn candidate(found: &FoundDraft) -> Option<Candidate> {
    let are_probabilities = found
        .nodes
        .iter()
        .all(|node| (0.0..=1.0).contains(&node.probability));
    if !are_probabilities {
        return None;
    }
    let nodes = found.nodes.iter().map(|node| DraftNode {
        token: node.token,
        parent: node.parent,
        probability: node.probability,
        count: node.count,
        match_len: found.match_len,
        witnesses: None,
        origin: Origin {
            source: Source::Suffix,
            scope: Scope::Tenant,
            place: node.place.map(|(document, position)| IndexOrigin {
                document: DocumentKey(document.0),
                position,
            }),
        },
    });
    Candidate::new(
        nodes.collect(),
        found.match_len,
        Source::Suffix,
        Scope::Tenant,
    )
}

#[cfg(test)]
mod tests;
