//! The decisions of a scheduler that stands for election.

use std::time::{Duration, Instant};

use super::record::Entry;

/// How much longer than a lease a candidate waits, as a share of it. Clocks of two machines may run at slightly
/// different speeds.
const MARGIN: f64 = 0.1;

/// The next thing to do with the record.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Wish {
    Read,
    /// Write the own name, if the record still has this version; `None`: if there is none.
    Write {
        expected: Option<String>,
    },
    Wait,
}

/// A scheduler that stands for election.
pub(super) struct Candidate {
    me: String,
    lease: Duration,
    /// The last content that was read. `None`: nothing yet, or it is known to be out of date.
    seen: Option<Seen>,
    /// Until when it leads.
    until: Option<Instant>,
    /// The record was written in this round, so nothing more is to be done in it.
    is_done: bool,
}

/// A content of the record, and since when it has not changed.
#[derive(Debug)]
struct Seen {
    /// `None`: there is no record.
    entry: Option<Entry>,
    since: Instant,
}

impl Candidate {
    pub(super) fn new(me: String, lease: Duration) -> Self {
        Candidate {
            me,
            lease,
            seen: None,
            until: None,
            is_done: false,
        }
    }

    /// The next thing to do.
    pub(super) fn wish(&self, now: Instant) -> Wish {
        let Some(seen) = &self.seen else {
            return Wish::Read;
        };
        if self.is_done {
            return Wish::Wait;
        }
        let Some(entry) = &seen.entry else {
            return Wish::Write { expected: None };
        };
        let silence_max = self.lease.mul_f64(1.0 + MARGIN);
        let is_free = entry.holder.is_empty() || now.duration_since(seen.since) >= silence_max;
        if entry.holder == self.me || is_free {
            let expected = Some(entry.version.clone());
            return Wish::Write { expected };
        }
        Wish::Read
    }

    /// Learns what the record has.
    pub(super) fn read(&mut self, found: Option<Entry>, now: Instant) {
        if found.as_ref().is_none_or(|found| found.holder != self.me) {
            self.until = None;
        }
        let version = |entry: &Option<Entry>| entry.as_ref().map(|entry| entry.version.clone());
        let unchanged = self.seen.as_ref();
        let unchanged = unchanged.filter(|seen| version(&seen.entry) == version(&found));
        let since = unchanged.map_or(now, |seen| seen.since);
        self.seen = Some(Seen {
            entry: found,
            since,
        });
    }

    /// Learns what became of a write that was sent at `sent`: the new version, or `None` if somebody else was faster.
    pub(super) fn written(&mut self, version: Option<String>, sent: Instant) {
        match version {
            Some(version) => {
                let holder = self.me.clone();
                let entry = Some(Entry { holder, version });
                self.seen = Some(Seen { entry, since: sent });
                // The others wait from when they read this, which is later.
                self.until = Some(sent + self.lease);
                self.is_done = true;
            }
            // It may have been this process, by a write whose answer was lost. So it leads until it has read.
            None => self.seen = None,
        }
    }

    /// Ends a round: in the next one the record is read or written again.
    pub(super) fn end_round(&mut self) {
        self.is_done = false;
    }

    /// Until when it leads.
    pub(super) fn leads_until(&self) -> Option<Instant> {
        self.until
    }

    /// The holder of the record, as far as it is known.
    pub(super) fn leader(&self) -> String {
        let entry = self.seen.as_ref().and_then(|seen| seen.entry.as_ref());
        entry.map(|entry| entry.holder.clone()).unwrap_or_default()
    }

    /// Leads no more. Returns the version of the record to give back, if this process holds it.
    pub(super) fn resign(&mut self) -> Option<String> {
        self.until = None;
        let entry = self.seen.take()?.entry?;
        (entry.holder == self.me).then_some(entry.version)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn entry(holder: &str, version: u32) -> Option<Entry> {
        Some(Entry {
            holder: holder.to_owned(),
            version: version.to_string(),
        })
    }

    fn write(version: u32) -> Wish {
        Wish::Write {
            expected: Some(version.to_string()),
        }
    }

    #[test]
    fn a_record_that_does_not_change_for_longer_than_a_lease_is_free() {
        let (start, lease) = (Instant::now(), Duration::from_millis(1_000));
        let at = |ms: u64| start + Duration::from_millis(ms);
        let mut candidate = Candidate::new("me".into(), lease);
        assert_eq!(candidate.wish(at(0)), Wish::Read);
        for (ms, version) in [(0, 1), (300, 1), (600, 2), (900, 2), (1_600, 2)] {
            candidate.read(entry("other", version), at(ms));
            candidate.end_round();
            assert_eq!(candidate.wish(at(ms)), Wish::Read, "{ms}");
        }
        assert_eq!(candidate.wish(at(1_699)), Wish::Read);
        assert_eq!(candidate.wish(at(1_700)), write(2));
        // Somebody else was faster.
        candidate.written(None, at(1_700));
        assert_eq!(candidate.wish(at(1_700)), Wish::Read);
        candidate.read(entry("third", 3), at(1_701));
        candidate.end_round();
        assert_eq!(candidate.wish(at(1_701)), Wish::Read);
        assert_eq!(candidate.leads_until(), None);
    }

    #[test]
    fn a_leader_leads_for_a_lease_after_it_sent_its_last_renewal() {
        let (start, lease) = (Instant::now(), Duration::from_millis(1_000));
        let at = |ms: u64| start + Duration::from_millis(ms);
        let mut candidate = Candidate::new("me".into(), lease);
        candidate.read(None, at(0));
        assert_eq!(candidate.wish(at(0)), Wish::Write { expected: None });
        candidate.written(Some("1".into()), at(0));
        assert_eq!(candidate.wish(at(1)), Wish::Wait);
        candidate.end_round();
        assert_eq!(candidate.leads_until(), Some(at(1_000)));
        assert_eq!(candidate.wish(at(250)), write(1));
        // The answer to this write is lost, and the next one finds another version: its own.
        candidate.written(None, at(500));
        assert_eq!(candidate.leads_until(), Some(at(1_000)));
        candidate.read(entry("me", 2), at(510));
        assert_eq!(candidate.wish(at(510)), write(2));
        candidate.written(Some("3".into()), at(520));
        candidate.end_round();
        assert_eq!(candidate.leads_until(), Some(at(1_520)));
        assert_eq!(candidate.resign(), Some("3".to_owned()));
        assert_eq!(candidate.leads_until(), None);
        // A record that was given back is taken at once.
        candidate.read(entry("", 4), at(600));
        assert_eq!(candidate.wish(at(600)), write(4));
    }

    #[test]
    fn a_leader_that_was_replaced_leads_no_more() {
        let start = Instant::now();
        let mut candidate = Candidate::new("me".into(), Duration::from_secs(1));
        candidate.read(entry("", 1), start);
        candidate.written(Some("2".into()), start);
        candidate.end_round();
        candidate.written(None, start);
        candidate.read(entry("other", 3), start);
        assert_eq!(candidate.leads_until(), None);
        assert_eq!(candidate.leader(), "other");
        assert_eq!(candidate.resign(), None);
    }
}
