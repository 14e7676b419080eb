//! Acceptance statistics that outlive the worker.
//!
//! The draft store keeps one table per namespace. A worker that meets a namespace asks for it and goes on from there,
//! and saves its own table now and then and when it stops. Where several workers serve a namespace, the last one that
//! saves wins: each of them began with the table of all before it, so little is lost. A sum over the counts of all
//! workers was rejected: replayed recordings are served 0.5 % faster at most with statistics that are known from the
//! start.
//!
//! An actor makes the calls. The decode loop passes bytes and takes in answers, and never waits.

use std::cmp::Ordering;
use std::num::NonZeroUsize;
use std::sync::Arc;
use std::time::{Duration, Instant};

use lru::LruCache;
use parking_lot::Mutex;
use refrain_protocol::acceptance::{AcceptanceStatsReply, AcceptanceStatsRequest};
use refrain_protocol::error::code;
use refrain_protocol::{ApiError, NamespaceId, SignedNamespace};
use refrain_rpc::DraftStore;
use refrain_service_kit::actors::{self, Actor, Inbox};
use refrain_speculation::router::Router;
use refrain_speculation::statistics::AcceptanceStatistics;
use tokio::sync::mpsc;

use crate::config::{RouterChoice, WorkerConfig};
use crate::metrics::WorkerMetrics;

/// Maximum number of calls that wait for the store. Beyond that a namespace waits for its next turn.
const CALLS_MAX: usize = 16;

/// Exchanges statistics with the store.
pub(crate) struct StatisticsKeeper {
    /// Time between saves; `None` if nothing is kept.
    interval: Option<Duration>,
    /// As many namespaces as the router knows.
    namespaces: LruCache<NamespaceId, Turn>,
    calls: mpsc::Sender<Call>,
    answers: mpsc::Receiver<Answer>,
    /// Makes the calls.
    actor: Option<Actor>,
}

/// The next save of a namespace.
struct Turn {
    namespace: SignedNamespace,
    due: Instant,
    /// Observations in the statistics that the store has; `None` before the store was asked.
    saved: Option<u64>,
    /// The store's table that these continue; 0 for none.
    table: u64,
}

/// A call to the store.
struct Call {
    id: NamespaceId,
    request: AcceptanceStatsRequest,
}

/// A call that has no outcome yet.
struct BegunCall {
    id: NamespaceId,
    asked: bool,
}

/// The outcome of a call.
struct Answer {
    id: NamespaceId,
    asked: bool,
    reply: Result<AcceptanceStatsReply, ApiError>,
}

impl StatisticsKeeper {
    pub(super) fn start(
        config: &WorkerConfig,
        namespaces_max: NonZeroUsize,
        store: Arc<dyn DraftStore>,
        metrics: Arc<WorkerMetrics>,
    ) -> Self {
        let speculation = &config.speculation;
        let is_kept =
            speculation.router == RouterChoice::Goodput && speculation.statistics_interval_ms > 0;
        let interval = is_kept.then(|| Duration::from_millis(speculation.statistics_interval_ms));
        // Each answer belongs to a call that had a place in the queue.
        let (answer, answers) = mpsc::channel(CALLS_MAX + 1);
        let begun = Arc::<Mutex<Option<BegunCall>>>::default();
        let make_calls = move |calls: Inbox<Call>| {
            let (store, metrics) = (store.clone(), metrics.clone());
            make_calls(calls, answer.clone(), begun.clone(), store, metrics)
        };
        let (calls, actor) = match interval {
            Some(_) => {
                let (calls, actor) = actors::start_with("statistics", CALLS_MAX, make_calls);
                (calls, Some(actor))
            }
            None => (mpsc::channel(1).0, None),
        };
        StatisticsKeeper {
            interval,
            namespaces: LruCache::new(namespaces_max),
            calls,
            answers,
            actor,
        }
    }

    /// A request of this namespace begins. The store is asked for its statistics, if the namespace is new here.
    pub(super) fn meet(&mut self, id: NamespaceId, namespace: &SignedNamespace, now: Instant) {
        if self.interval.is_none() {
            return;
        }
        let new = || Turn {
            namespace: namespace.clone(),
            due: now,
            saved: None,
            table: 0,
        };
        // Signatures expire, so the latest one is kept.
        self.namespaces
            .get_or_insert_mut(id, new)
            .namespace
            .clone_from(namespace);
    }

    /// Takes in the answers, and makes the calls that are due.
    pub(super) fn exchange(&mut self, router: &mut Router<NamespaceId>, now: Instant) {
        while let Ok(answer) = self.answers.try_recv() {
            self.take(answer, router);
        }
        let Some(interval) = self.interval else {
            return;
        };
        let mut forgotten = Vec::new();
        for (id, turn) in &mut self.namespaces {
            if turn.due > now {
                continue;
            }
            turn.due = now + interval;
            match turn.news(router.known_statistics(*id)) {
                News::None => {}
                News::Forgotten => forgotten.push(*id),
                News::Call => {
                    if let Ok(place) = self.calls.try_reserve() {
                        place.send(turn.call(*id, router.known_statistics(*id)));
                    }
                }
            }
        }
        for id in forgotten {
            self.namespaces.pop(&id);
        }
    }

    fn take(&mut self, answer: Answer, router: &mut Router<NamespaceId>) {
        let Some(turn) = self.namespaces.peek_mut(&answer.id) else {
            return;
        };
        let own = router.statistics(answer.id);
        match answer.reply {
            Ok(reply) => {
                turn.table = reply.table;
                // A worker that has learnt more in the meantime keeps its own statistics.
                if let Some(kept) = read(&reply.statistics)
                    && kept.observations() > own.observations()
                {
                    *own = kept;
                }
            }
            Err(error) => {
                tracing::debug!(%error, "acceptance statistics were not exchanged with the store");
                if error.has_code(code::STATISTICS_ERASED) {
                    // The counts from before the erasure are forgotten here, too.
                    *own = AcceptanceStatistics::default();
                    turn.table = 0;
                }
                // The next turn makes the call again.
                let asks = answer.asked || turn.table == 0;
                turn.saved = (!asks).then_some(0);
            }
        }
    }

    /// Returns when a call is due, and never if nothing is kept.
    pub(crate) async fn wait(&self) {
        let due = self.namespaces.iter().map(|(_, turn)| turn.due).min();
        match due.filter(|_| self.interval.is_some()) {
            Some(due) => tokio::time::sleep_until(due.into()).await,
            None => std::future::pending().await,
        }
    }

    /// Saves the tables that the store does not have yet.
    pub(super) async fn finish(&mut self, router: &mut Router<NamespaceId>) {
        let Some(actor) = self.actor.take() else {
            return;
        };
        self.exchange(router, Instant::now());
        let (closed, _) = mpsc::channel(1);
        let calls = std::mem::replace(&mut self.calls, closed);
        // Nobody reads the answers any more. The actor would wait for room for them, and the loop below for it.
        self.answers.close();
        for (id, turn) in &mut self.namespaces {
            let own = router.known_statistics(*id);
            // Statistics whose predecessors the store was never asked for are not worth a call that replaces those.
            let has_news = turn.saved.is_some() && turn.news(own) == News::Call;
            if has_news && calls.send(turn.call(*id, own)).await.is_err() {
                break;
            }
        }
        drop(calls);
        actor.ended().await;
    }
}

/// Whether a namespace has something to tell the store.
#[derive(PartialEq, Eq)]
enum News {
    None,
    /// A call is due.
    Call,
    /// The router has evicted the namespace, and has no or newer statistics. To save those would destroy the store's.
    Forgotten,
}

impl Turn {
    /// `own` are the router's statistics of the namespace, if it knows any.
    fn news(&self, own: Option<&AcceptanceStatistics>) -> News {
        match (self.saved, own) {
            (None, _) => News::Call,
            (Some(0), None) => News::None,
            (Some(_), None) => News::Forgotten,
            (Some(saved), Some(own)) => match own.observations().cmp(&saved) {
                Ordering::Less => News::Forgotten,
                Ordering::Equal => News::None,
                Ordering::Greater => News::Call,
            },
        }
    }

    /// The next call: it asks, if the store was not asked yet, and else it saves.
    fn call(&mut self, id: NamespaceId, own: Option<&AcceptanceStatistics>) -> Call {
        let own = own.filter(|_| self.saved.is_some());
        self.saved = Some(own.map_or(0, AcceptanceStatistics::observations));
        let request = AcceptanceStatsRequest {
            namespace: self.namespace.clone(),
            table: self.table,
            statistics: own.map_or_else(Vec::new, AcceptanceStatistics::to_bytes),
        };
        Call { id, request }
    }
}

async fn make_calls(
    mut calls: Inbox<Call>,
    answers: mpsc::Sender<Answer>,
    begun: Arc<Mutex<Option<BegunCall>>>,
    store: Arc<dyn DraftStore>,
    metrics: Arc<WorkerMetrics>,
) {
    // A panic took its answer. As an error, the namespace makes the call again.
    let lost = begun.lock().take();
    if let Some(BegunCall { id, asked }) = lost {
        let reply = Err(ApiError::internal("the call panicked"));
        let _ = answers.send(Answer { id, asked, reply }).await;
    }
    while let Some(Call { id, request }) = calls.recv().await {
        let asked = request.statistics.is_empty();
        *begun.lock() = Some(BegunCall { id, asked });
        let reply = store.acceptance_stats(request).await;
        metrics.statistics_call(reply.is_ok());
        *begun.lock() = None;
        // A worker that stops does not listen.
        let _ = answers.send(Answer { id, asked, reply }).await;
    }
}

/// The statistics in an answer. Bytes of another version are as good as none: statistics are learnt again.
fn read(bytes: &[u8]) -> Option<AcceptanceStatistics> {
    if bytes.is_empty() {
        return None;
    }
    AcceptanceStatistics::from_bytes(bytes)
        .inspect_err(|error| tracing::info!(%error, "acceptance statistics are learnt again"))
        .ok()
}
