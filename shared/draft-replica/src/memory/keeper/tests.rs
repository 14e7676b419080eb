//! The keeper at work on indexes that are written and asked meanwhile.

mod figures;

use std::sync::atomic::AtomicUsize;

use async_trait::async_trait;
use refrain_protocol::document::{
    AppendReply, AppendRequest, DocumentHead, DocumentUpdate, FeedCursor, FeedEvent, FinishReason,
    FollowReply, FollowRequest, StoreStats, TouchRequest,
};
use refrain_protocol::{ApiError, DocumentId, Namespace, NamespaceId, SignedNamespace};
use refrain_rpc::DraftStore;
use refrain_service_kit::mesh::{MeshConfig, NamespaceSigner};
use refrain_service_kit::telemetry::Metrics;
use refrain_speculation::{Candidate, ProposeParams};

use super::super::{Memory, NamespaceMemory};
use super::*;
use crate::config::MemoryConfig;
use crate::memory::drafts::settled_bytes;
use crate::memory::drafts::tests::proposed;

/// A store whose feed holds these documents, each whole and ended.
#[derive(Default)]
struct Feed {
    documents: Vec<Vec<u32>>,
    /// Documents handed out.
    sent: AtomicUsize,
}

#[async_trait]
impl DraftStore for Feed {
    async fn append(&self, _: AppendRequest) -> Result<AppendReply, ApiError> {
        Ok(AppendReply {
            lengths: Vec::new(),
        })
    }

    async fn follow(&self, request: FollowRequest) -> Result<FollowReply, ApiError> {
        let from = request.after.sequence as usize;
        if from >= self.documents.len() {
            std::future::pending::<()>().await;
        }
        let mut tokens = 0;
        let mut events = Vec::new();
        for (number, text) in self.documents.iter().enumerate().skip(from) {
            if !events.is_empty() && tokens + text.len() > request.max_tokens as usize {
                break;
            }
            tokens += text.len();
            events.push(FeedEvent::Update(whole(number as u128, text)));
        }
        let sequence = (from + events.len()) as u64;
        self.sent.store(sequence as usize, Ordering::Relaxed);
        Ok(FollowReply {
            reset: false,
            caught_up: sequence as usize == self.documents.len(),
            events,
            cursor: FeedCursor {
                generation: 0,
                sequence,
            },
        })
    }

    async fn touch(&self, _: TouchRequest) -> Result<(), ApiError> {
        Ok(())
    }

    async fn stats(&self) -> Result<StoreStats, ApiError> {
        Ok(StoreStats::default())
    }
}

fn piece(document: u128, prev_len: u32, tokens: &[u32]) -> DocumentUpdate {
    DocumentUpdate {
        document: DocumentId(document),
        epoch: 1,
        prev_len,
        tokens: tokens.to_vec(),
        head: DocumentHead::default(),
        finish: None,
    }
}

fn whole(document: u128, text: &[u32]) -> DocumentUpdate {
    DocumentUpdate {
        finish: Some(FinishReason::Stop),
        ..piece(document, 0, text)
    }
}

/// A memory with its keeper.
struct Bench {
    memory: Memory,
    metrics: Metrics,
    signed: SignedNamespace,
}

impl Bench {
    fn new(store: Arc<Feed>, change: impl FnOnce(&mut MemoryConfig)) -> Self {
        let mut config = MemoryConfig {
            upkeep_ms: 1,
            seal_tokens: 1_000,
            ..MemoryConfig::default()
        };
        change(&mut config);
        let metrics = Metrics::new().unwrap();
        let own = MemoryMetrics::new(&metrics).unwrap();
        let signer = NamespaceSigner::new(&MeshConfig::generate().unwrap()).unwrap();
        Bench {
            memory: Memory::new(config, 64, store, own),
            metrics,
            signed: signer.sign(Namespace {
                tenant: "acme".into(),
                model: "fake".into(),
                tokenizer: "fake".into(),
            }),
        }
    }

    fn namespace(&self, id: u128) -> Arc<NamespaceMemory> {
        self.memory.namespace(NamespaceId(id), &self.signed)
    }

    /// A figure that is shown.
    fn figure(&self, series: &str) -> f64 {
        let shown = String::from_utf8(self.metrics.render()).unwrap();
        let value = shown
            .lines()
            .find_map(|line| line.strip_prefix(series)?.strip_prefix(' '));
        value.unwrap().parse().unwrap()
    }

    fn jobs(&self, job: &str) -> f64 {
        self.figure(&format!("refrain_worker_index_jobs_total{{job=\"{job}\"}}"))
    }
}

async fn eventually(what: &str, holds: impl Fn() -> bool) {
    let waited = tokio::time::timeout(Duration::from_secs(60), async {
        while !holds() {
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
    });
    assert!(waited.await.is_ok(), "never: {what}");
}

fn draft(drafts: &Drafts, context: &[u32], document: Option<u128>) -> Option<Candidate> {
    proposed(drafts, &ProposeParams::default(), context, document)
}

/// No two of these texts share a token.
fn distinct(document: u128, len: u32) -> Vec<u32> {
    (0..len).map(|at| document as u32 * 1000 + at).collect()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn appends_and_drafts_go_on_while_seals_run() {
    let bench = Arc::new(Bench::new(Arc::default(), |_| {}));
    let memory = bench.namespace(1);
    let (shared, figures) = (memory.clone(), bench.clone());
    let written = tokio::task::spawn_blocking(move || {
        let mut during_builds = 0;
        let started = Instant::now();
        let mut document = 0;
        // However the threads take their turns, until each has had some.
        loop {
            let (seals, merges) = (figures.jobs("seal"), figures.jobs("merge"));
            if document >= 200 && seals >= 5.0 && merges >= 1.0 && during_builds >= 5 {
                return document;
            }
            assert!(
                started.elapsed() < Duration::from_secs(60),
                "{seals} seals, {merges} merges, {during_builds} steps during builds"
            );
            let text = distinct(document, 100);
            shared.begin(DocumentId(document));
            for (number, tokens) in text.chunks(10).enumerate() {
                shared.merge(&piece(document, number as u32 * 10, tokens));
                let is_building = shared.drafts.building.try_lock().is_err();
                let drafts = shared.lock();
                let so_far = (number + 1) * 10;
                assert_eq!(drafts.len_of(DocumentId(document)), Some(so_far as u32));
                // Nothing follows a new text, and what was said before can be found, sealed or not.
                assert_eq!(draft(&drafts, &text[..so_far], Some(document)), None);
                let old = distinct(document / 2, 100);
                let found = draft(&drafts, &old[..8], None);
                if document > 0 {
                    assert_eq!(found.unwrap().tree.tokens().next(), Some(old[8]));
                }
                drop(drafts);
                during_builds += usize::from(is_building);
            }
            shared.merge(&whole(document, &text));
            shared.end(DocumentId(document));
            document += 1;
        }
    });
    let written: u128 = written.await.unwrap();
    eventually("nearly all is sealed, in few segments", || {
        let drafts = memory.lock();
        drafts.index.live_tokens() < 1_000 && drafts.index.plan_merge().is_none()
    })
    .await;
    let drafts = memory.lock();
    assert_eq!(drafts.index.tokens(), 100 * written as u64);
    for document in 0..written {
        let text = distinct(document, 100);
        let found = draft(&drafts, &text[..50], None).unwrap();
        let drafted: Vec<u32> = found.tree.tokens().collect();
        assert_eq!(drafted, text[50..50 + drafted.len()]);
    }
    drop(drafts);
    bench.memory.observe();
    let shown = |name: &str| bench.figure(&format!("refrain_worker_index_{name}"));
    assert_eq!(
        shown("live_tokens") + shown("sealed_tokens"),
        shown("tokens")
    );
    assert_eq!(shown("live_bytes") + shown("segment_bytes"), shown("bytes"));
    assert!(shown("segments") >= 1.0);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_the_feed_brings_waits_for_seals() {
    let feed = Arc::new(Feed {
        documents: (0..600).map(|number| distinct(number, 100)).collect(),
        ..Feed::default()
    });
    let bench = Bench::new(feed.clone(), |config| config.follow_tokens = 500);
    let memory = bench.namespace(1);
    eventually("all of the feed is here", || {
        let live = memory.lock().index.live_tokens();
        // A reply is fetched below twice `seal_tokens`.
        assert!(live < 2 * 1_000 + 500, "{live} live tokens");
        memory.lock().index.tokens() == 60_000
    })
    .await;
    assert!(bench.jobs("seal") > 20.0);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn small_namespaces_share_the_room_for_what_is_live() {
    let feed = Arc::new(Feed {
        documents: (0..30).map(|number| distinct(number, 100)).collect(),
        ..Feed::default()
    });
    let bench = Bench::new(feed, |config| {
        config.seal_tokens = 1_000_000;
        config.live_tokens_max = 5_000;
        config.seal_after_ms = 5;
        config.follow_tokens = 500;
    });
    let memories: Vec<_> = (0..20).map(|id| bench.namespace(id)).collect();
    eventually("all are followed, and little is live", || {
        let live = memories
            .iter()
            .map(|memory| memory.lock().index.live_tokens());
        let is_followed = |memory: &Arc<NamespaceMemory>| memory.lock().index.tokens() == 3_000;
        memories.iter().all(is_followed) && live.sum::<u64>() <= 5_000
    })
    .await;
    // What does not press stays live: a namespace has one tree, and not a segment for every few documents.
    let live = memories
        .iter()
        .map(|memory| memory.lock().index.live_tokens());
    assert!(live.sum::<u64>() > 0);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn limits_hold_over_all_namespaces() {
    let bytes_max = 400_000;
    let bench = Bench::new(Arc::default(), |config| config.bytes_max = bytes_max);
    let old = bench.namespace(1);
    let memory = bench.namespace(2);
    old.merge(&whole(0, &distinct(0, 100)));
    for document in 0..1_000 {
        memory.merge(&whole(document, &distinct(document, 100)));
        // Much more of what is live would drive out what is sealed.
        eventually("there is room", || {
            memory.lock().index.live_tokens() < 1_500
        })
        .await;
    }
    eventually(
        "the namespace that was used last is within the limit",
        || {
            let sizes = memory.lock().index.sizes();
            settled_bytes(&sizes) <= bytes_max
                && sizes.live_tokens < 1_000
                && memory.lock().index.plan_merge().is_none()
        },
    )
    .await;
    bench.memory.observe();
    let (shown, tokens) = {
        let drafts = memory.lock();
        assert!(drafts.len_of(DocumentId(999)).is_some(), "the newest left");
        assert!(drafts.len_of(DocumentId(0)).is_none(), "the oldest stayed");
        (drafts.index.bytes() as f64, drafts.index.tokens())
    };
    assert!(tokens > 5_000, "{tokens} tokens are left");
    assert_eq!(bench.figure("refrain_worker_index_bytes"), shown);
    // Masks may take a third more until they are merged away.
    assert!(shown < 1.4 * bytes_max as f64, "{shown} bytes");
    assert_eq!(bench.figure("refrain_worker_index_namespaces"), 1.0);
    assert!(bench.figure("refrain_worker_index_evictions_total") > 1.0);
}

#[tokio::test]
async fn looking_for_work_does_not_wait_for_those_who_draft() {
    let bench = Bench::new(Arc::new(Feed::default()), |_| {});
    let shared = bench.namespace(1);
    // Who drafts holds the drafts for reading. A look that wanted them alone would never come back.
    let drafting = shared.read();
    let looked = std::thread::scope(|scope| {
        let look = scope.spawn(|| view(&shared.drafts, Instant::now(), Duration::ZERO));
        let until = Instant::now() + Duration::from_secs(20);
        while !look.is_finished() && Instant::now() < until {
            std::thread::sleep(Duration::from_millis(1));
        }
        let is_back = look.is_finished();
        drop(drafting);
        is_back
    });
    assert!(looked);
}
