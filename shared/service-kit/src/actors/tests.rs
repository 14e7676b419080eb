use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use parking_lot::Mutex;
use tokio::sync::Notify;
use tokio::time::Instant;

use super::*;
use crate::telemetry::Metrics;

const GRACE: Duration = Duration::from_secs(60);

#[tokio::test(start_paused = true)]
async fn a_body_that_panics_begins_anew_after_a_pause_and_what_is_outside_of_it_stays() {
    let (runs, done) = (Arc::new(AtomicU64::new(0)), Arc::new(Notify::new()));
    let (counted, finished) = (runs.clone(), done.clone());
    let began = Instant::now();
    let actor = start("test of restarts", move || {
        let (runs, done) = (counted.clone(), finished.clone());
        async move {
            if runs.fetch_add(1, Ordering::Relaxed) < 3 {
                panic!("a test asked for it");
            }
            done.notify_one();
            std::future::pending::<()>().await;
        }
    });
    done.notified().await;
    // Pauses of 100, 200 and 400 ms at least, by the paused clock.
    assert!(began.elapsed() >= Duration::from_millis(700));
    assert_eq!(runs.load(Ordering::Relaxed), 4);
    assert_eq!(restarts("test of restarts"), 3);
    assert!(actor.stop(GRACE).await);
}

#[tokio::test]
async fn a_panic_of_what_makes_the_body_is_as_one_of_the_body() {
    let runs = AtomicU64::new(0);
    let actor = start("test of making", move || {
        assert!(runs.fetch_add(1, Ordering::Relaxed) > 0, "not at first");
        async {}
    });
    actor.ended().await;
    assert_eq!(restarts("test of making"), 1);
}

/// An actor that notes the numbers it is sent, and panics over 13.
fn notes(name: &'static str) -> (mpsc::Sender<u32>, Actor, Arc<Mutex<Vec<u32>>>) {
    let noted = Arc::<Mutex<Vec<u32>>>::default();
    let body_noted = noted.clone();
    let (sender, actor) = start_with(name, 4, move |mut inbox: Inbox<u32>| {
        let noted = body_noted.clone();
        async move {
            while let Some(number) = inbox.recv().await {
                assert_ne!(number, 13);
                noted.lock().push(number);
            }
        }
    });
    (sender, actor, noted)
}

#[tokio::test(start_paused = true)]
async fn a_mailbox_is_bounded_and_outlives_the_body() {
    let (sender, actor, noted) = notes("test of mailboxes");
    for number in [1, 13, 2, 3] {
        sender.try_send(number).unwrap();
    }
    assert!(sender.try_send(4).is_err(), "it holds four");
    let metrics = Metrics::new().unwrap();
    let shows = |line: &str| {
        let text = String::from_utf8(metrics.render()).unwrap();
        assert!(text.lines().any(|shown| shown == line), "{line}: {text}");
    };
    shows("refrain_actor_mailbox{actor=\"test of mailboxes\"} 4");
    drop(sender);
    actor.ended().await;
    assert_eq!(*noted.lock(), [1, 2, 3]);
    shows("refrain_actor_mailbox{actor=\"test of mailboxes\"} 0");
    shows("refrain_actor_restarts_total{actor=\"test of mailboxes\"} 1");
}

#[tokio::test(start_paused = true)]
async fn an_actor_that_is_asked_to_stop_reads_its_mailbox_first() {
    let (sender, actor, noted) = notes("test of stops");
    sender.send(1).await.unwrap();
    tokio::task::yield_now().await;
    sender.try_send(2).unwrap();
    sender.try_send(3).unwrap();
    assert!(actor.stop(GRACE).await);
    assert_eq!(*noted.lock(), [1, 2, 3]);
    assert!(sender.is_closed());
}

#[tokio::test(start_paused = true)]
async fn an_actor_that_does_not_stop_is_aborted_after_the_grace() {
    let began = Instant::now();
    let (sender, actor) = start_with("test of aborts", 1, |_: Inbox<()>| std::future::pending());
    assert!(!actor.stop(GRACE).await);
    assert_eq!(began.elapsed(), GRACE);
    sender.closed().await;
}

#[tokio::test]
async fn an_actor_is_aborted_when_it_is_dropped_and_not_when_detached() {
    let (gone, mut is_gone) = mpsc::channel::<()>(1);
    let waits = |held: mpsc::Sender<()>| {
        move || {
            let held = held.clone();
            async move { held.closed().await }
        }
    };
    drop(start("test of drops", waits(gone)));
    assert_eq!(is_gone.recv().await, None);
    let (held, mut is_held) = mpsc::channel::<()>(1);
    start("test of drops", waits(held)).detached();
    tokio::task::yield_now().await;
    assert!(is_held.try_recv().is_err());
    assert!(running().contains(&"test of drops"));
    is_held.close();
    assert_eq!(is_held.recv().await, None);
}

#[tokio::test]
async fn a_test_may_kill_an_actor_by_its_name() {
    let (sender, actor, noted) = notes("test of kills");
    for number in 0..3 {
        sender.send(number).await.unwrap();
        kill("test of kills");
        while restarts("test of kills") <= u64::from(number) {
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
    }
    assert!(actor.stop(GRACE).await);
    assert_eq!(*noted.lock(), [0, 1, 2]);
}

#[test]
fn an_actor_ends_with_the_runtime_of_its_body() {
    let runtime = || {
        tokio::runtime::Builder::new_current_thread()
            .build()
            .unwrap()
    };
    let of_body = runtime();
    let actor = start_on(of_body.handle(), "test of runtimes", std::future::pending);
    drop(of_body);
    runtime().block_on(actor.ended());
}
