//! The weights of a model, as far as this gateway knows: their version, and how often it saw them change.

use std::sync::atomic::{AtomicU64, Ordering};

/// No worker has named a version yet.
const UNKNOWN: u64 = u64::MAX;

/// The weights of a model, as far as answers and orders tell.
#[derive(Debug)]
pub struct KnownWeights {
    version: AtomicU64,
    changes: AtomicU64,
}

impl Default for KnownWeights {
    fn default() -> Self {
        KnownWeights {
            version: AtomicU64::new(UNKNOWN),
            changes: AtomicU64::new(0),
        }
    }
}

impl KnownWeights {
    /// The newest version that a worker has named, or that of the last order; 0 before there was any.
    pub fn version(&self) -> u64 {
        match self.version.load(Ordering::Relaxed) {
            UNKNOWN => 0,
            version => version,
        }
    }

    /// How often the weights have changed so far. The samples between two changes are those of one epoch.
    pub fn changes(&self) -> u64 {
        self.changes.load(Ordering::Relaxed)
    }

    /// Notes the version of an answer. An older one, of a worker that lags behind, changes nothing. The first one is
    /// no change, since the gateway may have been started in the midst of an epoch.
    pub fn seen(&self, version: u64) {
        let note = |known| (known == UNKNOWN || known < version).then_some(version);
        // Every step comes here, so the usual case is only a read.
        let noted = self
            .version
            .fetch_update(Ordering::Relaxed, Ordering::Relaxed, note);
        if noted.is_ok_and(|known| known != UNKNOWN) {
            self.changes.fetch_add(1, Ordering::Relaxed);
        }
    }

    /// Notes the version that a worker has after an order. It may be an older one, if a trainer goes back.
    pub fn replaced(&self, version: u64) {
        if self.version.swap(version, Ordering::Relaxed) != version {
            self.changes.fetch_add(1, Ordering::Relaxed);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn newer_answers_and_all_orders_are_changes_and_the_first_answer_is_none() {
        let weights = KnownWeights::default();
        assert_eq!((weights.version(), weights.changes()), (0, 0));
        let mut changes = Vec::new();
        for version in [7, 7, 8, 7, 8] {
            weights.seen(version);
            changes.push(weights.changes());
        }
        assert_eq!(changes, [0, 0, 1, 1, 1]);
        // Each of two workers tells that it has carried out an order.
        for version in [9, 9] {
            weights.replaced(version);
        }
        assert_eq!((weights.version(), weights.changes()), (9, 2));
        weights.seen(9);
        weights.replaced(3);
        weights.seen(3);
        assert_eq!((weights.version(), weights.changes()), (3, 3));
    }
}
