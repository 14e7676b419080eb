//! The gate that a trainer's orders close: which requests go on, which are held, and which end.
//!
//! It is a plain value without a clock. Time that requests cannot use because the gate is shut does not count for
//! them: see [`Gate::working_time`].

use std::time::{Duration, Instant};

use refrain_protocol::engine_order::PauseMode;

/// The fate of a request at the gate.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Fate {
    /// It is decoded.
    Runs,
    /// It waits.
    Held,
    /// It ends with what it has.
    Aborted,
}

/// A pause.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Pause {
    /// Its number, from 1 on.
    pub(crate) number: u64,
    pub(crate) mode: PauseMode,
    /// The requests that it waited for have ended. Only [`PauseMode::Wait`] begins without it.
    is_settled: bool,
}

impl Pause {
    /// Whether the requests have ended that it waits for, if it waits for any.
    pub(crate) fn is_settled(&self) -> bool {
        self.is_settled
    }

    /// Whether it is the same one, whether or not it is settled.
    pub(crate) fn is_same(&self, other: &Pause) -> bool {
        (self.number, self.mode) == (other.number, other.mode)
    }
}

/// The state of the gate.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Gate {
    pause: Option<Pause>,
    /// Number of pauses so far.
    pauses: u64,
    /// The engine replaces its weights, and generates nothing meanwhile.
    is_loading: bool,
    /// Number of orders that the engine is carrying out.
    calls: u32,
    /// Number of changes so far.
    changes: u64,
    /// How long the gate was shut, and since when it is.
    shut_for: Duration,
    shut_since: Option<Instant>,
}

impl Gate {
    /// The pause, if there is one.
    pub(crate) fn pause(&self) -> Option<Pause> {
        self.pause
    }

    /// Number of changes so far.
    pub(crate) fn changes(&self) -> u64 {
        self.changes
    }

    /// The number of the pause in which a request begins now; 0 for one that ran before, or that no pause holds.
    pub(super) fn begins_in(&self, has_output: bool) -> u64 {
        let pause = self.pause.filter(|_| !has_output);
        pause.map_or(0, |pause| pause.number)
    }

    /// Whether a request began in the present pause.
    pub(super) fn is_new(&self, begun_in: u64) -> bool {
        self.pause.is_some_and(|pause| pause.number == begun_in)
    }

    /// The fate of a request that began in the pause of this number.
    pub(crate) fn fate(&self, begun_in: u64) -> Fate {
        match self.pause {
            Some(_) if self.is_new(begun_in) => Fate::Held,
            Some(pause) if pause.mode == PauseMode::Abort => Fate::Aborted,
            _ if self.is_shut() => Fate::Held,
            _ => Fate::Runs,
        }
    }

    /// Whether nothing is decoded at all.
    pub(crate) fn is_shut(&self) -> bool {
        self.is_loading || self.pause.is_some_and(|pause| pause.is_settled)
    }

    /// Whether the engine's silence, and the end of its streams, may be by order.
    pub(crate) fn is_ordered(&self) -> bool {
        self.calls > 0 || self.is_loading || self.pause.is_some()
    }

    /// An instant on a clock that stands still while the gate is shut.
    pub(crate) fn working_time(&self, now: Instant) -> Instant {
        let open_since = self
            .shut_since
            .map_or(Duration::ZERO, |since| now.saturating_duration_since(since));
        let shut_for = self.shut_for + open_since;
        now.checked_sub(shut_for).unwrap_or(now)
    }

    /// Begins a pause, or gives the present one another mode. A repeat changes nothing.
    pub(crate) fn begin_pause(&mut self, mode: PauseMode, now: Instant) -> Pause {
        if let Some(pause) = self.pause.filter(|pause| pause.mode == mode) {
            return pause;
        }
        if self.pause.is_none() {
            self.pauses += 1;
        }
        let pause = Pause {
            number: self.pauses,
            mode,
            is_settled: mode != PauseMode::Wait,
        };
        self.change(now, |gate| gate.pause = Some(pause));
        pause
    }

    /// Notes that the requests have ended that a pause waited for.
    pub(super) fn settle(&mut self, pause: Pause, now: Instant) {
        let waiting = self.pause.filter(|present| !present.is_settled);
        if waiting.is_some_and(|present| present.is_same(&pause)) {
            self.change(now, |gate| {
                gate.pause = Some(Pause {
                    is_settled: true,
                    ..pause
                });
            });
        }
    }

    /// Ends the pause.
    pub(super) fn end_pause(&mut self, now: Instant) {
        if self.pause.is_some() {
            self.change(now, |gate| gate.pause = None);
        }
    }

    /// Notes that the engine begins or ends an order, and whether it generates nothing meanwhile.
    pub(super) fn set_call(&mut self, begins: bool, is_loading: bool, now: Instant) {
        self.change(now, |gate| {
            gate.calls = match begins {
                true => gate.calls + 1,
                false => gate.calls.saturating_sub(1),
            };
            gate.is_loading = is_loading && begins;
        });
    }

    fn change(&mut self, now: Instant, change: impl FnOnce(&mut Gate)) {
        change(self);
        self.changes += 1;
        match (self.shut_since, self.is_shut()) {
            (None, true) => self.shut_since = Some(now),
            (Some(since), false) => {
                self.shut_for += now.saturating_duration_since(since);
                self.shut_since = None;
            }
            _ => {}
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn after(seconds: u64) -> Instant {
        static START: std::sync::OnceLock<Instant> = std::sync::OnceLock::new();
        *START.get_or_init(|| Instant::now() + Duration::from_secs(1_000))
            + Duration::from_secs(seconds)
    }

    #[test]
    fn each_mode_has_a_fate_for_requests_that_run_and_for_new_ones() {
        let mut gate = Gate::default();
        assert_eq!(gate.begins_in(false), 0);
        assert_eq!(gate.fate(0), Fate::Runs);
        for (mode, running) in [
            (PauseMode::Keep, Fate::Held),
            (PauseMode::Abort, Fate::Aborted),
            (PauseMode::Wait, Fate::Runs),
        ] {
            let pause = gate.begin_pause(mode, after(0));
            // A request with output ran before, wherever it did.
            assert_eq!((gate.begins_in(false), gate.begins_in(true)), (1, 0));
            assert_eq!((gate.fate(0), gate.fate(1)), (running, Fate::Held));
            assert_eq!(gate.begin_pause(mode, after(0)), pause);
        }
        let pause = gate.pause().unwrap();
        assert!(!gate.is_shut());
        gate.settle(pause, after(1));
        assert!(gate.is_shut());
        assert_eq!(gate.fate(0), Fate::Held);
        // A repeat does not let anything run again.
        gate.begin_pause(PauseMode::Wait, after(1));
        assert_eq!(gate.fate(0), Fate::Held);
        gate.end_pause(after(2));
        assert_eq!((gate.fate(0), gate.fate(1)), (Fate::Runs, Fate::Runs));
        // A request that was new in an earlier pause runs in the next one.
        gate.begin_pause(PauseMode::Abort, after(3));
        assert_eq!((gate.fate(1), gate.fate(2)), (Fate::Aborted, Fate::Held));
    }

    #[test]
    fn a_pause_that_ended_is_not_settled() {
        let mut gate = Gate::default();
        let pause = gate.begin_pause(PauseMode::Wait, after(0));
        gate.end_pause(after(1));
        gate.begin_pause(PauseMode::Wait, after(2));
        gate.settle(pause, after(3));
        assert!(!gate.is_shut());
    }

    #[test]
    fn the_clock_stands_still_while_the_gate_is_shut() {
        let mut gate = Gate::default();
        gate.begin_pause(PauseMode::Keep, after(10));
        assert_eq!(gate.working_time(after(10)), after(10));
        assert_eq!(gate.working_time(after(15)), after(10));
        gate.begin_pause(PauseMode::Wait, after(20));
        assert_eq!(gate.working_time(after(25)), after(15));
        gate.end_pause(after(30));
        assert_eq!(gate.working_time(after(30)), after(20));
        gate.set_call(true, true, after(40));
        assert!(gate.is_ordered() && gate.is_shut());
        assert_eq!(gate.working_time(after(50)), after(30));
        gate.set_call(false, true, after(50));
        assert!(!gate.is_ordered());
        assert_eq!(gate.working_time(after(60)), after(40));
    }
}
