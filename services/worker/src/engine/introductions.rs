//! Whom an engine with the drafts inside is told of when it comes back: one that was restarted knows no namespace, and would
//! learn of each with its first request, which is too late to draft for that one.

use std::num::NonZeroUsize;
use std::sync::{Mutex, MutexGuard, PoisonError};

use lru::LruCache;
use refrain_protocol::engine::Sampling;
use refrain_protocol::{ApiError, DocumentId, NamespaceId, RequestId};
use refrain_service_kit::random;

use super::streaming::{GenerateRequest, Keeping};

/// Namespaces of late, and whether the engine is there. No I/O: who confirms that the engine is there also tells it.
pub(super) struct Introductions {
    state: Mutex<State>,
}

struct State {
    /// With a token of each, as the gateway signed it last; none, where nobody is to be introduced.
    tokens: Option<LruCache<NamespaceId, String>>,
    is_away: bool,
}

impl Introductions {
    /// Of so many namespaces at most.
    pub(super) fn new(namespaces_max: usize) -> Self {
        let state = State {
            tokens: NonZeroUsize::new(namespaces_max).map(LruCache::new),
            is_away: false,
        };
        Introductions {
            state: Mutex::new(state),
        }
    }

    /// A request of this namespace goes to the engine.
    pub(super) fn met(&self, namespace: NamespaceId, token: &str) {
        if let Some(tokens) = &mut self.lock().tokens {
            tokens.put(namespace, token.to_owned());
        }
    }

    /// The engine does not answer.
    pub(super) fn engine_left(&self) {
        self.lock().is_away = true;
    }

    /// The engine answers. Returns whom it must be told of, the one used last first: all, if it was away.
    pub(super) fn engine_is_here(&self) -> Vec<(NamespaceId, String)> {
        let mut state = self.lock();
        if !std::mem::take(&mut state.is_away) {
            return Vec::new();
        }
        let tokens = state.tokens.iter().flat_map(|tokens| tokens.iter());
        tokens.map(|(id, token)| (*id, token.clone())).collect()
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// A request that nobody asked for, on behalf of a namespace.
///
/// # Errors
/// The system has no randomness.
pub(super) fn introduction(
    namespace: NamespaceId,
    token: String,
) -> Result<GenerateRequest, ApiError> {
    Ok(GenerateRequest {
        request: RequestId(random::u128()?),
        call: random::u64()?,
        namespace,
        tokens: vec![0],
        prompt_len: 1,
        // With a single one it would have ended before the engine's scheduler hears of it.
        tokens_max: 2,
        sampling: Sampling::default(),
        priority: None,
        keeping: Some(Keeping {
            token,
            group: None,
            // The engine writes no output that has a name, and nobody else writes this one.
            document: DocumentId(random::u128()?),
            epoch: 1,
        }),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_engine_is_told_once_each_time_that_it_comes_back() {
        let introductions = Introductions::new(2);
        for (namespace, token) in [(1, "first"), (2, "second"), (3, "third"), (2, "renewed")] {
            introductions.met(NamespaceId(namespace), token);
        }
        assert_eq!(introductions.engine_is_here(), []);
        let latest = [
            (NamespaceId(2), "renewed".to_owned()),
            (NamespaceId(3), "third".to_owned()),
        ];
        for _ in 0..2 {
            introductions.engine_left();
            introductions.engine_left();
            assert_eq!(introductions.engine_is_here(), latest);
            assert_eq!(introductions.engine_is_here(), []);
        }
        let nobody = Introductions::new(0);
        nobody.met(NamespaceId(1), "first");
        nobody.engine_left();
        assert_eq!(nobody.engine_is_here(), []);
    }
}
