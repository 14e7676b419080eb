//! Finished sessions whose KV is kept, so that later sessions with the same prefix can reuse it.

use super::session::Session;

/// The kept sessions, in order of last use.
#[derive(Debug, Default)]
pub(super) struct PrefixCache {
    /// Least recently used first. The KV of each holds exactly the tokens of its text.
    kept: Vec<Session>,
}

impl PrefixCache {
    pub(super) fn len(&self) -> usize {
        self.kept.len()
    }

    /// Returns the sessions in order of last use.
    pub(super) fn iter(&self) -> impl Iterator<Item = &Session> {
        self.kept.iter()
    }

    /// Returns the sessions for modification, in order of last use.
    pub(super) fn iter_mut(&mut self) -> impl Iterator<Item = &mut Session> {
        self.kept.iter_mut()
    }

    /// Makes the session at `place` the most recently used one.
    pub(super) fn touch(&mut self, place: usize) {
        self.kept[place..].rotate_left(1);
    }

    /// Evicts up to `count` sessions, least recently used first, and returns them.
    pub(super) fn evict(&mut self, count: usize) -> Vec<Session> {
        let count = count.min(self.kept.len());
        self.kept.drain(..count).collect()
    }

    /// Keeps only the sessions for which `is_wanted` is true.
    pub(super) fn retain(&mut self, is_wanted: impl FnMut(&Session) -> bool) {
        self.kept.retain(is_wanted);
    }

    /// Adds a session. If a kept session begins with its text, that one is marked as used instead.
    pub(super) fn insert(&mut self, mut session: Session) {
        let begins_with_it = |kept: &Session| {
            kept.namespace == session.namespace && kept.text.starts_with(&session.text)
        };
        if let Some(place) = self.kept.iter().position(begins_with_it) {
            let kept = &mut self.kept[place];
            kept.drafter_state = kept.drafter_state.take().or(session.drafter_state);
            return self.touch(place);
        }
        // A session whose text is a prefix of this one is never the better match. Only its drafter state can be of
        // use.
        self.kept.retain_mut(|kept| {
            let is_prefix =
                kept.namespace == session.namespace && session.text.starts_with(&kept.text);
            if is_prefix && session.drafter_state.is_none() {
                session.drafter_state = kept.drafter_state.take();
            }
            !is_prefix
        });
        self.kept.push(session);
    }
}
