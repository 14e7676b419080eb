//! Which loads run or have just ended, by the last block of each.

use std::collections::HashMap;
use std::time::{Duration, Instant};

use super::chain::BlockKey;

/// The next act of a session that lacks blocks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Verdict {
    /// It starts a load and waits for it.
    Start,
    /// It waits for a load that runs.
    Wait,
    /// The load has ended or took too long. The session reads the rest of its text.
    GoOn,
    /// Too many loads run.
    Refused,
}

#[derive(Clone, Copy, Debug)]
struct Load {
    started: Instant,
    has_ended: bool,
}

/// The loads of the last moments.
#[derive(Debug)]
pub(super) struct LoadTable {
    loads: HashMap<BlockKey, Load>,
    loads_max: usize,
}

impl LoadTable {
    pub(super) fn new(loads_max: usize) -> Self {
        LoadTable {
            loads: HashMap::new(),
            loads_max,
        }
    }

    /// Decides for a session whose last missing block is `last`, which waits for at most `wait`. A load that found
    /// nothing is remembered for as long.
    pub(super) fn ask(&mut self, last: BlockKey, now: Instant, wait: Duration) -> Verdict {
        let age = |load: &Load| now.saturating_duration_since(load.started);
        if let Some(load) = self.loads.get(&last) {
            let is_late = age(load) >= wait;
            if !is_late && !load.has_ended {
                return Verdict::Wait;
            }
            // A load that is late may still end, so it is not begun again soon.
            if age(load) < 2 * wait {
                return Verdict::GoOn;
            }
        }
        self.loads.retain(|_, load| age(load) < 2 * wait);
        if self.loads.len() >= self.loads_max {
            return Verdict::Refused;
        }
        let load = Load {
            started: now,
            has_ended: false,
        };
        self.loads.insert(last, load);
        Verdict::Start
    }

    /// Notes the end of a load.
    pub(super) fn end(&mut self, last: BlockKey) {
        if let Some(load) = self.loads.get_mut(&last) {
            load.has_ended = true;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_session_waits_for_a_load_until_it_ends_or_is_late() {
        let mut table = LoadTable::new(2);
        let (start, wait) = (Instant::now(), Duration::from_millis(100));
        let ask = |table: &mut LoadTable, key, ms| {
            table.ask(BlockKey(key), start + Duration::from_millis(ms), wait)
        };
        assert_eq!(ask(&mut table, 1, 0), Verdict::Start);
        assert_eq!(ask(&mut table, 1, 99), Verdict::Wait);
        assert_eq!(ask(&mut table, 1, 100), Verdict::GoOn);
        assert_eq!(ask(&mut table, 2, 100), Verdict::Start);
        assert_eq!(ask(&mut table, 3, 110), Verdict::Refused);
        table.end(BlockKey(2));
        assert_eq!(ask(&mut table, 2, 120), Verdict::GoOn);
        // The first has been forgotten by now, so there is room, and it may be tried again.
        assert_eq!(ask(&mut table, 1, 200), Verdict::Start);
        assert_eq!(ask(&mut table, 2, 300), Verdict::Start);
    }
}
