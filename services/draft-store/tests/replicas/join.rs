//! Joining: a replica takes over from another one what the stream does not have any more.

use refrain_protocol::admin::EraseRequest;

use super::nats::{Nats, Wire};
use super::*;

/// Drops the oldest messages of the stream, as its age or size would.
async fn shorten(nats: &Nats) {
    let client = async_nats::connect(nats.url()).await.unwrap();
    let context = async_nats::jetstream::new(client);
    let stream = context.get_stream("refrain-0").await.unwrap();
    stream.purge().keep(1).await.unwrap();
}

/// Replicas of one mesh that know each other's addresses.
struct Cluster {
    dir: tempfile::TempDir,
    nats: Nats,
    mesh: MeshConfig,
    peers: Vec<String>,
}

impl Cluster {
    fn new() -> Cluster {
        let dir = tempfile::tempdir().unwrap();
        Cluster {
            nats: Nats::start(dir.path()),
            dir,
            mesh: MeshConfig::generate().unwrap(),
            peers: Vec::new(),
        }
    }

    async fn start(&mut self, name: &str) -> Replica {
        self.start_at(name, u64::MAX).await
    }

    /// Starts a replica that takes over so many bytes a second at most.
    async fn start_at(&mut self, name: &str, join_bytes_s_max: u64) -> Replica {
        let mut config = config(self.dir.path(), name, &self.nats.url());
        config.listen = Some(([127, 0, 0, 1], 0).into());
        if let Some(feed) = &mut config.feed {
            feed.peers = self.peers.clone();
            feed.join_bytes_s_max = join_bytes_s_max;
        }
        let replica = Replica::start_in(config, self.mesh.clone()).await;
        let addr = replica.server.addr().unwrap();
        self.peers.push(format!("http://{addr}"));
        replica
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_new_replica_takes_over_what_the_stream_has_lost() {
    let mut cluster = Cluster::new();
    let a = cluster.start("a").await.caught_up().await;
    for document in 0..3_000 {
        let tenant = ["one", "two", "three"][document as usize % 3];
        a.append(tenant, vec![whole(document, 40)]).await;
    }
    a.append("one", vec![whole(5_000, 200_000)]).await;
    // Some of them are in segments.
    a.handle().compact().await.unwrap();
    let request = EraseRequest {
        tenant: Some("two".into()),
        ..EraseRequest::default()
    };
    a.handle().erase(request).await.unwrap();
    end_equal(&[&a]).await;
    shorten(&cluster.nats).await;
    // It has not ended, and nobody has sent it yet.
    a.append("one", vec![update(6_000, 0, &text(6_000, 30))])
        .await;
    let b = cluster.start("b").await.caught_up().await;
    assert_eq!(b.metric("refrain_draft_store_feed_joins_total"), 1.0);
    assert!(b.metric("refrain_draft_store_feed_joined_documents_total") >= 2_001.0);
    assert!(b.metric("refrain_draft_store_feed_joined_segments_total") >= 2.0);
    assert!(b.metric("refrain_draft_store_feed_join_documents_wanted") >= 2_001.0);
    let metric = |name: &str| b.metric(&format!("refrain_draft_store_feed_join_{name}"));
    assert_eq!(metric("documents"), metric("documents_wanted"));
    assert_eq!(metric("tokens"), metric("tokens_wanted"));
    a.append("three", vec![whole(7_000, 40)]).await;
    b.append("three", vec![whole(7_001, 40)]).await;
    let sums = end_equal(&[&a, &b]).await;
    let documents: u64 = sums.iter().map(|sum| sum.documents).sum();
    assert_eq!(documents, 2_000 + 2 + 2);
    assert_eq!(b.text("one", 5_000).await, Some(text(5_000, 200_000)));
    assert_eq!(b.text("one", 6_000).await, Some(text(6_000, 30)));
    // After a restart it goes on from there.
    b.stop().await;
    let b = cluster.start("b").await.caught_up().await;
    assert_eq!(b.metric("refrain_draft_store_feed_joins_total"), 0.0);
    end_equal(&[&a, &b]).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_replica_that_was_away_too_long_joins_anew() {
    let mut cluster = Cluster::new();
    let a = cluster.start("a").await.caught_up().await;
    let b = cluster.start("b").await.caught_up().await;
    for document in 0..20 {
        a.append("one", vec![whole(document, 40)]).await;
        b.append("two", vec![whole(document, 40)]).await;
    }
    end_equal(&[&a, &b]).await;
    cluster.nats.kill();
    eventually("the replica notices", async || {
        b.metric("refrain_draft_store_feed_connected") == 0.0
    })
    .await;
    // It is stored here, and goes to the others after all. The erased tenant's does not.
    b.append("one", vec![whole(100, 40)]).await;
    b.append("two", vec![whole(101, 40)]).await;
    b.stop().await;
    cluster.nats.restart();
    let request = EraseRequest {
        tenant: Some("two".into()),
        ..EraseRequest::default()
    };
    a.handle().erase(request).await.unwrap();
    for document in 20..30 {
        a.append("one", vec![whole(document, 40)]).await;
    }
    end_equal(&[&a]).await;
    shorten(&cluster.nats).await;
    let b = cluster.start("b").await.caught_up().await;
    assert_eq!(b.metric("refrain_draft_store_feed_joins_total"), 1.0);
    let sums = end_equal(&[&a, &b]).await;
    let documents: u64 = sums.iter().map(|sum| sum.documents).sum();
    assert_eq!(documents, 31);
    assert_eq!(a.text("one", 100).await, Some(text(100, 40)));
    assert_eq!(a.text("two", 101).await, None);
}

/// A replica with several segments of one tenant, whose documents the stream has lost.
async fn filled(cluster: &mut Cluster) -> Replica {
    let a = cluster.start("a").await.caught_up().await;
    for segment in 0..4 {
        let documents = (0..40).map(|document| whole(segment * 100 + document, 5_000));
        a.append("one", documents.collect()).await;
        a.handle().compact().await.unwrap();
    }
    end_equal(&[&a]).await;
    shorten(&cluster.nats).await;
    a
}

/// Slow enough to do something in the middle: there are seven megabytes, and two files come at once.
const SLOW_BYTES_S: u64 = 1 << 20;

const SEGMENTS: &str = "refrain_draft_store_feed_joined_segments_total";
const BYTES: &str = "refrain_draft_store_feed_joined_bytes_total";

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_join_over_a_wire_that_is_cut_goes_on_where_it_was() {
    let mut cluster = Cluster::new();
    let a = filled(&mut cluster).await;
    let wire = Wire::to(a.server.addr().unwrap()).await;
    cluster.peers = vec![wire.url().replace("nats://", "http://")];
    let b = cluster.start_at("b", SLOW_BYTES_S).await;
    eventually("the first segment is there", async || {
        b.metric(SEGMENTS) >= 1.0
    })
    .await;
    assert!(b.metric(SEGMENTS) < 4.0);
    assert!(b.handle().readiness().is_err());
    wire.set_cut(true);
    // Longer than calls are repeated, so another session goes on.
    eventually("the session ends", async || {
        let trouble = b.handle().readiness().unwrap_err();
        trouble.contains("documents of another replica cannot be taken over")
            || trouble.contains("none of feed.peers can hand its documents over")
    })
    .await;
    a.append(
        "one",
        vec![whole(1_000, 40), update(100, 5_000, &[1, 2, 3])],
    )
    .await;
    wire.set_cut(false);
    let b = b.caught_up().await;
    end_equal(&[&a, &b]).await;
    assert!(b.metric("refrain_draft_store_feed_joins_total") >= 2.0);
    assert_eq!(b.metric(SEGMENTS), 4.0, "none came twice");
    let files = a.handle().store_stats().await.unwrap().segment_bytes as f64;
    // A piece whose answer was cut off comes again.
    assert!(
        b.metric(BYTES) < files * 1.6,
        "{} of {files}",
        b.metric(BYTES)
    );
    assert_eq!(b.text("one", 1_000).await, Some(text(1_000, 40)));
    let longer = [text(100, 5_000), vec![1, 2, 3]].concat();
    assert_eq!(b.text("one", 100).await, Some(longer));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_is_erased_while_files_travel_does_not_come() {
    let mut cluster = Cluster::new();
    let a = filled(&mut cluster).await;
    a.append("two", vec![whole(1, 5_000)]).await;
    a.handle().compact().await.unwrap();
    let b = cluster.start_at("b", SLOW_BYTES_S).await;
    eventually("the first segment is there", async || {
        b.metric(SEGMENTS) >= 1.0
    })
    .await;
    let request = EraseRequest {
        tenant: Some("one".into()),
        ..EraseRequest::default()
    };
    let erased = a.handle().erase(request).await.unwrap();
    assert_eq!(erased.documents, 160);
    let b = b.caught_up().await;
    let sums = end_equal(&[&a, &b]).await;
    let documents: u64 = sums.iter().map(|sum| sum.documents).sum();
    assert_eq!(documents, 1);
    assert_eq!(b.text("two", 1).await, Some(text(1, 5_000)));
    assert_eq!(b.text("one", 3).await, None);
    // Nothing of it is left in files either.
    let segments = cluster.dir.path().join("b/segments");
    let left: u64 = std::fs::read_dir(segments)
        .unwrap()
        .map(|file| file.unwrap().metadata().unwrap().len())
        .sum();
    assert!(left < 200_000, "{left} bytes are left");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_peer_that_goes_away_in_the_middle_is_replaced_by_another() {
    let mut cluster = Cluster::new();
    let a = filled(&mut cluster).await;
    let c = cluster.start("c").await.caught_up().await;
    end_equal(&[&a, &c]).await;
    let b = cluster.start_at("b", SLOW_BYTES_S).await;
    eventually("the first segment is there", async || {
        b.metric(SEGMENTS) >= 1.0
    })
    .await;
    a.stop().await;
    c.append("one", vec![whole(1_000, 40)]).await;
    let b = b.caught_up().await;
    let sums = end_equal(&[&b, &c]).await;
    let documents: u64 = sums.iter().map(|sum| sum.documents).sum();
    assert_eq!(documents, 161);
    assert!(b.metric("refrain_draft_store_feed_joins_total") >= 2.0);
    assert_eq!(b.text("one", 301).await, Some(text(301, 5_000)));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn without_a_peer_that_can_help_it_says_why() {
    let mut cluster = Cluster::new();
    let a = cluster.start("a").await.caught_up().await;
    for document in 0..5 {
        a.append("one", vec![whole(document, 40)]).await;
    }
    end_equal(&[&a]).await;
    shorten(&cluster.nats).await;
    a.stop().await;
    let b = cluster.start("b").await;
    eventually("the replica says why", async || {
        let trouble = b.handle().readiness().unwrap_err();
        trouble.contains("none of feed.peers can hand its documents over")
    })
    .await;
    // The one that it waits for comes back at another address, and a restart names that.
    let a = cluster.start("a").await.caught_up().await;
    b.stop().await;
    let b = cluster.start("b").await.caught_up().await;
    end_equal(&[&a, &b]).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_erasure_is_answered_with_the_state_of_the_other_replicas() {
    let mut cluster = Cluster::new();
    let a = cluster.start("a").await.caught_up().await;
    let b = cluster.start("b").await.caught_up().await;
    let c = cluster.start("c").await.caught_up().await;
    for document in 0..10 {
        c.append("one", vec![whole(document, 40)]).await;
    }
    end_equal(&[&a, &b, &c]).await;
    let of_a = cluster.peers[0].clone();
    b.stop().await;
    let request = EraseRequest {
        tenant: Some("one".into()),
        ..EraseRequest::default()
    };
    let erased = c.handle().erase(request).await.unwrap();
    assert_eq!((erased.documents, erased.replicas.len()), (10, 2));
    for replica in &erased.replicas {
        assert_eq!(replica.is_done, replica.url == of_a, "{replica:?}");
        assert_eq!(replica.trouble.is_none(), replica.is_done, "{replica:?}");
    }
    assert_eq!(a.text("one", 3).await, None);
    assert_eq!(
        a.metric("refrain_draft_store_rewrites_total{outcome=\"done\"}"),
        1.0
    );
}
