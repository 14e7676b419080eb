//! A snapshot of the volume of a running store is a backup.

use std::process::Command;

use super::crash::{acknowledgement, start_child, token};
use super::*;

/// Acknowledgements before the snapshot.
const ACKNOWLEDGED: usize = 400;

fn run(command: &str, arguments: &[&str]) {
    let status = Command::new(command).args(arguments).status().unwrap();
    assert!(status.success(), "{command} {arguments:?}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_snapshot_of_a_running_store_has_all_that_was_acknowledged_before_it() {
    let dir = tempfile::tempdir().unwrap();
    let (running, backup) = (dir.path().join("running"), dir.path().join("backup"));
    std::fs::create_dir(&running).unwrap();
    // It rewrites its log without a pause.
    let (mut child, mut lines) = start_child(&running, 1);
    let (mut acknowledged, mut is_rewritten) = (BTreeMap::new(), false);
    while acknowledged.len() < ACKNOWLEDGED || !is_rewritten {
        let line = lines.next().unwrap().unwrap();
        is_rewritten |= line == "rewritten";
        acknowledged.extend(acknowledgement(&line));
    }
    // While the process stands still, its files are what a snapshot of their volume would have.
    let id = child.id().to_string();
    run("kill", &["-STOP", &id]);
    run(
        "cp",
        &["-a", running.to_str().unwrap(), backup.to_str().unwrap()],
    );
    run("kill", &["-CONT", &id]);
    let goes_on = lines.by_ref().map_while(Result::ok);
    assert!(
        goes_on
            .take(1_000)
            .any(|line| acknowledgement(&line).is_some())
    );
    child.kill().unwrap();
    child.wait().unwrap();

    let restored = Store::start(sealing(&backup)).await;
    restored.ready().unwrap();
    for lost in ["segments_lost", "quarantines", "damaged_records"] {
        assert_eq!(
            restored.metric(&format!("refrain_draft_store_{lost}_total")),
            0.0
        );
    }
    let mut follower = Follower::default();
    follower.catch_up(&restored, "a").await;
    for (document, len) in &acknowledged {
        let text = &follower.texts[document];
        assert!(text.len() >= *len as usize, "{document} lost its end");
        for (at, given) in text.iter().enumerate() {
            assert_eq!(*given, token(*document, at as u32));
        }
    }
    // It goes on from there.
    let later = finished(update(7, 0, &[5; 30]));
    restored.append("a", vec![later]).await.unwrap();
    follower.catch_up(&restored, "a").await;
    assert_eq!(follower.texts[&7], [5; 30]);
    restored.stop().await;
}
