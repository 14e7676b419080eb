//! Callers of several replicas and shards, over HTTP.

use std::cell::Cell;
use std::net::SocketAddr;
use std::sync::Arc;

use refrain_protocol::document::{FeedCursor, FeedDelta, FeedEvent};
use refrain_protocol::group::RegisterGroupRequest;
use refrain_protocol::pull::Scope;
use refrain_protocol::shard::shard_of;
use refrain_rpc::testing::ScopeReader;
use refrain_rpc::{DraftStore, StoreCluster};
use refrain_service_kit::http::MeshClient;
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::watch;

use super::nats::{Nats, free_port};
use super::*;

/// An address that a replica can have before it is started.
fn free_addr() -> SocketAddr {
    SocketAddr::from(([127, 0, 0, 1], free_port()))
}

fn listening(dir: &Path, name: &str, nats: &str) -> DraftStoreConfig {
    let addr = free_addr();
    let mut config = config(dir, name, nats);
    config.listen = Some(addr);
    let feed = config.feed.as_mut().unwrap();
    feed.advertise_url = format!("http://{addr}");
    config
}

/// Starts two replicas with the same keys, and waits until they have caught up.
async fn start_both(configs: &[DraftStoreConfig; 2], mesh: &MeshConfig) -> [Replica; 2] {
    let [a, b] = configs.clone();
    let a = Replica::start_in(a, mesh.clone()).await;
    let b = Replica::start_in(b, mesh.clone()).await;
    [a.caught_up().await, b.caught_up().await]
}

/// How often somebody has asked a replica for its directory. Only callers do.
fn directory_calls(replica: &Replica) -> f64 {
    let text = String::from_utf8(replica.metrics.render()).unwrap();
    let calls = text.lines().filter(|line| {
        line.starts_with("refrain_http_requests_total{") && line.contains("/internal/v1/directory")
    });
    calls
        .filter_map(|line| line.rsplit(' ').next()?.parse::<f64>().ok())
        .sum()
}

/// Waits until the caller has learned both replicas, and has asked each for its directory.
async fn both_are_known(replicas: [&Replica; 2]) {
    // The answer to the first question may be on its way.
    eventually("the caller knows both", async || {
        replicas
            .iter()
            .all(|replica| directory_calls(replica) >= 2.0)
    })
    .await;
}

fn url(config: &DraftStoreConfig) -> String {
    config.feed.as_ref().unwrap().advertise_url.clone()
}

fn caller(mesh: &MeshConfig, urls: &[String]) -> StoreCluster {
    let client = MeshClient::new("", &mesh.secret, PATIENCE).unwrap();
    StoreCluster::new(client, urls).unwrap()
}

fn sign(mesh: &MeshConfig, tenant: &str) -> SignedNamespace {
    NamespaceSigner::new(mesh).unwrap().sign(names(tenant))
}

/// Reads to the end of the feed, or waits for news there.
async fn follow(
    store: &dyn DraftStore,
    mesh: &MeshConfig,
    after: FeedCursor,
    wait_ms: u32,
) -> FeedDelta {
    let reader = ScopeReader {
        after,
        wait_ms,
        ..ScopeReader::new(sign(mesh, "one"))
    };
    reader.read(store).await.unwrap()
}

fn documents(reply: &FeedDelta) -> Vec<u128> {
    let events = reply.events.iter().map(|event| match event {
        FeedEvent::Update(update) => update.document.0,
        FeedEvent::Remove(document) => panic!("{document:?} was removed"),
    });
    events.collect()
}

async fn append(store: &dyn DraftStore, mesh: &MeshConfig, update: DocumentUpdate) {
    let request = AppendRequest {
        namespace: sign(mesh, "one"),
        updates: vec![update],
        waited_ms: 0,
        acknowledgement: None,
    };
    store.append(request).await.unwrap();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_reader_goes_on_at_another_replica_and_reads_nothing_twice() {
    let dir = tempfile::tempdir().unwrap();
    let nats = Nats::start(dir.path());
    let mesh = MeshConfig::generate().unwrap();
    let configs = ["a", "b"].map(|name| listening(dir.path(), name, &nats.url()));
    let replicas = start_both(&configs, &mesh).await;
    // It is told one of them. The other one it learns.
    let store = caller(&mesh, &[url(&configs[0])]);
    both_are_known(replicas.each_ref()).await;
    for document in 0..20 {
        append(&store, &mesh, whole(document, 50)).await;
    }
    let first = follow(&store, &mesh, FeedCursor::default(), 0).await;
    assert_eq!(documents(&first), (0..20).collect::<Vec<_>>());
    end_equal(&replicas.each_ref()).await;
    let caught_up = follow(&store, &mesh, first.cursor, 0).await;
    assert!(caught_up.events.is_empty() && !caught_up.reset);

    // A replica knows what came before a quiet moment.
    tokio::time::sleep(Duration::from_millis(400)).await;
    let [a, b] = replicas;
    let (used, other) = match caught_up.cursor.generation == generation(&a).await {
        true => (a, b),
        false => (b, a),
    };
    used.stop().await;
    append(&store, &mesh, whole(20, 50)).await;
    let moved = follow(&store, &mesh, caught_up.cursor, 10_000).await;
    assert!(!moved.reset, "it began anew");
    assert_ne!(moved.cursor.generation, caught_up.cursor.generation);
    assert_eq!(documents(&moved), [20]);
    other.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_reader_goes_on_at_a_replica_that_was_just_restarted() {
    let dir = tempfile::tempdir().unwrap();
    let nats = Nats::start(dir.path());
    let mesh = MeshConfig::generate().unwrap();
    let configs = ["a", "b"].map(|name| config(dir.path(), name, &nats.url()));
    let [a, b] = start_both(&configs, &mesh).await;
    for document in 0..20 {
        a.append("one", vec![whole(document, 50)]).await;
    }
    end_equal(&[&a, &b]).await;
    let first = follow(&a.handle(), &mesh, FeedCursor::default(), 0).await;
    // From here on nothing happens in its namespace.
    a.append("two", vec![whole(1, 50)]).await;
    end_equal(&[&a, &b]).await;
    let here = generation(&b).await;
    b.stop().await;
    a.append("two", vec![whole(2, 50)]).await;
    let b = Replica::start_in(configs[1].clone(), mesh.clone()).await;
    let moved = follow(&b.handle(), &mesh, first.cursor, 0).await;
    assert!(!moved.reset && moved.events.is_empty(), "{moved:?}");
    assert_eq!((moved.cursor.generation, moved.caught_up), (here, true));
    // It is at the end, and learns what comes.
    let b = b.caught_up().await;
    a.append("one", vec![whole(20, 50)]).await;
    let next = follow(&b.handle(), &mesh, moved.cursor, 10_000).await;
    assert_eq!((documents(&next), next.reset), (vec![20], false));
}

async fn generation(replica: &Replica) -> u64 {
    let state = refrain_rpc::ReplicaPeer::replica_state(&replica.handle()).await;
    state.unwrap().generation
}

/// A listener in front of a replica that can fall silent: connections stay, and nothing passes.
async fn silencer(target: SocketAddr) -> (SocketAddr, watch::Sender<bool>) {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let addr = listener.local_addr().unwrap();
    let (tell, is_silent) = watch::channel(false);
    tokio::spawn(async move {
        while let Ok((mut near, _)) = listener.accept().await {
            let mut is_silent = is_silent.clone();
            tokio::spawn(async move {
                let Ok(mut far) = TcpStream::connect(target).await else {
                    return;
                };
                let silenced = async {
                    drop(is_silent.wait_for(|silent| *silent).await);
                };
                let passed = tokio::select! {
                    biased;
                    () = silenced => None,
                    passed = tokio::io::copy_bidirectional(&mut near, &mut far) => Some(passed),
                };
                if passed.is_none() {
                    std::future::pending::<()>().await;
                }
            });
        }
    });
    (addr, tell)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_call_to_a_replica_that_falls_silent_is_made_at_another_one() {
    let dir = tempfile::tempdir().unwrap();
    let nats = Nats::start(dir.path());
    let mesh = MeshConfig::generate().unwrap();
    let mut configs = ["a", "b"].map(|name| listening(dir.path(), name, &nats.url()));
    let mut silencers = Vec::new();
    for config in &mut configs {
        let (addr, silence) = silencer(config.listen.unwrap()).await;
        config.feed.as_mut().unwrap().advertise_url = format!("http://{addr}");
        silencers.push(silence);
    }
    let replicas = start_both(&configs, &mesh).await;
    let urls = configs.each_ref().map(url);
    let store = Arc::new(caller(&mesh, &urls));
    append(&*store, &mesh, whole(0, 50)).await;
    // A cursor from before the document is in the stream would have it read once more elsewhere.
    end_equal(&replicas.iter().collect::<Vec<_>>()).await;
    let at = follow(&*store, &mesh, FeedCursor::default(), 0)
        .await
        .cursor;
    // The caller waits for news, half a minute at a time.
    let (waiting, signed) = (store.clone(), mesh.clone());
    let waiting = tokio::spawn(async move {
        let mut after = at;
        loop {
            let news = follow(&*waiting, &signed, after, 30_000).await;
            if news.reset || documents(&news).contains(&1) {
                return news.reset;
            }
            after = news.cursor;
        }
    });
    // On a busy machine the caller may have left the replica where it was.
    let waits_at = || {
        let waits = |replica: &Replica| replica.metric("refrain_draft_store_feed_waiters") == 1.0;
        replicas.iter().position(waits)
    };
    let used = Cell::new(None);
    eventually("the call waits", async || {
        used.set(waits_at());
        used.get().is_some()
    })
    .await;
    let used = used.get().unwrap();
    silencers[used].send_replace(true);
    // The timeout of the call itself is longer than the patience here.
    eventually("it is made elsewhere", async || {
        replicas[1 - used].metric("refrain_draft_store_feed_waiters") == 1.0
    })
    .await;
    append(&*store, &mesh, whole(1, 50)).await;
    assert!(!waiting.await.unwrap(), "it began anew");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn namespaces_are_spread_over_shards() {
    let dir = tempfile::tempdir().unwrap();
    let nats = Nats::start(dir.path());
    let mesh = MeshConfig::generate().unwrap();
    let mut configs = ["s0", "s1"].map(|name| listening(dir.path(), name, &nats.url()));
    for (shard, config) in (0..).zip(&mut configs) {
        let feed = config.feed.as_mut().unwrap();
        (feed.shard, feed.shards) = (shard, 2);
    }
    let replicas = start_both(&configs, &mesh).await;
    let store = caller(&mesh, &[url(&configs[0])]);
    let mut counts = [0; 2];
    for tenant in 0..16 {
        let tenant = format!("tenant {tenant}");
        let shard = shard_of(names(&tenant).id(), 2) as usize;
        counts[shard] += 1;
        let request = || AppendRequest {
            namespace: sign(&mesh, &tenant),
            updates: vec![whole(1, 10)],
            waited_ms: 0,
            acknowledgement: None,
        };
        eventually("both shards are known", async || {
            store.append(request()).await.is_ok()
        })
        .await;
        let text = replicas[shard].handle();
        assert_eq!(text.append(request()).await.unwrap().lengths, [10]);
        let refused = replicas[1 - shard].handle().append(request()).await;
        let refused = refused.unwrap_err().to_string();
        assert!(
            refused.contains(&format!("belongs to shard {shard} of 2")),
            "{refused}"
        );
    }
    assert!(counts.iter().all(|count| *count > 0), "{counts:?}");
    // A pull is of one shard, which the caller is told for each namespace.
    let mut pulls = [(); 2].map(|()| ScopeReader::new(sign(&mesh, "tenant 0")).request());
    pulls.iter_mut().for_each(|pull| pull.namespaces.clear());
    for tenant in 0..16 {
        let signed = sign(&mesh, &format!("tenant {tenant}"));
        let shard = store.shard_of(signed.namespace.id()) as usize;
        pulls[shard]
            .namespaces
            .extend(ScopeReader::new(signed).request().namespaces);
    }
    for (pull, count) in pulls.iter().zip(counts) {
        assert_eq!(store.pull(pull.clone()).await.unwrap().deltas.len(), count);
    }
    let [mut mixed, other] = pulls;
    mixed.namespaces.extend(other.namespaces);
    let refused = store.pull(mixed).await.unwrap_err();
    assert_eq!(refused.kind, refrain_protocol::ErrorKind::Unavailable);
    assert_eq!(store.stats().await.unwrap().documents, 16);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn samples_of_a_group_are_read_at_another_replica_while_they_grow() {
    let dir = tempfile::tempdir().unwrap();
    let nats = Nats::start(dir.path());
    let mesh = MeshConfig::generate().unwrap();
    let mut configs = ["a", "b"].map(|name| config(dir.path(), name, &nats.url()));
    for config in &mut configs {
        let feed = config.feed.as_mut().unwrap();
        (feed.groups, feed.silent_s) = (true, 3_600);
    }
    let replicas = start_both(&configs, &mesh).await;
    for replica in &replicas {
        let request = RegisterGroupRequest {
            namespace: sign(&mesh, "one"),
            group: "g".into(),
            ttl_ms: 600_000,
        };
        replica.handle().register_group(request).await.unwrap();
    }
    let mut cursor = FeedCursor::default();
    for part in 0..3 {
        let mut piece = update(7, part * 40, &text(7, 200)[part as usize * 40..][..40]);
        piece.head.group = Some("g".into());
        replicas[0].append("one", vec![piece]).await;
        let mut len = 0;
        while len < (part + 1) * 40 {
            let reader = ScopeReader {
                scope: Scope::Group("g".into()),
                after: cursor,
                ..ScopeReader::new(sign(&mesh, "one"))
            };
            let log = reader.read(&replicas[1].handle()).await.unwrap();
            cursor = log.cursor;
            for event in &log.events {
                if let FeedEvent::Update(update) = event {
                    len = update.prev_len + update.tokens.len() as u32;
                }
            }
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    }
}
