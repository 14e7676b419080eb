//! One behaviour per test.

use super::*;

use std::sync::atomic::Ordering;

use crate::catalog::{ExportEnd, ExportLimits};
use crate::config::{DraftStoreConfig, StoreTuning, TenantQuota};
use crate::metrics::RemovalReason;
use crate::record::ErasureRecord;
use crate::writer::requests::{Append, UpdateAuthor};

const DAY_MS: u64 = 24 * 3600 * 1000;

pub(super) fn small() -> DraftStoreConfig {
    DraftStoreConfig {
        tuning: StoreTuning {
            tombstones_max: 8,
            ..StoreTuning::default()
        },
        ..DraftStoreConfig::default()
    }
}

#[test]
fn repeats_overlaps_gaps_and_epochs() {
    let mut store = Store::new(small());
    let lengths = store.append(
        "a",
        &[
            update(1, 1, 0, &[1, 2, 3]),
            update(1, 1, 0, &[1, 2, 3]),
            update(1, 1, 2, &[3, 4]),
            update(1, 1, 9, &[9]),
            update(2, 1, 5, &[9]),
            update(1, 2, 1, &[7]),
            update(1, 1, 2, &[3, 4]),
            // Everything of it had been there, and the newer attempt has cut it off.
            update(1, 1, 0, &[1, 2]),
        ],
    );
    assert_eq!(lengths, [3, 3, 4, 4, 0, 2, FENCED_LEN, 2]);
    assert_eq!(store.text("a", 1), Some(vec![1, 7]));
    assert_eq!(store.text("a", 2), None);
}

#[test]
fn a_late_first_update_of_an_epoch_corrects_the_text_before_the_second() {
    let mut store = Store::new(small());
    let mut follower = Follower::default();
    store.append("a", &[update(1, 1, 0, &[1, 2, 3, 4, 5])]);
    follower.catch_up(&store, "a", 100);
    // Epoch 2 cut at 2, but its second update arrived first.
    store.append("a", &[update(1, 2, 3, &[23, 24])]);
    follower.catch_up(&store, "a", 100);
    assert_eq!(store.text("a", 1), Some(vec![1, 2, 3, 23, 24]));
    assert_eq!(store.append("a", &[update(1, 2, 2, &[22])]), [5]);
    assert_eq!(store.text("a", 1), Some(vec![1, 2, 22, 23, 24]));
    follower.catch_up(&store, "a", 100);
    assert_eq!(follower.texts()[&1], [1, 2, 22, 23, 24]);
    assert_eq!(follower.resets, 1, "only the first contact");
}

#[test]
fn a_document_is_stored_in_few_pieces() {
    let mut store = Store::new(small());
    let text: Vec<u32> = (0..2500).collect();
    for (step, tokens) in text.chunks(10).enumerate() {
        store.append("a", &[update(1, 1, step as u32 * 10, tokens)]);
        assert!(store.pieces("a", 1) <= 2 + 1 + 65);
    }
    let pieces = store.pieces("a", 1);
    store.append("a", &[finished(update(1, 1, 2500, &[]))]);
    assert_eq!(store.pieces("a", 1), pieces, "its end writes no text again");
    assert_eq!(store.text("a", 1), Some(text.clone()));
    store.append("a", &[update(1, 2, 1500, &[7, 7])]);
    let store = store.reopen();
    assert_eq!(store.text("a", 1).unwrap()[..1500], text[..1500]);
    assert_eq!(store.text("a", 1).unwrap()[1500..], [7, 7]);
    assert!(store.pieces("a", 1) <= pieces);
}

#[test]
fn a_follower_gets_each_token_once_while_a_document_grows() {
    let mut store = Store::new(small());
    let mut follower = Follower::default();
    for step in 0..100u32 {
        store.append("a", &[update(1, 1, step * 5, &[step; 5])]);
        follower.catch_up(&store, "a", 1000);
    }
    store.append("a", &[finished(update(1, 1, 500, &[]))]);
    follower.catch_up(&store, "a", 1000);
    assert_eq!(follower.tokens, 500);
    assert_eq!(
        follower.documents[&DocumentId(1)].finish,
        Some(FinishReason::Stop)
    );
    // A settled document is one entry for a new follower, and nothing for one that has it.
    store.tick(200_000);
    let events = follower.events;
    follower.catch_up(&store, "a", 1000);
    assert_eq!(follower.events, events);
    let mut fresh = Follower::default();
    fresh.catch_up(&store, "a", 1000);
    assert_eq!((fresh.events, fresh.tokens), (1, 500));
    assert_eq!(fresh.documents, follower.documents);
}

#[test]
fn cursors_and_order_outlive_a_restart() {
    let mut store = Store::new(small());
    let mut follower = Follower::default();
    for document in 0..5 {
        store.append("a", &[update(document, 1, 0, &[1, 2])]);
        store.now_ms += 1000;
    }
    follower.catch_up(&store, "a", 1000);
    // A time of use is written again only if the stored one is old.
    store.tick(400_000);
    store.touch("a", 0);
    store.tick(1000);
    store.touch("a", 1);
    store.tick(1000);
    let mut store = store.reopen();
    follower.catch_up(&store, "a", 1000);
    assert_eq!((follower.resets, follower.events), (1, 5));
    let open = store.shared.read().unwrap();
    assert_eq!(
        open.catalog.uses.oldest(),
        Some(key("a", 2)),
        "0 and 1 were used"
    );
    drop(open);
    store.append("a", &[update(9, 1, 0, &[1])]);
    follower.catch_up(&store, "a", 1000);
    assert_eq!((follower.resets, follower.events), (1, 6));
}

#[test]
fn the_least_recently_used_are_evicted_first_and_followers_are_told() {
    let mut store = Store::new(DraftStoreConfig {
        tokens_max: 30,
        ..small()
    });
    let mut follower = Follower::default();
    for document in 0..3 {
        store.append("a", &[update(document, 1, 0, &[1; 10])]);
    }
    follower.catch_up(&store, "a", 1000);
    store.touch("a", 0);
    store.append("a", &[update(3, 1, 0, &[1; 10])]);
    assert_eq!(store.documents("a"), [0, 2, 3]);
    follower.catch_up(&store, "a", 1000);
    assert_eq!(follower.texts().into_keys().collect::<Vec<_>>(), [0, 2, 3]);
    let left = store
        .log
        .records()
        .keys()
        .filter(|key| key[0] == b'p')
        .count();
    assert_eq!(left, 3);
    // The tombstone survives a restart, for followers that were away.
    let mut away = Follower::default();
    away.catch_up(&store, "a", 1000);
    store.append("a", &[update(4, 1, 0, &[1; 10])]);
    let store = store.reopen();
    away.catch_up(&store, "a", 1000);
    assert_eq!((away.resets, away.texts().len()), (1, 3));
}

#[test]
fn a_tenant_over_its_budget_evicts_only_its_own_documents() {
    let mut store = Store::new(DraftStoreConfig {
        tenant_tokens_max: 25,
        ..small()
    });
    store.append("b", &[update(0, 1, 0, &[1; 20])]);
    for document in 1..6 {
        store.append("a", &[update(document, 1, 0, &[1; 10])]);
    }
    assert_eq!(store.documents("b"), [0]);
    assert_eq!(store.documents("a"), [4, 5]);
}

#[test]
fn a_tenant_may_have_a_quota_of_its_own_in_tokens_or_bytes() {
    let quota = |tokens_max, bytes_max| TenantQuota {
        tokens_max,
        bytes_max,
    };
    let mut store = Store::new(DraftStoreConfig {
        tenant_tokens_max: 25,
        tenants: [
            ("large".to_owned(), quota(Some(45), None)),
            ("small".to_owned(), quota(None, Some(300))),
        ]
        .into(),
        ..small()
    });
    for document in 0..6 {
        for tenant in ["large", "small", "other"] {
            store.append(tenant, &[update(document, 1, 0, &[1; 10])]);
        }
    }
    assert_eq!(store.documents("large"), [2, 3, 4, 5]);
    assert_eq!(store.documents("other"), [4, 5]);
    let kept = store.documents("small");
    assert_eq!(kept, [5], "one of some 200 bytes each");
    // A sealed document counts with its size in the segment.
    store.seal("large");
    store.tick(1);
    assert_eq!(store.documents("large"), [2, 3, 4, 5]);
}

#[test]
fn static_documents_are_never_evicted_but_count_towards_the_budget() {
    let mut store = Store::new(DraftStoreConfig {
        tenant_tokens_max: 35,
        retention_days: 1,
        ..small()
    });
    let import = |store: &mut Store, document, is_static| {
        let append = Append {
            namespace: names("a").id(),
            names: names("a"),
            updates: vec![finished(update(document, 1, 0, &[1; 10]))],
            waited_ms: 0,
            author: UpdateAuthor::Operator { is_static },
        };
        let now_ms = store.now_ms;
        store.run(|core, catalog| core.append(catalog, &[append], &[], now_ms));
    };
    import(&mut store, 0, true);
    import(&mut store, 1, false);
    store.seal("a");
    // Importing a sealed document as static makes it static.
    import(&mut store, 1, true);
    for document in 2..6 {
        store.append("a", &[finished(update(document, 1, 0, &[1; 10]))]);
    }
    assert_eq!(store.documents("a"), [0, 1, 5]);
    // It stays static after a restart and a seal, and a use does not change that.
    store.touch("a", 0);
    store.seal("a");
    let mut store = store.reopen();
    store.tick(3 * 24 * 3600 * 1000);
    assert_eq!(store.documents("a"), [0, 1]);
    assert_eq!(store.text("a", 1), Some(vec![1; 10]));
    store.append("a", &[finished(update(6, 1, 0, &[1; 10]))]);
    store.append("a", &[finished(update(7, 1, 0, &[1; 10]))]);
    assert_eq!(store.documents("a"), [0, 1, 7]);
    let now_ms = store.now_ms;
    store.run(|core, catalog| core.remove(catalog, &[key("a", 0)], RemovalReason::Erased, now_ms));
    assert_eq!(store.documents("a"), [1, 7]);
}

#[test]
fn bytes_are_a_budget_too_and_evictions_go_in_steps() {
    let mut store = Store::new(DraftStoreConfig {
        tuning: StoreTuning {
            eviction_step: 2,
            ..StoreTuning::default()
        },
        ..small()
    });
    for document in 0..8 {
        store.append("a", &[update(document, 1, 0, &[1; 10])]);
    }
    let bytes = store.shared.read().unwrap().catalog.totals().bytes;
    let config = DraftStoreConfig {
        bytes_max: bytes / 4,
        ..store.config.clone()
    };
    let mut store = Store::open(store.log, store.dir, config, store.now_ms);
    let first = store.tick(1);
    assert_eq!((first.removed.len(), first.more), (2, true));
    while store.tick(1).more {}
    assert_eq!(store.documents("a"), [6, 7]);
}

#[test]
fn documents_beyond_their_retention_are_evicted() {
    let mut store = Store::new(DraftStoreConfig {
        retention_days: 2,
        ..small()
    });
    store.append("a", &[update(0, 1, 0, &[1])]);
    store.tick(DAY_MS);
    store.append("a", &[update(1, 1, 0, &[1])]);
    store.touch("a", 0);
    assert!(store.tick(DAY_MS - 1).removed.is_empty());
    let gone = store.tick(2).removed;
    assert_eq!(
        gone,
        [(key("a", 0), RemovalReason::Age)],
        "use does not make it younger"
    );
    store.tick(DAY_MS);
    assert_eq!(store.documents("a"), [] as [u128; 0]);
}

#[test]
fn a_follower_behind_the_tombstones_starts_over() {
    let mut store = Store::new(DraftStoreConfig {
        tokens_max: 20,
        ..small()
    });
    let mut away = Follower::default();
    store.append("a", &[update(0, 1, 0, &[1; 10])]);
    away.catch_up(&store, "a", 1000);
    for document in 1..20 {
        store.append("a", &[update(document, 1, 0, &[1; 10])]);
    }
    let mut store = store.reopen();
    away.catch_up(&store, "a", 1000);
    assert_eq!((away.resets, away.texts().len()), (2, 2));
    // A new follower reads page by page, and old tombstones do not reset it.
    let mut paging = Follower::default();
    paging.catch_up(&store, "a", 1);
    assert_eq!((paging.resets, paging.texts().len()), (1, 2));
    // Its cursor stays valid while later removals are remembered.
    store.append("a", &[update(30, 1, 0, &[1; 10])]);
    paging.catch_up(&store, "a", 1);
    assert_eq!((paging.resets, paging.texts()), (1, store_texts(&store)));
}

fn store_texts(store: &Store) -> BTreeMap<u128, Vec<TokenId>> {
    store
        .documents("a")
        .into_iter()
        .map(|id| (id, store.text("a", id).unwrap()))
        .collect()
}

#[test]
fn namespaces_do_not_see_each_other() {
    let mut store = Store::new(small());
    store.append("a", &[update(1, 1, 0, &[1, 2, 3])]);
    store.append("b", &[update(1, 1, 0, &[4])]);
    let mut follower = Follower::default();
    follower.catch_up(&store, "b", 1000);
    assert_eq!(follower.texts(), BTreeMap::from([(1, vec![4])]));
    let mut stranger = Follower::default();
    stranger.catch_up(&store, "nobody", 1000);
    assert_eq!(stranger.events, 0);
}

#[test]
fn a_damaged_record_costs_only_itself() {
    let mut store = Store::new(small());
    let mut follower = Follower::default();
    for document in 0..4 {
        store.append("a", &[update(document, 1, 0, &[1; 30])]);
    }
    follower.catch_up(&store, "a", 1000);
    // A damaged state is noticed at start.
    let state = crate::record::document_key(crate::record::RecordKind::State, key("a", 1));
    store.log.records().get_mut(&state).unwrap()[20] ^= 4;
    let names_key =
        crate::record::namespace_key(crate::record::RecordKind::Namespace, names("a").id());
    store.log.records().get_mut(&names_key).unwrap()[17] ^= 1;
    let mut store = store.reopen();
    assert_eq!(store.damaged_records, 2);
    store.tick(1);
    assert_eq!(store.documents("a"), [0, 2, 3]);
    follower.catch_up(&store, "a", 1000);
    assert_eq!(follower.texts().len(), 3);
    // A damaged piece is noticed by a reader.
    let piece = crate::record::piece_key(key("a", 2), 0);
    store.log.records().get_mut(&piece).unwrap()[20] ^= 4;
    let read = read_feed(
        &store.shared,
        names("a").id(),
        FeedCursor::default(),
        &Default::default(),
        1000,
    )
    .unwrap();
    assert_eq!(read.damaged.iter().collect::<Vec<_>>(), [&key("a", 2)]);
    assert_eq!(read.delta.events.len(), 3, "two documents and a tombstone");
    let keys: Vec<_> = read.damaged.into_iter().collect();
    let mut open = store.shared.write();
    store
        .core
        .remove(
            &mut open.as_mut().unwrap().catalog,
            &keys,
            RemovalReason::Damage,
            store.now_ms,
        )
        .unwrap();
    drop(open);
    assert_eq!(store.documents("a"), [0, 3]);
    // Or by a writer that cuts it, which then wants the whole text again.
    let piece = crate::record::piece_key(key("a", 3), 0);
    store.log.records().remove(&piece);
    assert_eq!(store.append("a", &[update(3, 2, 10, &[1])]), [0]);
    assert_eq!(store.append("a", &[update(3, 1, 0, &[5; 31])]), [31]);
    follower.catch_up(&store, "a", 1000);
    assert_eq!(follower.texts(), store_texts(&store));
}

#[test]
fn a_lost_tombstone_resets_only_the_followers_that_needed_it() {
    let mut store = Store::new(DraftStoreConfig {
        tokens_max: 10,
        ..small()
    });
    let (mut away, mut present) = (Follower::default(), Follower::default());
    store.append("a", &[update(1, 1, 0, &[1; 10])]);
    away.catch_up(&store, "a", 1000);
    store.append("a", &[update(2, 1, 0, &[1; 10])]);
    present.catch_up(&store, "a", 1000);
    for (key, value) in store.log.records().iter_mut() {
        if key[0] == b't' {
            value[18] ^= 1;
        }
    }
    let mut store = store.reopen();
    store.tick(1);
    let store = store.reopen();
    away.catch_up(&store, "a", 1000);
    present.catch_up(&store, "a", 1000);
    assert_eq!((away.resets, present.resets), (2, 1));
    assert_eq!(away.texts(), present.texts());
}

#[test]
fn a_refusing_disk_acknowledges_nothing() {
    let mut store = Store::new(small());
    store.append("a", &[update(1, 1, 0, &[1])]);
    store.log.refuses.store(true, Ordering::Relaxed);
    let append = Append {
        namespace: names("a").id(),
        names: names("a"),
        updates: vec![update(1, 1, 1, &[2])],
        waited_ms: 0,
        author: UpdateAuthor::Worker,
    };
    let mut open = store.shared.write();
    let catalog = &mut open.as_mut().unwrap().catalog;
    assert!(
        store
            .core
            .append(catalog, &[append], &[], store.now_ms)
            .is_err()
    );
    drop(open);
    store.log.refuses.store(false, Ordering::Relaxed);
    let mut store = store.reopen();
    assert_eq!(store.text("a", 1), Some(vec![1]));
    assert_eq!(store.append("a", &[update(1, 1, 1, &[2])]), [2]);
}

#[test]
fn a_commit_is_one_write_however_many_updates_it_holds() {
    let mut store = Store::new(small());
    let before = store.log.commits.load(Ordering::Relaxed);
    let updates: Vec<_> = (0..500)
        .map(|document| update(document, 1, 0, &[1, 2, 3]))
        .collect();
    store.append("a", &updates);
    assert_eq!(store.log.commits.load(Ordering::Relaxed), before + 1);
    store.tick(1);
    assert_eq!(
        store.log.commits.load(Ordering::Relaxed),
        before + 1,
        "nothing to do, no write"
    );
}

#[test]
fn one_namespace_too_many_is_refused() {
    let mut store = Store::new(DraftStoreConfig {
        namespaces_max: 1,
        ..small()
    });
    store.append("a", &[update(1, 1, 0, &[1])]);
    let append = Append {
        namespace: names("b").id(),
        names: names("b"),
        updates: vec![update(1, 1, 0, &[2])],
        waited_ms: 0,
        author: UpdateAuthor::Worker,
    };
    let mut open = store.shared.write();
    let catalog = &mut open.as_mut().unwrap().catalog;
    let outcome = store
        .core
        .append(catalog, &[append], &[], store.now_ms)
        .unwrap();
    assert_eq!(outcome.lengths, [None]);
}

#[test]
fn the_parts_of_one_tenant_leave_room_for_others() {
    let mut store = Store::new(DraftStoreConfig {
        namespaces_max: 8,
        ..small()
    });
    let mut is_stored = |tenant: &str| {
        let append = Append {
            namespace: names(tenant).id(),
            names: names(tenant),
            updates: vec![update(1, 1, 0, &[2])],
            waited_ms: 0,
            author: UpdateAuthor::Worker,
        };
        let mut open = store.shared.write();
        let catalog = &mut open.as_mut().unwrap().catalog;
        let outcome = store.core.append(catalog, &[append], &[], store.now_ms);
        outcome.unwrap().lengths[0].is_some()
    };
    let parts = ["a\u{1f}user:1", "a\u{1f}user:2", "a\u{1f}user:3"];
    assert_eq!(parts.map(&mut is_stored), [true, true, false]);
    assert!(is_stored("a\u{1f}user:1"), "a part that is known stays");
    assert!(is_stored("b") && is_stored("b\u{1f}user:1"));
}

pub(super) fn erasure(tenant: &str) -> ErasureRecord {
    ErasureRecord {
        tenant: Some(tenant.into()),
        ..ErasureRecord::default()
    }
}

#[test]
fn exports_that_began_since_the_mark_end_before_an_erasure_is_answered() {
    let mut store = Store::new(small());
    for tenant in ["a", "b"] {
        store.append(tenant, &[update(1, 1, 0, &[1, 2, 3])]);
    }
    let (mark, now_ms) = (erasure("a"), store.now_ms);
    let mut marked = None;
    store.run(|core, catalog| {
        let (mark, outcome) = core.mark(catalog, mark, now_ms)?;
        marked = mark;
        Ok(outcome)
    });
    let begin = |store: &Store, number: u64, tenant: &'static str| {
        let open = store.shared.read().unwrap();
        let catalog = &open.catalog;
        let is_wanted = |names: &Namespace| names.tenant == tenant;
        let begun = catalog.begin_export(number, is_wanted, ExportLimits::NONE);
        assert!(begun.is_some_and(|begun| begun.is_ok()));
    };
    begin(&store, 1, "a");
    begin(&store, 2, "b");
    // It was evicted before it could be erased: the export has a copy, and no removal will report it as erased.
    store.run(|core, catalog| core.remove(catalog, &[key("a", 1)], RemovalReason::Tokens, now_ms));
    let open = store.shared.read().unwrap();
    let catalog = &open.catalog;
    let ours = catalog.exports.get(1).unwrap().ok().unwrap();
    assert_eq!(ours.put_aside(key("a", 1)).unwrap().tokens, [1, 2, 3]);
    catalog.end_exports(&marked.unwrap());
    assert!(matches!(
        catalog.exports.get(1),
        Some(Err(ExportEnd::Erased))
    ));
    assert!(matches!(catalog.exports.get(2), Some(Ok(_))));
}
