//! The worker's copy of the drafts: one suffix index per namespace, fed by the requests that run here and
//! by the draft store's feed, which carries everybody else's and survives restarts.
//!
//! The decode loop reads and appends under a lock that is held for microseconds. The follower applies news
//! in small pieces, so that it holds it no longer; only the two ends of a rebuild, which copy texts and compare
//! them, take milliseconds.

mod drafts;
mod follower;

use std::sync::{Arc, Mutex, MutexGuard};

use refrain_clients::DraftStore;
use refrain_protocol::document::DocumentUpdate;
use refrain_protocol::{DocumentId, NamespaceId, SignedNamespace};
use refrain_suffix_index::IndexConfig;
use tokio::runtime::Handle;
use tokio::sync::Notify;
use tokio::task::JoinHandle;

use self::drafts::Drafts;
use self::follower::Follower;
use crate::config::MemoryConfig;
use crate::metrics::WorkerMetrics;

/// One namespace's drafts and the task that follows the store for it.
pub(crate) struct NamespaceMemory {
    pub(crate) id: NamespaceId,
    drafts: Mutex<Drafts>,
    grant: Mutex<SignedNamespace>,
    /// The grant is a newer one now.
    renewed: Notify,
}

impl NamespaceMemory {
    pub(crate) fn lock(&self) -> MutexGuard<'_, Drafts> {
        self.drafts
            .lock()
            .unwrap_or_else(|poisoned| poisoned.into_inner())
    }

    /// The newest signature seen.
    pub(crate) fn grant(&self) -> SignedNamespace {
        self.grant
            .lock()
            .unwrap_or_else(|poisoned| poisoned.into_inner())
            .clone()
    }

    fn renew(&self, signed: &SignedNamespace) {
        let mut grant = self
            .grant
            .lock()
            .unwrap_or_else(|poisoned| poisoned.into_inner());
        if signed.issued_at_s > grant.issued_at_s {
            *grant = signed.clone();
            self.renewed.notify_one();
        }
    }

    pub(crate) fn begin(&self, document: DocumentId) {
        self.lock().begin(document);
    }

    pub(crate) fn end(&self, document: DocumentId) {
        self.lock().end(document);
    }

    /// Takes a piece of a running output. Past the index's capacity it can't be drafted from, no more.
    pub(crate) fn merge(&self, update: &DocumentUpdate) {
        if let Err(error) = self.lock().merge(update) {
            tracing::warn!(%error, "index took no more tokens");
        }
    }
}

/// All namespaces that this worker serves.
pub(crate) struct Memory {
    config: MemoryConfig,
    index: IndexConfig,
    store: Arc<dyn DraftStore>,
    metrics: WorkerMetrics,
    /// Where followers run: the runtime that started the worker, not the thread that met a namespace first,
    /// which may be one of a listener that stops.
    tasks: Handle,
    /// Most recently used last.
    namespaces: Mutex<Vec<Followed>>,
}

struct Followed {
    memory: Arc<NamespaceMemory>,
    follower: JoinHandle<()>,
}

impl Drop for Followed {
    fn drop(&mut self) {
        self.follower.abort();
    }
}

impl Memory {
    pub(crate) fn new(
        config: MemoryConfig,
        pattern_tokens_max: u32,
        store: Arc<dyn DraftStore>,
        metrics: WorkerMetrics,
    ) -> Self {
        let index = IndexConfig {
            pattern_tokens_max,
            ..IndexConfig::default()
        };
        Memory {
            config,
            index,
            store,
            metrics,
            tasks: Handle::current(),
            namespaces: Mutex::default(),
        }
    }

    /// The drafts of a namespace whose signature has been checked. Follows the store from the first use on.
    pub(crate) fn namespace(
        &self,
        id: NamespaceId,
        signed: &SignedNamespace,
    ) -> Arc<NamespaceMemory> {
        let mut namespaces = self
            .namespaces
            .lock()
            .unwrap_or_else(|poisoned| poisoned.into_inner());
        let followed = match namespaces
            .iter()
            .position(|followed| followed.memory.id == id)
        {
            Some(place) => namespaces.remove(place),
            None => {
                if namespaces.len() >= self.config.namespaces_max {
                    self.evict(&mut namespaces);
                }
                self.follow(id, signed)
            }
        };
        while tokens(&namespaces) > self.config.tokens_max && !namespaces.is_empty() {
            self.evict(&mut namespaces);
        }
        followed.memory.renew(signed);
        let memory = followed.memory.clone();
        namespaces.push(followed);
        self.metrics.index_namespaces.set(namespaces.len() as i64);
        memory
    }

    fn follow(&self, id: NamespaceId, signed: &SignedNamespace) -> Followed {
        let memory = Arc::new(NamespaceMemory {
            id,
            drafts: Mutex::new(Drafts::new(
                self.index.clone(),
                self.config.namespace_tokens_max,
            )),
            grant: Mutex::new(signed.clone()),
            renewed: Notify::new(),
        });
        let follower = Follower {
            memory: memory.clone(),
            store: self.store.clone(),
            config: self.config.clone(),
            metrics: self.metrics.clone(),
        };
        Followed {
            memory,
            follower: self.tasks.spawn(follower.run()),
        }
    }

    /// Lets go of the namespace that was unused longest. Requests of it that run keep their drafts through
    /// their own reference; nothing new comes.
    fn evict(&self, namespaces: &mut Vec<Followed>) {
        namespaces.remove(0);
        self.metrics.index_evictions.inc();
    }

    /// Follows nothing any more: the worker stops.
    pub(crate) fn stop(&self) {
        self.namespaces
            .lock()
            .unwrap_or_else(|poisoned| poisoned.into_inner())
            .clear();
    }

    /// Brings the gauges up to date.
    pub(crate) fn observe(&self) {
        let memories: Vec<Arc<NamespaceMemory>> = self
            .namespaces
            .lock()
            .unwrap_or_else(|poisoned| poisoned.into_inner())
            .iter()
            .map(|followed| followed.memory.clone())
            .collect();
        let (mut tokens, mut bytes, mut documents) = (0, 0, 0);
        for memory in memories {
            let drafts = memory.lock();
            tokens += drafts.index.tokens();
            bytes += drafts.index.bytes();
            documents += drafts.index.documents();
        }
        self.metrics.index_tokens.set(tokens as i64);
        self.metrics.index_bytes.set(bytes as i64);
        self.metrics.index_documents.set(documents as i64);
    }
}

fn tokens(namespaces: &[Followed]) -> u64 {
    namespaces
        .iter()
        .map(|followed| followed.memory.lock().index.tokens())
        .sum()
}
