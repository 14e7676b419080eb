//! A broker that is away, that was lost, or that has another stream than the configuration says.

use refrain_protocol::ErrorKind;

use super::nats::{Nats, Wire};
use super::*;

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn while_the_broker_is_away_appends_are_kept_and_sent_later() {
    let dir = tempfile::tempdir().unwrap();
    let mut nats = Nats::start(dir.path());
    let with_bound = |name| {
        let mut config = config(dir.path(), name, &nats.url());
        if let Some(feed) = &mut config.feed {
            feed.outbox_max = 30;
        }
        config
    };
    let a = Replica::ready(with_bound("a")).await;
    let b = Replica::ready(with_bound("b")).await;
    let level = Acknowledgement::Replicated;
    let subject = format!("refrain.0.{}", names("one").id());
    a.append_at(level, "one", vec![whole(0, 100)])
        .await
        .unwrap();
    assert_eq!(nats.messages(&subject).await, 1);
    // One that still grows is sent at once, since its caller waits. Then only what is new is sent.
    let growing = [
        update(1, 0, &text(1, 10)),
        update(1, 10, &text(1, 15)[10..]),
    ];
    for piece in growing {
        a.append_at(level, "one", vec![piece]).await.unwrap();
    }
    assert_eq!(nats.messages(&subject).await, 3);
    nats.kill();
    eventually("the replica notices", async || {
        a.metric("refrain_draft_store_feed_connected") == 0.0
    })
    .await;
    let refused = a.append_at(level, "one", vec![whole(2, 100)]).await;
    let refused = refused.unwrap_err();
    assert_eq!(refused.kind, ErrorKind::Unavailable);
    assert!(refused.retry_after_ms.is_some(), "{refused}");
    // It is stored here nevertheless, and drafts go on.
    assert_eq!(a.text("one", 2).await, Some(text(2, 100)));
    assert_eq!(a.handle().readiness(), Ok(()));
    let mut stored = 3;
    let full = loop {
        let level = Acknowledgement::Local;
        match a.append_at(level, "one", vec![whole(stored, 20)]).await {
            Ok(_) => stored += 1,
            Err(error) => break error,
        }
        assert!(stored < 100, "the outbox has no bound");
    };
    assert!(stored > 20, "{stored} documents were stored");
    assert_eq!(full.kind, ErrorKind::Unavailable);
    assert!(full.to_string().contains("feed.outbox_max"), "{full}");
    let rejections = "refrain_draft_store_rejections_total{limit=\"outbox_max\"}";
    assert_eq!(a.metric(rejections), 1.0);
    assert_eq!(b.text("one", 2).await, None);
    nats.restart();
    let sums = end_equal(&[&a, &b]).await;
    assert_eq!(u128::from(sums[0].documents), stored);
    a.append_at(level, "one", vec![whole(2, 100)])
        .await
        .unwrap();
    a.append_at(level, "one", vec![whole(200, 100)])
        .await
        .unwrap();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_replica_that_was_cut_off_agrees_with_the_others_afterwards() {
    let dir = tempfile::tempdir().unwrap();
    let nats = Nats::start(dir.path());
    let wire = Wire::to(nats.addr()).await;
    let a = Replica::ready(config(dir.path(), "a", &nats.url())).await;
    let b = Replica::ready(config(dir.path(), "b", &wire.url())).await;
    for round in 0..3u32 {
        wire.set_cut(true);
        for document in 0..10 {
            let number = u128::from(round) * 100 + document;
            a.append("one", vec![whole(number, 60)]).await;
            b.append("one", vec![whole(number + 50, 60)]).await;
            // Both have the same request, which went on here and there.
            let of = |epoch, len| DocumentUpdate {
                epoch: u64::from(round) * 2 + epoch,
                ..whole(1_000 + document, len)
            };
            a.append("one", vec![of(1, 40 + round)]).await;
            b.append("one", vec![of(2, 30 + round)]).await;
        }
        wire.set_cut(false);
        end_equal(&[&a, &b]).await;
        assert_eq!(a.text("one", 1_003).await, Some(text(1_003, 30 + round)));
    }
    assert!(b.metric("refrain_draft_store_feed_sessions_total") >= 3.0);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_stream_with_other_limits_is_an_error_that_says_what_to_do() {
    let dir = tempfile::tempdir().unwrap();
    let nats = Nats::start(dir.path());
    let a = Replica::ready(config(dir.path(), "a", &nats.url())).await;
    let mut other = config(dir.path(), "b", &nats.url());
    if let Some(feed) = &mut other.feed {
        feed.max_age_s = 1_000;
    }
    let b = Replica::start(other).await;
    eventually("the replica says why", async || {
        let trouble = b.handle().readiness().unwrap_err();
        trouble.contains("max_age is 2678400 s and the configuration says 1000 s")
            && trouble.contains("nats stream edit refrain-0")
    })
    .await;
    // It stores nevertheless.
    b.append("one", vec![whole(1, 10)]).await;
    assert_eq!(a.text("one", 1).await, None);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_replica_that_missed_messages_for_good_says_so() {
    let dir = tempfile::tempdir().unwrap();
    let nats = Nats::start(dir.path());
    let a = Replica::ready(config(dir.path(), "a", &nats.url())).await;
    let b = Replica::ready(config(dir.path(), "b", &nats.url())).await;
    a.append("one", vec![whole(1, 10)]).await;
    end_equal(&[&a, &b]).await;
    b.stop().await;
    for document in 2..10 {
        a.append("one", vec![whole(document, 10)]).await;
    }
    end_equal(&[&a]).await;
    // As the age or the size of the stream would.
    let client = async_nats::connect(nats.url()).await.unwrap();
    let context = async_nats::jetstream::new(client);
    let stream = context.get_stream("refrain-0").await.unwrap();
    stream.purge().keep(2).await.unwrap();
    let b = Replica::start(config(dir.path(), "b", &nats.url())).await;
    eventually("the replica says why", async || {
        let trouble = b.handle().readiness().unwrap_err();
        trouble.contains("feed.max_age_s") && trouble.contains("join anew")
    })
    .await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_the_broker_has_lost_comes_from_the_replicas_again() {
    let dir = tempfile::tempdir().unwrap();
    let mut nats = Nats::start(dir.path());
    let a = Replica::ready(config(dir.path(), "a", &nats.url())).await;
    let b = Replica::ready(config(dir.path(), "b", &nats.url())).await;
    for document in 0..10 {
        a.append("one", vec![whole(document, 40)]).await;
    }
    end_equal(&[&a, &b]).await;
    nats.kill();
    let copy = dir.path().join("copy");
    files::copy(nats.dir(), &copy);
    nats.restart();
    for document in 10..20 {
        a.append("one", vec![whole(document, 40)]).await;
    }
    end_equal(&[&a, &b]).await;
    a.stop().await;
    b.stop().await;
    // The last messages are lost, and others get their sequences.
    nats.kill();
    std::fs::remove_dir_all(nats.dir()).unwrap();
    files::copy(&copy, nats.dir());
    nats.restart();
    let c = Replica::ready(config(dir.path(), "c", &nats.url())).await;
    for document in 20..50 {
        c.append("one", vec![whole(document, 40)]).await;
    }
    end_equal(&[&c]).await;
    let a = Replica::ready(config(dir.path(), "a", &nats.url())).await;
    let b = Replica::ready(config(dir.path(), "b", &nats.url())).await;
    let sums = end_equal(&[&a, &b, &c]).await;
    assert_eq!(sums[0].documents, 50);
    for replica in [&a, &b] {
        assert_eq!(
            replica.metric("refrain_draft_store_feed_restarts_total"),
            1.0
        );
    }
    assert_eq!(c.text("one", 15).await, Some(text(15, 40)));
}
