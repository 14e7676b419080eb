//! Introductions of namespaces to a restarted engine with the Refrain plugin inside.
//!
//! A restarted engine has no namespaces. It would meet each one with its first request, which is too late to draft
//! for that request. So the worker sends one short request per recently used namespace as soon as the engine is back.

use std::num::NonZeroUsize;

use lru::LruCache;
use parking_lot::Mutex;
use refrain_protocol::chunk::DraftRules;
use refrain_protocol::engine::Sampling;
use refrain_protocol::{ApiError, DocumentId, NamespaceId, RequestId};
use refrain_service_kit::mesh::is_too_old;
use refrain_service_kit::random;

use super::generate::{AttachedDocument, GenerateRequest};
use super::streaming::IntroductionCounts;

/// The recently used namespaces, and which of them the engine still lacks. It has no clock and does no I/O: the
/// caller that confirms the engine also sends the introductions.
pub(super) struct Introductions {
    attempts_max: u32,
    state: Mutex<IntroductionState>,
}

struct IntroductionState {
    /// The namespaces, the least recently used one first to go.
    recent: LruCache<NamespaceId, RecentNamespace>,
    engine_is_away: bool,
    counts: IntroductionCounts,
}

/// A namespace's token, as the gateway signed it last.
struct RecentNamespace {
    token: String,
    issued_at_s: u64,
    /// Remaining attempts to introduce it; 0: the engine has it, or an introduction is under way.
    attempts_left: u32,
}

/// A namespace to be introduced by the receiver of this value.
#[derive(Debug, PartialEq)]
pub(super) struct Introduction {
    pub(super) namespace: NamespaceId,
    token: String,
    issued_at_s: u64,
    /// Remaining attempts after this one.
    attempts_left: u32,
}

impl Introductions {
    /// Creates an empty table of at most `namespaces_max` namespaces, with `attempts_max` attempts for each.
    pub(super) fn new(namespaces_max: NonZeroUsize, attempts_max: u32) -> Self {
        let state = IntroductionState {
            recent: LruCache::new(namespaces_max),
            engine_is_away: false,
            counts: IntroductionCounts::default(),
        };
        Introductions {
            attempts_max,
            state: Mutex::new(state),
        }
    }

    /// Records that a request of this namespace goes to the engine.
    pub(super) fn record_use(&self, namespace: NamespaceId, attached: &AttachedDocument) {
        let mut state = self.state.lock();
        let recent = &mut state.recent;
        let attempts_left = recent
            .peek(&namespace)
            .map_or(0, |recent| recent.attempts_left);
        let now = RecentNamespace {
            token: attached.token.clone(),
            issued_at_s: attached.issued_at_s,
            attempts_left,
        };
        recent.put(namespace, now);
    }

    /// Begins a check whether the engine is reachable.
    pub(super) fn begin_check(&self) -> EngineCheck<'_> {
        EngineCheck {
            introductions: self,
            is_reachable: false,
        }
    }

    /// Records that the engine accepted an introduction.
    pub(super) fn succeeded(&self) {
        self.state.lock().counts.succeeded += 1;
    }

    /// Records that an introduction failed. The next check repeats it, unless this was the last attempt.
    pub(super) fn failed(&self, introduction: &Introduction) {
        let mut state = self.state.lock();
        state.counts.failed += 1;
        if let Some(recent) = state.recent.peek_mut(&introduction.namespace) {
            recent.attempts_left = introduction.attempts_left;
        }
    }

    /// Outcomes of introductions since the last call.
    pub(super) fn take_counts(&self) -> IntroductionCounts {
        std::mem::take(&mut self.state.lock().counts)
    }
}

/// A check whether the engine is reachable. Dropping it without an answer, as a timeout does, means that the engine
/// is away.
pub(super) struct EngineCheck<'a> {
    introductions: &'a Introductions,
    is_reachable: bool,
}

impl EngineCheck<'_> {
    /// Records that the engine answers. Returns the introductions that are due, the most recently used namespace
    /// last, since the plugin evicts namespaces in the order in which it met them. If the engine was away, all
    /// namespaces are due except those with an expired signature.
    pub(super) fn engine_is_reachable(mut self, now_s: u64) -> Vec<Introduction> {
        self.is_reachable = true;
        let mut state = self.introductions.state.lock();
        let IntroductionState {
            recent,
            engine_is_away,
            counts,
        } = &mut *state;
        let came_back = std::mem::take(engine_is_away);
        let (mut due, mut expired) = (Vec::new(), Vec::new());
        for (namespace, recent) in recent.iter_mut().rev() {
            if came_back {
                recent.attempts_left = self.introductions.attempts_max;
            }
            if recent.attempts_left == 0 {
                continue;
            }
            if is_too_old(recent.issued_at_s, now_s) {
                expired.push(*namespace);
                continue;
            }
            due.push(Introduction {
                namespace: *namespace,
                token: recent.token.clone(),
                issued_at_s: recent.issued_at_s,
                attempts_left: recent.attempts_left - 1,
            });
            recent.attempts_left = 0;
        }
        for namespace in expired {
            recent.pop(&namespace);
            counts.expired += 1;
        }
        due
    }
}

impl Drop for EngineCheck<'_> {
    fn drop(&mut self) {
        if !self.is_reachable {
            self.introductions.state.lock().engine_is_away = true;
        }
    }
}

impl Introduction {
    /// A short request on behalf of the namespace, without any client behind it.
    ///
    /// # Errors
    /// The system's random generator failed.
    pub(super) fn request(&self) -> Result<GenerateRequest, ApiError> {
        Ok(GenerateRequest {
            request: RequestId(random::u128()?),
            call: random::u64()?,
            namespace: self.namespace,
            tokens: vec![0],
            prompt_len: 1,
            // A request for a single token would end before the engine's scheduler sees it.
            tokens_max: 2,
            sampling: Sampling::default(),
            priority: None,
            attached: Some(AttachedDocument {
                token: self.token.clone(),
                issued_at_s: self.issued_at_s,
                group: None,
                // The plugin uploads no output with a document id, and the worker does not upload this one.
                document: DocumentId(random::u128()?),
                epoch: 1,
                drafts: DraftRules::default(),
            }),
        })
    }
}

#[cfg(test)]
mod tests {
    use refrain_service_kit::mesh::NAMESPACE_TTL_S;

    use super::*;

    const NOW_S: u64 = 1_000_000;

    /// At most two introductions, after requests of namespaces with these tokens and times of signature.
    fn introductions(used: &[(u128, &str, u64)]) -> Introductions {
        let introductions = Introductions::new(NonZeroUsize::new(2).unwrap(), 2);
        for (namespace, token, issued_at_s) in used {
            let attached = AttachedDocument {
                token: (*token).into(),
                issued_at_s: *issued_at_s,
                group: None,
                document: DocumentId(7),
                epoch: 1,
                drafts: DraftRules::default(),
            };
            introductions.record_use(NamespaceId(*namespace), &attached);
        }
        introductions
    }

    fn names(due: &[Introduction]) -> Vec<(u128, &str)> {
        let named = due.iter();
        named
            .map(|due| (due.namespace.0, due.token.as_str()))
            .collect()
    }

    #[test]
    fn namespaces_are_introduced_once_after_each_restart() {
        let used = [(1, "first"), (2, "second"), (3, "third"), (2, "renewed")];
        let introductions = introductions(&used.map(|(id, token)| (id, token, NOW_S)));
        assert_eq!(introductions.begin_check().engine_is_reachable(NOW_S), []);
        for _ in 0..2 {
            // The engine does not answer.
            drop(introductions.begin_check());
            drop(introductions.begin_check());
            // The namespace that is introduced last is evicted last.
            let due = introductions.begin_check().engine_is_reachable(NOW_S);
            assert_eq!(names(&due), [(3, "third"), (2, "renewed")]);
            assert_eq!(introductions.begin_check().engine_is_reachable(NOW_S), []);
        }
    }

    #[test]
    fn failed_introductions_are_repeated_up_to_the_limit() {
        let introductions = introductions(&[(1, "first", NOW_S), (2, "second", NOW_S)]);
        drop(introductions.begin_check());
        let due = introductions.begin_check().engine_is_reachable(NOW_S);
        introductions.succeeded();
        introductions.failed(&due[1]);
        let due = introductions.begin_check().engine_is_reachable(NOW_S);
        assert_eq!(names(&due), [(2, "second")]);
        // An introduction that is under way is not repeated.
        assert_eq!(introductions.begin_check().engine_is_reachable(NOW_S), []);
        introductions.failed(&due[0]);
        assert_eq!(introductions.begin_check().engine_is_reachable(NOW_S), []);
        let counts = IntroductionCounts {
            succeeded: 1,
            failed: 2,
            expired: 0,
        };
        assert_eq!(introductions.take_counts(), counts);
        assert_eq!(introductions.take_counts(), IntroductionCounts::default());
    }

    #[test]
    fn expired_tokens_are_not_sent() {
        let introductions = introductions(&[(1, "old", NOW_S), (2, "young", NOW_S + 1)]);
        drop(introductions.begin_check());
        let now_s = NOW_S + NAMESPACE_TTL_S + 1;
        let due = introductions.begin_check().engine_is_reachable(now_s);
        assert_eq!(names(&due), [(2, "young")]);
        assert_eq!(introductions.take_counts().expired, 1);
        // An expired namespace is forgotten and counted once.
        drop(introductions.begin_check());
        assert_eq!(
            introductions.begin_check().engine_is_reachable(now_s).len(),
            1
        );
        assert_eq!(introductions.take_counts().expired, 0);
    }
}
