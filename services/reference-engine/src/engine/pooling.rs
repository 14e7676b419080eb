//! The pool as sessions see it: they hand in the blocks that fill up, and begin with those that it has.

use std::sync::Arc;

use refrain_protocol::{ApiError, ErrorKind, NamespaceId};

use super::session::Session;
use crate::network::BLOCK_TOKENS;
use crate::pool::{BlockId, KvPool, PooledText, WeightsIdentity};

/// Delay after which the item of a session whose blocks are loaded is sent again. A block from a file or another
/// engine takes about as long.
const LOADING_RETRY_AFTER_MS: u64 = 3;

/// Code of the error for an item that has to be sent again because blocks of its session are being loaded.
pub(crate) const KV_LOADING: &str = "engine_kv_loading";

/// The pool, and the weights that the sessions compute with.
#[derive(Clone, Debug)]
pub(crate) struct Pooling {
    pub(crate) pool: Arc<KvPool>,
    pub(crate) weights: WeightsIdentity,
}

impl Pooling {
    /// The text of a new session.
    pub(super) fn text(&self, namespace: NamespaceId) -> PooledText {
        PooledText::new(BlockId::root(namespace, self.weights))
    }

    /// Hands in the blocks of a session that filled up since the last time, or all of its blocks.
    pub(super) fn keep(&self, session: &mut Session, all: bool) {
        let Some(text) = &mut session.pooled else {
            return;
        };
        let full = session.kv.full_blocks();
        let from = if all { 0 } else { text.kept };
        if from >= full {
            return;
        }
        text.chain.extend(&session.text[..full * BLOCK_TOKENS]);
        let ids = text.chain.ids();
        let tenant = session.tenant;
        self.pool
            .keep(tenant, ids, &session.text, &session.kv, from);
        text.kept = full;
        if all {
            self.name_prefixes(session);
        }
    }

    /// Tells the pool the hashes by which schedulers know what a session holds.
    fn name_prefixes(&self, session: &mut Session) {
        let prefixes = session.held();
        let ids = session.pooled.as_ref().map(|text| text.chain.ids());
        for prefix in prefixes.into_iter().flatten() {
            // Prefixes end where blocks end.
            let last = prefix.len / BLOCK_TOKENS - 1;
            if let Some(last) = ids.and_then(|ids| ids.get(last)) {
                self.pool.name_prefix(prefix.hash, last.key());
            }
        }
    }
}

/// The error for an item whose session waits for blocks.
pub(super) fn loading() -> ApiError {
    let message = "keys and values of this text are being loaded; send the item again";
    ApiError::new(ErrorKind::Overloaded, message)
        .with_code(KV_LOADING)
        .with_retry_after_ms(LOADING_RETRY_AFTER_MS)
}
