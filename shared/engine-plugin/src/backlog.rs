//! Tokens that wait for another thread, and their limit.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use prometheus::IntGauge;

/// A number of waiting tokens with a limit. Clones count the same tokens, and the gauge shows their number.
#[derive(Clone)]
pub(crate) struct Backlog {
    tokens: Arc<AtomicUsize>,
    tokens_max: usize,
    shown: IntGauge,
}

impl Backlog {
    pub(crate) fn new(tokens_max: usize, shown: IntGauge) -> Self {
        Backlog {
            tokens: Arc::default(),
            tokens_max,
            shown,
        }
    }

    /// Whether this many more tokens may wait.
    pub(crate) fn has_room(&self, tokens: usize) -> bool {
        let waiting = self.tokens.load(Ordering::Relaxed);
        waiting.saturating_add(tokens) <= self.tokens_max
    }

    /// Counts tokens that wait from now on, whether there is room for them or not.
    pub(crate) fn add(&self, tokens: usize) {
        self.tokens.fetch_add(tokens, Ordering::Relaxed);
        self.shown.add(tokens as i64);
    }

    /// Takes tokens off that were added before.
    pub(crate) fn take_off(&self, tokens: usize) {
        self.tokens.fetch_sub(tokens, Ordering::Relaxed);
        self.shown.sub(tokens as i64);
    }

    /// As [`add`](Self::add), until the result is dropped.
    pub(crate) fn hold(&self, tokens: usize) -> HeldTokens {
        self.add(tokens);
        HeldTokens(self.clone(), tokens)
    }
}

/// Tokens that wait until this is dropped.
pub(crate) struct HeldTokens(Backlog, usize);

impl Drop for HeldTokens {
    fn drop(&mut self) {
        self.0.take_off(self.1);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_limit_holds_whatever_the_gauge_shows() {
        let gauge = IntGauge::new("tokens", "tokens").unwrap();
        let backlog = Backlog::new(10, gauge.clone());
        backlog.add(6);
        assert_eq!(gauge.get(), 6);
        gauge.set(0);
        assert!(backlog.has_room(4) && !backlog.has_room(5));
        let other_thread = backlog.clone();
        other_thread.take_off(6);
        assert!(backlog.has_room(10) && !backlog.has_room(11));
        assert!(!backlog.has_room(usize::MAX));
    }
}
