//! Maintenance of indexes that requests read and write meanwhile.

use refrain_protocol::document::{DocumentHead, DocumentUpdate, FeedEvent, FinishReason};
use refrain_protocol::{DocumentId, Namespace, NamespaceId, SignedNamespace};
use refrain_rpc::testing::FakeStore;
use refrain_service_kit::mesh::{MeshConfig, NamespaceSigner};
use refrain_service_kit::telemetry::Metrics;
use refrain_speculation::draft::{Candidate, ProposeParams};

use super::*;
use crate::config::ReplicaConfig;
use crate::replica::draft_index::settled_bytes;
use crate::replica::draft_index::tests::proposed;
use crate::replica::{DraftReplica, NamespaceReplica};

/// A store whose feed holds as many documents of 100 tokens, each whole and ended.
fn feed(documents: u128) -> Arc<FakeStore> {
    let store = FakeStore::default();
    for number in 0..documents {
        let update = whole(number, &distinct(number, 100));
        store.push_news(FeedEvent::Update(update));
    }
    Arc::new(store)
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

/// A replica with its maintenance task.
struct Bench {
    replica: DraftReplica,
    metrics: Metrics,
    signed: SignedNamespace,
}

impl Bench {
    fn new(store: Arc<FakeStore>, change: impl FnOnce(&mut ReplicaConfig)) -> Self {
        let mut config = ReplicaConfig {
            upkeep_ms: 1,
            seal_tokens: 1_000,
            ..ReplicaConfig::default()
        };
        change(&mut config);
        let metrics = Metrics::new().unwrap();
        let own = ReplicaMetrics::register(metrics.registry()).unwrap();
        let signer = NamespaceSigner::new(&MeshConfig::generate().unwrap()).unwrap();
        Bench {
            replica: DraftReplica::new(config, 64, store, own),
            metrics,
            signed: signer.sign(Namespace {
                tenant: "acme".into(),
                model: "fake".into(),
                tokenizer: "fake".into(),
            }),
        }
    }

    fn namespace(&self, id: u128) -> Arc<NamespaceReplica> {
        self.replica.namespace(NamespaceId(id), &self.signed)
    }

    /// The value of a series.
    fn figure(&self, series: &str) -> f64 {
        let shown = String::from_utf8(self.metrics.render()).unwrap();
        let value = shown
            .lines()
            .find_map(|line| line.strip_prefix(series)?.strip_prefix(' '));
        value.unwrap().parse().unwrap()
    }

    fn jobs(&self, job: &str) -> f64 {
        self.figure(&format!("refrain_replica_jobs_total{{job=\"{job}\"}}"))
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

fn draft(drafts: &DraftIndex, context: &[u32], document: Option<u128>) -> Option<Candidate> {
    proposed(drafts, &ProposeParams::default(), context, document)
}

/// No two of these texts share a token.
fn distinct(document: u128, len: u32) -> Vec<u32> {
    (0..len).map(|at| document as u32 * 1000 + at).collect()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn appends_and_drafts_go_on_while_seals_run() {
    let bench = Arc::new(Bench::new(Arc::default(), |_| {}));
    let namespace = bench.namespace(1);
    let (shared, figures) = (namespace.clone(), bench.clone());
    let written = tokio::task::spawn_blocking(move || {
        let mut during_builds = 0;
        let started = Instant::now();
        let mut document = 0;
        // Until each thread has had its turns, in whatever order they come.
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
            shared.pin(DocumentId(document));
            for (number, tokens) in text.chunks(10).enumerate() {
                shared.merge((&piece(document, number as u32 * 10, tokens)).into());
                let is_building = shared.index.building.try_lock().is_err();
                let drafts = shared.read();
                let so_far = (number + 1) * 10;
                assert_eq!(drafts.len_of(DocumentId(document)), Some(so_far as u32));
                // Nothing follows a new text, and older outputs can be found, sealed or not.
                assert_eq!(draft(&drafts, &text[..so_far], Some(document)), None);
                let old = distinct(document / 2, 100);
                let found = draft(&drafts, &old[..8], None);
                if document > 0 {
                    assert_eq!(found.unwrap().tree.tokens().next(), Some(old[8]));
                }
                drop(drafts);
                during_builds += usize::from(is_building);
            }
            shared.merge((&whole(document, &text)).into());
            shared.unpin(DocumentId(document));
            document += 1;
        }
    });
    let written: u128 = written.await.unwrap();
    eventually("nearly all is sealed, in few segments", || {
        let drafts = namespace.read();
        drafts.index.live_tokens() < 1_000 && drafts.index.plan_merge().is_none()
    })
    .await;
    let drafts = namespace.read();
    assert_eq!(drafts.index.tokens(), 100 * written as u64);
    for document in 0..written {
        let text = distinct(document, 100);
        let found = draft(&drafts, &text[..50], None).unwrap();
        let drafted: Vec<u32> = found.tree.tokens().collect();
        assert_eq!(drafted, text[50..50 + drafted.len()]);
    }
    drop(drafts);
    bench.replica.observe();
    let shown = |name: &str| bench.figure(&format!("refrain_replica_{name}"));
    assert_eq!(
        shown("live_tokens") + shown("sealed_tokens"),
        shown("tokens")
    );
    assert_eq!(shown("live_bytes") + shown("segment_bytes"), shown("bytes"));
    assert!(shown("segments") >= 1.0);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_feed_waits_for_seals() {
    let bench = Bench::new(feed(600), |config| config.pull_tokens = 500);
    let namespace = bench.namespace(1);
    eventually("all of the feed is here", || {
        let live = namespace.read().index.live_tokens();
        // The next reply is fetched once less than twice `seal_tokens` is live.
        assert!(live < 2 * 1_000 + 500, "{live} live tokens");
        namespace.read().index.tokens() == 60_000
    })
    .await;
    assert!(bench.jobs("seal") > 20.0);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn small_namespaces_share_the_live_capacity() {
    let bench = Bench::new(feed(30), |config| {
        config.seal_tokens = 1_000_000;
        config.live_tokens_max = 5_000;
        config.seal_after_ms = 5;
        config.pull_tokens = 500;
    });
    let namespaces: Vec<_> = (0..20).map(|id| bench.namespace(id)).collect();
    eventually("all are followed, and little is live", || {
        let live = namespaces
            .iter()
            .map(|namespace| namespace.read().index.live_tokens());
        let is_followed =
            |namespace: &Arc<NamespaceReplica>| namespace.read().index.tokens() == 3_000;
        namespaces.iter().all(is_followed) && live.sum::<u64>() <= 5_000
    })
    .await;
    // The rest stays live, so that a namespace has one tree, and not a segment for every few documents.
    let live = namespaces
        .iter()
        .map(|namespace| namespace.read().index.live_tokens());
    assert!(live.sum::<u64>() > 0);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn limits_hold_over_all_namespaces() {
    let bytes_max = 400_000;
    let bench = Bench::new(Arc::default(), |config| config.bytes_max = bytes_max);
    let old = bench.namespace(1);
    let namespace = bench.namespace(2);
    old.merge((&whole(0, &distinct(0, 100))).into());
    for document in 0..1_000 {
        namespace.merge((&whole(document, &distinct(document, 100))).into());
        // Many more live tokens would evict sealed ones.
        eventually("there is capacity", || {
            namespace.read().index.live_tokens() < 1_500
        })
        .await;
    }
    eventually(
        "the most recently used namespace is within the limit",
        || {
            let sizes = namespace.read().index.sizes();
            settled_bytes(&sizes) <= bytes_max
                && sizes.live_tokens < 1_000
                && namespace.read().index.plan_merge().is_none()
        },
    )
    .await;
    bench.replica.observe();
    let (shown, tokens) = {
        let drafts = namespace.read();
        assert!(
            drafts.len_of(DocumentId(999)).is_some(),
            "the newest was evicted"
        );
        assert!(drafts.len_of(DocumentId(0)).is_none(), "the oldest stayed");
        (drafts.index.bytes() as f64, drafts.index.tokens())
    };
    assert!(tokens > 5_000, "{tokens} tokens are left");
    assert_eq!(bench.figure("refrain_replica_bytes"), shown);
    // Masked documents may take a third more until they are merged away.
    assert!(shown < 1.4 * bytes_max as f64, "{shown} bytes");
    assert_eq!(bench.figure("refrain_replica_namespaces"), 1.0);
    let evicted = |unit: &str| {
        bench.figure(&format!(
            "refrain_replica_evictions_total{{unit=\"{unit}\"}}"
        ))
    };
    assert!(evicted("document") > 1.0);
    assert_eq!(evicted("namespace"), 1.0);
}

#[tokio::test]
async fn a_namespace_that_is_used_meanwhile_stays_and_no_other_goes_in_its_place() {
    let bench = Bench::new(Arc::default(), |_| {});
    let registry = bench.replica.registry.clone();
    for id in 0..3 {
        let namespace = bench.namespace(id);
        namespace.merge((&whole(id, &distinct(id, 100))).into());
    }
    // No maintenance runs, since nothing is awaited here.
    let measure = || {
        let namespaces = registry.namespaces().into_iter();
        let measured = namespaces.map(|namespace| {
            let size = namespace.read().size();
            (namespace, size)
        });
        measured.collect::<Vec<_>>()
    };
    let ids = || registry.namespaces().iter().map(|of| of.id.0).collect();
    let limit = IndexSize {
        tokens: 250,
        bytes: u64::MAX,
    };
    let measured = measure();
    // A request uses the one that would go.
    bench.namespace(0);
    let fitted = registry.fit(measured, limit);
    assert!(fitted.is_outdated);
    let left: Vec<u128> = ids();
    assert_eq!(left, [1, 2, 0]);
    assert_eq!(registry.fit(measure(), limit), Fitted::default());
    let left: Vec<u128> = ids();
    assert_eq!(left, [2, 0]);
    // The last one loses its document rather than to be evicted.
    let fitted = registry.fit(
        measure(),
        IndexSize {
            tokens: 50,
            ..limit
        },
    );
    assert_eq!(fitted.evicted, 1);
    let left: Vec<u128> = ids();
    assert_eq!(left, [0]);
}

#[tokio::test]
async fn looking_for_a_job_does_not_wait_for_requests_that_draft() {
    let bench = Bench::new(Arc::default(), |_| {});
    let shared = bench.namespace(1);
    // A request that drafts shares the lock. A look that wanted it alone would never return.
    let drafting = shared.read();
    let looked = std::thread::scope(|scope| {
        let look = scope.spawn(|| view(&shared.index, Instant::now(), Duration::ZERO));
        let until = Instant::now() + Duration::from_secs(120);
        while !look.is_finished() && Instant::now() < until {
            std::thread::sleep(Duration::from_millis(1));
        }
        let is_back = look.is_finished();
        drop(drafting);
        is_back
    });
    assert!(looked);
}
