//! The key of a pool: workers that can take each other's requests.

use std::sync::Arc;

use refrain_protocol::scheduling::{Heartbeat, LeaseRequest};

/// Model and tokenizer. Workers of one pool differ only in load, in context length and in the KV caches they hold.
/// Cheap to clone.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(super) struct PoolKey {
    pub(super) model: Arc<str>,
    pub(super) tokenizer: Arc<str>,
}

impl PoolKey {
    pub(super) fn of_request(request: &LeaseRequest) -> Self {
        let namespace = &request.namespace.namespace;
        PoolKey {
            model: namespace.model.as_str().into(),
            tokenizer: namespace.tokenizer.as_str().into(),
        }
    }

    pub(super) fn of_worker(heartbeat: &Heartbeat) -> Self {
        PoolKey {
            model: heartbeat.model.as_str().into(),
            tokenizer: heartbeat.tokenizer.as_str().into(),
        }
    }
}
