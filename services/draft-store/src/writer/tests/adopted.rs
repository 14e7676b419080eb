//! A segment that came as a file from another store.

use std::io::Write as _;

use super::*;
use crate::metrics::RemovalReason;
use crate::reading::join;
use crate::segments::ReceivedSegment;
use refrain_protocol::join::{JoinListRequest, JoinPieceRequest};

fn text(document: u128, len: u32) -> Vec<TokenId> {
    (0..len).map(|at| at * 31 + document as u32).collect()
}

/// Another store with these documents in one segment.
fn other(documents: std::ops::Range<u128>) -> Store {
    let mut store = Store::with_generation(DraftStoreConfig::default(), 70);
    for document in documents {
        let mut sent = finished(update(document, 1, 0, &text(document, 50)));
        sent.head.left_context = vec![7, 8, 9];
        store.append("a", &[sent]);
        store.now_ms += 1_000;
    }
    store.seal("a");
    store
}

/// Takes the only segment of a store over.
fn take_over(store: &mut Store, from: &Store) {
    let namespace = names("a").id();
    let request = JoinListRequest {
        namespace,
        with_segments: true,
        after: None,
        handed_over: Vec::new(),
        documents_max: 10,
    };
    let list = join::list(&from.shared, &request).unwrap();
    let [segment] = &list.segments[..] else {
        panic!("{list:?}");
    };
    let checksum = segment.checksum;
    let (mut file, path) = segments::create_received(store.dir.path(), checksum).unwrap();
    let request = JoinPieceRequest {
        namespace,
        segment: checksum,
        offset: 0,
        bytes_max: u32::MAX,
    };
    let piece = join::piece(&from.shared, &request, 1 << 20).unwrap();
    assert_eq!(piece.bytes.len() as u64, segment.bytes);
    file.write_all(&piece.bytes).unwrap();
    let received = ReceivedSegment {
        file: segments::open_received(&path, namespace, checksum).unwrap(),
        origin: 70,
        seen: list.seen,
        gone: segment.gone.clone(),
        used_s: segment.used_s.clone(),
    };
    store.segment += 1;
    let (dir, id, now_ms) = (store.dir.clone(), store.segment, store.now_ms);
    store.run(|core, catalog| core.adopt_segment(catalog, dir.path(), id, received, now_ms));
}

#[test]
fn followers_learn_of_its_documents_and_a_restart_finds_them() {
    let from = other(0..10);
    let mut store = Store::new(DraftStoreConfig::default());
    for document in 20..40 {
        store.append("a", &[finished(update(document, 1, 0, &text(document, 5)))]);
    }
    let mut follower = Follower::default();
    follower.catch_up(&store, "a", 60);
    let resets = follower.resets;
    take_over(&mut store, &from);
    follower.catch_up(&store, "a", 60);
    assert_eq!(follower.texts().len(), 30);
    store.append("a", &[finished(update(41, 1, 0, &text(41, 5)))]);
    follower.catch_up(&store, "a", 60);
    assert_eq!(
        follower.resets, resets,
        "the sequences are those of this store"
    );
    for _ in 0..2 {
        let texts = follower.texts();
        assert_eq!(texts.len(), 31);
        assert_eq!(texts[&3], text(3, 50));
        let open = store.shared.read().unwrap();
        let known = open.catalog.document(key("a", 3)).unwrap();
        assert!(known.slot.is_some(), "it is read from the file");
        assert_eq!(known.state.stored_ms, 1_000_000_003_000);
        drop(open);
        store = store.reopen();
        let events = follower.events;
        follower.catch_up(&store, "a", 60);
        assert_eq!(follower.events, events, "a restart is no news");
    }
    assert_eq!(store.merge("a").documents, 10);
}

#[test]
fn what_is_known_here_is_joined_and_what_is_gone_there_stays_away() {
    let mut from = other(0..6);
    let namespace = names("a").id();
    let keys = [key("a", 1)];
    let now_ms = from.now_ms;
    from.run(|core, catalog| core.remove(catalog, &keys, RemovalReason::Tokens, now_ms));
    from.now_ms += 5_000;
    from.touch("a", 2);
    let mut store = Store::new(DraftStoreConfig::default());
    // One is the beginning of what comes, the other goes on after it.
    store.append("a", &[update(3, 1, 0, &text(3, 20))]);
    store.append("a", &[update(4, 1, 0, &text(4, 60))]);
    take_over(&mut store, &from);
    for _ in 0..2 {
        assert_eq!(store.documents("a"), [0, 2, 3, 4, 5]);
        assert_eq!(store.text("a", 3), Some(text(3, 50)));
        assert_eq!(store.text("a", 4), Some(text(4, 60)));
        let open = store.shared.read().unwrap();
        let slot = |document| open.catalog.document(key("a", document)).unwrap().slot;
        assert!(slot(0).is_some() && slot(3).is_none() && slot(4).is_none());
        let used_ms = open.catalog.document(key("a", 2)).unwrap().state.used_ms;
        assert_eq!(used_ms, (from.now_ms / 1_000) * 1_000);
        let (sealed, others) = open.catalog.sealed_and_others(namespace);
        assert_eq!((sealed[0].1.len(), others.len()), (3, 2));
        drop(open);
        store = store.reopen();
    }
}

#[test]
fn a_file_of_which_everything_is_known_is_not_kept() {
    let from = other(0..4);
    let mut store = Store::new(DraftStoreConfig::default());
    take_over(&mut store, &from);
    take_over(&mut store, &from);
    assert_eq!(store.segments(), [1]);
    assert_eq!(segments::list(store.dir.path()).unwrap(), (vec![1], vec![]));
    assert_eq!(store.documents("a"), [0, 1, 2, 3]);
}
