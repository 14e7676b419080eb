//! Look-ups in a store that answers, that is slow, and that answers nonsense.

use std::sync::Mutex;

use async_trait::async_trait;
use refrain_protocol::Namespace;
use refrain_protocol::document::{
    AppendReply, AppendRequest, FollowReply, FollowRequest, StoreStats, TouchRequest,
};
use refrain_protocol::lookup::{FoundNode, LookupReply};
use refrain_service_kit::mesh::{MeshConfig, NamespaceSigner};
use refrain_service_kit::telemetry::Metrics;
use tokio::sync::Semaphore;

use super::*;
use crate::config::ReplicaConfig;
use crate::replica::DraftReplica;

/// Answers as many look-ups as there are permits, each context with its last token twice.
struct SlowStore {
    permits: Semaphore,
    refuses: AtomicBool,
    asked: Mutex<Vec<usize>>,
}

#[async_trait]
impl DraftStore for SlowStore {
    async fn append(&self, _: AppendRequest) -> Result<AppendReply, ApiError> {
        Err(ApiError::internal("nothing is appended"))
    }

    async fn follow(&self, _: FollowRequest) -> Result<FollowReply, ApiError> {
        std::future::pending().await
    }

    async fn touch(&self, _: TouchRequest) -> Result<(), ApiError> {
        Ok(())
    }

    async fn stats(&self) -> Result<StoreStats, ApiError> {
        Ok(StoreStats::default())
    }

    async fn lookup(&self, request: LookupRequest) -> Result<LookupReply, ApiError> {
        self.asked.lock().unwrap().push(request.contexts.len());
        if self.refuses.load(Ordering::Relaxed) {
            return Err(ApiError::new(ErrorKind::Unavailable, "opening"));
        }
        self.permits.acquire().await.unwrap().forget();
        let drafts = request.contexts.iter().map(|context| {
            let token = *context.tokens.last()?;
            Some(draft(&[(token, None, 0.5), (token, Some(0), 0.25)]))
        });
        Ok(LookupReply {
            drafts: drafts.collect(),
        })
    }
}

fn draft(nodes: &[(u32, Option<u32>, f32)]) -> FoundDraft {
    let nodes = nodes.iter().map(|&(token, parent, probability)| FoundNode {
        token,
        parent,
        probability,
        count: 1,
        place: Some((DocumentId(7), 3)),
    });
    FoundDraft {
        score: 99.0,
        match_len: 5,
        nodes: nodes.collect(),
    }
}

struct Bench {
    store: Arc<SlowStore>,
    replica: DraftReplica,
    signer: NamespaceSigner,
    metrics: Metrics,
    lookup: RemoteLookup,
}

impl Bench {
    fn new(wait: Duration) -> Self {
        let store = Arc::new(SlowStore {
            permits: Semaphore::new(0),
            refuses: AtomicBool::new(false),
            asked: Mutex::default(),
        });
        let config = RemoteLookupConfig {
            wait_us_max: wait.as_micros() as u64,
            step_share_max: 0.5,
        };
        let metrics = Metrics::new().unwrap();
        let own = ReplicaMetrics::register(metrics.registry()).unwrap();
        let params = ProposeParams::default();
        Bench {
            lookup: RemoteLookup::new(store.clone(), &config, &params, own.clone()),
            replica: DraftReplica::new(ReplicaConfig::default(), 64, store.clone(), own),
            signer: NamespaceSigner::new(&MeshConfig::generate().unwrap()).unwrap(),
            store,
            metrics,
        }
    }

    fn query(&self, tenant: u128, document: u128) -> DraftQuery {
        let signed = self.signer.sign(Namespace {
            tenant: tenant.to_string(),
            model: "fake".into(),
            tokenizer: "fake".into(),
        });
        DraftQuery {
            replica: self.replica.namespace(NamespaceId(tenant), &signed),
            document: DocumentId(document),
            context: vec![1, 2, document as u32],
            span: tracing::Span::none(),
        }
    }

    async fn look_up(&mut self, queries: &[(u128, u128)]) -> Vec<u128> {
        let queries = queries
            .iter()
            .map(|&(tenant, document)| self.query(tenant, document));
        let queries: Vec<DraftQuery> = queries.collect();
        let found = self.lookup.look_up(queries).await;
        let mut documents: Vec<u128> = found.keys().map(|document| document.0).collect();
        documents.sort_unstable();
        documents
    }

    fn asked(&self) -> Vec<usize> {
        let mut asked = self.store.asked.lock().unwrap().clone();
        asked.sort_unstable();
        asked
    }

    fn count(&self, outcome: &str) -> bool {
        let shown = String::from_utf8(self.metrics.render()).unwrap();
        shown.contains(&format!(
            "refrain_replica_lookups_total{{outcome=\"{outcome}\"}} 1\n"
        ))
    }
}

#[tokio::test(start_paused = true)]
async fn one_call_looks_up_for_all_requests_of_a_namespace() {
    let mut bench = Bench::new(Duration::from_secs(60));
    bench.store.permits.add_permits(10);
    assert!(
        bench.look_up(&[(1, 5)]).await.is_empty(),
        "no step was measured yet"
    );
    bench.lookup.record_step(100.0);
    assert_eq!(bench.look_up(&[(1, 5), (2, 8), (1, 6)]).await, [5, 6, 8]);
    assert_eq!(bench.asked(), [1, 2]);
    bench.replica.stop();
}

#[tokio::test(start_paused = true)]
async fn a_step_does_not_wait_for_a_late_answer_nor_ask_again_meanwhile() {
    let mut bench = Bench::new(Duration::from_millis(5));
    bench.lookup.record_step(100.0);
    assert!(bench.look_up(&[(1, 5)]).await.is_empty());
    assert!(bench.count("late") && bench.count("asked"));
    // For that namespace a call is in flight.
    assert!(bench.look_up(&[(1, 5)]).await.is_empty());
    assert_eq!(bench.asked(), [1]);
    bench.store.permits.add_permits(1);
    while bench
        .query(1, 5)
        .replica
        .is_looking_up
        .load(Ordering::Relaxed)
    {
        tokio::task::yield_now().await;
    }
    bench.store.permits.add_permits(10);
    bench.lookup.wait_max = Duration::from_secs(60);
    assert_eq!(bench.look_up(&[(1, 5)]).await, [5]);
    bench.replica.stop();
}

#[tokio::test(start_paused = true)]
async fn a_step_is_not_held_up_for_a_share_of_it_that_is_too_short_nor_by_a_store_that_refuses() {
    let mut bench = Bench::new(Duration::from_secs(60));
    bench.store.permits.add_permits(10);
    bench.lookup.record_step(0.000_199);
    assert!(bench.look_up(&[(1, 5)]).await.is_empty());
    bench.lookup.step_s = Some(100.0);
    bench.store.refuses.store(true, Ordering::Relaxed);
    assert!(bench.look_up(&[(1, 5)]).await.is_empty());
    assert!(bench.look_up(&[(1, 5)]).await.is_empty());
    assert_eq!(bench.asked(), [1], "asked again at once");
    assert!(bench.count("failed"));
    // Other namespaces are asked for.
    bench.store.refuses.store(false, Ordering::Relaxed);
    assert_eq!(bench.look_up(&[(1, 5), (2, 8)]).await, [8]);
    bench.replica.stop();
}

#[test]
fn nodes_that_are_no_tree_are_no_draft() {
    let sound = candidate(&draft(&[(1, None, 0.5), (2, Some(0), 0.25)])).unwrap();
    // The score is that of the nodes, not that of the answer.
    assert_eq!(
        (sound.score, sound.match_len, sound.tree.len()),
        (1.75, 5, 2)
    );
    let place = sound.tree.nodes()[0].origin.place.unwrap();
    assert_eq!((place.document.0, place.position), (7, 3));
    for nodes in [
        vec![],
        vec![(1, Some(0), 0.5)],
        vec![(1, None, 0.5), (1, None, 0.5)],
        vec![(1, None, 1.5)],
        vec![(1, None, f32::NAN)],
    ] {
        assert!(candidate(&draft(&nodes)).is_none(), "{nodes:?}");
    }
}
