//! Acceptance statistics in commits.

use super::*;

use std::sync::atomic::Ordering;

use crate::record::{RecordKind, acceptance_statistics_range, namespace_key};
use crate::writer::requests::{Append, SavedStatistics, StatisticsUpdate, UpdateAuthor};
use crate::writer::tests::scripts::{erasure, small};

/// Statistics of a tenant that continue a table, or begin one. Their bytes are not looked into here.
fn statistics(tenant: &str, continues: u64, new_table: u64, byte: u8) -> StatisticsUpdate {
    StatisticsUpdate {
        namespace: names(tenant).id(),
        names: names(tenant),
        continues,
        new_table,
        // More than one record holds.
        statistics: vec![byte; 5000],
    }
}

fn kept(store: &Store, tenant: &str) -> Option<(u64, Vec<u8>)> {
    let kept = store.core.statistics(names(tenant).id()).unwrap();
    kept.map(|kept| (kept.table, kept.statistics))
}

#[test]
fn one_commit_holds_appends_and_statistics_of_many_callers() {
    let mut store = Store::new(small());
    let append = Append {
        namespace: names("a").id(),
        names: names("a"),
        updates: vec![update(1, 1, 0, &[1, 2, 3])],
        waited_ms: 0,
        author: UpdateAuthor::Worker,
    };
    let all = [
        statistics("a", 0, 7, 1),
        statistics("b", 0, 8, 2),
        statistics("a", 0, 9, 3),
    ];
    let (commits, now_ms) = (store.log.commits.load(Ordering::Relaxed), store.now_ms);
    let outcome = store.run(|core, catalog| core.append(catalog, &[append], &all, now_ms));
    assert_eq!(store.log.commits.load(Ordering::Relaxed), commits + 1);
    assert_eq!(outcome.lengths, [Some(vec![3])]);
    // The last one replaces the first, in the table that the first began.
    let saved = [7, 8, 7].map(|table| Some(SavedStatistics::Table(table)));
    assert_eq!(outcome.statistics, saved);
    let store = store.reopen();
    assert_eq!(kept(&store, "a"), Some((7, vec![3; 5000])));
    assert_eq!(kept(&store, "b"), Some((8, vec![2; 5000])));
    assert_eq!(kept(&store, "c"), None);
}

#[test]
fn statistics_from_before_an_erasure_are_refused_after_it() {
    let mut store = Store::new(small());
    let now_ms = store.now_ms;
    let save = |store: &mut Store, update| {
        let outcome = store.run(|core, catalog| core.append(catalog, &[], &[update], now_ms));
        outcome.statistics[0]
    };
    let begun = save(&mut store, statistics("a", 0, 7, 1));
    assert_eq!(begun, Some(SavedStatistics::Table(7)));
    let went_on = save(&mut store, statistics("a", 7, 100, 2));
    assert_eq!(went_on, Some(SavedStatistics::Table(7)));
    store.run(|core, catalog| Ok(core.mark(catalog, erasure("a"), now_ms)?.1));
    assert_eq!(kept(&store, "a"), None);
    let refused = save(&mut store, statistics("a", 7, 101, 3));
    assert_eq!(refused, Some(SavedStatistics::Erased));
    assert_eq!(kept(&store, "a"), None);
    let anew = save(&mut store, statistics("a", 0, 9, 4));
    assert_eq!(anew, Some(SavedStatistics::Table(9)));
    // Another table exists now, and the erased one is still refused.
    let refused = save(&mut store, statistics("a", 7, 102, 5));
    assert_eq!(refused, Some(SavedStatistics::Erased));
    assert_eq!(kept(&store.reopen(), "a"), Some((9, vec![4; 5000])));
}

#[test]
fn acceptance_statistics_are_erased_even_if_the_names_are_lost() {
    let mut store = Store::new(small());
    let now_ms = store.now_ms;
    let update = StatisticsUpdate {
        statistics: vec![1; 10],
        ..statistics("a", 0, 7, 1)
    };
    store.run(|core, catalog| core.append(catalog, &[], &[update], now_ms));
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
