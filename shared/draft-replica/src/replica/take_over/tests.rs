//! Taking over from a store that has segments, that loses them, and that answers nonsense.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use async_trait::async_trait;
use refrain_protocol::document::{
    AppendReply, AppendRequest, DocumentHead, DocumentUpdate, FeedEvent, FollowReply,
    FollowRequest, StoreStats, StreamPosition, TouchRequest,
};
use refrain_protocol::segment::{DocumentsReply, SegmentPiece};
use refrain_protocol::{Namespace, NamespaceId};
use refrain_rpc::DraftStore;
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
    sequence: 70,
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

/// A store of two segments with ten documents each, the third of them removed, and one document in no segment. The
/// feed has all of it as well.
struct SealedStore {
    fault: Fault,
    calls: Mutex<Vec<&'static str>>,
    pieces: AtomicUsize,
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

impl SealedStore {
    fn note(&self, call: &'static str) {
        self.calls.lock().unwrap().push(call);
    }
}

#[async_trait]
impl DraftStore for SealedStore {
    async fn append(&self, _: AppendRequest) -> Result<AppendReply, ApiError> {
        Err(ApiError::internal("nothing is appended"))
    }

    async fn follow(&self, request: FollowRequest) -> Result<FollowReply, ApiError> {
        if request.after.sequence > NOW.sequence {
            tokio::time::sleep(Duration::from_millis(request.wait_ms.into())).await;
            return Ok(FollowReply {
                reset: false,
                events: Vec::new(),
                cursor: request.after,
                caught_up: true,
            });
        }
        self.note("follow");
        let from_start = request.after == FeedCursor::default();
        // The news are one document more and one less. A caller from the start gets everything before them.
        let all = (0..21).filter(|document| from_start && *document != 2);
        let mut events: Vec<FeedEvent> = all
            .map(|document| FeedEvent::Update(whole(document)))
            .collect();
        events.push(FeedEvent::Update(whole(21)));
        events.push(FeedEvent::Remove(DocumentId(11)));
        Ok(FollowReply {
            reset: from_start,
            events,
            cursor: FeedCursor {
                sequence: NOW.sequence + 2,
                ..NOW
            },
            caught_up: true,
        })
    }

    async fn touch(&self, _: TouchRequest) -> Result<(), ApiError> {
        Ok(())
    }

    async fn stats(&self) -> Result<StoreStats, ApiError> {
        Ok(StoreStats::default())
    }

    async fn segments(&self, _: SegmentsRequest) -> Result<SegmentsReply, ApiError> {
        self.note("segments");
        if self.fault == Fault::NoSegments {
            return Err(ApiError::new(ErrorKind::NotFound, "none"));
        }
        let info = |number: u64, masked: Vec<u32>| SegmentInfo {
            segment: number,
            words: segment(number).len() as u64,
            tokens: u64::from(LEN) * 10,
            masked,
        };
        let last = if self.fault == Fault::WrongMask {
            10
        } else {
            2
        };
        Ok(SegmentsReply {
            cursor: NOW,
            segments: vec![info(0, vec![last]), info(1, Vec::new())],
            unsealed: vec![DocumentId(20), DocumentId(99)],
        })
    }

    async fn segment_piece(&self, request: SegmentPieceRequest) -> Result<SegmentPiece, ApiError> {
        self.note("piece");
        let asked = self.pieces.fetch_add(1, Ordering::Relaxed);
        if self.fault == Fault::Flaky && asked.is_multiple_of(2) {
            return Err(ApiError::new(ErrorKind::Unavailable, "later"));
        }
        if let Fault::Merged(times) = self.fault
            && asked < times
        {
            return Err(ApiError::new(ErrorKind::NotFound, "gone"));
        }
        let mut words = segment(request.segment);
        if self.fault == Fault::Damaged {
            words[20] ^= 1;
        }
        // A few words at a time, however many were asked for.
        let from = request.offset as usize;
        let to = words.len().min(from + 300);
        let end = if self.fault == Fault::Short { 0 } else { to };
        Ok(SegmentPiece {
            words: words[from.min(end)..end].to_vec(),
        })
    }

    async fn documents(&self, request: DocumentsRequest) -> Result<DocumentsReply, ApiError> {
        self.note("documents");
        let known = request.documents.iter().filter(|document| document.0 == 20);
        Ok(DocumentsReply {
            updates: known.map(|document| whole(document.0)).collect(),
            covered: request.documents.len() as u32,
        })
    }
}

struct Met {
    store: Arc<SealedStore>,
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
    let store = Arc::new(SealedStore {
        fault,
        calls: Mutex::default(),
        pieces: AtomicUsize::new(0),
    });
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
        self.store.calls.lock().unwrap().clone()
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
    expected.extend(["documents", "follow"]);
    assert_eq!(met.calls(), expected);
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
        follow_wait_ms: 1,
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
