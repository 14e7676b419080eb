//! Tests of the commands, on directories and on a running store.

use std::io::Write as _;
use std::path::Path;
use std::time::Duration;

use refrain_draft_store::{DraftStoreConfig, DraftStoreServer, FeedConfig};
use refrain_service_kit::mesh::{MeshAuth, MeshConfig};
use refrain_service_kit::telemetry::{Metrics, install_crypto_provider};

use super::import::Imported;
use super::*;

fn closed(dir: &Path) -> TargetArgs {
    TargetArgs {
        data_dir: Some(dir.to_owned()),
        ..TargetArgs::default()
    }
}

/// A trace of `count` calls. Every seventh has no output, and some outputs occur twice.
fn trace(count: u32) -> String {
    let mut text = String::new();
    for call in 0..count {
        let output: Vec<u32> = (0..if call % 7 == 3 { 0 } else { 40 + call % 90 })
            .map(|at| at * 17 + call % 5)
            .collect();
        text += &format!(
            "{{\"workload\":\"w\",\"session\":\"s{}\",\"turn\":{call},\"group\":null,\"model\":\"gpt\",\
             \"prompt_token_ids\":{:?},\"output_token_ids\":{output:?},\"more\":1}}\n",
            call % 3,
            (0..call % 40).collect::<Vec<_>>()
        );
    }
    text
}

fn import_args(target: TargetArgs, trace: &Path) -> ImportArgs {
    ImportArgs {
        target,
        trace: trace.to_owned(),
        tenant: Some("acme".into()),
        model: Some("m".into()),
        tokenizer_id: Some("t".into()),
        json: true,
        ..ImportArgs::default()
    }
}

async fn export(target: TargetArgs, output: &Path) -> u64 {
    let args = ExportArgs {
        target,
        tenant: "acme".into(),
        output: Some(output.to_owned()),
        ..ExportArgs::default()
    };
    export::run(&args).await.unwrap()
}

async fn documents(target: &TargetArgs) -> StoreStats {
    let target = Target::open(target, Access::Read).await.unwrap();
    let stats = target.store().store_stats().await.unwrap();
    target.close().await;
    stats
}

fn checked(target: &TargetArgs) -> PlainArgs {
    PlainArgs {
        target: target.clone(),
        json: true,
    }
}

/// The lines of an export in order of their text, without the number of the turn: it counts the documents of a
/// session in the order in which they were stored, and batches of an import that are in flight together may overtake
/// each other.
fn lines_without_turn(export: &str) -> Vec<String> {
    let without_turn = |line: &str| {
        let mut line: serde_json::Value = serde_json::from_str(line).unwrap();
        assert!(line.as_object_mut().unwrap().remove("turn").is_some());
        line.to_string()
    };
    let mut lines: Vec<_> = export.lines().map(without_turn).collect();
    lines.sort_unstable();
    lines
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_is_imported_is_exported_and_imported_again() {
    let dir = tempfile::tempdir().unwrap();
    let path = |name: &str| dir.path().join(name);
    std::fs::write(path("trace"), trace(1_400)).unwrap();
    let args = import_args(closed(&path("one")), &path("trace"));
    let mut acknowledged = Vec::new();
    let done = import::run(&args, &mut acknowledged).await.unwrap();
    assert_eq!(
        done,
        Imported {
            documents: 1_200,
            empty: 200
        }
    );
    let acknowledged = String::from_utf8(acknowledged).unwrap();
    let acknowledged: Vec<&str> = acknowledged.lines().collect();
    assert_eq!(acknowledged.first(), Some(&"{\"acknowledged\": 512}"));
    assert_eq!(acknowledged.last(), Some(&"{\"acknowledged\": 1200}"));
    let before = documents(&args.target).await;
    assert_eq!((before.documents, before.namespaces), (1_200, 1));
    assert!(before.log_bytes > 0 && before.disk_bytes >= before.log_bytes);
    // A second import adds nothing.
    import::run(&args, &mut Vec::new()).await.unwrap();
    assert_eq!(documents(&args.target).await.tokens, before.tokens);
    // An export that is imported into another store and exported again is the same.
    assert_eq!(export(closed(&path("one")), &path("out.zst")).await, 1_200);
    let again = ImportArgs {
        target: closed(&path("two")),
        trace: path("out.zst"),
        ..ImportArgs::default()
    };
    import::run(&again, &mut Vec::new()).await.unwrap();
    export(closed(&path("two")), &path("out")).await;
    let first = zstd::decode_all(std::fs::File::open(path("out.zst")).unwrap()).unwrap();
    let first = String::from_utf8(first).unwrap();
    let second = std::fs::read_to_string(path("out")).unwrap();
    assert!(lines_without_turn(&first) == lines_without_turn(&second));
    assert!(first.contains("\"prompt_token_ids\":[0,1,2,3,4],"));
}

async fn running(dir: &Path) -> (DraftStoreServer, TargetArgs) {
    let mesh = MeshConfig::generate().unwrap();
    let (running, url) = started(dir, &mesh, None).await;
    let target = TargetArgs {
        url: Some(url),
        secret: Some(mesh.secret),
        ..TargetArgs::default()
    };
    (running, target)
}

async fn started(
    dir: &Path,
    mesh: &MeshConfig,
    feed: Option<FeedConfig>,
) -> (DraftStoreServer, String) {
    install_crypto_provider();
    let config = DraftStoreConfig {
        data_dir: dir.to_owned(),
        listen: Some("127.0.0.1:0".parse().unwrap()),
        feed,
        ..DraftStoreConfig::default()
    };
    let metrics = Metrics::new().unwrap();
    let auth = MeshAuth::new(mesh).unwrap();
    let running = refrain_draft_store::start(config, auth, &metrics).await;
    let running = running.unwrap();
    let url = format!("http://{}", running.addr().unwrap());
    (running, url)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_running_store_does_the_same_over_http() {
    let dir = tempfile::tempdir().unwrap();
    let path = |name: &str| dir.path().join(name);
    let mut file = std::fs::File::create(path("trace")).unwrap();
    file.write_all(&zstd::bulk::compress(trace(700).as_bytes(), 1).unwrap())
        .unwrap();
    let (store, target) = running(&path("data")).await;
    let args = import_args(target.clone(), &path("trace"));
    let done = import::run(&args, &mut Vec::new()).await.unwrap();
    assert_eq!(done.documents, 600);
    assert_eq!(documents(&target).await.documents, 600);
    assert_eq!(export(target.clone(), &path("out")).await, 600);
    let plain = |target: &TargetArgs| PlainArgs {
        target: target.clone(),
        json: true,
    };
    verify(checked(&target)).await.unwrap();
    compact(plain(&target)).await.unwrap();
    let session = EraseArgs {
        target: target.clone(),
        tenant: Some("acme".into()),
        model: None,
        session: Some("s1".into()),
        from_ms: None,
        until_ms: None,
        quarantines: false,
        everything: false,
        scheduler: None,
        json: false,
    };
    erase::run(session).await.unwrap();
    assert_eq!(documents(&target).await.documents, 400);
    // The directory is in use.
    assert!(
        Target::open(&closed(&path("data")), Access::Read)
            .await
            .is_err()
    );
    let stranger = TargetArgs {
        secret: Some("not the secret of this mesh at all".into()),
        ..target
    };
    assert!(stats(plain(&stranger)).await.is_err());
    store.drain(Duration::from_secs(5)).await;
    verify(checked(&closed(&path("data")))).await.unwrap();
}

/// The broker of these stores is away, so each has only what it was sent itself.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn commands_for_shards_reach_the_shard_of_each_namespace() {
    let dir = tempfile::tempdir().unwrap();
    let path = |name: &str| dir.path().join(name);
    let mesh = MeshConfig::generate().unwrap();
    let (mut stores, mut urls) = (Vec::new(), Vec::new());
    for shard in 0..2 {
        let feed = FeedConfig {
            servers: vec!["nats://127.0.0.1:1".into()],
            shards: 2,
            shard,
            ..FeedConfig::default()
        };
        let (store, url) = started(&path(&format!("store-{shard}")), &mesh, Some(feed)).await;
        stores.push(store);
        urls.push(url);
    }
    let cluster = |urls: &[String]| TargetArgs {
        cluster: urls.to_vec(),
        secret: Some(mesh.secret.clone()),
        ..TargetArgs::default()
    };
    let both = cluster(&urls);
    std::fs::write(path("trace"), trace(70)).unwrap();
    for model in 0..8 {
        let args = ImportArgs {
            model: Some(format!("m{model}")),
            ..import_args(both.clone(), &path("trace"))
        };
        let imported = import::run(&args, &mut Vec::new()).await.unwrap();
        assert_eq!(imported.documents, 60);
    }
    assert_eq!(documents(&both).await.documents, 480);
    let mut held = Vec::new();
    for url in &urls {
        let one = TargetArgs {
            url: Some(url.clone()),
            ..cluster(&[])
        };
        held.push(documents(&one).await.documents);
    }
    assert!(held.iter().all(|documents| *documents > 0), "{held:?}");
    assert_eq!(held.iter().sum::<u64>(), 480);
    assert_eq!(export(both.clone(), &path("out")).await, 480);
    let plain = || PlainArgs {
        target: both.clone(),
        json: true,
    };
    stats(plain()).await.unwrap();
    verify(plain()).await.unwrap();
    compact(plain()).await.unwrap();
    let tenant = EraseArgs {
        target: both.clone(),
        tenant: Some("acme".into()),
        model: None,
        session: None,
        from_ms: None,
        until_ms: None,
        quarantines: false,
        everything: true,
        scheduler: None,
        json: false,
    };
    erase::run(tenant).await.unwrap();
    assert_eq!(documents(&both).await.documents, 0);
    // A change is never made in some shards only because others are unknown.
    let one = Target::open(&cluster(&urls[..1]), Access::Write).await;
    let error = one.err().unwrap().to_string();
    assert!(error.contains("of shard 1 is known, of 2"), "{error}");
    let confirmed = confirm(ConfirmArgs {
        target: both,
        loss: true,
        clock: false,
        json: false,
    });
    let error = confirmed.await.unwrap_err().to_string();
    assert!(error.contains("name it with --url"), "{error}");
    for store in stores {
        store.drain(Duration::from_secs(5)).await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn damage_is_named_and_left_as_it_is() {
    let dir = tempfile::tempdir().unwrap();
    let path = |name: &str| dir.path().join(name);
    std::fs::write(path("trace"), trace(100)).unwrap();
    let args = import_args(closed(&path("data")), &path("trace"));
    import::run(&args, &mut Vec::new()).await.unwrap();
    let journal = path("data").join("log/journal");
    let mut bytes = std::fs::read(&journal).unwrap();
    let magic = b"RfJ\x01";
    let starts: Vec<usize> = bytes
        .windows(4)
        .enumerate()
        .filter(|(_, window)| window == magic)
        .map(|(at, _)| at)
        .collect();
    assert!(starts.len() > 100);
    let before = bytes.clone();
    // Damage one record in seven, but not the store's identity, which comes first.
    for at in starts.into_iter().skip(7).step_by(7) {
        bytes[at + 12] ^= 1;
    }
    std::fs::write(&journal, &bytes).unwrap();
    let verified = async || verify(checked(&closed(&path("data")))).await;
    let outcome = verified().await.unwrap_err();
    assert!(outcome.to_string().contains("are damaged"), "{outcome}");
    // Nothing was moved to quarantine or rewritten: once repaired, everything is there.
    std::fs::write(&journal, before).unwrap();
    verified().await.unwrap();
    assert_eq!(documents(&closed(&path("data"))).await.documents, 86);
    let confirmed = confirm(ConfirmArgs {
        target: closed(&path("data")),
        loss: true,
        clock: true,
        json: false,
    });
    confirmed.await.unwrap();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn after_a_refusal_the_count_is_a_prefix_and_the_same_command_goes_on() {
    let dir = tempfile::tempdir().unwrap();
    let path = |name: &str| dir.path().join(name);
    // Each tenant is a batch of its own, and all of them are in flight together.
    let lines = |second: &str| {
        let sessions = [("a", "a"), ("b", second), ("c", "c"), ("d", "d")];
        let line = |(tenant, session)| {
            let names = format!("{{\"tenant\":\"{tenant}\",\"session\":\"{session}\"");
            format!("{names},\"prompt_token_ids\":[1],\"output_token_ids\":[2,3]}}\n")
        };
        sessions.map(line).concat()
    };
    // The store refuses such a long name.
    std::fs::write(path("trace"), lines(&"s".repeat(5_000))).unwrap();
    let args = ImportArgs {
        tenant: None,
        ..import_args(closed(&path("data")), &path("trace"))
    };
    let mut acknowledged = Vec::new();
    let error = import::run(&args, &mut acknowledged).await.unwrap_err();
    assert!(error.to_string().contains("512 bytes"), "{error:#}");
    assert_eq!(acknowledged, b"{\"acknowledged\": 1}\n");
    std::fs::write(path("trace"), lines("b")).unwrap();
    let done = import::run(&args, &mut Vec::new()).await.unwrap();
    assert_eq!(done.documents, 4);
    assert_eq!(documents(&args.target).await.documents, 4);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_line_that_is_wrong_is_named_and_what_came_before_is_kept() {
    let dir = tempfile::tempdir().unwrap();
    let path = |name: &str| dir.path().join(name);
    let content = format!("{}{{\"output\":\"text\"}}\n", trace(800));
    std::fs::write(path("trace"), content).unwrap();
    let args = import_args(closed(&path("data")), &path("trace"));
    let error = import::run(&args, &mut Vec::new()).await.unwrap_err();
    let error = format!("{error:#}");
    assert!(
        error.contains("line 801") && error.contains("--tokenizer"),
        "{error}"
    );
    assert_eq!(documents(&args.target).await.documents, 512);
    let nameless = ImportArgs {
        tenant: None,
        ..args
    };
    let error = import::run(&nameless, &mut Vec::new()).await.unwrap_err();
    assert!(format!("{error:#}").contains("--tenant"), "{error:#}");
}
