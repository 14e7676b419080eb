//! The homes of sessions: the workers that ran their last turns. Workers are named by their places in the worker
//! table.

use std::collections::HashMap;

use lru::LruCache;
use refrain_protocol::LeaseId;
use refrain_protocol::scheduling::SessionHash;

/// Time without a turn after which a session is taken to be over, milliseconds.
const IDLE_MS_MAX: u64 = 15 * 60 * 1_000;

/// Where the last turn of a session ran.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Home {
    pub(crate) worker: usize,
    /// The lease of the turn.
    pub(crate) lease: LeaseId,
    at_ms: u64,
}

/// The home of each session, within a limit.
#[derive(Debug)]
pub(crate) struct SessionHomes {
    homes: LruCache<SessionHash, Home>,
    /// Sessions of each worker.
    counts: HashMap<usize, u32>,
    sessions_max: usize,
}

impl SessionHomes {
    pub(crate) fn new(sessions_max: usize) -> Self {
        SessionHomes {
            homes: LruCache::unbounded(),
            counts: HashMap::new(),
            sessions_max,
        }
    }

    pub(crate) fn len(&self) -> usize {
        self.homes.len()
    }

    /// The home of a session; `None` if it is new.
    pub(crate) fn home(&self, session: SessionHash) -> Option<Home> {
        self.homes.peek(&session).copied()
    }

    /// Sessions of a worker.
    pub(crate) fn count(&self, worker: usize) -> u32 {
        self.counts.get(&worker).copied().unwrap_or(0)
    }

    /// A worker gets the next turn of a session.
    pub(crate) fn moves(
        &mut self,
        session: SessionHash,
        worker: usize,
        lease: LeaseId,
        at_ms: u64,
    ) {
        let home = Home {
            worker,
            lease,
            at_ms,
        };
        *self.counts.entry(worker).or_default() += 1;
        if let Some(before) = self.homes.put(session, home) {
            self.leave(before.worker);
        }
        while let Some((_, oldest)) = self.homes.peek_lru()
            && (self.homes.len() > self.sessions_max || oldest.at_ms + IDLE_MS_MAX < at_ms)
        {
            let worker = oldest.worker;
            self.homes.pop_lru();
            self.leave(worker);
        }
    }

    /// Forgets a worker, because it is gone or another process. Its sessions are new again.
    pub(crate) fn forget(&mut self, worker: usize) {
        if self.counts.remove(&worker).is_some() {
            let of_worker = self.homes.iter().filter(|(_, home)| home.worker == worker);
            let sessions: Vec<SessionHash> = of_worker.map(|(session, _)| *session).collect();
            for session in sessions {
                self.homes.pop(&session);
            }
        }
    }

    fn leave(&mut self, worker: usize) {
        if let Some(count) = self.counts.get_mut(&worker) {
            *count = count.saturating_sub(1);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_session_lives_where_its_last_turn_ran() {
        let mut homes = SessionHomes::new(2);
        let (a, b, c) = (SessionHash(1), SessionHash(2), SessionHash(3));
        let lease = LeaseId(1);
        let lives = |homes: &SessionHomes, session| homes.home(session).map(|home| home.worker);
        homes.moves(a, 0, lease, 0);
        homes.moves(b, 0, lease, 1);
        assert_eq!((lives(&homes, a), homes.count(0)), (Some(0), 2));
        assert_eq!(homes.len(), 2);
        homes.moves(a, 1, LeaseId(2), 2);
        assert_eq!(
            (lives(&homes, a), homes.count(0), homes.count(1)),
            (Some(1), 1, 1)
        );
        assert_eq!(homes.home(a).unwrap().lease, LeaseId(2));
        // There is room for two.
        homes.moves(c, 1, lease, 3);
        assert_eq!(
            (lives(&homes, b), homes.count(0), homes.count(1)),
            (None, 0, 2)
        );
        homes.moves(b, 0, lease, IDLE_MS_MAX + 4);
        assert_eq!(
            (homes.home(a), homes.home(c), homes.count(1)),
            (None, None, 0)
        );
        homes.forget(0);
        assert_eq!((homes.home(b), homes.count(0)), (None, 0));
    }
}
