//! The table of sessions: those that are open, and finished ones whose KV is kept for reuse.
//!
//! It keeps two budgets: how many sessions there are, and how many KV blocks. Both give way by dropping kept
//! sessions, least recently used first; only when none is left is a caller refused.

use std::collections::HashMap;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use refrain_protocol::engine::{Sampling, SessionSpec};
use refrain_protocol::{ApiError, EngineSessionId, ErrorKind, NamespaceId, TokenId};

use crate::drafter::{Trail, TrailShape};
use crate::kv::{BLOCK_TOKENS, BlockCount, KvCache, KvShape};

/// When a caller that was refused for room may try again.
const RETRY_AFTER_MS: u64 = 250;

/// An open session.
#[derive(Debug)]
pub(crate) struct Session {
    pub(crate) namespace: NamespaceId,
    pub(crate) sampling: Sampling,
    /// All tokens. Between steps, the last one's forward pass is owed: `kv` is one shorter.
    pub(crate) text: Vec<TokenId>,
    pub(crate) kv: KvCache,
    /// What the drafter needs, in sessions that were opened for its drafts.
    pub(crate) trail: Option<Trail>,
    used: Instant,
}

/// A finished session: `kv` holds exactly `text`.
#[derive(Debug)]
struct Kept {
    namespace: NamespaceId,
    text: Vec<TokenId>,
    kv: KvCache,
    trail: Option<Trail>,
}

/// All sessions of an engine.
#[derive(Debug)]
pub(crate) struct Sessions {
    shape: KvShape,
    /// Without it, sessions have no trails.
    trails: Option<TrailShape>,
    sessions_max: usize,
    blocks_max: u64,
    idle: Duration,
    blocks: BlockCount,
    open: HashMap<EngineSessionId, Session>,
    /// Least recently used first.
    kept: Vec<Kept>,
}

impl Sessions {
    pub(crate) fn new(
        shape: KvShape,
        trails: Option<TrailShape>,
        sessions_max: usize,
        kv_tokens_max: u64,
        idle: Duration,
    ) -> Self {
        Sessions {
            shape,
            trails,
            sessions_max,
            blocks_max: kv_tokens_max.div_ceil(BLOCK_TOKENS as u64),
            idle,
            blocks: BlockCount::default(),
            open: HashMap::new(),
            kept: Vec::new(),
        }
    }

    /// Makes a session without text. [`Sessions::reuse`] is to follow: it makes room in the table, but not
    /// before it has looked for what the new session can use.
    ///
    /// # Errors
    /// `Conflict` if it is open already, `Overloaded` if all are in use.
    pub(crate) fn open(
        &mut self,
        id: EngineSessionId,
        spec: SessionSpec,
        now: Instant,
    ) -> Result<(), ApiError> {
        if self.open.contains_key(&id) {
            return Err(ApiError::new(
                ErrorKind::Conflict,
                format!("session {id} is open already"),
            )
            .with_code("session_open"));
        }
        if self.open.len() >= self.sessions_max {
            return Err(overloaded(
                "sessions",
                format!("all {} sessions are in use", self.sessions_max),
            ));
        }
        let session = Session {
            namespace: spec.namespace,
            sampling: spec.sampling,
            text: Vec::new(),
            kv: KvCache::new(self.shape, self.blocks.clone()),
            trail: self
                .trails
                .as_ref()
                .filter(|_| spec.self_drafts)
                .map(Trail::new),
            used: now,
        };
        self.open.insert(id, session);
        Ok(())
    }

    /// An open session.
    pub(crate) fn get(&self, id: EngineSessionId) -> Option<&Session> {
        self.open.get(&id)
    }

    /// An open session, to change.
    pub(crate) fn get_mut(&mut self, id: EngineSessionId) -> Option<&mut Session> {
        self.open.get_mut(&id)
    }

    /// Takes a session out for the length of a step. If the step panics, it is gone with all its state.
    pub(crate) fn take(&mut self, id: EngineSessionId) -> Option<Session> {
        self.open.remove(&id)
    }

    /// Puts it back.
    pub(crate) fn put(&mut self, id: EngineSessionId, mut session: Session, now: Instant) {
        session.used = now;
        self.open.insert(id, session);
    }

    /// Gives session `id` the KV of the longest beginning of its text, all but the last token, that any other
    /// session of its namespace holds, if that is more than it has. Returns how many tokens it gained.
    pub(crate) fn reuse(&mut self, id: EngineSessionId) -> usize {
        let gained = self.take_prefix(id);
        let over = (self.open.len() + self.kept.len()).saturating_sub(self.sessions_max);
        self.kept.drain(..over.min(self.kept.len()));
        gained
    }

    fn take_prefix(&mut self, id: EngineSessionId) -> usize {
        let Some(session) = self.open.get(&id) else {
            return 0;
        };
        let wanted = &session.text[..session.text.len().saturating_sub(1)];
        let have = session.kv.len();
        let trailing = |trail: &Option<Trail>| trail.as_ref().map_or(0, Trail::end);
        // Among equals the one whose drafter has come further, if that is of use here.
        let useful = |trail, len: usize| match session.trail {
            Some(_) => trailing(trail).min(len),
            None => 0,
        };
        let shared = |namespace: NamespaceId, text: &[TokenId], kv: &KvCache| {
            if namespace != session.namespace {
                return 0;
            }
            let same = text
                .iter()
                .zip(wanted)
                .take_while(|(left, right)| left == right)
                .count();
            same.min(kv.len())
        };
        let kept = self.kept.iter().enumerate().map(|(at, kept)| {
            let len = shared(kept.namespace, &kept.text, &kept.kv);
            (len, Some(at), &kept.kv, &kept.trail)
        });
        let open = self
            .open
            .iter()
            .filter(|(other, _)| **other != id)
            .map(|(_, other)| {
                let len = shared(other.namespace, &other.text, &other.kv);
                (len, None, &other.kv, &other.trail)
            });
        let Some((len, at, kv, trail)) = kept
            .chain(open)
            .max_by_key(|(len, _, _, trail)| (*len, useful(trail, *len)))
        else {
            return 0;
        };
        if len <= have {
            return 0;
        }
        let prefix = kv.prefix(len);
        let trail = trail
            .as_ref()
            .filter(|_| useful(trail, len) > trailing(&session.trail))
            .map(|trail| trail.prefix(len));
        if let Some(at) = at {
            // Used now, so last to go.
            self.kept[at..].rotate_left(1);
        }
        if let Some(session) = self.open.get_mut(&id) {
            session.kv = prefix;
            session.trail = trail.or(session.trail.take());
        }
        len - have
    }

    /// Makes sure that `blocks` more can be allocated, and for drafters `draft_blocks` more. Drafters give way to
    /// targets: what open sessions' drafters hold is dropped before a target is refused.
    ///
    /// # Errors
    /// `Overloaded` if open sessions alone leave too little room.
    pub(crate) fn reserve(&mut self, blocks: u64, draft_blocks: u64) -> Result<(), ApiError> {
        while self.used_blocks(draft_blocks) + blocks > self.blocks_max {
            if !self.kept.is_empty() {
                self.kept.remove(0);
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
            for trail in self
                .open
                .values_mut()
                .filter_map(|open| open.trail.as_mut())
            {
                trail.forget_rows();
            }
        }
        Ok(())
    }

    /// Blocks in use, with those of drafters and `draft_blocks` more of them as the share of a block that each is.
    fn used_blocks(&self, draft_blocks: u64) -> u64 {
        let drafters = self.trails.as_ref().map_or(0, |trails| {
            let numbers = trails.kv_numbers(draft_blocks);
            numbers.div_ceil(self.shape.block_len() as u64)
        });
        self.blocks.load(Ordering::Relaxed) + drafters
    }

    /// Ends a session; with `keep` its KV stays while there is room.
    pub(crate) fn close(&mut self, id: EngineSessionId, keep: bool) {
        let Some(mut session) = self.open.remove(&id) else {
            return;
        };
        session.text.truncate(session.kv.len());
        if !keep || session.text.is_empty() {
            return;
        }
        if let Some(trail) = &mut session.trail {
            trail.truncate(session.text.len(), session.text.len());
        }
        let longer = |kept: &Kept| {
            kept.namespace == session.namespace && kept.text.starts_with(&session.text)
        };
        if let Some(at) = self.kept.iter().position(longer) {
            let kept = &mut self.kept[at];
            kept.trail = kept.trail.take().or(session.trail);
            return self.kept[at..].rotate_left(1);
        }
        // What is a beginning of this one can never be the better match, apart from what its drafter has read.
        self.kept.retain_mut(|kept| {
            let beginning =
                kept.namespace == session.namespace && session.text.starts_with(&kept.text);
            if beginning && session.trail.is_none() {
                session.trail = kept.trail.take();
            }
            !beginning
        });
        self.kept.push(Kept {
            namespace: session.namespace,
            text: session.text,
            kv: session.kv,
            trail: session.trail,
        });
    }

    /// Closes sessions that no step has touched for long. Returns how many.
    pub(crate) fn expire(&mut self, now: Instant) -> usize {
        let idle: Vec<EngineSessionId> = self
            .open
            .iter()
            .filter(|(_, session)| now.saturating_duration_since(session.used) >= self.idle)
            .map(|(id, _)| *id)
            .collect();
        for id in &idle {
            self.close(*id, true);
        }
        idle.len()
    }

    /// (open, kept) sessions.
    pub(crate) fn counts(&self) -> (usize, usize) {
        (self.open.len(), self.kept.len())
    }

    /// Tokens whose captured states are held for heads; a shared one counts once.
    pub(crate) fn state_tokens(&self) -> u64 {
        self.trails.as_ref().map_or(0, TrailShape::state_tokens)
    }

    /// (used, most) KV tokens, drafters' included.
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
                Duration::from_millis(100),
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
                self_drafts: false,
                namespace: NamespaceId(namespace),
                sampling: Sampling::default(),
            };
            self.sessions.open(id, spec, self.now)?;
            let len = text.len();
            self.sessions.get_mut(id).unwrap().text = text.collect();
            let gained = self.sessions.reuse(id);
            let blocks = self.sessions.get(id).unwrap().kv.growth_blocks(len - 1);
            self.sessions.reserve(blocks, 0)?;
            self.sessions.get_mut(id).unwrap().kv.grow(len - 1);
            Ok(gained)
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
}
