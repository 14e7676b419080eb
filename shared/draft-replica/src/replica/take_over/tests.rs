//! Taking over from a store that has segments, that loses them, and that answers nonsense.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use refrain_protocol::document::{DocumentHead, DocumentUpdate, FeedEvent, StreamPosition};
use refrain_protocol::{Namespace, NamespaceId};
use refrain_rpc::testing::{FakeStore, StoreCall, StoredDocument};
use refrain_service_kit::mesh::{MeshConfig, NamespaceSigner};
use refrain_service_kit::telemetry::Metrics;
use refrain_suffix_index::{DocumentKey, SegmentBuilder};

use super::*;
use crate::config::ReplicaConfig;
use crate::metrics::ReplicaMetrics;
use crate::replica::capacity::Reservation;
use crate::replica::{DraftReplica, NamespaceReplica};

const LEN: u32 = 50;
/// Where the feed stands when the segments are listed.
const NOW: FeedCursor = FeedCursor {
    generation: 5,
    sequence: 20,
    seen: StreamPosition {
        stream: 0,
        sequence: 0,
    },
};

/// A fault of the store.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Fault {
    None,
    /// This many calls for pieces fail, because the segment was merged away.
    Merged(usize),
    /// Every other call for a piece fails for now.
    Flaky,
    Damaged,
    Short,
    WrongMask,
    NoSegments,
}

fn text(document: u128) -> Vec<u32> {
    (0..LEN).map(|at| document as u32 * 1_000 + at).collect()
}

fn whole(document: u128) -> DocumentUpdate {
    DocumentUpdate {
        document: DocumentId(document),
        epoch: 1,
        prev_len: 0,
        tokens: text(document),
        head: DocumentHead::default(),
        finish: None,
    }
}

fn segment(number: u64) -> Vec<u32> {
    let mut builder = SegmentBuilder::new();
    for document in u128::from(number) * 10..u128::from(number) * 10 + 10 {
        builder.add(DocumentKey(document), [], text(document));
    }
    let bytes = builder.build().unwrap().to_bytes();
    let words = bytes.chunks_exact(4);
    words
        .map(|word| u32::from_le_bytes(word.try_into().unwrap()))
        .collect()
}

/// A store of two segments with ten documents each, the third of them removed, and one document in no segment. The
/// feed has all of it as well, and then one document more and one less.
fn sealed_store(fault: Fault) -> Arc<FakeStore> {
    let store = FakeStore::default();
    let mut content = store.content();
    content.generation = NOW.generation;
    let all = (0..22).filter(|document| *document != 2);
    content.news = all
        .map(|document| FeedEvent::Update(whole(document)))
        .chain([FeedEvent::Remove(DocumentId(11))])
        .collect();
    let unsealed = StoredDocument {
        tokens: text(20),
        ..StoredDocument::default()
    };
    content.documents.insert(DocumentId(20), unsealed);
    // A few words at a time, however many are asked for.
    content.piece_words_max = 300;
    let mut infos = Vec::new();
    for number in 0..2 {
        let mut words = segment(number);
        infos.push(SegmentInfo {
            segment: number,
            words: words.len() as u64,
            tokens: u64::from(LEN) * 10,
            masked: match (number, fault) {
                (0, Fault::WrongMask) => vec![10],
                (0, _) => vec![2],
                _ => Vec::new(),
            },
        });
        match fault {
            Fault::Damaged => words[20] ^= 1,
            Fault::Short => words.truncate(300),
            _ => {}
        }
        content.segment_words.insert(number, words);
    }
    content.segments = (fault != Fault::NoSegments).then(|| SegmentsReply {
        cursor: NOW,
        segments: infos,
        unsealed: vec![DocumentId(20), DocumentId(99)],
    });
    drop(content);
    let pieces = AtomicUsize::new(0);
    store.refuse(move |call| {
        let StoreCall::SegmentPiece(_) = call else {
            return None;
        };
        let asked = pieces.fetch_add(1, Ordering::Relaxed);
        match fault {
            Fault::Flaky if asked.is_multiple_of(2) => Some(ErrorKind::Unavailable),
            Fault::Merged(times) if asked < times => Some(ErrorKind::NotFound),
            _ => None,
        }
    });
    Arc::new(store)
}

struct Met {
    store: Arc<FakeStore>,
    metrics: Metrics,
    replica: DraftReplica,
    namespace: Arc<NamespaceReplica>,
}

/// A replica that met the namespace, once it has the documents 0 to 21 but for 2 and 11.
async fn met(fault: Fault, config: ReplicaConfig) -> Met {
    met_beside(fault, config, 0).await.0
}

/// As [`met`], while `coming` tokens are being fetched for another namespace.
async fn met_beside(fault: Fault, config: ReplicaConfig, coming: u64) -> (Met, Reservation) {
    let store = sealed_store(fault);
    let metrics = Metrics::new().unwrap();
    let own = ReplicaMetrics::register(metrics.registry()).unwrap();
    let signer = NamespaceSigner::new(&MeshConfig::generate().unwrap()).unwrap();
    let signed = signer.sign(Namespace {
        tenant: "acme".into(),
        model: "fake".into(),
        tokenizer: "fake".into(),
    });
    let replica = DraftReplica::new(config.clone(), 64, store.clone(), own);
    let of_another = SegmentInfo {
        segment: 7,
        words: coming,
        tokens: coming,
        masked: Vec::new(),
    };
    let (_, reservation) = replica
        .registry
        .shared
        .capacity
        .reserve(vec![of_another], &config);
    let namespace = replica.namespace(NamespaceId(1), &signed);
    let waited = tokio::time::timeout(Duration::from_secs(60), async {
        let has = |document| namespace.read().len_of(DocumentId(document)).is_some();
        while !has(21) || has(11) {
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
    });
    waited.await.unwrap();
    let met = Met {
        store,
        metrics,
        replica,
        namespace,
    };
    (met, reservation)
}

impl Met {
    fn calls(&self) -> Vec<&'static str> {
        let content = self.store.content();
        let calls = content.calls.iter().map(|call| match call {
            StoreCall::Segments(_) => "segments",
            StoreCall::SegmentPiece(_) => "piece",
            StoreCall::Documents(_) => "documents",
            StoreCall::Pull(_) => "pull",
            _ => "other",
        });
        calls.collect()
    }

    fn outcome(&self, outcome: &str) -> bool {
        self.outcomes(outcome, 1)
    }

    fn outcomes(&self, outcome: &str, count: usize) -> bool {
        let shown = String::from_utf8(self.metrics.render()).unwrap();
        shown.contains(&format!(
            "refrain_replica_take_overs_total{{outcome=\"{outcome}\"}} {count}\n"
        ))
    }

    fn assert_all_there(&self) {
        let drafts = self.namespace.read();
        for document in 0..22 {
            let expected = (document != 2 && document != 11).then_some(LEN);
            assert_eq!(drafts.len_of(DocumentId(document)), expected, "{document}");
        }
        assert_eq!(drafts.index.tokens(), 20 * u64::from(LEN));
    }
}

#[tokio::test(start_paused = true)]
async fn segments_are_taken_over_in_a_call_for_each_piece() {
    let met = met(Fault::None, ReplicaConfig::default()).await;
    met.assert_all_there();
    // 526 words each and more, in pieces of 300 at most.
    let pieces = segment(0).len().div_ceil(300) * 2;
    let mut expected = vec!["segments"];
    expected.extend(vec!["piece"; pieces]);
    expected.extend(["documents", "pull"]);
    // After that it waits for news.
    assert_eq!(met.calls()[..expected.len()], expected);
    assert!(met.outcome("done"));
    assert_eq!(met.namespace.read().index.segments().len(), 2);
    // A document of a segment that continues is taken back to the live part, as any other.
    met.namespace.pin(DocumentId(5));
    let more = DocumentUpdate {
        prev_len: LEN,
        tokens: vec![9, 9],
        ..whole(5)
    };
    met.namespace.merge((&more).into());
    assert_eq!(met.namespace.read().len_of(DocumentId(5)), Some(LEN + 2));
    // The first taken over are the first to be evicted.
    let evicted = met.namespace.write().evict(19 * u64::from(LEN));
    assert_eq!(evicted, 2);
    assert_eq!(met.namespace.read().len_of(DocumentId(0)), None);
    met.replica.stop();
}

#[tokio::test(start_paused = true)]
async fn segments_that_did_not_fit_beside_a_reservation_are_taken_over_once_that_is_gone() {
    let config = ReplicaConfig {
        tokens_max: 1_600,
        take_over_again_ms: 1,
        pull_wait_ms: 1,
        upkeep_ms: 1,
        ..ReplicaConfig::default()
    };
    let (met, coming) = met_beside(Fault::None, config, 700).await;
    assert!(met.namespace.is_partial());
    assert_eq!(met.namespace.read().len_of(DocumentId(5)), None);
    assert_eq!(met.namespace.read().len_of(DocumentId(15)), Some(LEN));
    // A namespace without a running request has no claim to the capacity.
    drop(coming);
    tokio::time::sleep(Duration::from_millis(50)).await;
    assert!(met.outcomes("done", 1));
    // Outputs of a group stay there, except for those that the store removed.
    let group = met
        .replica
        .join_group(NamespaceId(1), "prompt", DocumentId(300))
        .unwrap();
    group.group().merge((&whole(300)).into());
    group.group().merge((&whole(11)).into());
    let group = group.group().clone();
    met.namespace.pin(DocumentId(21));
    let waited = tokio::time::timeout(Duration::from_secs(60), async {
        while !met.outcomes("done", 2) || met.namespace.is_partial() {
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
    });
    waited.await.unwrap();
    let waited = tokio::time::timeout(Duration::from_secs(60), async {
        while group.read().len_of(DocumentId(11)).is_some() {
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
    });
    waited.await.unwrap();
    assert_eq!(group.read().len_of(DocumentId(300)), Some(LEN));
    met.assert_all_there();
    // All of it is here, so the store is not asked again.
    let listed = |met: &Met| {
        met.calls()
            .iter()
            .filter(|call| **call == "segments")
            .count()
    };
    let before = listed(&met);
    tokio::time::sleep(Duration::from_millis(50)).await;
    assert_eq!(listed(&met), before);
    met.replica.stop();
}

#[tokio::test(start_paused = true)]
async fn a_take_over_begins_again_when_a_segment_is_merged_away() {
    let again = met(Fault::Merged(2), ReplicaConfig::default()).await;
    again.assert_all_there();
    assert!(again.outcome("done"));
    let listed = again
        .calls()
        .iter()
        .filter(|call| **call == "segments")
        .count();
    assert_eq!(listed, 3);
    let in_vain = met(Fault::Merged(3), ReplicaConfig::default()).await;
    in_vain.assert_all_there();
    assert!(in_vain.outcome("failed"));
}

#[tokio::test(start_paused = true)]
async fn a_call_that_fails_for_now_is_made_again_for_the_missing_part() {
    let met = met(Fault::Flaky, ReplicaConfig::default()).await;
    met.assert_all_there();
    assert!(met.outcome("done"));
    let calls = met.calls();
    let pieces = calls.iter().filter(|call| **call == "piece").count();
    assert_eq!(pieces, segment(0).len().div_ceil(300) * 2 * 2);
    assert_eq!(calls.iter().filter(|call| **call == "segments").count(), 1);
}

#[tokio::test(start_paused = true)]
async fn without_sound_segments_the_feed_brings_everything() {
    for fault in [
        Fault::Damaged,
        Fault::Short,
        Fault::WrongMask,
        Fault::NoSegments,
    ] {
        let met = met(fault, ReplicaConfig::default()).await;
        met.assert_all_there();
        let outcome = if fault == Fault::NoSegments {
            "nothing"
        } else {
            "failed"
        };
        assert!(met.outcome(outcome), "{fault:?}");
        assert_eq!(met.namespace.read().index.segments().len(), 0, "{fault:?}");
    }
}
