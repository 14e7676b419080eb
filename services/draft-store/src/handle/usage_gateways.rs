//! The gateways that send usage, and the erasures that each has carried out.

use std::collections::HashMap;
use std::time::{Duration, Instant};

use parking_lot::Mutex;

/// A gateway that was silent for so long is not waited for. They call about every second.
const SILENT_AFTER: Duration = Duration::from_secs(10);

/// Most gateways that are remembered. Erasures do not wait for further ones.
const GATEWAYS_MAX: usize = 4_096;

/// The gateways that have called lately.
#[derive(Default)]
pub(crate) struct UsageGateways {
    gateways: Mutex<HashMap<u128, Gateway>>,
}

struct Gateway {
    /// It has carried out all erasures up to this time, in Unix milliseconds.
    erasures_done_ms: u64,
    called: Instant,
}

/// How far the gateways are with an erasure.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct ErasedGateways {
    pub(crate) done: u64,
    pub(crate) pending: u64,
}

impl UsageGateways {
    /// Notes a call of a gateway.
    pub(crate) fn called(&self, gateway: u128, erasures_done_ms: u64, now: Instant) {
        let mut gateways = self.gateways.lock();
        if gateways.len() >= GATEWAYS_MAX && !gateways.contains_key(&gateway) {
            gateways.retain(|_, of| now.saturating_duration_since(of.called) < SILENT_AFTER);
            if gateways.len() >= GATEWAYS_MAX {
                return;
            }
        }
        let called = Gateway {
            erasures_done_ms,
            called: now,
        };
        gateways.insert(gateway, called);
    }

    /// How far the gateways that are heard of are with an erasure of this time.
    pub(crate) fn erased(&self, at_ms: u64, now: Instant) -> ErasedGateways {
        let gateways = self.gateways.lock();
        let heard = gateways
            .values()
            .filter(|of| now.saturating_duration_since(of.called) < SILENT_AFTER);
        let (done, pending): (Vec<&Gateway>, Vec<&Gateway>) =
            heard.partition(|of| of.erasures_done_ms >= at_ms);
        ErasedGateways {
            done: done.len() as u64,
            pending: pending.len() as u64,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn gateways_count_as_done_once_they_say_so_and_silent_ones_do_not_count() {
        let gateways = UsageGateways::default();
        let start = Instant::now();
        gateways.called(1, 5, start);
        gateways.called(2, 0, start);
        let erased = |at_ms, now| {
            let ErasedGateways { done, pending } = gateways.erased(at_ms, now);
            (done, pending)
        };
        assert_eq!(erased(5, start), (1, 1));
        assert_eq!(erased(6, start), (0, 2));
        gateways.called(2, 6, start + SILENT_AFTER / 2);
        assert_eq!(erased(6, start + SILENT_AFTER / 2), (1, 1));
        assert_eq!(erased(6, start + SILENT_AFTER), (1, 0));
        assert_eq!(erased(6, start + 2 * SILENT_AFTER), (0, 0));
    }

    #[test]
    fn at_most_so_many_gateways_are_remembered_and_silent_ones_make_room() {
        let gateways = UsageGateways::default();
        let start = Instant::now();
        let most = GATEWAYS_MAX as u128;
        for gateway in 0..=most {
            gateways.called(gateway, 1, start);
        }
        assert_eq!(gateways.erased(1, start).done, GATEWAYS_MAX as u64);
        let later = start + SILENT_AFTER;
        gateways.called(most, 1, later);
        assert_eq!(gateways.erased(1, later).done, 1);
    }
}
