//! Erased documents do not come back: not by a late message, a replica that was away, or the stream.

use refrain_protocol::admin::EraseRequest;
use refrain_rpc::ReplicaPeer as _;

use super::nats::{Nats, Wire};
use super::*;

fn tenant(name: &str) -> EraseRequest {
    EraseRequest {
        tenant: Some(name.into()),
        ..EraseRequest::default()
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_erased_document_does_not_come_back_from_a_replica_that_was_away() {
    let dir = tempfile::tempdir().unwrap();
    let nats = Nats::start(dir.path());
    let wire = Wire::to(nats.addr()).await;
    let a = Replica::ready(config(dir.path(), "a", &nats.url())).await;
    let b = Replica::ready(config(dir.path(), "b", &wire.url())).await;
    for document in 0..10 {
        a.append("gone", vec![whole(document, 40)]).await;
        a.append("kept", vec![whole(document, 40)]).await;
    }
    end_equal(&[&a, &b]).await;
    wire.set_cut(true);
    // They are here, and on the way to nobody.
    for document in 10..20 {
        b.append("gone", vec![whole(document, 40)]).await;
        b.append("kept", vec![whole(document, 40)]).await;
    }
    b.append("gone", vec![update(30, 0, &text(30, 10))]).await;
    let late = update(30, 10, &text(30, 20)[10..]);
    let erased = a.handle().erase(tenant("gone")).await.unwrap();
    assert_eq!(erased.documents, 10);
    assert_eq!(a.text("gone", 3).await, None);
    assert_eq!(b.text("gone", 3).await, Some(text(3, 40)), "it is away");
    // A request that began after the erasure stays.
    tokio::time::sleep(Duration::from_millis(20)).await;
    a.append("gone", vec![whole(40, 40)]).await;
    wire.set_cut(false);
    eventually("the replica that was away erases", async || {
        b.text("gone", 15).await.is_none() && b.text("gone", 30).await.is_none()
    })
    .await;
    // Its worker goes on, and sends first the rest, then all of it.
    b.append("gone", vec![late]).await;
    let again = DocumentUpdate {
        head: DocumentHead {
            created_ms: erased.erased_at_ms - 1,
            ..DocumentHead::default()
        },
        ..whole(30, 20)
    };
    b.append("gone", vec![again.clone()]).await;
    a.append("gone", vec![again]).await;
    let sums = end_equal(&[&a, &b]).await;
    let of = |tenant: &str| {
        let id = names(tenant).id();
        let sum = sums.iter().find(|sum| sum.namespace == id);
        sum.map_or(0, |sum| sum.documents)
    };
    assert_eq!(of("kept"), 20);
    assert_eq!(of("gone"), 1, "the one that began later");
    for replica in [&a, &b] {
        assert_eq!(replica.text("gone", 40).await, Some(text(40, 40)));
    }
    // The stream has no text of the erased documents either. A new replica learns the same from it.
    let subject = format!("refrain.0.{}", names("gone").id());
    eventually("the stream is cleared", async || {
        a.metric("refrain_draft_store_feed_erased_messages_total") >= 1.0
    })
    .await;
    let left = nats.messages(&subject).await;
    let c = Replica::ready(config(dir.path(), "c", &nats.url())).await;
    end_equal(&[&a, &b, &c]).await;
    assert_eq!(c.text("gone", 3).await, None);
    // One message with the document, and messages of removals.
    assert!((1..30).contains(&left), "{left} messages");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_erased_session_is_gone_everywhere_and_the_others_stay() {
    let dir = tempfile::tempdir().unwrap();
    let nats = Nats::start(dir.path());
    let a = Replica::ready(config(dir.path(), "a", &nats.url())).await;
    let b = Replica::ready(config(dir.path(), "b", &nats.url())).await;
    let of = |session: &str, document| {
        let mut sent = whole(document, 30);
        sent.head.session = Some(session.into());
        sent
    };
    for document in 0..10 {
        a.append("one", vec![of("gone", document)]).await;
        b.append("one", vec![of("kept", document + 100)]).await;
    }
    end_equal(&[&a, &b]).await;
    let request = EraseRequest {
        session: Some("gone".into()),
        ..tenant("one")
    };
    b.handle().erase(request).await.unwrap();
    let sums = end_equal(&[&a, &b]).await;
    assert_eq!(sums[0].documents, 10);
    eventually("the stream is cleared", async || {
        // Documents that were ready together have shared a message.
        (1.0..=10.0).contains(&b.metric("refrain_draft_store_feed_erased_messages_total"))
    })
    .await;
    // Both have rewritten their files: no text of the session is left there.
    eventually("nothing is left in the files", async || {
        a.metric("refrain_draft_store_rewrites_total{outcome=\"done\"}") >= 1.0
            && b.metric("refrain_draft_store_rewrites_total{outcome=\"done\"}") >= 1.0
    })
    .await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn documents_that_shared_a_message_with_erased_ones_are_in_the_stream_all_the_same() {
    let dir = tempfile::tempdir().unwrap();
    let nats = Nats::start(dir.path());
    let a = Replica::ready(config(dir.path(), "a", &nats.url())).await;
    let of = |document: u128| {
        let mut sent = whole(document, 30);
        let session = if document.is_multiple_of(4) {
            "gone"
        } else {
            "kept"
        };
        sent.head.session = Some(session.into());
        sent
    };
    // They are ready at once, so they travel together.
    a.append("one", (0..40).map(of).collect()).await;
    end_equal(&[&a]).await;
    let subject = format!("refrain.0.{}", names("one").id());
    let sent = nats.messages(&subject).await;
    assert!((1..10).contains(&sent), "{sent} messages of 40 documents");
    let request = EraseRequest {
        session: Some("gone".into()),
        ..tenant("one")
    };
    a.handle().erase(request).await.unwrap();
    eventually("the stream is cleared", async || {
        a.metric("refrain_draft_store_feed_erased_messages_total") == sent as f64
    })
    .await;
    // It has nothing but the stream.
    let b = Replica::ready(config(dir.path(), "b", &nats.url())).await;
    let sums = end_equal(&[&a, &b]).await;
    assert_eq!(sums[0].documents, 30);
    assert_eq!(b.text("one", 5).await, Some(text(5, 30)));
    assert_eq!(b.text("one", 8).await, None);
}

/// Waits until both replicas have read the whole stream, and have carried out all erasures, also in the stream.
async fn carried_out(replicas: [&Replica; 2]) {
    eventually("the erasures are carried out", async || {
        let [first, second] = replicas.map(Replica::handle);
        let first = first.replica_state().await.unwrap();
        let second = second.replica_state().await.unwrap();
        let sequences = [first.erased_sequence, second.erased_sequence];
        first.sequence == second.sequence && sequences == [first.sequence; 2]
    })
    .await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_replay_rewrites_the_files_once_for_all_erasures_and_not_at_all_if_none_hits() {
    let dir = tempfile::tempdir().unwrap();
    let nats = Nats::start(dir.path());
    let rewrites =
        |replica: &Replica| replica.metric("refrain_draft_store_rewrites_total{outcome=\"done\"}");
    let a = Replica::ready(config(dir.path(), "a", &nats.url())).await;
    let b = Replica::ready(config(dir.path(), "b", &nats.url())).await;
    for document in 0..10 {
        for tenant in ["kept", "one", "two", "three"] {
            a.append(tenant, vec![whole(document, 40)]).await;
        }
    }
    for nobody in 0..4 {
        a.handle()
            .erase(tenant(&format!("x{nobody}")))
            .await
            .unwrap();
    }
    end_equal(&[&a, &b]).await;
    carried_out([&a, &b]).await;
    assert_eq!((rewrites(&a), rewrites(&b)), (0.0, 0.0), "they hit nothing");
    b.stop().await;
    for tenant_name in ["one", "two", "three"] {
        a.handle().erase(tenant(tenant_name)).await.unwrap();
    }
    // It replays three erasures that hit, and has read the documents before.
    let b = Replica::ready(config(dir.path(), "b", &nats.url())).await;
    assert_eq!(rewrites(&b), 1.0);
    let sums = end_equal(&[&a, &b]).await;
    assert_eq!(sums.iter().map(|sum| sum.documents).sum::<u64>(), 10);
    assert_eq!(b.text("one", 3).await, None);
    // It replays all of them, and has never had what they hit: by then the stream has none of it.
    carried_out([&a, &b]).await;
    let c = Replica::ready(config(dir.path(), "c", &nats.url())).await;
    end_equal(&[&a, &b, &c]).await;
    assert_eq!(c.text("one", 3).await, None);
    assert_eq!(rewrites(&c), 0.0, "nothing was removed");
}
