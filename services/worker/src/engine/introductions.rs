//! Whom an engine with the drafts inside is told of when it comes back: one that was restarted knows no namespace, and would
//! learn of each with its first request, which is too late to draft for that one.

use std::num::NonZeroUsize;
use std::sync::{Mutex, MutexGuard, PoisonError};

use lru::LruCache;
use refrain_protocol::engine::Sampling;
use refrain_protocol::{ApiError, DocumentId, NamespaceId, RequestId};
use refrain_service_kit::mesh::is_too_old;
use refrain_service_kit::random;

use super::streaming::{GenerateRequest, Introduced, Keeping};

/// Namespaces of late, whether the engine is there, and which of them it is still to be told of. No I/O and no clock: who
/// confirms that the engine is there also tells it.
pub(super) struct Introductions {
    attempts_max: u32,
    state: Mutex<State>,
}

struct State {
    /// None, where nobody is to be introduced.
    known: Option<LruCache<NamespaceId, Known>>,
    is_away: bool,
    outcomes: Introduced,
}

/// A namespace's token, as the gateway signed it last.
struct Known {
    token: String,
    issued_at_s: u64,
    /// How often the engine may be told of it yet; 0: it need not be, or somebody is about it.
    attempts_left: u32,
}

/// A namespace that the engine is to be told of, by who took this.
#[derive(Debug, PartialEq)]
pub(super) struct Introduction {
    pub(super) namespace: NamespaceId,
    token: String,
    issued_at_s: u64,
    /// After this one.
    attempts_left: u32,
}

impl Introductions {
    /// Of so many namespaces at most, for each of which the engine is asked so often at most.
    pub(super) fn new(namespaces_max: usize, attempts_max: u32) -> Self {
        let state = State {
            known: NonZeroUsize::new(namespaces_max).map(LruCache::new),
            is_away: false,
            outcomes: Introduced::default(),
        };
        Introductions {
            attempts_max,
            state: Mutex::new(state),
        }
    }

    /// A request of this namespace goes to the engine.
    pub(super) fn met(&self, namespace: NamespaceId, keeping: &Keeping) {
        let mut state = self.lock();
        let Some(known) = &mut state.known else {
            return;
        };
        let attempts_left = known
            .peek(&namespace)
            .map_or(0, |known| known.attempts_left);
        let now = Known {
            token: keeping.token.clone(),
            issued_at_s: keeping.issued_at_s,
            attempts_left,
        };
        known.put(namespace, now);
    }

    /// Somebody looks whether the engine is there.
    pub(super) fn look(&self) -> Look<'_> {
        Look {
            introductions: self,
            is_here: false,
        }
    }

    /// The engine was told.
    pub(super) fn told(&self) {
        self.lock().outcomes.told += 1;
    }

    /// The engine could not be told: it will be with the next look, unless that was the last attempt.
    pub(super) fn failed(&self, introduction: &Introduction) {
        let mut state = self.lock();
        state.outcomes.failed += 1;
        let known = state.known.as_mut();
        if let Some(known) = known.and_then(|known| known.peek_mut(&introduction.namespace)) {
            known.attempts_left = introduction.attempts_left;
        }
    }

    /// What came of introductions since this was last asked.
    pub(super) fn take_outcomes(&self) -> Introduced {
        std::mem::take(&mut self.lock().outcomes)
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// A look for the engine. Given up without an answer, as by who would wait no longer, it means that the engine is away.
pub(super) struct Look<'a> {
    introductions: &'a Introductions,
    is_here: bool,
}

impl Look<'_> {
    /// The engine answers. Returns whom it must be told of, the one used last at the end: what is inside forgets in the order
    /// in which it was told. These are all, if it was away, less those whose tokens would be refused.
    pub(super) fn engine_is_here(mut self, now_s: u64) -> Vec<Introduction> {
        self.is_here = true;
        let mut state = self.introductions.lock();
        let State {
            known: Some(known),
            is_away,
            outcomes,
        } = &mut *state
        else {
            return Vec::new();
        };
        let came_back = std::mem::take(is_away);
        let (mut due, mut expired) = (Vec::new(), Vec::new());
        for (namespace, known) in known.iter_mut().rev() {
            if came_back {
                known.attempts_left = self.introductions.attempts_max;
            }
            if known.attempts_left == 0 {
                continue;
            }
            if is_too_old(known.issued_at_s, now_s) {
                expired.push(*namespace);
                continue;
            }
            due.push(Introduction {
                namespace: *namespace,
                token: known.token.clone(),
                issued_at_s: known.issued_at_s,
                attempts_left: known.attempts_left - 1,
            });
            known.attempts_left = 0;
        }
        for namespace in expired {
            known.pop(&namespace);
            outcomes.expired += 1;
        }
        due
    }
}

impl Drop for Look<'_> {
    fn drop(&mut self) {
        if !self.is_here {
            self.introductions.lock().is_away = true;
        }
    }
}

impl Introduction {
    /// A request that nobody asked for, on behalf of the namespace.
    ///
    /// # Errors
    /// The system has no randomness.
    pub(super) fn request(&self) -> Result<GenerateRequest, ApiError> {
        Ok(GenerateRequest {
            request: RequestId(random::u128()?),
            call: random::u64()?,
            namespace: self.namespace,
            tokens: vec![0],
            prompt_len: 1,
            // With a single one it would have ended before the engine's scheduler hears of it.
            tokens_max: 2,
            sampling: Sampling::default(),
            priority: None,
            keeping: Some(Keeping {
                token: self.token.clone(),
                issued_at_s: self.issued_at_s,
                group: None,
                // The engine writes no output that has a name, and nobody else writes this one.
                document: DocumentId(random::u128()?),
                epoch: 1,
            }),
        })
    }
}

#[cfg(test)]
mod tests {
    use refrain_service_kit::mesh::NAMESPACE_TTL_S;

    use super::*;

    const NOW_S: u64 = 1_000_000;

    /// Namespaces are met with these tokens, signed at these times.
    fn introductions(namespaces_max: usize, met: &[(u128, &str, u64)]) -> Introductions {
        let introductions = Introductions::new(namespaces_max, 2);
        for (namespace, token, issued_at_s) in met {
            let keeping = Keeping {
                token: (*token).into(),
                issued_at_s: *issued_at_s,
                group: None,
                document: DocumentId(7),
                epoch: 1,
            };
            introductions.met(NamespaceId(*namespace), &keeping);
        }
        introductions
    }

    fn told(due: &[Introduction]) -> Vec<(u128, &str)> {
        let named = due.iter();
        named
            .map(|due| (due.namespace.0, due.token.as_str()))
            .collect()
    }

    #[test]
    fn an_engine_is_told_once_each_time_that_it_comes_back() {
        let met = [(1, "first"), (2, "second"), (3, "third"), (2, "renewed")];
        let introductions = introductions(2, &met.map(|(id, token)| (id, token, NOW_S)));
        assert_eq!(introductions.look().engine_is_here(NOW_S), []);
        for _ in 0..2 {
            // Answered by nobody.
            drop(introductions.look());
            drop(introductions.look());
            // What is told last is forgotten last.
            let due = introductions.look().engine_is_here(NOW_S);
            assert_eq!(told(&due), [(3, "third"), (2, "renewed")]);
            assert_eq!(introductions.look().engine_is_here(NOW_S), []);
        }
    }

    #[test]
    fn nobody_is_introduced_where_none_may_be() {
        let introductions = introductions(0, &[(1, "first", NOW_S)]);
        drop(introductions.look());
        assert_eq!(introductions.look().engine_is_here(NOW_S), []);
    }

    #[test]
    fn what_fails_is_tried_again_so_often_and_no_more() {
        let introductions = introductions(2, &[(1, "first", NOW_S), (2, "second", NOW_S)]);
        drop(introductions.look());
        let due = introductions.look().engine_is_here(NOW_S);
        introductions.told();
        introductions.failed(&due[1]);
        let due = introductions.look().engine_is_here(NOW_S);
        assert_eq!(told(&due), [(2, "second")]);
        // While somebody is about it, nobody else is.
        assert_eq!(introductions.look().engine_is_here(NOW_S), []);
        introductions.failed(&due[0]);
        assert_eq!(introductions.look().engine_is_here(NOW_S), []);
        let outcomes = Introduced {
            told: 1,
            failed: 2,
            expired: 0,
        };
        assert_eq!(introductions.take_outcomes(), outcomes);
        assert_eq!(introductions.take_outcomes(), Introduced::default());
    }

    #[test]
    fn tokens_that_would_be_refused_are_not_sent() {
        let introductions = introductions(2, &[(1, "old", NOW_S), (2, "young", NOW_S + 1)]);
        drop(introductions.look());
        let now_s = NOW_S + NAMESPACE_TTL_S + 1;
        let due = introductions.look().engine_is_here(now_s);
        assert_eq!(told(&due), [(2, "young")]);
        assert_eq!(introductions.take_outcomes().expired, 1);
        // Forgotten, not counted again.
        drop(introductions.look());
        assert_eq!(introductions.look().engine_is_here(now_s).len(), 1);
        assert_eq!(introductions.take_outcomes().expired, 0);
    }
}
