//! A small disk that fills up. Appends are refused clearly, everything acknowledged is there, and the store goes on
//! once there is space.

use std::path::PathBuf;
use std::process::Command;

use refrain_protocol::ErrorKind;
use refrain_rpc::StoreAdmin as _;

use super::rewrite::noise;
use super::*;

/// A disk in memory. It is unmounted when dropped.
pub(super) struct SmallDisk {
    dir: tempfile::TempDir,
}

impl SmallDisk {
    /// Mounts it. `None`, with the reason on standard error, if nothing can be mounted.
    pub(super) fn mount(megabytes: u32) -> Option<Self> {
        let disk = SmallDisk {
            dir: tempfile::tempdir().unwrap(),
        };
        let mounted = disk.run("mount", &["-t", "tmpfs", "-o", &size(megabytes), "tmpfs"]);
        if let Err(reason) = &mounted {
            eprintln!("skipped: only root can mount the small disk that this test fills: {reason}");
        }
        mounted.is_ok().then_some(disk)
    }

    /// Runs a program on the disk. The error is what it wrote.
    fn run(&self, program: &str, arguments: &[&str]) -> Result<(), String> {
        let mut command = Command::new(program);
        let output = command.args(arguments).arg(self.dir.path()).output();
        let output = output.map_err(|error| error.to_string())?;
        let written = String::from_utf8_lossy(&output.stderr).into_owned();
        output.status.success().then_some(()).ok_or(written)
    }

    /// Mounts it again with other options. That is tried for ten seconds, because it fails while a thread of a closed
    /// log still has a file open, or while another test changes the table of mounts that `mount` reads.
    fn remount(&self, options: &str) {
        let options = format!("remount,{options}");
        for tries in 0.. {
            let Err(reason) = self.run("mount", &["-o", &options]) else {
                return;
            };
            assert!(tries < 200, "{reason}");
            std::thread::sleep(Duration::from_millis(50));
        }
    }

    fn resize(&self, megabytes: u32) {
        self.remount(&size(megabytes));
    }

    pub(super) fn path(&self) -> &Path {
        self.dir.path()
    }

    pub(super) fn make_read_only(&self) {
        self.remount("ro");
    }

    /// Fills it with a file that is not the store's.
    fn fill(&self) -> PathBuf {
        let path = self.dir.path().join("foreign");
        let mut file = std::fs::File::create(&path).unwrap();
        for bytes in [1 << 20, 1 << 12] {
            while std::io::Write::write_all(&mut file, &vec![7; bytes]).is_ok() {}
        }
        path
    }
}

impl Drop for SmallDisk {
    fn drop(&mut self) {
        let _ = self.run("umount", &["-l"]);
    }
}

fn size(megabytes: u32) -> String {
    format!("size={megabytes}m")
}

fn config_on(disk: &SmallDisk) -> DraftStoreConfig {
    DraftStoreConfig {
        tuning: StoreTuning {
            // Nothing is rewritten meanwhile.
            rewrite_bytes_min: 1 << 30,
            ..tuning()
        },
        ..config(disk.dir.path())
    }
}

/// Appends until that is refused. Returns how many appends were acknowledged, and the refusal.
async fn append_until_refused(store: &Store, from: u128) -> (u128, ApiError) {
    for document in from.. {
        let sent = finished(update(document, 0, &noise(document, 4_000)));
        if let Err(error) = store.append("a", vec![sent]).await {
            return (document, error);
        }
        assert!(document < 100_000, "the disk does not fill up");
    }
    unreachable!()
}

async fn check(store: &Store, documents: u128) {
    let mut follower = Follower::default();
    follower.catch_up(store, "a").await;
    for document in 0..documents {
        assert_eq!(follower.texts[&document], noise(document, 4_000));
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_disk_full_up_to_its_reserve_refuses_appends_and_nothing_else() {
    let Some(disk) = SmallDisk::mount(26) else {
        return;
    };
    let store = Store::start(config_on(&disk)).await;
    let (acknowledged, error) = append_until_refused(&store, 0).await;
    assert_eq!(error.kind, ErrorKind::Unavailable);
    assert!(error.message.contains("disk_reserve_bytes"), "{error:?}");
    assert!(error.retry_after_ms.is_some() && acknowledged > 50);
    check(&store, acknowledged).await;
    // The store is still open, and operations that free space still work.
    assert_eq!(
        store.metric("refrain_draft_store_writer_restarts_total"),
        0.0
    );
    let rejections = "refrain_draft_store_rejections_total{limit=\"disk_reserve_bytes\"}";
    assert!(store.metric(rejections) >= 1.0);
    assert_eq!(store.handle().verify().await.unwrap().damaged, 0);
    store.stop().await;
    // The store opens as it is, and goes on once there is space.
    let store = Store::start(config_on(&disk)).await;
    check(&store, acknowledged).await;
    disk.resize(40);
    let (more, _) = append_until_refused(&store, acknowledged).await;
    assert!(more > acknowledged + 50, "{acknowledged}, then {more}");
    check(&store, more).await;
    store.stop().await;
}

/// The reserve is enough to open the log again, even if imports alone filled the disk.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_disk_full_up_to_its_reserve_has_space_for_an_open_with_a_new_catalogue() {
    for megabytes in [18, 40] {
        let Some(disk) = SmallDisk::mount(megabytes) else {
            return;
        };
        let store = Store::start(config_on(&disk)).await;
        let (acknowledged, _) = append_until_refused(&store, 0).await;
        store.stop().await;
        for _ in 0..3 {
            let store = Store::start(config_on(&disk)).await;
            check(&store, acknowledged).await;
            // There is no space for a complete copy, and half a copy must not fill what is left.
            let refused = store.handle().compact().await.unwrap_err();
            assert_eq!(refused.kind, ErrorKind::Unavailable);
            store.stop().await;
        }
        let catalog = logs::catalog(&disk.dir.path().join("data/log"));
        std::fs::remove_dir_all(catalog).unwrap();
        let store = Store::start(config_on(&disk)).await;
        check(&store, acknowledged).await;
        store.stop().await;
    }
}

/// A complete store was lost like this: sled takes a snapshot that it could not write for its newest one.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_failed_start_on_a_full_disk_loses_nothing() {
    let Some(disk) = SmallDisk::mount(40) else {
        return;
    };
    let child = crash::filled_and_killed(&config_on(&disk).data_dir);
    let foreign = disk.fill();
    let mut failed = 0;
    for _ in 0..3 {
        match Store::try_start(config_on(&disk)).await {
            Ok(store) => store.stop().await,
            Err(_) => failed += 1,
        }
    }
    assert!(failed > 0, "every start had room");
    std::fs::remove_file(foreign).unwrap();
    let store = Store::start(config_on(&disk)).await;
    assert_eq!(store.ready(), Ok(()));
    let mut follower = Follower::default();
    follower.catch_up(&store, "a").await;
    for (document, len) in &child {
        assert!(follower.texts[document].len() >= *len as usize);
    }
    assert_eq!(store.metric("refrain_draft_store_quarantines_total"), 0.0);
    store.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_disk_that_others_fill_costs_nothing_acknowledged() {
    let Some(disk) = SmallDisk::mount(20) else {
        return;
    };
    let without_reserve = DraftStoreConfig {
        disk_reserve_bytes: 0,
        ..config_on(&disk)
    };
    let store = Store::start(without_reserve).await;
    for document in 0..50u128 {
        let sent = finished(update(document, 0, &noise(document, 4_000)));
        store.append("a", vec![sent]).await.unwrap();
    }
    let foreign = disk.fill();
    let (acknowledged, error) = append_until_refused(&store, 50).await;
    assert_eq!(error.kind, ErrorKind::Unavailable, "{error:?}");
    // The service answers, even if only to say that it cannot.
    store.handle().stats().await.unwrap();
    std::fs::remove_file(foreign).unwrap();
    let mut tries = 0;
    let sent = |document| finished(update(document, 0, &noise(document, 4_000)));
    while let Err(error) = store.append("a", vec![sent(acknowledged)]).await {
        assert_eq!(error.kind, ErrorKind::Unavailable);
        tokio::time::sleep(Duration::from_millis(20)).await;
        tries += 1;
        assert!(tries < 15_000, "{error:?}");
    }
    check(&store, acknowledged + 1).await;
    assert_eq!(store.metric("refrain_draft_store_quarantines_total"), 0.0);
    store.stop().await;
}
