//! The table of sessions: open ones, and finished ones whose KV is kept for reuse.
//!
//! It enforces two limits: the number of sessions and the number of KV blocks. Kept sessions are evicted first, least
//! recently used first. Parked sessions are next, the oldest first: their requests come back, but those of other
//! sessions are here. Callers are refused only when none is left.

mod pooled;

use std::collections::{HashMap, HashSet};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use refrain_protocol::engine::{Sampling, SessionSpec};
use refrain_protocol::prefix::PrefixHash;
use refrain_protocol::scheduling::KvReport;
use refrain_protocol::{ApiError, EngineSessionId, ErrorKind, TenantId};

use super::form_slot::FormSlot;
use super::pooling::Pooling;
use super::prefix_cache::PrefixCache;
use super::session::{Session, SessionPrefixes};
use crate::backend::Backend;
use crate::drafter::{DrafterState, DrafterStateShape};
use crate::network::{BLOCK_TOKENS, BlockCount, KvCache, KvShape};
use crate::pool::{WeightsIdentity, is_of_tenant};

/// Delay after which a caller that was refused for lack of room may try again.
const RETRY_AFTER_MS: u64 = 250;

/// All sessions of an engine.
#[derive(Debug)]
pub(crate) struct Sessions {
    shape: KvShape,
    /// Shape of the drafter's per-session state, if there is a drafter.
    drafter_shape: Option<DrafterStateShape>,
    sessions_max: usize,
    blocks_max: u64,
    limits: SessionTimes,
    blocks: BlockCount,
    open: HashMap<EngineSessionId, Session>,
    kept: PrefixCache,
    /// Number of parked sessions that made room for others so far.
    parked_evicted: u64,
    /// The pool, which outlives the sessions, if the engine has one.
    pooling: Option<Pooling>,
    /// The place of keys and values, if it is not in the blocks.
    backend: Option<Arc<dyn Backend>>,
    /// Tenants that were forgotten, and when, as long as a request that was parked then may go on.
    forgotten: Vec<(TenantId, Instant)>,
}

/// How long sessions stay open without a step.
#[derive(Clone, Copy, Debug)]
pub(crate) struct SessionTimes {
    pub(crate) idle: Duration,
    pub(crate) parked: Duration,
}

impl Sessions {
    pub(crate) fn new(
        shape: KvShape,
        drafter_shape: Option<DrafterStateShape>,
        sessions_max: usize,
        kv_tokens_max: u64,
        limits: SessionTimes,
    ) -> Self {
        Sessions {
            shape,
            drafter_shape,
            sessions_max,
            blocks_max: kv_tokens_max.div_ceil(BLOCK_TOKENS as u64),
            limits,
            blocks: BlockCount::default(),
            open: HashMap::new(),
            kept: PrefixCache::default(),
            parked_evicted: 0,
            pooling: None,
            backend: None,
            forgotten: Vec::new(),
        }
    }

    /// The table with the place of keys and values, if it is not in the blocks.
    pub(crate) fn with_backend(self, backend: Option<Arc<dyn Backend>>) -> Self {
        Sessions { backend, ..self }
    }

    /// Names blocks of new sessions by other weights.
    pub(super) fn renew_pooling(&mut self, weights: WeightsIdentity) {
        if let Some(pooling) = &mut self.pooling {
            pooling.weights = weights;
        }
    }

    /// Whether sessions use a pool.
    pub(super) fn has_pool(&self) -> bool {
        self.pooling.is_some()
    }

    /// Lets sessions use a pool.
    pub(crate) fn set_pooling(&mut self, pooling: Pooling) {
        self.pooling = Some(pooling);
    }

    /// Opens a session without text. The caller must call [`Sessions::reuse`] next, which makes room in the table
    /// after it has searched the kept sessions. The form is taken if the session opens.
    ///
    /// # Errors
    /// `Conflict` if the session is already open, and `Overloaded` if all sessions are in use.
    pub(crate) fn open(
        &mut self,
        id: EngineSessionId,
        spec: SessionSpec,
        form: &mut Option<FormSlot>,
        now: Instant,
    ) -> Result<(), ApiError> {
        if self.open.contains_key(&id) {
            return Err(ApiError::new(
                ErrorKind::Conflict,
                format!("session {id} is already open"),
            )
            .with_code("session_open"));
        }
        if self.open.len() >= self.sessions_max
            && let Some(oldest) = self.oldest_parked()
        {
            self.parked_evicted += 1;
            self.close(oldest, true);
        }
        if self.open.len() >= self.sessions_max {
            return Err(overloaded(
                "sessions",
                format!("all {} sessions are in use", self.sessions_max),
            ));
        }
        let leaves_nothing = self.was_forgotten(spec.tenant, now);
        let session = Session {
            namespace: spec.namespace,
            tenant: spec.tenant,
            leaves_nothing,
            sampling: spec.sampling,
            prompt_len: spec.prompt_len as usize,
            text: Vec::new(),
            kv: KvCache::in_backend(self.backend.as_ref(), self.shape, self.blocks.clone()),
            drafter_state: self
                .drafter_shape
                .as_ref()
                .filter(|_| spec.self_drafts)
                .map(DrafterState::new),
            form: form.take(),
            pooled: self
                .pooling
                .as_ref()
                .filter(|_| !leaves_nothing)
                .map(|pooling| pooling.text(spec.namespace)),
            prefixes: SessionPrefixes::new(&spec.namespace),
            used: now,
            parked: None,
        };
        self.open.insert(id, session);
        Ok(())
    }

    /// Parks an open session: it stays as it is for as long as there is room.
    pub(crate) fn park(&mut self, id: EngineSessionId, now: Instant) {
        if let Some(session) = self.open.get_mut(&id) {
            session.parked = Some(now);
            self.keep_blocks(id);
        }
    }

    /// Ends the parking of a session whose request goes on, so that it makes room for nobody.
    pub(crate) fn resume(&mut self, id: EngineSessionId) {
        if let Some(session) = self.open.get_mut(&id) {
            session.parked = None;
        }
    }

    fn oldest_parked(&self) -> Option<EngineSessionId> {
        let parked = self.open.iter();
        let parked = parked.filter_map(|(id, session)| Some((session.parked?, *id)));
        parked.min().map(|(_, id)| id)
    }

    /// Returns an open session.
    pub(crate) fn get(&self, id: EngineSessionId) -> Option<&Session> {
        self.open.get(&id)
    }

    /// Returns an open session for modification.
    pub(crate) fn get_mut(&mut self, id: EngineSessionId) -> Option<&mut Session> {
        self.open.get_mut(&id)
    }

    /// Takes a session out for the duration of a step. If the step panics, the session is lost with all its state.
    pub(crate) fn take(&mut self, id: EngineSessionId) -> Option<Session> {
        self.open.remove(&id)
    }

    /// Puts a session back.
    pub(crate) fn put(&mut self, id: EngineSessionId, mut session: Session, now: Instant) {
        session.used = now;
        if let Some(pooling) = &self.pooling {
            pooling.keep(&mut session, false);
        }
        self.open.insert(id, session);
    }

    /// Finds the longest prefix of a session's text, without the last token, that another session of its namespace
    /// holds. If it is longer than the session's own KV, the session shares it. Returns the number of tokens gained.
    pub(crate) fn reuse(&mut self, id: EngineSessionId) -> usize {
        let gained = self.take_prefix(id);
        let excess = (self.open.len() + self.kept.len()).saturating_sub(self.sessions_max);
        self.evict_kept(excess);
        gained
    }

    /// Evicts up to `count` kept sessions. Returns whether it evicted any.
    fn evict_kept(&mut self, count: usize) -> bool {
        let evicted = self.kept.evict(count);
        let is_any = !evicted.is_empty();
        for mut session in evicted {
            if let Some(pooling) = &self.pooling {
                pooling.keep(&mut session, true);
            }
        }
        is_any
    }

    fn take_prefix(&mut self, id: EngineSessionId) -> usize {
        let Some(session) = self.open.get(&id) else {
            return 0;
        };
        let wanted = &session.text[..session.text.len().saturating_sub(1)];
        // Among equal prefixes, the one that the drafter has read furthest is best, if this session drafts.
        let useful = |other: &Session, len: usize| match session.drafter_state {
            Some(_) => other.drafter_end().min(len),
            None => 0,
        };
        let kept = self.kept.iter().enumerate();
        let kept = kept.map(|(place, kept)| (Some(place), kept));
        let open = self.open.iter().filter(|(other, _)| **other != id);
        let best = kept
            .chain(open.map(|(_, open)| (None, open)))
            .map(|(place, other)| (other.shared_len(session.namespace, wanted), place, other))
            .max_by_key(|(len, _, other)| (*len, useful(other, *len)));
        let Some((len, place, other)) = best else {
            return 0;
        };
        let gained = len.saturating_sub(session.kv.len());
        if gained == 0 {
            return 0;
        }
        let kv = other.kv.prefix(len);
        if kv.is_void() {
            return 0;
        }
        let state = other
            .drafter_state
            .as_ref()
            .filter(|_| useful(other, len) > session.drafter_end())
            .map(|state| state.prefix(len));
        if let Some(place) = place {
            self.kept.touch(place);
        }
        if let Some(session) = self.open.get_mut(&id) {
            session.kv = kv;
            session.drafter_state = state.or(session.drafter_state.take());
        }
        gained
    }

    /// Makes sure that `blocks` more target blocks and `draft_blocks` more drafter blocks can be allocated. Targets
    /// take precedence: the drafter caches of open sessions are dropped before a target is refused.
    ///
    /// # Errors
    /// `Overloaded` if the open sessions leave too little room.
    pub(crate) fn reserve(&mut self, blocks: u64, draft_blocks: u64) -> Result<(), ApiError> {
        while self.used_blocks(draft_blocks) + blocks > self.blocks_max {
            if self.evict_kept(1) {
                continue;
            }
            if let Some(oldest) = self.oldest_parked() {
                self.parked_evicted += 1;
                self.close(oldest, false);
                continue;
            }
            let full = blocks + self.blocks.load(Ordering::Relaxed) > self.blocks_max;
            if full || draft_blocks > 0 {
                let tokens = self.blocks_max * BLOCK_TOKENS as u64;
                return Err(overloaded(
                    "kv",
                    format!("open sessions fill the KV cache of {tokens} tokens"),
                ));
            }
            let open = self.open.values_mut();
            for state in open.filter_map(|open| open.drafter_state.as_mut()) {
                state.keep_rows(0);
            }
        }
        Ok(())
    }

    /// Returns the number of blocks in use. Drafter blocks, of which `draft_blocks` more are assumed, count by their
    /// size.
    fn used_blocks(&self, draft_blocks: u64) -> u64 {
        let block_len = self.shape.block_len() as u64;
        let drafters = self.drafter_shape.as_ref().map_or(0, |shape| {
            let floats = shape.kv_floats(draft_blocks);
            // A backend's blocks are empty, and its room is counted in tokens.
            match floats == 0 || block_len == 0 {
                true => shape.kv_blocks(draft_blocks),
                false => floats.div_ceil(block_len),
            }
        });
        self.blocks.load(Ordering::Relaxed) + drafters
    }

    /// Closes a session. With `keep`, its KV stays as long as there is room.
    pub(crate) fn close(&mut self, id: EngineSessionId, keep: bool) {
        let Some(mut session) = self.open.remove(&id) else {
            return;
        };
        session.cut_to_kv();
        if let Some(pooling) = self
            .pooling
            .as_ref()
            .filter(|_| keep || session.parked.is_some())
        {
            pooling.keep(&mut session, true);
        }
        if keep && !session.leaves_nothing && !session.text.is_empty() {
            // A kept session never samples again.
            session.sampling = Sampling::default();
            session.form = None;
            session.parked = None;
            self.kept.insert(session);
        }
    }

    /// Forgets the sessions that are kept for reuse, and what the pool holds.
    pub(crate) fn forget_kept(&mut self) {
        self.kept.evict(usize::MAX);
        if let Some(pooling) = &self.pooling {
            pooling.pool.clear();
        }
    }

    /// Whether a tenant was forgotten so recently that a session may be the rest of a request that was parked then.
    fn was_forgotten(&self, tenant: TenantId, now: Instant) -> bool {
        self.forgotten.iter().any(|(forgotten, at)| {
            is_of_tenant(tenant, *forgotten)
                && now.saturating_duration_since(*at) < self.limits.parked
        })
    }

    /// Forgets the sessions of a tenant that are kept for reuse or parked. Those that run go on, and nothing of them
    /// is kept, nor of those that begin while one of the parked ones may go on. Returns how many sessions were
    /// forgotten, and how many run. The pool is left as it is.
    pub(crate) fn forget_tenant(&mut self, tenant: TenantId, now: Instant) -> (usize, usize) {
        let parked_max = self.limits.parked;
        self.forgotten.retain(|(other, at)| {
            *other != tenant && now.saturating_duration_since(*at) < parked_max
        });
        self.forgotten.push((tenant, now));
        let is_of = |session: &Session| is_of_tenant(session.tenant, tenant);
        let before = self.kept.len() + self.open.len();
        self.kept.retain(|kept| !is_of(kept));
        self.open
            .retain(|_, open| open.parked.is_none() || !is_of(open));
        let forgotten = before - self.kept.len() - self.open.len();
        let running = self.open.values_mut().filter(|open| is_of(open));
        let running = running.map(|open| {
            open.leaves_nothing = true;
            open.pooled = None;
        });
        (forgotten, running.count())
    }

    /// Forgets all sessions, open ones as well.
    pub(crate) fn forget_all(&mut self) {
        self.open.clear();
        self.forget_kept();
    }

    /// Closes sessions that no step has used for the idle time or that have been parked for too long, and returns
    /// their number.
    pub(crate) fn expire(&mut self, now: Instant) -> usize {
        let SessionTimes { idle, parked } = self.limits;
        let is_over = |session: &Session| {
            let since = |time| now.saturating_duration_since(time);
            since(session.used) >= idle || session.parked.is_some_and(|at| since(at) >= parked)
        };
        let idle: Vec<EngineSessionId> = self
            .open
            .iter()
            .filter(|(_, session)| is_over(session))
            .map(|(id, _)| *id)
            .collect();
        for id in &idle {
            self.close(*id, true);
        }
        idle.len()
    }

    /// Returns the numbers of open sessions, parked ones included, and of kept sessions.
    pub(crate) fn counts(&self) -> (usize, usize) {
        (self.open.len(), self.kept.len())
    }

    /// Returns the number of parked sessions.
    pub(crate) fn parked(&self) -> usize {
        let parked = self.open.values().filter(|open| open.parked.is_some());
        parked.count()
    }

    /// Takes the number of parked sessions that made room for others since the last call.
    pub(crate) fn take_parked_evicted(&mut self) -> u64 {
        std::mem::take(&mut self.parked_evicted)
    }

    /// Reports the KV cache. A block that a running session shares with a kept one counts as running, and drafters'
    /// caches count as running as well. The price of reading is the caller's to fill in.
    pub(crate) fn kv_report(&mut self) -> KvReport {
        let running = self.open.values().filter(|open| open.parked.is_none());
        let running: HashSet<usize> = running
            .flat_map(|session| session.kv.block_addresses())
            .collect();
        let blocks = self.blocks.load(Ordering::Relaxed);
        let kept = blocks.saturating_sub(running.len() as u64);
        let (used, capacity_tokens) = self.kv_tokens();
        let kept_tokens = kept * BLOCK_TOKENS as u64;
        let sessions = self.open.values_mut().chain(self.kept.iter_mut());
        let prefixes = sessions.flat_map(Session::held).flatten();
        let mut held: Vec<PrefixHash> = prefixes.map(|prefix| prefix.hash).collect();
        if let Some(pooling) = &self.pooling {
            held.extend(pooling.pool.prefixes());
        }
        held.sort_unstable();
        held.dedup();
        KvReport {
            capacity_tokens,
            running_tokens: used - kept_tokens,
            kept_tokens,
            prefill_ms_per_1k: None,
            held: Some(held),
        }
    }

    /// Returns the number of tokens whose captured states are held. A shared one counts once.
    pub(crate) fn state_tokens(&self) -> u64 {
        self.drafter_shape
            .as_ref()
            .map_or(0, DrafterStateShape::state_tokens)
    }

    /// Returns the used and the greatest number of KV tokens, those of drafters included.
    pub(crate) fn kv_tokens(&self) -> (u64, u64) {
        let block = BLOCK_TOKENS as u64;
        (self.used_blocks(0) * block, self.blocks_max * block)
    }
}

fn overloaded(limit: &str, message: String) -> ApiError {
    ApiError::new(ErrorKind::Overloaded, format!("{message}; try again later"))
        .with_code(format!("engine_{limit}_full"))
        .with_retry_after_ms(RETRY_AFTER_MS)
}

#[cfg(test)]
mod tests {
    use refrain_protocol::NamespaceId;

    use super::*;

    const SHAPE: KvShape = KvShape {
        layers: 1,
        kv_heads: 1,
        head_dim: 2,
    };

    struct Table {
        sessions: Sessions,
        now: Instant,
    }

    impl Table {
        fn new(sessions_max: usize, kv_tokens_max: u64) -> Self {
            let sessions = Sessions::new(
                SHAPE,
                None,
                sessions_max,
                kv_tokens_max,
                SessionTimes {
                    idle: Duration::from_millis(100),
                    parked: Duration::from_millis(40),
                },
            );
            Table {
                sessions,
                now: Instant::now(),
            }
        }

        fn open(
            &mut self,
            id: u128,
            namespace: u128,
            text: std::ops::Range<u32>,
        ) -> Result<usize, ApiError> {
            let id = EngineSessionId(id);
            let spec = SessionSpec {
                namespace: NamespaceId(namespace),
                ..SessionSpec::default()
            };
            self.sessions.open(id, spec, &mut None, self.now)?;
            let len = text.len();
            self.sessions.get_mut(id).unwrap().text = text.collect();
            let gained = self.sessions.reuse(id);
            let blocks = self.sessions.get(id).unwrap().kv.growth_blocks(len - 1);
            self.sessions.reserve(blocks, 0)?;
            self.sessions.get_mut(id).unwrap().kv.grow(len - 1);
            Ok(gained)
        }

        fn park(&mut self, id: u128) {
            self.now += Duration::from_millis(1);
            self.sessions.park(EngineSessionId(id), self.now);
        }

        fn is_open(&self, id: u128) -> bool {
            self.sessions.get(EngineSessionId(id)).is_some()
        }

        fn close(&mut self, id: u128) {
            self.sessions.close(EngineSessionId(id), true);
        }
    }

    #[test]
    fn prefixes_are_reused_inside_a_namespace_only() {
        let mut table = Table::new(10, 10_000);
        assert_eq!(table.open(1, 1, 0..100).unwrap(), 0);
        assert_eq!(table.open(2, 1, 0..50).unwrap(), 49);
        table.close(1);
        assert_eq!(table.open(3, 1, 0..200).unwrap(), 99);
        assert_eq!(table.open(4, 2, 0..200).unwrap(), 0);
        assert_eq!(table.open(5, 1, 1..200).unwrap(), 0);
    }

    #[test]
    fn a_longer_session_replaces_its_own_beginning() {
        let mut table = Table::new(10, 10_000);
        table.open(1, 1, 0..40).unwrap();
        table.close(1);
        table.open(2, 1, 0..80).unwrap();
        table.close(2);
        assert_eq!(table.sessions.counts(), (0, 1));
        table.open(3, 1, 0..60).unwrap();
        table.close(3);
        assert_eq!(table.sessions.counts(), (0, 1));
        assert_eq!(table.open(4, 1, 0..80).unwrap(), 79);
    }

    #[test]
    fn kept_sessions_make_room_least_recently_used_first() {
        let mut table = Table::new(3, 10_000);
        for id in 1..=3 {
            table.open(id, id, 0..40).unwrap();
            table.close(id);
        }
        assert_eq!(table.open(4, 1, 0..40).unwrap(), 39);
        // 1 was read, so 2 was the oldest.
        assert_eq!(table.sessions.counts(), (1, 2));
        table.close(4);
        assert_eq!(table.open(5, 3, 0..40).unwrap(), 39);
    }

    #[test]
    fn blocks_are_bounded_and_open_sessions_are_never_dropped() {
        let mut table = Table::new(10, 128);
        table.open(1, 1, 0..65).unwrap();
        table.close(1);
        table.open(2, 2, 0..65).unwrap();
        assert_eq!(table.sessions.kv_tokens(), (128, 128));
        table.open(3, 3, 0..33).unwrap();
        assert_eq!(table.sessions.counts().1, 0);
        let error = table.open(4, 4, 0..65).unwrap_err();
        assert_eq!(
            (error.kind, error.retry_after_ms.is_some()),
            (ErrorKind::Overloaded, true)
        );
        assert_eq!(table.sessions.counts().0, 3);
    }

    #[test]
    fn sessions_are_bounded_and_expire() {
        let mut table = Table::new(1, 10_000);
        table.open(1, 1, 0..4).unwrap();
        assert_eq!(
            table.open(1, 1, 0..4).unwrap_err().kind,
            ErrorKind::Conflict
        );
        assert_eq!(
            table.open(2, 1, 0..4).unwrap_err().kind,
            ErrorKind::Overloaded
        );
        assert_eq!(
            table.sessions.expire(table.now + Duration::from_millis(99)),
            0
        );
        assert_eq!(
            table
                .sessions
                .expire(table.now + Duration::from_millis(100)),
            1
        );
        assert_eq!(table.sessions.counts(), (0, 1));
        table.open(2, 1, 0..4).unwrap();
    }

    #[test]
    fn parked_sessions_yield_after_kept_ones_and_the_oldest_first() {
        let mut table = Table::new(10, 160);
        for id in 1..=3 {
            table.open(id, id, 0..33).unwrap();
        }
        table.open(4, 4, 0..33).unwrap();
        table.close(4);
        table.park(2);
        table.park(1);
        assert_eq!(table.sessions.parked(), 2);
        // One block is free, and the kept session makes room for another.
        table.open(5, 5, 0..65).unwrap();
        assert_eq!(table.sessions.counts(), (4, 0));
        table.open(6, 6, 0..33).unwrap();
        assert!(!table.is_open(2) && table.is_open(1));
        table.sessions.resume(EngineSessionId(1));
        table.park(3);
        table.open(7, 7, 0..33).unwrap();
        assert!(table.is_open(1) && !table.is_open(3));
        assert_eq!(table.sessions.take_parked_evicted(), 2);
        let error = table.open(8, 8, 0..33).unwrap_err();
        assert_eq!(error.code.as_deref(), Some("engine_kv_full"));
    }

    #[test]
    fn parked_sessions_yield_their_places_and_expire() {
        let mut table = Table::new(2, 10_000);
        table.open(1, 1, 0..40).unwrap();
        table.open(2, 2, 0..40).unwrap();
        table.park(2);
        table.open(3, 3, 0..40).unwrap();
        assert!(table.is_open(1) && !table.is_open(2));
        table.park(3);
        let after = |ms| table.now + Duration::from_millis(ms);
        let (before, at) = (after(39), after(40));
        assert_eq!(table.sessions.expire(before), 0);
        assert_eq!(table.sessions.expire(at), 1);
        // An expired session is kept while there is room.
        assert_eq!(table.open(4, 3, 0..40).unwrap(), 39);
    }

    #[test]
    fn the_report_tells_running_from_kept_and_what_is_held() {
        use refrain_protocol::prefix::prefix_hashes;

        let mut table = Table::new(10, 10_016);
        let text = |len: u32| (0..len).collect::<Vec<_>>();
        let hashes = |namespace, len| prefix_hashes(&NamespaceId(namespace), &text(len));
        table.open(1, 1, 0..201).unwrap();
        table.close(1);
        // It shares two of seven blocks.
        table.open(2, 1, 0..65).unwrap();
        table.open(3, 2, 0..129).unwrap();
        table.park(3);
        table.open(4, 3, 0..30).unwrap();
        let report = table.sessions.kv_report();
        assert_eq!(report.capacity_tokens, 10_016);
        assert_eq!(report.running_tokens, 3 * 32);
        assert_eq!(report.kept_tokens, 9 * 32);
        let mut held = vec![hashes(1, 200)[2], hashes(1, 64)[0], hashes(2, 128)[1]];
        held.sort_unstable();
        assert_eq!(report.held, Some(held));
        assert_eq!(table.sessions.kv_tokens().0, 12 * 32);
    }
}
