//! Interrupted requests that are remembered, in case the engine only made room and resumes them.

use std::num::NonZeroUsize;

use lru::LruCache;

use crate::config::PluginConfig;
use crate::metrics::PluginMetrics;
use crate::request_state::RequestState;

/// A limited number of requests, with a limited number of tokens. The one interrupted first is forgotten first.
pub(crate) struct PausedRequests {
    by_id: LruCache<String, RequestState>,
    /// Tokens of their texts.
    tokens: usize,
    tokens_max: usize,
    metrics: PluginMetrics,
}

impl PausedRequests {
    pub(crate) fn new(config: &PluginConfig, metrics: PluginMetrics) -> Self {
        let requests_max = NonZeroUsize::new(config.paused_requests_max);
        PausedRequests {
            by_id: LruCache::new(requests_max.unwrap_or(NonZeroUsize::MIN)),
            tokens: 0,
            tokens_max: config.paused_tokens_max,
            metrics,
        }
    }

    /// Remembers a request. Others may be forgotten for it; one that is too long by itself is forgotten, too.
    pub(crate) fn put(&mut self, id: String, paused: RequestState) {
        self.take(&id);
        self.tokens += paused.tokens();
        // Its own id is not there, so a request that is pushed out is another one.
        if let Some((_, pushed_out)) = self.by_id.push(id, paused) {
            self.forget(&pushed_out);
        }
        while self.tokens > self.tokens_max
            && let Some((_, oldest)) = self.by_id.pop_lru()
        {
            self.forget(&oldest);
        }
        self.metrics.paused_tokens.set(self.tokens as i64);
    }

    fn forget(&mut self, paused: &RequestState) {
        self.tokens -= paused.tokens();
        self.metrics.forgotten.inc();
    }

    /// Removes and returns a request.
    pub(crate) fn take(&mut self, id: &str) -> Option<RequestState> {
        let paused = self.by_id.pop(id)?;
        self.tokens -= paused.tokens();
        self.metrics.paused_tokens.set(self.tokens as i64);
        Some(paused)
    }
}
