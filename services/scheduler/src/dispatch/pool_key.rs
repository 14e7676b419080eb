//! The key of a pool: workers that can take each other's requests.

use refrain_protocol::scheduling::{Heartbeat, LeaseRequest};

/// Model and tokenizer. Workers of one pool differ only in load, in context length and in the KV caches they hold.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(super) struct PoolKey {
    pub(super) model: String,
    pub(super) tokenizer: String,
}

impl PoolKey {
    pub(super) fn of_request(request: &LeaseRequest) -> Self {
        let namespace = &request.namespace.namespace;
        PoolKey {
            model: namespace.model.clone(),
            tokenizer: namespace.tokenizer.clone(),
        }
    }

    /// Whether a request belongs to the pool.
    pub(super) fn is_of_request(&self, request: &LeaseRequest) -> bool {
        let namespace = &request.namespace.namespace;
        namespace.model == self.model && namespace.tokenizer == self.tokenizer
    }

    pub(super) fn of_worker(heartbeat: &Heartbeat) -> Self {
        PoolKey {
            model: heartbeat.model.clone(),
            tokenizer: heartbeat.tokenizer.clone(),
        }
    }
}
