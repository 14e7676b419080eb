//! Windows of arrival: the bound on overtaking.
//!
//! The longest first lets short ones starve while longer ones keep coming. Ageing by waiting time was rejected: all
//! requests of a large rollout arrive at once and wait for long, so all of them would age and the order would be
//! lost. Here a window opens with a request that arrives outside all others, and takes all that arrive within its
//! length. The order of lengths holds within a window, and an earlier window goes before a later one.

use std::collections::BTreeSet;

/// Windows that are remembered. A request of a forgotten one opens a window of its own.
const WINDOWS_MAX: usize = 1_024;

/// The starts of the windows.
#[derive(Debug)]
pub(crate) struct Windows {
    length_ms: u64,
    starts_ms: BTreeSet<u64>,
}

impl Windows {
    pub(crate) fn new(length_ms: u64) -> Self {
        Windows {
            length_ms,
            starts_ms: BTreeSet::new(),
        }
    }

    /// The start of the window of a request that arrived at `arrived_ms`.
    pub(crate) fn of(&mut self, arrived_ms: u64) -> u64 {
        let before = self.starts_ms.range(..=arrived_ms).next_back();
        if let Some(start_ms) = before.copied()
            && arrived_ms - start_ms < self.length_ms
        {
            return start_ms;
        }
        self.starts_ms.insert(arrived_ms);
        while self.starts_ms.len() > WINDOWS_MAX {
            self.starts_ms.pop_first();
        }
        arrived_ms
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_window_opens_with_the_first_request_outside_all_others() {
        let mut windows = Windows::new(100);
        let starts = [50, 149, 150, 149, 40, 1_000].map(|arrived_ms| windows.of(arrived_ms));
        assert_eq!(starts, [50, 50, 150, 50, 40, 1_000]);
        let mut windows = Windows::new(1);
        for arrived_ms in 0..5_000 {
            windows.of(arrived_ms);
        }
        assert_eq!(windows.starts_ms.len(), WINDOWS_MAX);
    }
}
