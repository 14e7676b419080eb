//! The primer: it fills the table from which an engine drafts by itself with outputs of the draft store.
//!
//! It looks at the engine now and then. An engine that has started is sent the newest outputs of the namespaces that
//! requests use, and later each new one, of whatever worker. No request waits for it: it sends one piece at a time
//! into a slot of its own, and pauses between pieces while other slots have requests.

use std::collections::HashMap;
use std::num::NonZeroUsize;
use std::sync::Arc;
use std::time::{Duration, Instant};

use lru::LruCache;
use parking_lot::Mutex;
use refrain_protocol::document::FeedCursor;
use refrain_protocol::pull::{NamespacePull, PullRequest, Scope, ScopeNews, ScopePull};
use refrain_protocol::{ApiError, ErrorKind, NamespaceId, SignedNamespace};
use refrain_rpc::DraftStore;
use tokio::sync::Notify;

use super::primer_texts::PrimerTexts;
use crate::engine::StreamingEngine;
use crate::shared::Shared;

/// Most namespaces that are primed; the least recently used one makes room.
const NAMESPACES_MAX: NonZeroUsize = NonZeroUsize::new(8).unwrap();
/// How long a namespace is primed after the start of its last chunk.
const USED_FOR: Duration = Duration::from_secs(600);
/// Tokens of the store's feed that are read with one call.
const PULL_TOKENS: u32 = 65_536;
/// Pause after a piece while others use the engine, in times of that piece. So the primer has a fifth of it.
const PAUSE_PIECES: u32 = 4;

/// The primer of an engine.
pub(crate) struct Primer {
    shared: Arc<Shared>,
    engine: Arc<dyn StreamingEngine>,
    store: Arc<dyn DraftStore>,
    used: Mutex<LruCache<NamespaceId, UsedNamespace>>,
    has_use: Notify,
}

#[derive(Clone)]
struct UsedNamespace {
    signed: SignedNamespace,
    last: Instant,
}

/// A namespace whose feed is read.
struct FollowedNamespace {
    texts: PrimerTexts,
    cursor: FeedCursor,
    is_caught_up: bool,
}

#[derive(Default)]
struct PrimerState {
    followed: HashMap<NamespaceId, FollowedNamespace>,
    read_at: Option<Instant>,
    starts: EngineStarts,
    /// Only the first failure of several is logged.
    fails: bool,
}

/// Notices that an engine has started anew. It has no clock and does no I/O.
#[derive(Default)]
struct EngineStarts {
    last_request: Option<u64>,
    was_away: bool,
}

impl EngineStarts {
    /// Notes how many requests the engine has had. Returns whether it has started since the last look: it was away,
    /// or has had fewer requests than before.
    fn look(&mut self, last_request: Option<u64>) -> bool {
        let is_anew = self.was_away || last_request < self.last_request;
        *self = EngineStarts {
            last_request,
            was_away: false,
        };
        is_anew
    }

    fn note_failure(&mut self, kind: ErrorKind) {
        self.was_away |= kind == ErrorKind::Unavailable;
    }
}

impl Primer {
    pub(crate) fn new(
        shared: Arc<Shared>,
        engine: Arc<dyn StreamingEngine>,
        store: Arc<dyn DraftStore>,
    ) -> Self {
        Primer {
            shared,
            engine,
            store,
            used: Mutex::new(LruCache::new(NAMESPACES_MAX)),
            has_use: Notify::new(),
        }
    }

    /// Notes that a chunk of a namespace begins. A part of a tenant that is kept apart from the rest is not primed.
    pub(super) fn note_use(&self, id: NamespaceId, signed: &SignedNamespace) {
        if signed.namespace.is_partition() {
            return self.shared.metrics.families.primer_isolated.inc();
        }
        let mut used = self.used.lock();
        let newest = used.peek(&id).map(|known| &known.signed);
        let newest = newest.filter(|known| known.issued_at_s > signed.issued_at_s);
        let namespace = UsedNamespace {
            signed: newest.unwrap_or(signed).clone(),
            last: Instant::now(),
        };
        used.put(id, namespace);
        self.has_use.notify_one();
    }

    /// Primes the engine for as long as the worker lives.
    pub(crate) async fn run(self: Arc<Self>) {
        let mut state = PrimerState::default();
        loop {
            let all: Vec<_> = {
                let used = self.used.lock();
                used.iter().map(|(id, of)| (*id, of.clone())).collect()
            };
            state
                .followed
                .retain(|id, _| all.iter().any(|(used, _)| used == id));
            // The most recently used one comes first.
            let used = all
                .into_iter()
                .take_while(|(_, of)| of.last.elapsed() < USED_FOR);
            let used: Vec<_> = used.map(|(id, of)| (id, of.signed)).collect();
            if used.is_empty() {
                self.has_use.notified().await;
                continue;
            }
            let pause = match self.turn(&mut state, &used).await {
                Ok(pause) => {
                    state.fails = false;
                    pause
                }
                Err(_) => self.pause(),
            };
            tokio::time::sleep(pause).await;
        }
    }

    fn pause(&self) -> Duration {
        Duration::from_millis(self.shared.config.engine.primer.pause_ms)
    }

    /// Reads what is new, and sends a piece if the engine has room for it. Returns the pause before the next turn.
    ///
    /// # Errors
    /// The engine failed. The next turn may succeed.
    async fn turn(
        &self,
        state: &mut PrimerState,
        used: &[(NamespaceId, SignedNamespace)],
    ) -> Result<Duration, ApiError> {
        let is_due = state.read_at.is_none_or(|at| at.elapsed() >= self.pause());
        let is_behind = |id| state.followed.get(id).is_none_or(|of| !of.is_caught_up);
        let mut has_more = false;
        if is_due || used.iter().any(|(id, _)| is_behind(id)) {
            state.read_at = Some(Instant::now());
            for (id, signed) in used {
                match self.read_news(state, *id, signed).await {
                    Ok(is_caught_up) => has_more |= !is_caught_up,
                    // Texts that were read before can still be sent.
                    Err(error) => self.count_failure("store", &error),
                }
            }
        }
        let looked = self.engine.slots().await;
        let slots = looked.inspect_err(|error| self.engine_failed(state, "look", error))?;
        if state.starts.look(slots.last_request) {
            let followed = state.followed.values_mut();
            followed.for_each(|of| of.texts.begin_anew());
            self.shared.metrics.families.primer_starts.inc();
            tracing::info!("the engine has started anew; its drafts are primed");
        }
        if !slots.is_free {
            return Ok(self.pause());
        }
        let piece = used.iter().find_map(|(id, _)| {
            let of = state.followed.get_mut(id)?;
            of.is_caught_up.then(|| of.texts.next_piece())?
        });
        let Some(piece) = piece else {
            return Ok(if has_more {
                Duration::ZERO
            } else {
                self.pause()
            });
        };
        let began = Instant::now();
        let sent = self.engine.prime(&piece.tokens).await;
        sent.inspect_err(|error| self.engine_failed(state, "prime", error))?;
        let families = &self.shared.metrics.families;
        families.primer_tokens.inc_by(piece.tokens.len() as u64);
        families.primer_documents.inc_by(piece.documents);
        Ok(match slots.has_others {
            true => began.elapsed() * PAUSE_PIECES,
            false => Duration::ZERO,
        })
    }

    /// Reads the changes of a namespace since the last call. Returns whether that is all for now.
    ///
    /// # Errors
    /// The store cannot be reached, or refuses the namespace.
    async fn read_news(
        &self,
        state: &mut PrimerState,
        id: NamespaceId,
        signed: &SignedNamespace,
    ) -> Result<bool, ApiError> {
        let tokens_max = self.shared.config.engine.primer.tokens_max;
        let begin = || FollowedNamespace {
            texts: PrimerTexts::new(tokens_max),
            cursor: FeedCursor::default(),
            is_caught_up: false,
        };
        let followed = state.followed.entry(id).or_insert_with(begin);
        let scope = ScopePull {
            scope: Scope::Namespace,
            after: followed.cursor,
            own: Vec::new(),
        };
        let namespace = NamespacePull {
            namespace: signed.clone(),
            scopes: vec![scope],
        };
        let request = PullRequest {
            namespaces: vec![namespace],
            max_tokens: PULL_TOKENS,
            wait_ms: 0,
        };
        let reply = self.store.pull(request).await?;
        followed.is_caught_up = !reply.is_full;
        for delta in reply.deltas {
            match delta.news {
                ScopeNews::Changes { delta, .. } => {
                    if delta.reset {
                        followed.texts = PrimerTexts::new(tokens_max);
                    }
                    followed.cursor = delta.cursor;
                    delta
                        .events
                        .into_iter()
                        .for_each(|event| followed.texts.apply(event));
                }
                ScopeNews::Refused { kind, message } => {
                    // Its signature may be too old. The next chunk brings another.
                    self.used.lock().pop(&id);
                    return Err(ApiError::new(kind, message));
                }
                ScopeNews::Unregistered => {}
            }
        }
        Ok(followed.is_caught_up)
    }

    fn count_failure(&self, call: &str, error: &ApiError) {
        let failures = &self.shared.metrics.families.primer_failures;
        failures.with_label_values(&[call]).inc();
        tracing::debug!(call, kind = ?error.kind, "a call of the primer failed");
    }

    /// Notes a failed call to the engine, and logs the first of several.
    fn engine_failed(&self, state: &mut PrimerState, call: &str, error: &ApiError) {
        self.count_failure(call, error);
        state.starts.note_failure(error.kind);
        if !std::mem::replace(&mut state.fails, true) {
            // The engine's answer to a text may repeat it.
            let message = (call == "look").then_some(&error.message);
            tracing::warn!(call, kind = ?error.kind, message, "the engine cannot be primed; trying again");
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_engine_has_started_anew_if_it_was_away_or_has_had_fewer_requests() {
        let mut starts = EngineStarts::default();
        assert!(!starts.look(None) && !starts.look(Some(4)) && !starts.look(Some(4)));
        assert!(starts.look(Some(3)) && !starts.look(Some(9)));
        assert!(starts.look(None) && !starts.look(None));
        starts.note_failure(ErrorKind::Timeout);
        assert!(!starts.look(Some(9)));
        starts.note_failure(ErrorKind::Unavailable);
        assert!(starts.look(Some(90)) && !starts.look(Some(90)));
    }
}
