//! Interrupted requests that are remembered, in case the engine only made room and resumes them.

use std::num::NonZeroUsize;

use lru::LruCache;

use crate::request_state::RequestState;

/// A limited number of requests, with a limited number of tokens. The one interrupted first is forgotten first.
pub(crate) struct PausedRequests {
    by_id: LruCache<String, RequestState>,
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

    /// Remembers a request. Returns how many were forgotten for it; one that is too long by itself is among them.
    pub(crate) fn put(&mut self, id: String, paused: RequestState) -> u64 {
        self.take(&id);
        self.tokens += paused.tokens();
        // Its own id is not there, so a request that is pushed out is another one.
        let pushed_out = self.by_id.push(id, paused);
        let mut forgotten = u64::from(pushed_out.is_some());
        self.tokens -= pushed_out.map_or(0, |(_, paused)| paused.tokens());
        while self.tokens > self.tokens_max
            && let Some((_, paused)) = self.by_id.pop_lru()
        {
            self.tokens -= paused.tokens();
            forgotten += 1;
        }
        forgotten
    }

    /// Removes and returns a request.
    pub(crate) fn take(&mut self, id: &str) -> Option<RequestState> {
        let paused = self.by_id.pop(id)?;
        self.tokens -= paused.tokens();
        Some(paused)
    }
}
