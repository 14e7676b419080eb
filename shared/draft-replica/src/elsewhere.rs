//! Drafts from the draft store's own index, for requests of namespaces that are not all here.
//!
//! Before a step is composed the store is asked once for each such namespace, for all its requests together, and the
//! loop waits for the answers: never longer than a small share of a step. An answer that comes later is dropped, and
//! while it is awaited nothing more is asked of that namespace.

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use refrain_protocol::lookup::{FoundDraft, LookupContext, LookupRequest, LookupRules};
use refrain_protocol::{ApiError, DocumentId, ErrorKind, NamespaceId};
use refrain_rpc::DraftStore;
use refrain_speculation::{
    Candidate, DraftNode, DraftTree, Expansion, Origin, ProposeParams, Scope, Source,
};
use refrain_suffix_index::{DocumentKey, Origin as Place};
use tokio::task::JoinSet;

use crate::config::MemoryConfig;
use crate::memory::NamespaceMemory;
use crate::metrics::MemoryMetrics;

/// A shorter wait than this is not worth a call.
const WAIT_MIN: Duration = Duration::from_micros(100);
/// How long nothing is asked of a namespace after a call that failed.
const PAUSE: Duration = Duration::from_secs(1);
/// The same where the store has too much to do, which passes.
const PAUSE_OVERLOADED: Duration = Duration::from_millis(20);
/// Contexts of one call, which the store takes unless it is told to take fewer.
const CONTEXTS_MAX: usize = 256;
/// Weight of the latest step in the mean.
const STEP_WEIGHT: f64 = 0.1;

/// What the store found, by the requests' documents.
pub type FoundElsewhere = HashMap<DocumentId, Candidate>;

/// A request that could use a draft.
pub struct Wanted {
    /// The drafts of its namespace, as far as they are here.
    pub memory: Arc<NamespaceMemory>,
    /// Its output.
    pub document: DocumentId,
    /// The end of its text.
    pub context: Vec<u32>,
}

/// Asks the store.
pub struct Elsewhere {
    store: Arc<dyn DraftStore>,
    rules: LookupRules,
    draft_tokens_max: u32,
    wait_max: Duration,
    step_share_max: f64,
    metrics: MemoryMetrics,
    step_s: Option<f64>,
    /// Namespaces of which nothing is asked before a time.
    not_before: HashMap<NamespaceId, Instant>,
}

impl Elsewhere {
    /// Drafts are made as `params` say, within the waits of `config`.
    pub fn new(
        store: Arc<dyn DraftStore>,
        config: &MemoryConfig,
        params: &ProposeParams,
        metrics: MemoryMetrics,
    ) -> Self {
        Elsewhere {
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
            wait_max: Duration::from_micros(config.lookup_wait_us_max),
            step_share_max: config.lookup_step_share_max,
            metrics,
            step_s: None,
            not_before: HashMap::new(),
        }
    }

    /// Tells how long a step of the engine took.
    pub fn step_took(&mut self, seconds: f64) {
        let mean = self.step_s.get_or_insert(seconds);
        *mean += STEP_WEIGHT * (seconds - *mean);
    }

    /// How many tokens of context it wants.
    pub fn context_tokens(&self) -> usize {
        self.rules.max_pattern_tokens as usize
    }

    /// How long a step may wait; `None` where that is not worth a call.
    fn wait(&self) -> Option<Duration> {
        let share = Duration::try_from_secs_f64(self.step_s? * self.step_share_max).ok()?;
        Some(share.min(self.wait_max)).filter(|wait| *wait >= WAIT_MIN)
    }

    /// Asks for drafts and waits for them as long as a step may.
    pub async fn ask(&mut self, wanted: Vec<Wanted>) -> FoundElsewhere {
        let mut found = FoundElsewhere::new();
        let Some(wait) = self.wait().filter(|_| !wanted.is_empty()) else {
            return found;
        };
        let now = Instant::now();
        self.not_before.retain(|_, at| now < *at);
        let mut calls = JoinSet::new();
        for (memory, mut wanted) in by_namespace(wanted) {
            if self.not_before.contains_key(&memory.id) {
                continue;
            }
            wanted.truncate(CONTEXTS_MAX);
            let namespace = memory.id;
            let Some(asking) = Asking::begin(&memory) else {
                continue;
            };
            self.metrics.lookup("asked");
            let request = LookupRequest {
                namespace: memory.grant(),
                rules: self.rules,
                contexts: Vec::from_iter(wanted.iter().map(|one| LookupContext {
                    tokens: one.context.clone(),
                    draft_tokens_max: self.draft_tokens_max,
                })),
            };
            let documents: Vec<DocumentId> = wanted.iter().map(|one| one.document).collect();
            let store = self.store.clone();
            calls.spawn(async move {
                let reply = store.lookup(request).await;
                drop(asking);
                let reply = reply.map(|reply| (documents, reply.drafts));
                reply.map_err(|error| (namespace, error))
            });
        }
        let deadline = tokio::time::Instant::now() + wait;
        while !calls.is_empty() {
            match tokio::time::timeout_at(deadline, calls.join_next()).await {
                Ok(Some(Ok(Ok((documents, drafts))))) => {
                    self.metrics.lookup("answered");
                    let drafts = documents.into_iter().zip(drafts);
                    found.extend(drafts.filter_map(|(document, draft)| {
                        Some((document, candidate(draft.as_ref()?)?))
                    }));
                }
                Ok(Some(Ok(Err((namespace, error))))) => self.failed(namespace, &error),
                Ok(_) => {}
                Err(_) => {
                    for _ in 0..calls.len() {
                        self.metrics.lookup("late");
                    }
                    // They end by themselves: cutting them off would cost a connection each.
                    calls.detach_all();
                }
            }
        }
        found
    }

    fn failed(&mut self, namespace: NamespaceId, error: &ApiError) {
        self.metrics.lookup("failed");
        let pause = match error.kind {
            ErrorKind::Overloaded => PAUSE_OVERLOADED,
            _ => PAUSE,
        };
        self.not_before.insert(namespace, Instant::now() + pause);
        tracing::debug!(%error, "the draft store did not look up");
    }
}

/// A call that is under way for a namespace; the next may begin when this is dropped.
struct Asking(Arc<NamespaceMemory>);

impl Asking {
    fn begin(memory: &Arc<NamespaceMemory>) -> Option<Self> {
        let is_asking: &AtomicBool = &memory.is_asking;
        let was_asking = is_asking.swap(true, Ordering::Relaxed);
        (!was_asking).then(|| Asking(memory.clone()))
    }
}

impl Drop for Asking {
    fn drop(&mut self) {
        self.0.is_asking.store(false, Ordering::Relaxed);
    }
}

fn by_namespace(wanted: Vec<Wanted>) -> Vec<(Arc<NamespaceMemory>, Vec<Wanted>)> {
    let mut namespaces: Vec<(Arc<NamespaceMemory>, Vec<Wanted>)> = Vec::new();
    for one in wanted {
        match namespaces
            .iter_mut()
            .find(|(memory, _)| memory.id == one.memory.id)
        {
            Some((_, of_namespace)) => of_namespace.push(one),
            None => namespaces.push((one.memory.clone(), vec![one])),
        }
    }
    namespaces
}

/// A draft as if it had been found here; `None` for one that is no tree.
fn candidate(found: &FoundDraft) -> Option<Candidate> {
    let mut tree = DraftTree::new();
    for node in &found.nodes {
        let place = node.place.map(|(document, position)| Place {
            document: DocumentKey(document.0),
            position,
        });
        let drafted = DraftNode {
            token: node.token,
            parent: node.parent,
            probability: node.probability,
            count: node.count,
            origin: Origin {
                source: Source::Suffix,
                scope: Scope::Tenant,
                place,
            },
        };
        let is_probability = (0.0..=1.0).contains(&node.probability);
        if !is_probability || tree.push(drafted).is_err() {
            return None;
        }
    }
    (!tree.is_empty()).then(|| Candidate {
        score: tree.score(),
        tree,
        match_len: found.match_len,
        source: Source::Suffix,
        scope: Scope::Tenant,
    })
}

#[cfg(test)]
mod tests;
