//! A draft store of several replicas and shards, as one.
//!
//! A namespace belongs to a shard ([`shard_of`]), and each call goes to a replica of it: the nearest that is well.
//! When that one goes, the call is made again at the next. All calls of a draft store may be repeated: appends take
//! only what is new, and a follower's cursor means the same at every replica.
//!
//! A caller is told some replicas and learns the others from their directory. It asks each for the directory every
//! two seconds, and so notices too when one hangs: calls to it end then, and do not wait for their deadline.

mod view;

use std::collections::HashMap;
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

use async_trait::async_trait;
use parking_lot::Mutex;
use refrain_protocol::acceptance::{AcceptanceStatsReply, AcceptanceStatsRequest};
use refrain_protocol::document::{
    AppendReply, AppendRequest, StoreStats, TouchRequest, UnknownDocumentsReply,
    UnknownDocumentsRequest,
};
use refrain_protocol::group::RegisterGroupRequest;
use refrain_protocol::history::{OutputLengths, OutputLengthsRequest};
use refrain_protocol::pull::{PullReply, PullRequest, ScopeNews};
use refrain_protocol::segment::{
    DocumentsReply, DocumentsRequest, SegmentPiece, SegmentPieceRequest, SegmentsReply,
    SegmentsRequest,
};
use refrain_protocol::shard::{StoreDirectory, shard_of};
use refrain_protocol::tenants::{TenantChange, TenantChangeReply, TenantsReply, TenantsRequest};
use refrain_protocol::{ApiError, ErrorKind, NamespaceId};
use refrain_service_kit::actors;
use refrain_service_kit::http::MeshClient;
use refrain_service_kit::random;
use tokio::sync::watch;

use self::view::View;
use crate::draft_store::{DraftStore, HttpDraftStore};
use crate::replica_peer::{HttpReplicaPeer, ReplicaPeer as _};
use crate::usage_store::{HttpUsageStore, UsageReplica};

/// How often each replica is asked for its directory, and how long it may take.
const INTERVAL: Duration = Duration::from_secs(2);
const ANSWER_WAIT: Duration = Duration::from_secs(1);

/// Questions in a row without an answer after which a replica counts as gone.
const SILENT_MAX: u32 = 2;

/// How long a call waits for the first directory.
const FIRST_WAIT: Duration = Duration::from_secs(5);

/// [`DraftStore`] over several replicas. A clone is the same caller.
#[derive(Clone)]
pub struct StoreCluster {
    shared: Arc<Shared>,
}

struct Shared {
    client: MeshClient,
    view: Mutex<View>,
    replicas: Mutex<HashMap<String, Arc<Replica>>>,
    /// Whether a replica has answered so far.
    is_known: watch::Sender<bool>,
}

/// A replica as it is called.
struct Replica {
    url: String,
    store: HttpDraftStore,
    peer: HttpReplicaPeer,
    usage: Arc<HttpUsageStore>,
    /// Counts the times that it went, so that calls to it end.
    gone: watch::Sender<u64>,
}

/// The draft store of a configuration: one URL, or replicas of a store with a feed. `client` has the settings.
///
/// # Errors
/// The system has no random numbers.
pub fn draft_store(
    client: &MeshClient,
    url: &str,
    replicas: &[String],
) -> Result<Arc<dyn DraftStore>, ApiError> {
    if replicas.is_empty() {
        return Ok(Arc::new(HttpDraftStore::new(client.at(url))));
    }
    Ok(Arc::new(StoreCluster::new(client.clone(), replicas)?))
}

impl StoreCluster {
    /// Creates a caller that knows these replicas. It needs a Tokio runtime, on which it asks for directories until
    /// its last clone is dropped.
    ///
    /// # Errors
    /// The system has no random numbers.
    pub fn new(client: MeshClient, urls: &[String]) -> Result<Self, ApiError> {
        let urls: Vec<String> = urls
            .iter()
            .map(|url| url.trim_end_matches('/').to_owned())
            .collect();
        let caller = u64::from_le_bytes(random::bytes()?);
        let shared = Arc::new(Shared {
            client,
            view: Mutex::new(View::new(caller, &urls, Instant::now())),
            replicas: Mutex::default(),
            is_known: watch::Sender::new(false),
        });
        let asked = Arc::downgrade(&shared);
        let ask = move || ask_all(asked.clone());
        actors::start("directory of replicas", ask).detached();
        Ok(StoreCluster { shared })
    }

    /// Makes a call at a replica of a namespace's shard, and at the next one if that fails.
    async fn call<T, F>(
        &self,
        namespace: NamespaceId,
        call: impl Fn(Arc<Replica>) -> F,
    ) -> Result<T, ApiError>
    where
        F: Future<Output = Result<T, ApiError>>,
    {
        let shared = &self.shared;
        let shards = shared.shards().await?;
        self.call_shard(shard_of(namespace, shards), call).await
    }

    /// Pulls at a replica of the shard that all namespaces of the call belong to.
    async fn pull_shard(&self, request: PullRequest) -> Result<PullReply, ApiError> {
        let shards = self.shared.shards().await?;
        let namespaces = request.namespaces.iter();
        let mut of_namespaces = namespaces.map(|of| shard_of(of.namespace.namespace.id(), shards));
        let shard = of_namespaces.next().unwrap_or(0);
        if of_namespaces.any(|other| other != shard) {
            let message = "the shards have just become known; pull from each of them";
            return Err(ApiError::new(ErrorKind::Unavailable, message));
        }
        let pulled = self.call_shard(shard, |replica| {
            let request = request.clone();
            async move {
                let reply = replica.store.pull(request).await?;
                // Another replica may have it, and that one is called next.
                if reply.deltas.iter().any(|delta| is_unreadable(&delta.news)) {
                    let mut view = self.shared.view.lock();
                    view.failed(&replica.url, Instant::now());
                }
                Ok(reply)
            }
        });
        pulled.await
    }

    async fn call_shard<T, F>(
        &self,
        shard: u32,
        call: impl Fn(Arc<Replica>) -> F,
    ) -> Result<T, ApiError>
    where
        F: Future<Output = Result<T, ApiError>>,
    {
        let shared = &self.shared;
        let mut last = None;
        let order = shared.view.lock().order(shard, Instant::now());
        for url in order {
            let replica = shared.replica(&url);
            let mut gone = replica.gone.subscribe();
            let answered = tokio::select! {
                answered = call(replica) => answered,
                _ = gone.changed() => Err(
                    ApiError::new(ErrorKind::Unavailable, "the draft store does not answer").with_detail(&url)
                ),
            };
            match answered {
                Err(error) if may_do_better(error.kind) => {
                    tracing::debug!(%error, url, "a replica of the draft store failed a call");
                    shared.view.lock().failed(&url, Instant::now());
                    last = Some(error);
                }
                answered => return answered,
            }
        }
        Err(last.unwrap_or_else(|| {
            ApiError::new(
                ErrorKind::Unavailable,
                format!("no replica of shard {shard} of the draft store is known"),
            )
            .with_retry_after_ms(1_000)
        }))
    }
}

impl Shared {
    /// Number of shards, which the first answer of a replica tells.
    async fn shards(&self) -> Result<u32, ApiError> {
        let known = self.view.lock().shards();
        if let Some(shards) = known {
            return Ok(shards);
        }
        let mut answered = self.is_known.subscribe();
        // Without an answer in time, the view has nothing either.
        let first = answered.wait_for(|answered| *answered);
        let _ = tokio::time::timeout(FIRST_WAIT, first).await;
        self.view.lock().shards().ok_or_else(|| {
            let message = "no replica of the draft store has answered yet; check urls.draft_stores";
            ApiError::new(ErrorKind::Unavailable, message).with_retry_after_ms(1_000)
        })
    }

    fn replica(&self, url: &str) -> Arc<Replica> {
        let mut replicas = self.replicas.lock();
        let replica = replicas.entry(url.to_owned()).or_insert_with(|| {
            // One client for all calls: it knows when it has sent the time of this service's clock.
            let client = self.client.at(url);
            Arc::new(Replica {
                url: url.to_owned(),
                store: HttpDraftStore::new(client.clone()),
                usage: Arc::new(HttpUsageStore::new(client.clone())),
                peer: HttpReplicaPeer::new(client),
                gone: watch::Sender::default(),
            })
        });
        replica.clone()
    }

    fn answered(&self, url: &str, directory: &StoreDirectory, round_trip: Duration) {
        let mut view = self.view.lock();
        view.answered(url, directory, round_trip, Instant::now());
        drop(view);
        self.is_known.send_replace(true);
    }

    fn failed(&self, url: &str, silent: u32) {
        self.view.lock().failed(url, Instant::now());
        if silent >= SILENT_MAX {
            self.replica(url).gone.send_modify(|count| *count += 1);
        }
    }
}

/// Asks all known replicas for their directory, again and again while there is a caller.
async fn ask_all(shared: Weak<Shared>) {
    let mut interval = tokio::time::interval(INTERVAL);
    let mut silent: HashMap<String, u32> = HashMap::new();
    loop {
        interval.tick().await;
        let Some(shared) = shared.upgrade() else {
            return;
        };
        let urls = shared.view.lock().urls();
        shared.replicas.lock().retain(|url, _| urls.contains(url));
        silent.retain(|url, _| urls.contains(url));
        let questions = urls.into_iter().map(|url| {
            let replica = shared.replica(&url);
            async move {
                let began = Instant::now();
                let answer = tokio::time::timeout(ANSWER_WAIT, replica.peer.directory()).await;
                (url, answer, began.elapsed())
            }
        });
        for (url, answer, round_trip) in futures_util::future::join_all(questions).await {
            match answer {
                Ok(Ok(directory)) => {
                    silent.remove(&url);
                    shared.answered(&url, &directory, round_trip);
                }
                Ok(Err(error)) if error.kind == ErrorKind::NotFound => {
                    tracing::error!(url, %error, "urls.draft_stores names a draft store without a feed");
                    shared.failed(&url, 0);
                }
                Ok(Err(_)) | Err(_) => {
                    let count = silent.entry(url.clone()).or_default();
                    *count += 1;
                    shared.failed(&url, *count);
                }
            }
        }
    }
}

/// Whether another replica may answer a call that failed like this.
fn may_do_better(kind: ErrorKind) -> bool {
    matches!(
        kind,
        ErrorKind::Unavailable | ErrorKind::Timeout | ErrorKind::Upstream
    )
}

fn is_unreadable(news: &ScopeNews) -> bool {
    matches!(news, ScopeNews::Refused { kind, .. } if may_do_better(*kind))
}

fn no_tenants() -> ApiError {
    let message = "replicas of a draft store keep no tenants";
    ApiError::new(ErrorKind::NotFound, message)
}

/// Defines methods of [`DraftStore`] that make the call of their name at the shard of the request's namespace.
macro_rules! calls {
    ($($call:ident: $request:ty => $reply:ty;)+) => {
        #[async_trait]
        impl DraftStore for StoreCluster {
            $(async fn $call(&self, request: $request) -> Result<$reply, ApiError> {
                let namespace = request.namespace.namespace.id();
                self.call(namespace, |replica| {
                    let request = request.clone();
                    async move { replica.store.$call(request).await }
                })
                .await
            })+

            async fn pull(&self, request: PullRequest) -> Result<PullReply, ApiError> {
                self.pull_shard(request).await
            }

            fn shard_of(&self, namespace: NamespaceId) -> u32 {
                let shards = self.shared.view.lock().shards();
                shards.map_or(0, |shards| shard_of(namespace, shards))
            }

            async fn stats(&self) -> Result<StoreStats, ApiError> {
                let mut all = StoreStats::default();
                for shard in 0..self.shared.shards().await? {
                    all = all + self.call_shard(shard, async |replica| replica.store.stats().await).await?;
                }
                Ok(all)
            }

            async fn tenants(&self, _: TenantsRequest) -> Result<TenantsReply, ApiError> {
                Err(no_tenants())
            }

            async fn change_tenant(&self, _: TenantChange) -> Result<TenantChangeReply, ApiError> {
                Err(no_tenants())
            }

            fn usage_replicas(&self) -> Vec<UsageReplica> {
                let urls = self.shared.view.lock().urls();
                let replicas = urls.into_iter().map(|url| UsageReplica {
                    store: self.shared.replica(&url).usage.clone(),
                    name: url,
                });
                replicas.collect()
            }
        }
    };
}

calls! {
    append: AppendRequest => AppendReply;
    touch: TouchRequest => ();
    register_group: RegisterGroupRequest => ();
    output_lengths: OutputLengthsRequest => OutputLengths;
    segments: SegmentsRequest => SegmentsReply;
    segment_piece: SegmentPieceRequest => SegmentPiece;
    documents: DocumentsRequest => DocumentsReply;
    unknown_documents: UnknownDocumentsRequest => UnknownDocumentsReply;
    acceptance_stats: AcceptanceStatsRequest => AcceptanceStatsReply;
}

#[cfg(test)]
mod tests {
    use std::io::{Read as _, Write as _};
    use std::net::{TcpListener, TcpStream};

    use refrain_protocol::shard::ReplicaEntry;
    use refrain_service_kit::clocks::Clocks;

    use super::*;

    /// Reads one request. Returns its head.
    fn read(mut stream: &TcpStream) -> String {
        let mut head = Vec::new();
        while !head.ends_with(b"\r\n\r\n") {
            let mut byte = [0];
            stream.read_exact(&mut byte).unwrap();
            head.extend(byte);
        }
        String::from_utf8(head).unwrap().to_lowercase()
    }

    /// Answers a request with this head: with the directory if it asks for that, and otherwise with an error.
    fn answer(mut stream: &TcpStream, head: &str, directory: &StoreDirectory) {
        let is_directory = head.contains("/directory");
        let (status, body) = match is_directory {
            true => ("200 OK", serde_json::to_string(directory).unwrap()),
            false => ("404 Not Found", "{}".to_owned()),
        };
        let len = body.len();
        let text = format!(
            "HTTP/1.1 {status}\r\ncontent-length: {len}\r\nconnection: close\r\n\r\n{body}"
        );
        stream.write_all(text.as_bytes()).unwrap();
    }

    #[tokio::test]
    async fn a_replica_is_told_the_time_once_and_not_with_each_call() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let url = format!("http://{}", listener.local_addr().unwrap());
        let directory = StoreDirectory {
            shards: 1,
            shard: 0,
            is_ready: true,
            replicas: vec![ReplicaEntry {
                url: url.clone(),
                shard: 0,
                is_ready: true,
                sequence: 1,
                lag: 0,
            }],
        };
        let heads = Arc::new(Mutex::new(Vec::new()));
        let seen = heads.clone();
        std::thread::spawn(move || {
            for stream in listener.incoming() {
                let stream = stream.unwrap();
                let head = read(&stream);
                // The caller may look as soon as it has its answer.
                seen.lock().push(head.clone());
                answer(&stream, &head, &directory);
            }
        });
        let client = MeshClient::new("", &"0".repeat(64), Duration::from_secs(60)).unwrap();
        let clocks = Clocks::new("worker", false, 60);
        let cluster = StoreCluster::new(client.with_clocks(clocks), &[url]).unwrap();
        for _ in 0..5 {
            assert_eq!(cluster.stats().await.unwrap_err().kind, ErrorKind::NotFound);
        }
        let heads = heads.lock();
        let calls = heads.iter().filter(|head| head.contains("/stats"));
        let with_time = heads.iter().filter(|head| head.contains("x-refrain-clock"));
        assert_eq!((calls.count(), with_time.count()), (5, 1), "{heads:?}");
    }
}
