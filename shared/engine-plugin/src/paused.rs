//! Requests that were interrupted and are remembered, in case the engine only made room.

use std::num::NonZeroUsize;

use lru::LruCache;

use crate::request::Paused;

/// At most so many requests, and so many tokens of their texts; the one that was interrupted first goes first.
pub(crate) struct PausedRequests {
    by_id: LruCache<String, Paused>,
    tokens: usize,
    tokens_max: usize,
}

impl PausedRequests {
    pub(crate) fn new(requests_max: NonZeroUsize, tokens_max: usize) -> Self {
        PausedRequests {
            by_id: LruCache::new(requests_max),
            tokens: 0,
            tokens_max,
        }
    }

    /// Tokens of their texts.
    pub(crate) fn tokens(&self) -> usize {
        self.tokens
    }

    /// Remembers one. Returns how many had to go for it: one that is too long by itself goes too.
    pub(crate) fn put(&mut self, id: String, paused: Paused) -> u64 {
        self.take(&id);
        self.tokens += paused.tokens();
        // Its own id is not there, so what is pushed out is another one.
        let pushed_out = self.by_id.push(id, paused);
        let mut gone = u64::from(pushed_out.is_some());
        self.tokens -= pushed_out.map_or(0, |(_, paused)| paused.tokens());
        while self.tokens > self.tokens_max
            && let Some((_, paused)) = self.by_id.pop_lru()
        {
            self.tokens -= paused.tokens();
            gone += 1;
        }
        gone
    }

    /// Hands one out.
    pub(crate) fn take(&mut self, id: &str) -> Option<Paused> {
        let paused = self.by_id.pop(id)?;
        self.tokens -= paused.tokens();
        Some(paused)
    }
}
