//! Erasing, and the proof of it: every file is unpacked and searched.

use refrain_protocol::ErrorKind;
use refrain_protocol::admin::{EraseReply, EraseRequest};
use refrain_protocol::document::ERASED_LEN;
use refrain_rpc::StoreAdmin as _;

use super::rewrite::noise;
use super::*;

/// The planted tokens, in the forms in which they may be in a file.
struct Planted {
    tokens: Vec<TokenId>,
    forms: [Vec<u8>; 2],
}

impl Planted {
    fn new() -> Self {
        let tokens = noise(777_777, 16);
        let mut packed = Vec::new();
        for token in &tokens {
            let mut rest = *token;
            while rest >= 0x80 {
                packed.push(rest as u8 | 0x80);
                rest >>= 7;
            }
            packed.push(rest as u8);
        }
        let words = tokens.iter().flat_map(|token| token.to_le_bytes());
        Planted {
            forms: [packed, words.collect()],
            tokens,
        }
    }

    fn is_in(&self, bytes: &[u8]) -> bool {
        self.forms
            .iter()
            .any(|form| bytes.windows(form.len()).any(|window| window == form))
    }

    /// Files that hold them, plainly or in anything that can be unpacked.
    fn find(&self, dir: &Path) -> Vec<std::path::PathBuf> {
        let mut found = Vec::new();
        for entry in std::fs::read_dir(dir).unwrap() {
            let path = entry.unwrap().path();
            if path.is_dir() {
                found.extend(self.find(&path));
                continue;
            }
            let bytes = match std::fs::read(&path) {
                // A segment that was merged since it was listed.
                Err(error) if error.kind() == std::io::ErrorKind::NotFound => continue,
                bytes => bytes.unwrap(),
            };
            let unpacked = unpacked(&bytes);
            if self.is_in(&bytes) || unpacked.iter().any(|bytes| self.is_in(bytes)) {
                found.push(path);
            }
        }
        found
    }
}

/// The content after every zstd magic number, complete or not.
fn unpacked(bytes: &[u8]) -> Vec<Vec<u8>> {
    use std::io::Read as _;
    let magic = [0x28, 0xb5, 0x2f, 0xfd];
    let starts = bytes
        .windows(4)
        .enumerate()
        .filter(|(_, window)| *window == magic)
        .map(|(at, _)| at);
    starts
        .map(|at| {
            let mut out = Vec::new();
            let mut chunk = [0; 512];
            if let Ok(mut decoder) = zstd::stream::read::Decoder::new(&bytes[at..]) {
                // Up to the end of the frame, or to where it breaks off.
                while let Ok(read @ 1..) = decoder.read(&mut chunk) {
                    out.extend_from_slice(&chunk[..read]);
                    if out.len() > 1 << 20 {
                        break;
                    }
                }
            }
            out
        })
        .collect()
}

fn now_ms() -> u64 {
    let now = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH);
    now.unwrap().as_millis() as u64
}

fn of_session(session: &str, update: DocumentUpdate) -> DocumentUpdate {
    let mut update = update;
    update.head.session = Some(session.into());
    update.head.created_ms = now_ms();
    update
}

fn tenant(tenant: &str) -> EraseRequest {
    EraseRequest {
        tenant: Some(tenant.into()),
        ..EraseRequest::default()
    }
}

async fn erase(store: &Store, request: EraseRequest) -> EraseReply {
    store.handle().erase(request).await.unwrap()
}

async fn texts(store: &Store, tenant: &str) -> BTreeMap<u128, Vec<TokenId>> {
    let mut follower = Follower::default();
    follower.catch_up(store, tenant).await;
    follower.texts
}

fn with_quarantines(request: EraseRequest) -> EraseRequest {
    EraseRequest {
        quarantines: true,
        ..request
    }
}

/// Starts a store with planted tokens of tenant a, in several kinds of documents and in a quarantined log, and with
/// documents of tenant b.
async fn planted(dir: &Path, planted: &Planted) -> Store {
    let store = Store::start(config(dir)).await;
    let with = |filler: u128, len: u32| -> Vec<TokenId> {
        let mut tokens = noise(filler, len);
        tokens.extend(&planted.tokens);
        tokens.extend(noise(filler + 1, 300));
        tokens
    };
    for document in 0..20 {
        let theirs = finished(of_session("s", update(document, 0, &noise(document, 900))));
        store.append("b", vec![theirs]).await.unwrap();
        let text = with(document, 100 * document as u32);
        let ours = of_session("s", update(document, 0, &text));
        // Some run, some have ended, some grew in pieces.
        let ours = if document % 3 == 0 {
            finished(ours)
        } else {
            ours
        };
        store.append("a", vec![ours]).await.unwrap();
        if document % 3 == 1 {
            let more = of_session("s", update(document, text.len() as u32, &planted.tokens));
            store.append("a", vec![more]).await.unwrap();
        }
    }
    // Only in the left context, and compressible.
    let mut context = of_session("s", update(30, 0, &[5; 500]));
    context.head.left_context = planted.tokens.clone();
    store.append("a", vec![context]).await.unwrap();
    store.stop().await;
    assert!(!planted.find(&dir.join("data/log")).is_empty());
    // A log that cannot be read in full is salvaged and moved to quarantine.
    spoil_log(dir, 5);
    let store = Store::start(config(dir)).await;
    assert_eq!(store.metric("refrain_draft_store_quarantines_total"), 1.0);
    let found = planted.find(&dir.join("data"));
    let in_quarantine = |path: &&std::path::PathBuf| path.display().to_string().contains("quarant");
    assert!(found.iter().any(|path| in_quarantine(&path)), "{found:?}");
    assert!(found.iter().any(|path| !in_quarantine(&path)), "{found:?}");
    store
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn nothing_erased_is_left_in_any_file() {
    let dir = tempfile::tempdir().unwrap();
    let planted_tokens = Planted::new();
    let store = planted(dir.path(), &planted_tokens).await;
    let theirs = texts(&store, "b").await;
    let mut follower = Follower::default();
    follower.catch_up(&store, "a").await;
    assert_eq!(follower.texts.len(), 21);
    // A quarantine may be the only copy of somebody else's documents, so it is deleted only when it is named.
    let reply = erase(&store, tenant("a")).await;
    let counts = (reply.quarantines, reply.quarantines_kept);
    assert_eq!((reply.documents, counts), (21, (0, 1)));
    let left = planted_tokens.find(&dir.path().join("data"));
    assert!(!left.is_empty());
    assert!(
        left.iter()
            .all(|path| path.display().to_string().contains("quarantine-"))
    );
    // Nothing was sealed.
    assert_eq!(reply.files, ["log"]);
    let reply = erase(&store, with_quarantines(tenant("a"))).await;
    assert_eq!((reply.quarantines, reply.quarantines_kept), (1, 0));
    let left = planted_tokens.find(&dir.path().join("data"));
    assert!(left.is_empty(), "{left:?}");
    follower.catch_up(&store, "a").await;
    assert_eq!(
        (follower.texts.len(), follower.resets),
        (0, 1),
        "followers are told, not reset"
    );
    assert_eq!(erase(&store, tenant("a")).await.documents, 0);
    store.stop().await;
    let store = Store::start(config(dir.path())).await;
    assert_eq!(texts(&store, "b").await, theirs);
    assert!(texts(&store, "a").await.is_empty());
    store.stop().await;
    let left = planted_tokens.find(&dir.path().join("data"));
    assert!(left.is_empty(), "{left:?}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn nothing_erased_is_left_in_any_segment() {
    let dir = tempfile::tempdir().unwrap();
    let data = dir.path().join("data");
    let planted = Planted::new();
    let store = Store::start(sealing(dir.path())).await;
    for document in 0..60 {
        let session = if document % 4 == 0 { "s" } else { "other" };
        let mut text = noise(document, 600);
        if session == "s" {
            text.extend(&planted.tokens);
        }
        let ours = finished(of_session(session, update(document, 0, &text)));
        store.append("a", vec![ours]).await.unwrap();
        let theirs = finished(update(document, 0, &noise(document + 100, 300)));
        store.append("b", vec![theirs]).await.unwrap();
    }
    store.sealed(|stats| stats.segment_bytes > 100_000).await;
    store.stop().await;
    // One segment becomes unreadable, and moves to quarantine with what is planted in it.
    let broken = planted.find(&data.join("segments")).remove(0);
    let mut bytes = std::fs::read(&broken).unwrap();
    let last = bytes.len() - 1;
    bytes[last] ^= 1;
    std::fs::write(&broken, bytes).unwrap();
    let store = Store::start(sealing(dir.path())).await;
    assert_eq!(store.metric("refrain_draft_store_segments_lost_total"), 1.0);
    let found = planted.find(&data);
    let in_quarantine = |path: &&std::path::PathBuf| path.display().to_string().contains("quarant");
    assert_eq!(found.iter().filter(in_quarantine).count(), 1, "{found:?}");
    // It may have held all sealed documents of the session.
    let more = finished(of_session("s", update(64, 0, &planted.tokens)));
    store.append("a", vec![more]).await.unwrap();
    let (ours, theirs) = (texts(&store, "a").await, texts(&store, "b").await);
    let mut follower = Follower::default();
    follower.catch_up(&store, "a").await;
    let session = EraseRequest {
        session: Some("s".into()),
        ..tenant("a")
    };
    let reply = erase(&store, with_quarantines(session)).await;
    assert!(reply.documents > 0 && reply.quarantines == 1, "{reply:?}");
    assert!(planted.find(&data).is_empty());
    let kept: BTreeMap<_, _> = ours.into_iter().filter(|(id, _)| id % 4 != 0).collect();
    follower.catch_up(&store, "a").await;
    assert_eq!((&follower.texts, follower.resets), (&kept, 1));
    store.stop().await;
    let store = Store::start(sealing(dir.path())).await;
    assert_eq!(texts(&store, "a").await, kept);
    assert_eq!(texts(&store, "b").await, theirs);
    // The others are erased with their tenant.
    let reply = erase(&store, tenant("a")).await;
    // Whether the tenant has a segment by now is a matter of time. The rest of a segment gets another name.
    let (log, segments) = reply.files.split_first().unwrap();
    assert_eq!(log, "log", "{:?}", reply.files);
    assert!(segments.iter().all(|segment| !data.join(segment).exists()));
    store.stop().await;
    assert!(planted.find(&data).is_empty());
    let other = Planted {
        forms: [noise(1, 16), noise(1, 16)]
            .map(|words| words.iter().flat_map(|token| token.to_le_bytes()).collect()),
        tokens: Vec::new(),
    };
    assert!(other.find(&data).is_empty());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_worker_that_continues_an_erased_document_does_not_bring_it_back() {
    let dir = tempfile::tempdir().unwrap();
    let store = Store::start(config(dir.path())).await;
    let begun = of_session("s", update(1, 0, &[1; 50]));
    store.append("a", vec![begun.clone()]).await.unwrap();
    // The clock of its worker is ahead, so only the document's id tells.
    let mut ahead = of_session("s", update(2, 0, &[2; 50]));
    ahead.head.created_ms += 3_600_000;
    store.append("a", vec![ahead.clone()]).await.unwrap();
    // It began before the erasure, and was still on its way.
    let late = of_session("s", update(3, 0, &[3; 50]));
    tokio::time::sleep(Duration::from_millis(5)).await;
    erase(&store, tenant("a")).await;
    tokio::time::sleep(Duration::from_millis(5)).await;
    let mut store = store;
    for _ in 0..2 {
        let mut more = begun.clone();
        (more.prev_len, more.tokens) = (50, vec![1; 10]);
        let updates = vec![more, begun.clone(), ahead.clone(), late.clone()];
        let lengths = store.append("a", updates).await.unwrap();
        assert_eq!(
            lengths, [ERASED_LEN; 4],
            "answered, so that nobody tries again, and with a reason to forget them"
        );
        assert_eq!(store.handle().stats().await.unwrap().documents, 0);
        // All of this survives a restart.
        store.stop().await;
        store = Store::start(config(dir.path())).await;
    }
    let fresh = of_session("s", update(4, 0, &[4; 50]));
    store.append("a", vec![fresh]).await.unwrap();
    assert_eq!(
        texts(&store, "a").await.into_keys().collect::<Vec<_>>(),
        [4]
    );
    assert_eq!(store.metric("refrain_draft_store_erasures"), 1.0);
    assert_eq!(store.metric("refrain_draft_store_erased_documents"), 3.0);
    store.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_late_update_of_an_erased_tenant_tells_followers_to_drop_its_document() {
    let dir = tempfile::tempdir().unwrap();
    let store = Store::start(config(dir.path())).await;
    let late = of_session("s", update(3, 0, &[3; 50]));
    tokio::time::sleep(Duration::from_millis(5)).await;
    erase(&store, tenant("a")).await;
    let mut follower = Follower::default();
    follower.catch_up(&store, "a").await;
    // Another follower had it from the worker itself.
    follower.texts.insert(3, vec![3; 50]);
    let lengths = store.append("a", vec![late.clone()]).await.unwrap();
    assert_eq!(lengths, [ERASED_LEN]);
    follower.catch_up(&store, "a").await;
    assert!(follower.texts.is_empty() && follower.resets == 1);
    // The next chunk of its request begins later, and may send all of it.
    tokio::time::sleep(Duration::from_millis(5)).await;
    let mut next = late;
    next.head.created_ms = now_ms();
    let mut more = next.clone();
    (more.prev_len, more.tokens) = (50, vec![3; 10]);
    let lengths = store.append("a", vec![more, next]).await.unwrap();
    assert_eq!(lengths, [ERASED_LEN; 2]);
    assert!(texts(&store, "a").await.is_empty());
    store.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn sessions_models_and_time_ranges_are_erased_separately() {
    let dir = tempfile::tempdir().unwrap();
    let store = Store::start(config(dir.path())).await;
    let put = async |tenant: &str, session: &str, document: u128| {
        let update = of_session(session, update(document, 0, &[1; 20]));
        store.append(tenant, vec![update]).await.unwrap();
    };
    put("a", "s", 1).await;
    put("a", "other", 2).await;
    put("b", "s", 3).await;
    let session = EraseRequest {
        session: Some("s".into()),
        ..tenant("a")
    };
    assert_eq!(erase(&store, session).await.documents, 1);
    let model = EraseRequest {
        model: Some("another".into()),
        ..tenant("a")
    };
    assert_eq!(erase(&store, model).await.documents, 0);
    tokio::time::sleep(Duration::from_millis(20)).await;
    let from_ms = now_ms();
    put("a", "s", 4).await;
    put("b", "s", 5).await;
    tokio::time::sleep(Duration::from_millis(20)).await;
    let until_ms = now_ms();
    tokio::time::sleep(Duration::from_millis(20)).await;
    put("a", "s", 6).await;
    let time = EraseRequest {
        from_ms: Some(from_ms),
        until_ms: Some(until_ms),
        ..EraseRequest::default()
    };
    assert_eq!(erase(&store, time).await.documents, 2);
    let left = async |tenant: &str| texts(&store, tenant).await.into_keys().collect::<Vec<_>>();
    assert_eq!(left("a").await, [2, 6]);
    assert_eq!(left("b").await, [3]);
    for nothing in [
        EraseRequest::default(),
        EraseRequest {
            session: Some("s".into()),
            ..EraseRequest::default()
        },
        EraseRequest {
            model: Some("m".into()),
            ..EraseRequest::default()
        },
        EraseRequest {
            from_ms: Some(5),
            until_ms: Some(5),
            ..EraseRequest::default()
        },
    ] {
        let refused = store.handle().erase(nothing).await.unwrap_err();
        assert_eq!(refused.kind, ErrorKind::InvalidRequest);
    }
    store.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_erasure_during_appends_separates_old_from_new_documents() {
    let dir = tempfile::tempdir().unwrap();
    let store = std::sync::Arc::new(Store::start(config(dir.path())).await);
    let writers: Vec<_> = (0..4u128)
        .map(|writer| {
            let store = store.clone();
            tokio::spawn(async move {
                let mut begun = BTreeMap::new();
                for number in 0..60 {
                    let document = writer << 32 | number;
                    let head = of_session("s", update(document, 0, &[])).head;
                    begun.insert(document, head.created_ms);
                    for step in 0..4 {
                        let mut piece = update(document, step * 30, &noise(document, 30));
                        piece.head = head.clone();
                        let lengths = store.append("a", vec![piece]).await.unwrap();
                        assert!(
                            [step * 30 + 30, ERASED_LEN].contains(&lengths[0]),
                            "{lengths:?}"
                        );
                    }
                }
                begun
            })
        })
        .collect();
    eventually(async || store.handle().stats().await.unwrap().documents >= 40).await;
    let erased_at_ms = erase(&store, tenant("a")).await.erased_at_ms;
    let mut expected = Vec::new();
    for writer in writers {
        let begun = writer.await.unwrap().into_iter();
        expected.extend(begun.filter(|(_, created_ms)| *created_ms > erased_at_ms));
    }
    let left = texts(&store, "a").await;
    assert!(
        left.values().all(|text| text.len() == 120),
        "whole or not at all"
    );
    let expected: Vec<u128> = expected.into_iter().map(|(document, _)| document).collect();
    assert_eq!(left.into_keys().collect::<Vec<_>>(), expected);
    std::sync::Arc::into_inner(store).unwrap().stop().await;
}

fn rewrites(store: &Store) -> f64 {
    store.metric("refrain_draft_store_rewrites_total{outcome=\"done\"}")
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_log_is_rewritten_only_if_it_may_hold_something_removed() {
    let dir = tempfile::tempdir().unwrap();
    let planted = Planted::new();
    let data = dir.path().join("data");
    let tokens = &planted.tokens;
    let config = DraftStoreConfig {
        tokens_max: 1 << 20,
        ..config(dir.path())
    };
    let store = Store::start(config.clone()).await;
    store
        .append("a", vec![of_session("s", update(1, 0, tokens))])
        .await
        .unwrap();
    // Nothing was ever removed.
    for nobody in ["x", "y"] {
        let reply = erase(&store, tenant(nobody)).await;
        assert_eq!((reply.documents, reply.files.len()), (0, 0));
    }
    assert_eq!(rewrites(&store), 0.0);
    // A budget evicts what an erasure would have hit.
    let kept = of_session("s", update(2, 0, &vec![7; (1 << 20) - 9]));
    store.append("b", vec![kept]).await.unwrap();
    eventually(async || texts(&store, "a").await.is_empty()).await;
    assert!(!planted.find(&data).is_empty());
    let reply = erase(&store, tenant("a")).await;
    assert_eq!((reply.documents, reply.files), (0, vec!["log".to_owned()]));
    assert!(planted.find(&data).is_empty());
    assert_eq!(rewrites(&store), 1.0);
    erase(&store, tenant("a")).await;
    assert_eq!(rewrites(&store), 1.0, "it is clean now");
    // An erasure that hits something.
    let more = of_session("s", update(3, 0, &[8; 9]));
    store.append("c", vec![more]).await.unwrap();
    assert_eq!(erase(&store, tenant("c")).await.documents, 1);
    assert_eq!(rewrites(&store), 2.0);
    store.stop().await;
    // After a restart nobody knows what was removed before.
    let store = Store::start(config).await;
    erase(&store, tenant("x")).await;
    assert_eq!(rewrites(&store), 1.0);
    erase(&store, tenant("x")).await;
    assert_eq!(rewrites(&store), 1.0);
    assert_eq!(texts(&store, "b").await.len(), 1);
}
