//! The choice of the next segment, without threads and without an actor.

use super::*;

use std::time::{Duration, Instant};

use refrain_protocol::{ApiError, ErrorKind};
use tokio::sync::oneshot;

use crate::config::StoreTuning;
use crate::metrics::RemovalReason;
use crate::writer::errors::RETRY_AFTER;
use crate::writer::sealer::{PlannedSegment, SealView, Sealer};

fn config() -> DraftStoreConfig {
    DraftStoreConfig {
        seal_after_s: 60,
        seal_tokens: 2_000,
        tuning: StoreTuning {
            segments_max: 1,
            ..StoreTuning::default()
        },
        ..DraftStoreConfig::default()
    }
}

/// Ends some documents of 500 tokens each.
fn fill(store: &mut Store, documents: std::ops::Range<u128>) {
    for document in documents {
        let tokens: Vec<TokenId> = (0..500).map(|at| at * 7 + document as u32).collect();
        store.append("a", &[finished(update(document, 1, 0, &tokens))]);
    }
}

/// A sealer, and what it sees.
struct Bench {
    store: Store,
    sealer: Sealer,
    openings: u64,
    now: Instant,
    has_room: bool,
    orphans: Result<(), LogError>,
}

impl Bench {
    fn new(config: DraftStoreConfig) -> Self {
        Bench {
            sealer: Sealer::new(&config),
            store: Store::new(config),
            openings: 1,
            now: Instant::now(),
            has_room: true,
            orphans: Ok(()),
        }
    }

    fn next(&mut self) -> Option<PlannedSegment> {
        self.see(true)
    }

    fn see(&mut self, is_open: bool) -> Option<PlannedSegment> {
        let open = self.store.shared.read().unwrap();
        self.sealer.next(&SealView {
            open: Some(&*open).filter(|_| is_open),
            openings: self.openings,
            now: self.now,
            now_ms: self.store.now_ms,
            has_room: &|_| self.has_room,
            clear_orphans: &|_| self.orphans.clone(),
        })
    }

    fn elapse(&mut self, seconds: u64) {
        self.now += Duration::from_secs(seconds);
        self.store.tick(seconds * 1_000);
    }

    /// Carries out what is next. Returns whether there was anything.
    fn carry_out(&mut self) -> bool {
        let Some(planned) = self.next() else {
            return false;
        };
        self.store.make("a", planned.source, |_, _| {});
        true
    }

    fn remove(&mut self, documents: std::ops::Range<u128>) {
        let keys: Vec<_> = documents.map(|document| key("a", document)).collect();
        let now_ms = self.store.now_ms;
        self.store
            .run(|core, catalog| core.remove(catalog, &keys, RemovalReason::Tokens, now_ms));
    }

    fn purge(&mut self, seals: bool) -> oneshot::Receiver<Result<(), ApiError>> {
        let (waiter, waits) = oneshot::channel();
        self.sealer.request_purge(seals, waiter);
        waits
    }
}

fn is_seal(planned: &Option<PlannedSegment>) -> bool {
    matches!(
        planned,
        Some(PlannedSegment {
            source: SegmentSource::Log(_),
            ..
        })
    )
}

#[test]
fn what_has_ended_is_sealed_once_it_is_enough_and_old_enough() {
    let mut bench = Bench::new(config());
    fill(&mut bench.store, 0..3);
    bench.elapse(61);
    assert_eq!(bench.next(), None, "too few tokens");
    fill(&mut bench.store, 3..4);
    assert_eq!(bench.next(), None, "one of them is new");
    bench.elapse(61);
    assert!(is_seal(&bench.next()));
    bench.has_room = false;
    assert_eq!(bench.next(), None);
    // After a day even little is sealed, and all are looked at now and then only.
    let mut bench = Bench::new(config());
    fill(&mut bench.store, 0..3);
    assert_eq!(bench.next(), None);
    bench.elapse(24 * 3_600 + 1);
    assert!(is_seal(&bench.next()));
}

#[test]
fn a_crowded_log_is_sealed_at_once() {
    let mut config = config();
    config.tuning.unsealed_tokens_max = 1_400;
    let mut bench = Bench::new(config);
    fill(&mut bench.store, 0..3);
    bench.elapse(1);
    assert!(is_seal(&bench.next()));
}

#[test]
fn sealing_and_merging_take_turns() {
    let mut bench = Bench::new(config());
    let mut kinds = Vec::new();
    for round in 0..6u128 {
        // There is always something to seal, and soon something to merge.
        fill(&mut bench.store, round * 10..round * 10 + 5);
        bench.elapse(61);
        let planned = bench.next();
        kinds.push(is_seal(&planned));
        bench.store.make("a", planned.unwrap().source, |_, _| {});
    }
    assert_eq!(kinds, [true, true, false, true, false, true]);
}

#[test]
fn a_failed_job_is_tried_again_after_a_while() {
    let mut bench = Bench::new(config());
    fill(&mut bench.store, 0..4);
    bench.elapse(61);
    assert!(is_seal(&bench.next()));
    let failed = LogError::Refused("full".into());
    bench.sealer.failed(failed, bench.now);
    assert_eq!(bench.next(), None);
    bench.elapse(RETRY_AFTER.as_secs());
    assert!(is_seal(&bench.next()));
}

#[test]
fn a_purge_rewrites_what_holds_removed_documents_and_seals_on_request() {
    let mut bench = Bench::new(config());
    fill(&mut bench.store, 0..4);
    bench.elapse(61);
    assert!(bench.carry_out());
    bench.remove(0..1);
    let mut first = bench.purge(false);
    assert!(bench.carry_out());
    assert!(first.try_recv().is_err(), "not yet");
    // A second one begins after the first.
    fill(&mut bench.store, 10..13);
    let mut second = bench.purge(true);
    assert!(bench.carry_out());
    assert_eq!(first.try_recv().unwrap(), Ok(()));
    assert!(!is_seal(&bench.next()), "all is sealed");
    assert_eq!(second.try_recv().unwrap(), Ok(()));
    assert_eq!(bench.store.documents("a").len(), 6);
}

#[test]
fn a_purge_fails_if_the_store_was_closed_meanwhile() {
    for reopens in [false, true] {
        let mut bench = Bench::new(config());
        fill(&mut bench.store, 0..8);
        bench.elapse(61);
        assert!(bench.carry_out());
        bench.remove(0..1);
        let mut waits = bench.purge(true);
        assert!(bench.next().is_some(), "the first of its segments");
        if reopens {
            bench.openings += 1;
        }
        bench.see(reopens);
        let answer = waits.try_recv().unwrap();
        assert!(answer.is_err(), "something may be left");
    }
}

#[test]
fn a_purge_that_has_no_room_or_meets_a_file_that_stays_says_so() {
    let mut bench = Bench::new(config());
    fill(&mut bench.store, 0..4);
    bench.elapse(61);
    assert!(bench.carry_out());
    bench.remove(0..1);
    bench.has_room = false;
    let mut waits = bench.purge(false);
    assert_eq!(bench.next(), None);
    let refused = waits.try_recv().unwrap().unwrap_err();
    assert_eq!(refused.kind, ErrorKind::Unavailable);
    bench.has_room = true;
    bench.orphans = Err(LogError::Refused("a file stays".into()));
    let mut waits = bench.purge(false);
    bench.next();
    assert!(waits.try_recv().unwrap().is_err());
    let mut waits = bench.purge(false);
    bench.sealer.give_up();
    bench.next();
    assert!(waits.try_recv().is_err(), "nobody answers");
}
