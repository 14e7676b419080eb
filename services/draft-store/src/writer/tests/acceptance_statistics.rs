//! Acceptance statistics in commits.

use super::*;

use std::sync::atomic::Ordering;

use refrain_speculation::Calibration;

use crate::record::{RecordKind, acceptance_statistics_range, namespace_key};
use crate::writer::requests::{Append, StatisticsReport, UpdateAuthor};
use crate::writer::tests::scripts::{erasure, small};

/// A report of three tokens that the EAGLE-3 head drafted at a context of so many tokens; two were accepted.
fn report(tenant: &str, context_tokens: u32) -> StatisticsReport {
    let mut calibration = Calibration::new();
    calibration.observe_head(context_tokens, 3, 2);
    StatisticsReport {
        namespace: names(tenant).id(),
        names: names(tenant),
        observed: calibration.take_observed(),
    }
}

#[test]
fn one_commit_holds_appends_and_reports_of_many_callers() {
    let mut store = Store::new(small());
    let append = Append {
        namespace: names("a").id(),
        names: names("a"),
        updates: vec![update(1, 1, 0, &[1, 2, 3])],
        author: UpdateAuthor::Worker,
    };
    let all = [report("a", 100), report("b", 10), report("a", 7)];
    let (commits, now_ms) = (store.log.commits.load(Ordering::Relaxed), store.now_ms);
    let outcome = store.run(|core, catalog| core.append(catalog, &[append], &all, now_ms));
    assert_eq!(store.log.commits.load(Ordering::Relaxed), commits + 1);
    assert_eq!(outcome.lengths, [Some(vec![3])]);
    // The result is the same as if they had come one by one.
    let mut other = Store::new(small());
    let one_by_one = all.map(|report| {
        let outcome = other.run(|core, catalog| core.append(catalog, &[], &[report], now_ms));
        outcome.tables[0].clone()
    });
    assert_eq!(outcome.tables, one_by_one);
    assert_ne!(outcome.tables[0], outcome.tables[2]);
    let store = store.reopen();
    let known = store.core.statistics(names("a").id()).unwrap();
    assert_eq!(Some(known), one_by_one[2]);
}

#[test]
fn acceptance_statistics_are_erased_even_if_the_names_are_lost() {
    let mut store = Store::new(small());
    let now_ms = store.now_ms;
    store.run(|core, catalog| core.append(catalog, &[], &[report("a", 100)], now_ms));
    let kept = |store: &Store| {
        let (from, to) = acceptance_statistics_range(names("a").id());
        let records = store.log.records();
        records.range(from..to).count()
    };
    let named = namespace_key(RecordKind::Namespace, names("a").id());
    let damaged = store.log.records().insert(named, vec![1]);
    assert!(damaged.is_some());
    let mut store = store.reopen();
    assert_eq!(kept(&store), 1);
    store.run(|core, catalog| Ok(core.mark(catalog, erasure("a"), now_ms)?.1));
    assert_eq!(kept(&store), 0);
}
