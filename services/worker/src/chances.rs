//! What drafts are worth, shared with the other workers of a namespace through the draft store.
//!
//! When the worker meets a namespace it asks what is known there, and from then on it tells now and then what it observed,
//! which is answered with what all of them know. A task of its own makes the calls; the decode loop hands over bytes and
//! takes in answers, and never waits. What did not arrive is told the next time. (If the store took it and only the answer
//! was lost, it counts twice, which the decay forgets.) A worker that stops tells the rest.

use std::num::NonZeroUsize;
use std::sync::Arc;
use std::time::{Duration, Instant};

use lru::LruCache;
use refrain_protocol::acceptance::AcceptanceStatsRequest;
use refrain_protocol::{ApiError, ErrorKind, NamespaceId, SignedNamespace};
use refrain_rpc::DraftStore;
use refrain_speculation::{Goodput, Observed};
use refrain_speculation::statistics::AcceptanceStatistics;
use tokio::sync::mpsc;
use tokio::task::JoinHandle;

use crate::metrics::WorkerMetrics;

/// Calls that wait for the store at most; past it a namespace waits for its next turn.
const CALLS_MAX: usize = 16;

/// See the module.
pub(crate) struct Chances {
    /// `None`: nothing is shared.
    interval: Option<Duration>,
    /// Whose chances are learnt here; as many as the router knows.
    namespaces: LruCache<NamespaceId, Turn>,
    calls: mpsc::Sender<Told>,
    answers: mpsc::Receiver<Answer>,
    /// The task that makes the calls.
    telling: Option<JoinHandle<()>>,
}

/// When a namespace is told of next, and in whose name.
struct Turn {
    namespace: SignedNamespace,
    due: Instant,
    under_way: bool,
    /// It was never asked what is known there.
    is_new: bool,
}

/// What the store is told.
struct Told {
    id: NamespaceId,
    namespace: SignedNamespace,
    observed: Observed,
}

/// What came of it.
struct Answer {
    id: NamespaceId,
    /// What is known; `None` where that is nothing.
    known: Result<Option<AcceptanceStatistics>, Observed>,
}

impl Chances {
    /// Shares every `interval`, or not at all.
    pub(crate) fn start(
        interval: Option<Duration>,
        namespaces_max: NonZeroUsize,
        store: Arc<dyn DraftStore>,
        metrics: WorkerMetrics,
    ) -> Self {
        let (calls, told) = mpsc::channel(CALLS_MAX);
        // Each answers a call that was let in.
        let (say, answers) = mpsc::channel(CALLS_MAX + 1);
        Chances {
            interval,
            namespaces: LruCache::new(namespaces_max),
            calls,
            answers,
            telling: interval.map(|_| tokio::spawn(tell(told, say, store, metrics))),
        }
    }

    /// A request of this namespace begins: what is known there is asked for, if it is new here.
    pub(crate) fn meet(&mut self, id: NamespaceId, namespace: &SignedNamespace, now: Instant) {
        if self.interval.is_none() {
            return;
        }
        let new = || Turn {
            namespace: namespace.clone(),
            due: now,
            under_way: false,
            is_new: true,
        };
        // Signatures have a limited life: the latest counts.
        self.namespaces
            .get_or_insert_mut(id, new)
            .namespace
            .clone_from(namespace);
    }

    /// Takes in what was answered.
    fn hear(&mut self, router: &mut Goodput<NamespaceId>) {
        while let Ok(Answer { id, known }) = self.answers.try_recv() {
            if let Some(turn) = self.namespaces.peek_mut(&id) {
                turn.under_way = false;
            }
            match known {
                Ok(Some(known)) => router.calibration(id).rebase(known),
                Ok(None) => {}
                Err(observed) => router.calibration(id).put_back(&observed),
            }
        }
    }

    /// Takes in what was answered, and tells what is due.
    pub(crate) fn exchange(&mut self, router: &mut Goodput<NamespaceId>, now: Instant) {
        self.hear(router);
        let Some(interval) = self.interval else {
            return;
        };
        for (id, turn) in &mut self.namespaces {
            if turn.due > now || turn.under_way {
                continue;
            }
            turn.due = now + interval;
            let Ok(call) = self.calls.try_reserve() else {
                continue;
            };
            let calibration = router.calibration(*id);
            if turn.is_new || calibration.has_observed() {
                turn.is_new = false;
                turn.under_way = true;
                call.send(Told {
                    id: *id,
                    namespace: turn.namespace.clone(),
                    observed: calibration.take_observed(),
                });
            }
        }
    }

    /// How long nothing is to be told, where a loop without requests waits for something to do.
    pub(crate) async fn wait(&self, router: &Goodput<NamespaceId>) {
        let news = self
            .namespaces
            .iter()
            .filter(|(id, turn)| !turn.under_way && (turn.is_new || router.has_observed(id)));
        match news.map(|(_, turn)| turn.due).min() {
            Some(due) => tokio::time::sleep_until(due.into()).await,
            None => std::future::pending().await,
        }
    }

    /// Tells all that was not told yet, and returns when the store has answered. What it does not take is lost: nobody
    /// is there to tell it again.
    pub(crate) async fn finish(mut self, router: &mut Goodput<NamespaceId>) {
        // What the store did not take comes back with its answer, and is told again.
        self.hear(router);
        let Some(telling) = self.telling else { return };
        // Nobody learns from answers any more.
        drop(self.answers);
        for (id, turn) in self.namespaces {
            if !router.has_observed(&id) {
                continue;
            }
            let told = Told {
                id,
                namespace: turn.namespace,
                observed: router.calibration(id).take_observed(),
            };
            if self.calls.send(told).await.is_err() {
                return;
            }
        }
        drop(self.calls);
        // A panic there is reported where it happened.
        let _ = telling.await;
    }
}

async fn tell(
    mut told: mpsc::Receiver<Told>,
    say: mpsc::Sender<Answer>,
    store: Arc<dyn DraftStore>,
    metrics: WorkerMetrics,
) {
    while let Some(Told {
        id,
        namespace,
        observed,
    }) = told.recv().await
    {
        let request = AcceptanceStatsRequest {
            namespace,
            observed: match observed.is_empty() {
                true => Vec::new(),
                false => observed.to_bytes(),
            },
        };
        let answer = store.acceptance_stats(request).await;
        let known = match answer.and_then(|reply| read(&reply.tables)) {
            Ok(known) => Ok(known),
            Err(error) => {
                tracing::debug!(%error, "what drafts are worth was not told to the store");
                Err(observed)
            }
        };
        metrics.chances_call(known.is_ok());
        // A worker that stops does not listen.
        let _ = say.send(Answer { id, known }).await;
    }
}

fn read(tables: &[u8]) -> Result<Option<AcceptanceStatistics>, ApiError> {
    if tables.is_empty() {
        return Ok(None);
    }
    let known = AcceptanceStatistics::from_bytes(tables);
    known.map(Some).map_err(|error| {
        let message = "the draft store's chances cannot be read";
        ApiError::new(ErrorKind::Upstream, message).with_detail(error)
    })
}

#[cfg(test)]
mod tests {
    use std::sync::Mutex;
    use std::sync::atomic::{AtomicBool, Ordering};

    use async_trait::async_trait;
    use refrain_protocol::Namespace;
    use refrain_protocol::acceptance::AcceptanceStatsReply;
    use refrain_protocol::document::*;
    use refrain_service_kit::mesh::{MeshConfig, NamespaceSigner};
    use refrain_service_kit::telemetry::Metrics;
    use refrain_speculation::GoodputParams;

    use super::*;

    fn refused<T>() -> Result<T, ApiError> {
        Err(ApiError::new(ErrorKind::Unavailable, "told to"))
    }

    /// Keeps what it is told.
    #[derive(Default)]
    struct Store {
        refuses: AtomicBool,
        told: Mutex<Vec<Observed>>,
    }

    #[async_trait]
    impl DraftStore for Store {
        async fn append(&self, _: AppendRequest) -> Result<AppendReply, ApiError> {
            refused()
        }

        async fn follow(&self, _: FollowRequest) -> Result<FollowReply, ApiError> {
            refused()
        }

        async fn touch(&self, _: TouchRequest) -> Result<(), ApiError> {
            refused()
        }

        async fn stats(&self) -> Result<StoreStats, ApiError> {
            refused()
        }

        async fn acceptance_stats(
            &self,
            request: AcceptanceStatsRequest,
        ) -> Result<AcceptanceStatsReply, ApiError> {
            if self.refuses.load(Ordering::SeqCst) {
                return refused();
            }
            let observed = Observed::from_bytes(&request.observed).unwrap();
            self.told.lock().unwrap().push(observed);
            Ok(AcceptanceStatsReply { tables: Vec::new() })
        }
    }

    #[tokio::test]
    async fn what_was_refused_and_not_heard_of_is_told_at_the_end() {
        let store = Arc::new(Store::default());
        let metrics = WorkerMetrics::new(&Metrics::new().unwrap(), "fake").unwrap();
        let namespaces_max = NonZeroUsize::MIN;
        let hour = Duration::from_secs(3_600);
        let mut chances = Chances::start(Some(hour), namespaces_max, store.clone(), metrics);
        let mut router = Goodput::new(GoodputParams {
            namespaces_max,
            off_above_batch: None,
        });
        let namespace = Namespace {
            tenant: "acme".into(),
            model: "fake".into(),
            tokenizer: "fake".into(),
        };
        let id = namespace.id();
        let signer = NamespaceSigner::new(&MeshConfig::generate().unwrap()).unwrap();
        let now = Instant::now();
        chances.meet(id, &signer.sign(namespace), now);
        router.calibration(id).observe_head(10, 3, 2);
        let observed = {
            let mut same = AcceptanceStatistics::new();
            same.observe_head(10, 3, 2);
            same.take_observed()
        };
        assert!(!observed.is_empty());

        store.refuses.store(true, Ordering::SeqCst);
        chances.exchange(&mut router, now);
        let answered = tokio::time::timeout(Duration::from_secs(60), async {
            while chances.answers.is_empty() {
                tokio::time::sleep(Duration::from_millis(1)).await;
            }
        });
        assert!(answered.await.is_ok(), "no answer");
        assert!(!router.has_observed(&id));
        store.refuses.store(false, Ordering::SeqCst);
        chances.finish(&mut router).await;
        assert_eq!(*store.told.lock().unwrap(), [observed]);
    }
}
