//! kill -9 of stores and of the broker, during load.

use std::collections::BTreeMap;
use std::io::{BufRead, BufReader};
use std::process::{Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use super::nats::Nats;
use super::*;

const CHILD_DIR: &str = "REFRAIN_REPLICA_TEST_CHILD_DIR";
const CHILD_URL: &str = "REFRAIN_REPLICA_TEST_CHILD_URL";
const CHILD_ROUND: &str = "REFRAIN_REPLICA_TEST_CHILD_ROUND";

/// Documents that are written at once.
const WRITERS: u128 = 4;

/// The child process. It never ends by itself, so it is no test of its own: [`run_and_kill`] starts it by name.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[ignore = "the child process of another test, which starts it by name and kills it"]
async fn child_replica_that_appends_until_it_is_killed() {
    let variables = [CHILD_DIR, CHILD_URL, CHILD_ROUND].map(std::env::var);
    let [Ok(dir), Ok(url), Ok(round)] = variables else {
        panic!("this is the child process of what_was_acknowledged_survives_kill_9; run that test");
    };
    let round: u128 = round.parse().unwrap();
    let replica = Arc::new(Replica::ready(config(Path::new(&dir), "a", &url)).await);
    let writers: Vec<_> = (0..WRITERS)
        .map(|writer| {
            let replica = replica.clone();
            tokio::spawn(async move {
                for number in 0.. {
                    let document = round << 64 | writer << 32 | number;
                    let level = match number % 2 {
                        0 => Acknowledgement::Replicated,
                        _ => Acknowledgement::Local,
                    };
                    let mut len = 0;
                    while len < 90 {
                        let piece =
                            update(document, len, &text(document, len + 30)[len as usize..]);
                        let piece = if len == 60 { finished(piece) } else { piece };
                        let stored = replica.append_at(level, "one", vec![piece]).await;
                        len = stored.unwrap()[0];
                        println!("ack {level:?} {document} {len}");
                    }
                }
            })
        })
        .collect();
    for writer in writers {
        writer.await.unwrap();
    }
}

type Acknowledged = BTreeMap<u128, (bool, u32)>;

/// Runs the child, and kills it. Adds what it was acknowledged: whether it was replicated, and the length.
fn run_and_kill(dir: &Path, url: &str, round: usize, acknowledged: &mut Acknowledged) {
    let mut child = Command::new(std::env::current_exe().unwrap())
        .args([
            "--ignored",
            "--exact",
            "crash::child_replica_that_appends_until_it_is_killed",
            "--nocapture",
        ])
        .env(CHILD_DIR, dir)
        .env(CHILD_URL, url)
        .env(CHILD_ROUND, round.to_string())
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let lines = BufReader::new(child.stdout.take().unwrap()).lines();
    let mut killer = Some(child);
    let mut seen = 0;
    for line in lines.map_while(Result::ok) {
        let mut parts = line.split(' ');
        if parts.next() != Some("ack") {
            continue;
        }
        let level = parts.next().unwrap() == "Replicated";
        let document: u128 = parts.next().unwrap().parse().unwrap();
        let len: u32 = parts.next().unwrap().parse().unwrap();
        acknowledged.insert(document, (level, len));
        seen += 1;
        // At another moment in each round.
        if seen == 150 + 37 * round
            && let Some(mut child) = killer.take()
        {
            child.kill().unwrap();
            child.wait().unwrap();
        }
    }
    assert!(killer.is_none(), "the child ended by itself");
}

async fn check(replica: &Replica, document: u128, len: u32) {
    let found = replica.text("one", document).await.unwrap_or_default();
    assert!(
        found.len() >= len as usize,
        "{document} has {} of {len} tokens",
        found.len()
    );
    assert_eq!(found, text(document, found.len() as u32));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_was_acknowledged_survives_kill_9_of_a_store() {
    let dir = tempfile::tempdir().unwrap();
    let nats = Nats::start(dir.path());
    let b = Replica::ready(config(dir.path(), "b", &nats.url())).await;
    let mut acknowledged = Acknowledged::new();
    for round in 0..4 {
        let (path, url) = (dir.path().to_owned(), nats.url());
        let child = move || {
            let mut acknowledged = Acknowledged::new();
            run_and_kill(&path, &url, round, &mut acknowledged);
            acknowledged
        };
        let new = tokio::task::spawn_blocking(child).await.unwrap();
        let last = nats.messages("refrain.0.>").await;
        eventually("the other replica has what the stream has", async || {
            b.metric("refrain_draft_store_feed_sequence") >= last as f64
        })
        .await;
        // The store is gone now. All that it acknowledged as replicated is here nevertheless.
        let replicated = new.iter().filter(|(_, (level, _))| *level);
        for (document, (_, len)) in replicated.clone() {
            check(&b, *document, *len).await;
        }
        assert!(replicated.count() > 10);
        acknowledged.extend(new);
    }
    let a = Replica::ready(config(dir.path(), "a", &nats.url())).await;
    end_equal(&[&a, &b]).await;
    for (document, (_, len)) in &acknowledged {
        check(&b, *document, *len).await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_was_acknowledged_survives_kill_9_of_the_broker() {
    let dir = tempfile::tempdir().unwrap();
    let mut nats = Nats::start(dir.path());
    let a = Arc::new(Replica::ready(config(dir.path(), "a", &nats.url())).await);
    let b = Replica::ready(config(dir.path(), "b", &nats.url())).await;
    let stop = Arc::new(AtomicBool::new(false));
    let writers: Vec<_> = (0..WRITERS)
        .map(|writer| {
            let (a, stop) = (a.clone(), stop.clone());
            tokio::spawn(async move {
                let (mut stored, mut refused) = (Vec::new(), 0);
                for number in 0.. {
                    if stop.load(Ordering::Relaxed) {
                        break;
                    }
                    let document = writer << 32 | number;
                    let level = match number % 2 {
                        0 => Acknowledgement::Replicated,
                        _ => Acknowledgement::Local,
                    };
                    let sent = vec![whole(document, 60)];
                    match a.append_at(level, "one", sent).await {
                        Ok(_) => stored.push(document),
                        Err(_) => refused += 1,
                    }
                    tokio::time::sleep(Duration::from_millis(2)).await;
                }
                (stored, refused)
            })
        })
        .collect();
    for _ in 0..3 {
        let sent = a.metric("refrain_draft_store_feed_sent_total");
        eventually("messages are sent", async || {
            a.metric("refrain_draft_store_feed_sent_total") > sent + 100.0
        })
        .await;
        nats.kill();
        tokio::time::sleep(Duration::from_millis(300)).await;
        nats.restart();
    }
    stop.store(true, Ordering::Relaxed);
    let (mut stored, mut refused) = (Vec::new(), 0);
    for writer in writers {
        let (documents, refusals) = writer.await.unwrap();
        stored.extend(documents);
        refused += refusals;
    }
    end_equal(&[&a, &b]).await;
    for document in &stored {
        assert_eq!(b.text("one", *document).await, Some(text(*document, 60)));
    }
    assert!(stored.len() > 100, "{} were stored", stored.len());
    assert!(refused > 0, "the broker was never missed");
}
