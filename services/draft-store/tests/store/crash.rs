//! kill -9: a child process appends, prints what was acknowledged, and is killed in the middle of it.

use std::io::{BufRead, BufReader};
use std::process::{Child, ChildStdout, Command, Stdio};

use refrain_rpc::StoreAdmin as _;

use super::*;

const CHILD_DIR: &str = "REFRAIN_DRAFT_STORE_TEST_CHILD_DIR";
const CHILD_ROUND: &str = "REFRAIN_DRAFT_STORE_TEST_CHILD_ROUND";
/// Documents that grow at once in one round.
const WRITERS: u128 = 8;
/// Even, so that the last round has rewrites.
const ROUNDS: usize = 8;

pub(super) fn token(document: u128, at: u32) -> TokenId {
    (document as u32).wrapping_mul(7919).wrapping_add(at * 31) % 50_000
}

/// The child process. It never ends by itself, so it is no test of its own: [`run_and_kill`] starts it by name.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[ignore = "the child process of other tests, which start it by name and kill it"]
async fn child_that_appends_until_it_is_killed() {
    let (Ok(dir), Ok(round)) = (std::env::var(CHILD_DIR), std::env::var(CHILD_ROUND)) else {
        panic!(
            "this is the child process of nothing_acknowledged_is_lost_by_kill_9; run that test"
        );
    };
    let round: u128 = round.parse().unwrap();
    let store = std::sync::Arc::new(Store::start(sealing(Path::new(&dir))).await);
    println!("ready");
    if round % 2 == 1 {
        // Rewrite without a pause, so that the kill hits a rewrite.
        let handle = store.handle();
        tokio::spawn(async move {
            loop {
                if handle.compact().await.is_ok() {
                    println!("rewritten");
                }
            }
        });
    }
    let writers: Vec<_> = (0..WRITERS)
        .map(|writer| {
            let store = store.clone();
            tokio::spawn(async move {
                // One document after the other, piece by piece.
                for number in 0.. {
                    let document = round << 64 | writer << 32 | number;
                    let (mut len, goal) = (0, 40 + (number as u32 * 97) % 1500);
                    while len < goal {
                        let count = (1 + (len * 13) % 60).min(goal - len);
                        let tokens: Vec<_> =
                            (len..len + count).map(|at| token(document, at)).collect();
                        let piece = update(document, len, &tokens);
                        let last = len + count == goal;
                        let piece = if last { finished(piece) } else { piece };
                        let lengths = store.append("a", vec![piece]).await.unwrap();
                        len = lengths[0];
                        println!("ack {document} {len}");
                    }
                }
            })
        })
        .collect();
    for writer in writers {
        writer.await.unwrap();
    }
}

/// The lines that a child prints.
pub(super) type ChildLines = std::io::Lines<BufReader<ChildStdout>>;

/// Starts a child that appends. Returns it once it is ready, with what it prints from then on.
pub(super) fn start_child(dir: &Path, round: usize) -> (Child, ChildLines) {
    let mut child = Command::new(std::env::current_exe().unwrap())
        .args([
            "--ignored",
            "--exact",
            "crash::child_that_appends_until_it_is_killed",
            "--nocapture",
        ])
        .env(CHILD_DIR, dir)
        .env(CHILD_ROUND, round.to_string())
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let mut lines = BufReader::new(child.stdout.take().unwrap()).lines();
    assert!(
        lines.any(|line| line.unwrap().ends_with("ready")),
        "the child did not start"
    );
    (child, lines)
}

/// The document of an acknowledgement, and its length.
pub(super) fn acknowledgement(line: &str) -> Option<(u128, u32)> {
    let (document, len) = line.strip_prefix("ack ")?.split_once(' ')?;
    Some((document.parse().ok()?, len.parse().ok()?))
}

/// Runs the child, kills it, and returns how many rewrites it completed.
fn run_and_kill(dir: &Path, round: usize, acknowledged: &mut BTreeMap<u128, u32>) -> usize {
    let (mut child, lines) = start_child(dir, round);
    // The last child lives until it has completed a rewrite, which may take long on a busy machine.
    let awaited = if round == ROUNDS - 1 {
        "rewritten"
    } else {
        "ack "
    };
    let (done, begun) = std::sync::mpsc::channel();
    let killer = std::thread::spawn(move || {
        // If the child ended by itself, the missing acknowledgements fail the test.
        let _ = begun.recv_timeout(PATIENCE);
        std::thread::sleep(Duration::from_millis(250 + 90 * round as u64));
        child.kill().unwrap();
        child.wait().unwrap();
    });
    // Everything it printed before it died had been acknowledged.
    let mut rewrites = 0;
    for line in lines.map_while(Result::ok) {
        rewrites += usize::from(line == "rewritten");
        if line.starts_with(awaited) {
            let _ = done.send(());
        }
        acknowledged.extend(acknowledgement(&line));
    }
    killer.join().unwrap();
    rewrites
}

/// Fills a directory with a store that is killed. Returns what was acknowledged.
pub(super) fn filled_and_killed(data_dir: &Path) -> BTreeMap<u128, u32> {
    let mut acknowledged = BTreeMap::new();
    let dir = data_dir.parent().unwrap();
    run_and_kill(dir, 0, &mut acknowledged);
    assert!(!acknowledged.is_empty());
    acknowledged
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn nothing_acknowledged_is_lost_by_kill_9() {
    let dir = tempfile::tempdir().unwrap();
    let mut acknowledged = BTreeMap::new();
    let mut follower = Follower::default();
    let (mut rewrites, mut segments) = (0, 0.0);
    for round in 0..ROUNDS {
        let before = acknowledged.len();
        rewrites += run_and_kill(dir.path(), round, &mut acknowledged);
        assert!(
            acknowledged.len() > before,
            "round {round} acknowledged something"
        );
        let store = Store::start(sealing(dir.path())).await;
        segments = store.metric("refrain_draft_store_segments");
        assert_eq!(store.metric("refrain_draft_store_segments_lost_total"), 0.0);
        follower.catch_up(&store, "a").await;
        for (document, len) in &acknowledged {
            let text = &follower.texts[document];
            assert!(text.len() >= *len as usize, "{document} lost its end");
            for (at, given) in text.iter().enumerate() {
                assert_eq!(*given, token(*document, at as u32));
            }
        }
        assert_eq!(store.metric("refrain_draft_store_quarantines_total"), 0.0);
        assert_eq!(
            store.metric("refrain_draft_store_damaged_records_total"),
            0.0
        );
        assert_eq!(store.metric("refrain_draft_store_blob_files"), 0.0);
        let mut fresh = Follower::default();
        fresh.catch_up(&store, "a").await;
        assert_eq!(fresh.texts, follower.texts, "a cursor outlives a kill");
        store.stop().await;
    }
    assert_eq!(follower.resets, 1);
    assert!(segments > 0.0, "nothing was sealed before a kill");
    assert!(rewrites > 0, "no rewrite was completed before a kill");
}
