//! Replicas end with the same documents.

use super::nats::Nats;
use super::*;

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn two_replicas_hold_what_either_was_given() {
    let dir = tempfile::tempdir().unwrap();
    let nats = Nats::start(dir.path());
    let a = Replica::ready(config(dir.path(), "a", &nats.url())).await;
    let b = Replica::ready(config(dir.path(), "b", &nats.url())).await;
    for document in 0..40 {
        let (replica, tenant) = match document % 2 {
            0 => (&a, "one"),
            _ => (&b, "two"),
        };
        replica.append(tenant, vec![whole(document, 300)]).await;
    }
    // A request that goes on at another replica: its worker sends all of it there.
    a.append("one", vec![update(100, 0, &text(100, 50))]).await;
    let elsewhere = DocumentUpdate {
        epoch: 2,
        ..whole(100, 80)
    };
    b.append("one", vec![elsewhere]).await;
    // One that never ends is sent once it is silent.
    a.append("one", vec![update(101, 0, &text(101, 20))]).await;
    // One that needs several messages.
    a.append("one", vec![whole(102, 150_000)]).await;
    end_equal(&[&a, &b]).await;
    for replica in [&a, &b] {
        assert_eq!(replica.text("one", 100).await, Some(text(100, 80)));
        assert_eq!(replica.text("one", 101).await, Some(text(101, 20)));
        assert_eq!(replica.text("one", 102).await, Some(text(102, 150_000)));
        assert_eq!(replica.text("two", 1).await, Some(text(1, 300)));
        assert_eq!(replica.text("two", 0).await, None);
    }
    // A third one that is new has everything that the stream has.
    let c = Replica::ready(config(dir.path(), "c", &nats.url())).await;
    end_equal(&[&a, &b, &c]).await;
    for replica in [a, b, c] {
        replica.stop().await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_store_that_becomes_a_replica_sends_what_it_has() {
    let dir = tempfile::tempdir().unwrap();
    let nats = Nats::start(dir.path());
    let alone = DraftStoreConfig {
        feed: None,
        ..config(dir.path(), "a", &nats.url())
    };
    let a = Replica::start(alone).await;
    let level = Acknowledgement::Replicated;
    let refused = a.append_at(level, "one", vec![whole(0, 10)]).await;
    let refused = refused.unwrap_err().to_string();
    assert!(refused.contains("has no feed"), "{refused}");
    for document in 1..20 {
        a.append("one", vec![whole(document, 100)]).await;
    }
    a.stop().await;
    let b = Replica::ready(config(dir.path(), "b", &nats.url())).await;
    b.append("one", vec![whole(50, 100)]).await;
    let a = Replica::ready(config(dir.path(), "a", &nats.url())).await;
    let sums = end_equal(&[&a, &b]).await;
    assert_eq!(sums[0].documents, 20);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn evictions_reach_the_other_replica() {
    let dir = tempfile::tempdir().unwrap();
    let nats = Nats::start(dir.path());
    let small = |name| DraftStoreConfig {
        tokens_max: 5_000,
        document_tokens_max: 1_000,
        ..config(dir.path(), name, &nats.url())
    };
    let a = Replica::ready(small("a")).await;
    // This one never exceeds its budget, so it removes only what the other one says.
    let large = config(dir.path(), "b", &nats.url());
    let b = Replica::ready(large).await;
    for document in 0..80 {
        a.append("one", vec![whole(document, 200)]).await;
    }
    let sums = end_equal(&[&a, &b]).await;
    assert!(sums[0].tokens <= 5_000, "{sums:?}");
    assert!(sums[0].tokens >= 4_000, "{sums:?}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_replica_restored_from_an_old_copy_catches_up() {
    let dir = tempfile::tempdir().unwrap();
    let nats = Nats::start(dir.path());
    let a = Replica::ready(config(dir.path(), "a", &nats.url())).await;
    let b = Replica::ready(config(dir.path(), "b", &nats.url())).await;
    for document in 0..20 {
        b.append("one", vec![whole(document, 50)]).await;
    }
    end_equal(&[&a, &b]).await;
    b.stop().await;
    copy(&dir.path().join("b"), &dir.path().join("old"));
    let b = Replica::ready(config(dir.path(), "b", &nats.url())).await;
    for document in 20..40 {
        b.append("one", vec![whole(document, 50)]).await;
    }
    let longer = DocumentUpdate {
        epoch: 2,
        ..whole(3, 70)
    };
    b.append("one", vec![longer]).await;
    end_equal(&[&a, &b]).await;
    b.stop().await;
    let restored = Replica::ready(config(dir.path(), "old", &nats.url())).await;
    restored.append("one", vec![whole(50, 50)]).await;
    let sums = end_equal(&[&a, &restored]).await;
    assert_eq!(sums[0].documents, 41);
    assert_eq!(restored.text("one", 3).await, Some(text(3, 70)));
}

fn copy(from: &Path, to: &Path) {
    std::fs::create_dir_all(to).unwrap();
    for entry in std::fs::read_dir(from).unwrap() {
        let entry = entry.unwrap();
        let target = to.join(entry.file_name());
        match entry.file_type().unwrap().is_dir() {
            true => copy(&entry.path(), &target),
            false => {
                std::fs::copy(entry.path(), target).unwrap();
            }
        }
    }
}
