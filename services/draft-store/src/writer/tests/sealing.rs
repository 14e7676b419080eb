//! Sealed documents behave like all others, whatever happens to them.

use super::*;

use refrain_protocol::document::DocumentHead;

use crate::catalog::Catalog;
use crate::config::{DraftStoreConfig, StoreTuning};
use crate::metrics::RemovalReason;
use crate::record::{RecordKind, document_key};
use crate::segments::SegmentSource;
use crate::writer::core::{DAY_MS, WriterCore};
use crate::writer::requests::{Append, UpdateAuthor};

fn text(document: u128, len: u32) -> Vec<TokenId> {
    (0..len).map(|at| at * 31 + document as u32).collect()
}

fn filled(documents: std::ops::Range<u128>) -> Store {
    let mut store = Store::new(DraftStoreConfig::default());
    for document in documents {
        let mut sent = finished(update(document, 1, 0, &text(document, 50)));
        sent.head.group = Some(format!("g{document}"));
        sent.head.left_context = vec![7, 8, 9];
        store.append("a", &[sent]);
    }
    store
}

fn places(store: &Store) -> Vec<Option<SegmentId>> {
    let open = store.shared.read().unwrap();
    let catalog = &open.catalog;
    (0..100)
        .filter_map(|document| catalog.document(key("a", document)))
        .map(|known| known.slot.map(|slot| slot.segment))
        .collect()
}

fn records(store: &Store, kind: RecordKind) -> usize {
    let records = store.log.records();
    records.keys().filter(|key| key[0] == kind.byte()).count()
}

fn follows(store: &Store) -> BTreeMap<u128, Vec<TokenId>> {
    let mut follower = Follower::default();
    follower.catch_up(store, "a", 60);
    follower.texts()
}

#[test]
fn sealed_documents_leave_the_log_and_the_feed_is_unchanged() {
    let mut store = filled(0..10);
    let mut early = Follower::default();
    early.catch_up(&store, "a", 120);
    let before = follows(&store);
    let made = store.seal("a");
    assert_eq!((made.documents, made.tokens), (10, 500));
    for kind in [RecordKind::State, RecordKind::Head, RecordKind::Piece] {
        assert_eq!(records(&store, kind), 0, "{kind:?}");
    }
    for round in 0..2 {
        assert_eq!(places(&store), [Some(1); 10]);
        assert_eq!(follows(&store), before);
        let events = early.events;
        early.catch_up(&store, "a", 120);
        assert_eq!(early.events, events, "sealing is no news, round {round}");
        let open = store.shared.read().unwrap();
        let catalog = &open.catalog;
        let head = crate::reading::document_text::head(catalog, &*store.log, key("a", 3)).unwrap();
        let expected = DocumentHead {
            session: Some("s".into()),
            group: Some("g3".into()),
            left_context: vec![7, 8, 9],
            ..DocumentHead::default()
        };
        assert_eq!(head, expected);
        drop(open);
        store = store.reopen();
    }
}

#[test]
fn a_sealed_document_can_be_continued_repeated_and_shortened() {
    let mut store = filled(0..3);
    store.append("a", &[update(5, 1, 0, &text(5, 50))]);
    store.seal("a");
    let repeat = finished(update(0, 1, 0, &text(0, 50)));
    assert_eq!(store.append("a", &[repeat]), [50]);
    assert_eq!(places(&store), [Some(1); 4], "a repeat changes nothing");
    let more = update(1, 1, 50, &[1, 2]);
    let shorter = update(2, 2, 10, &[3]);
    let end = finished(update(5, 1, 40, &text(5, 50)[40..]));
    assert_eq!(store.append("a", &[more, shorter, end]), [52, 11, 50]);
    for _ in 0..2 {
        assert_eq!(places(&store), [Some(1), None, None, None]);
        let texts = follows(&store);
        assert_eq!(texts[&1], [text(1, 50), vec![1, 2]].concat());
        assert_eq!(texts[&2], [text(2, 10), vec![3]].concat());
        assert_eq!(texts[&5], text(5, 50));
        store = store.reopen();
    }
    store.seal("a");
    assert_eq!(places(&store), [Some(1), Some(2), Some(2), Some(2)]);
    let made = store.merge("a");
    assert_eq!((made.documents, made.tokens), (4, 50 + 52 + 11 + 50));
    assert_eq!(records(&store, RecordKind::Segment), 1);
    assert_eq!(records(&store, RecordKind::Marks), 0);
    assert_eq!(segments::list(store.dir.path()).unwrap().0, [3]);
    let texts = follows(&store);
    assert_eq!(follows(&store.reopen()), texts);
}

#[test]
fn a_document_that_changes_while_it_is_sealed_stays_in_the_log() {
    let mut store = filled(0..4);
    let documents: Vec<DocumentId> = (0..4).map(DocumentId).collect();
    let change = |core: &mut WriterCore, catalog: &mut Catalog| {
        let append = Append {
            namespace: names("a").id(),
            names: names("a"),
            updates: vec![update(1, 1, 50, &[9])],
            waited_ms: 0,
            author: UpdateAuthor::Worker,
        };
        core.append(catalog, &[append], &[], 1_000_000_000_500)
            .unwrap();
        let erased = [key("a", 2)];
        core.remove(catalog, &erased, RemovalReason::Erased, 1_000_000_000_500)
            .unwrap();
        core.touch(catalog, &[key("a", 3)], 1_000_000_900_000);
    };
    store.make("a", SegmentSource::Log(documents), change);
    for _ in 0..2 {
        assert_eq!(places(&store), [Some(1), None, Some(1)]);
        let texts = follows(&store);
        assert_eq!(texts.keys().collect::<Vec<_>>(), [&0, &1, &3]);
        assert_eq!(texts[&1], [text(1, 50), vec![9]].concat());
        let open = store.shared.read().unwrap();
        let used = open.catalog.document(key("a", 3));
        assert_eq!(used.unwrap().state.used_ms, 1_000_000_900_000);
        drop(open);
        store = store.reopen();
    }
    let file = std::fs::read(segments::path(store.dir.path(), 1)).unwrap();
    let words: Vec<u8> = text(2, 50).iter().flat_map(|t| t.to_le_bytes()).collect();
    let holds = |file: &[u8]| file.windows(words.len()).any(|window| window == words);
    assert!(holds(&file), "only marked");
    store.merge("a");
    let file = std::fs::read(segments::path(store.dir.path(), 2)).unwrap();
    assert!(!holds(&file));
}

#[test]
fn sealed_documents_are_used_evicted_and_grow_old() {
    let config = DraftStoreConfig {
        tokens_max: 500,
        tuning: StoreTuning {
            use_interval_s: 10,
            ..StoreTuning::default()
        },
        retention_days: 1,
        ..DraftStoreConfig::default()
    };
    let mut store = filled(0..10);
    store.config = config.clone();
    store.core.config = config;
    store.seal("a");
    let mut follower = Follower::default();
    follower.catch_up(&store, "a", 1_000);
    store.now_ms += 20_000;
    for document in 0..5 {
        store.touch("a", document);
    }
    store.tick(0);
    store = store.reopen();
    store.append("a", &[finished(update(20, 1, 0, &text(20, 100)))]);
    assert_eq!(store.documents("a"), [0, 1, 2, 3, 4, 7, 8, 9, 20]);
    follower.catch_up(&store, "a", 1_000);
    assert_eq!(follower.texts().len(), 9);
    assert_eq!(follower.resets, 1, "followers are told, not reset");
    store = store.reopen();
    assert_eq!(store.documents("a"), [0, 1, 2, 3, 4, 7, 8, 9, 20]);
    let stats = |store: &Store| {
        let open = store.shared.read().unwrap();
        let segments = open.catalog.segments();
        segments
            .iter()
            .map(|(_, one)| one.stats())
            .collect::<Vec<_>>()
    };
    assert_eq!(stats(&store)[0].masked_documents, 2);
    assert_eq!(stats(&store)[0].masked_tokens, 100);
    // The segment is removed with its last document.
    assert_eq!(store.tick(DAY_MS + 1_000).emptied, [1]);
    assert_eq!(store.documents("a"), [0; 0]);
    assert_eq!(store.segments(), [0; 0]);
    assert_eq!(
        records(&store, RecordKind::Segment) + records(&store, RecordKind::Marks),
        0
    );
}

#[test]
fn an_unreadable_document_is_removed_and_the_others_are_sealed() {
    let mut store = filled(0..3);
    let head = document_key(RecordKind::Head, key("a", 1));
    store.log.records().get_mut(&head).unwrap()[20] ^= 1;
    store.seal("a");
    assert_eq!(places(&store), [Some(1), Some(1)]);
    assert_eq!(
        follows(&store.reopen()).keys().collect::<Vec<_>>(),
        [&0, &2]
    );
}
