//! Engines that sources name: files, and the API of a cluster with canned answers.

use std::time::Duration;

use refrain_protocol::ErrorKind;
use refrain_worker::AdoptionConfig;

use crate::adoption::Lab;
use crate::bench::PATIENCE;
use crate::external::{Canned, Response, json, vllm};

async fn engine() -> Canned {
    vllm(&[("/version", json("{\"version\":\"0.32.0\"}"))]).await
}

fn quick(adoption: &mut AdoptionConfig, source: String) {
    adoption.sources = vec![source];
    adoption.lookup_interval_ms = 100;
    adoption.absence_ms_max = 200;
    // Only engines that register are bound by this list.
    adoption.allowed_hosts = Vec::new();
}

#[tokio::test]
async fn an_engine_that_registered_as_well_stays_without_its_source() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("engines.txt");
    let kept = folder.path().join("kept.json");
    let engine = engine().await;
    std::fs::write(&file, engine.url()).unwrap();
    let lab = Lab::start_with(|adoption| {
        quick(adoption, format!("file://{}", file.display()));
        adoption.allowed_hosts = vec!["127.0.0.1".into()];
        adoption.file = Some(kept.clone());
    });
    serves(&lab, &[engine.url()]).await;
    lab.adopt(engine.url(), None).await.unwrap();
    assert!(
        std::fs::read_to_string(&kept)
            .unwrap()
            .contains(engine.url())
    );
    let source = format!("file://{}", file.display());
    let named = format!("refrain_worker_discovered_engines{{source=\"{source}\"}}");
    std::fs::write(&file, "").unwrap();
    let waited = tokio::time::timeout(PATIENCE, async {
        while lab.figure(&named) != Some(0.0) {
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
        // The absence has an end, after which its caller may give it up.
        while lab.release(engine.url()).await.is_err() {
            assert_eq!(lab.engines().await.len(), 1);
            lab.adopt(engine.url(), None).await.unwrap();
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
    });
    waited.await.expect("the source gives it up");
    serves(&lab, &[]).await;
    lab.server.drain().await;
}

/// Waits until exactly these engines have a worker that runs.
async fn serves(lab: &Lab, urls: &[&str]) {
    let mut urls = urls.to_vec();
    urls.sort_unstable();
    let served = tokio::time::timeout(PATIENCE, async {
        loop {
            let engines = lab.engines().await;
            let mut found: Vec<_> = engines.iter().map(|engine| engine.url.as_str()).collect();
            found.sort_unstable();
            if found == urls && engines.iter().all(|engine| engine.fault.is_none()) {
                return;
            }
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
    });
    if served.await.is_err() {
        panic!("{urls:?} was never served, but {:?}", lab.engines().await);
    }
}

#[tokio::test]
async fn engines_of_a_file_come_and_go_with_its_lines() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("engines.txt");
    let kept = folder.path().join("kept.json");
    let source = format!("file://{}", file.display());
    let lab = Lab::start_with(|adoption| {
        quick(adoption, source.clone());
        adoption.file = Some(kept.clone());
    });
    let faults = format!("refrain_worker_discovery_faults_total{{source=\"{source}\"}}");
    let waited = tokio::time::timeout(PATIENCE, async {
        while lab.figure(&faults) < Some(2.0) {
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
    });
    waited.await.expect("a file that is not there is counted");
    let (one, other) = (engine().await, engine().await);
    let write = |lines: &[&str]| std::fs::write(&file, lines.join("\n")).unwrap();
    write(&["# the pool", one.url()]);
    serves(&lab, &[one.url()]).await;
    write(&[one.url(), other.url()]);
    serves(&lab, &[one.url(), other.url()]).await;
    // An engine that a source names cannot be given up by a caller.
    let error = lab.release(one.url()).await.unwrap_err();
    assert_eq!(error.kind, ErrorKind::Conflict, "{error}");
    // A line that cannot be read changes nothing.
    let before = lab.figure(&faults);
    write(&["nonsense"]);
    let waited = tokio::time::timeout(PATIENCE, async {
        while lab.figure(&faults) < before.map(|count| count + 5.0) {
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
    });
    waited.await.expect("the file is read again and again");
    serves(&lab, &[one.url(), other.url()]).await;
    write(&[other.url()]);
    serves(&lab, &[other.url()]).await;
    let left = lab.scheduler.left.lock().unwrap().clone();
    let [left] = &left[..] else {
        panic!("one worker leaves: {left:?}");
    };
    assert!(left.0.ends_with(one.url().trim_start_matches("http://")));
    let named = format!("refrain_worker_discovered_engines{{source=\"{source}\"}}");
    assert_eq!(lab.figure(&named), Some(1.0));
    // The next process learns of them from the source, not from the file of engines that registered.
    assert!(
        !std::fs::read_to_string(&kept)
            .unwrap_or_default()
            .contains(other.url())
    );
    lab.server.drain().await;
}

#[tokio::test]
async fn an_engine_that_cannot_serve_is_tried_until_it_can() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("engines.txt");
    let late = engine().await;
    late.set("/v1/models", json("{\"data\":[{\"id\":\"other\"}]}"));
    // One that nobody listens for must not hold the other up.
    std::fs::write(&file, format!("http://127.0.0.1:1\n{}", late.url())).unwrap();
    let lab = Lab::start_with(|adoption| quick(adoption, format!("file://{}", file.display())));
    let faults = tokio::time::timeout(PATIENCE, async {
        loop {
            let engines = lab.engines().await;
            let faults = engines.into_iter().filter_map(|engine| engine.fault);
            let faults = faults.collect::<Vec<_>>().join("\n");
            if faults.contains("serves other, not m") && !faults.contains("not answered yet") {
                return faults;
            }
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
    });
    faults.await.expect("both say what is wrong");
    late.set(
        "/v1/models",
        json("{\"data\":[{\"id\":\"m\",\"max_model_len\":400}]}"),
    );
    let waited = tokio::time::timeout(PATIENCE, async {
        loop {
            let engines = lab.engines().await;
            let served = engines.iter().find(|engine| engine.url == late.url());
            if served.is_some_and(|engine| engine.fault.is_none()) {
                return;
            }
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
    });
    waited.await.expect("the engine is tried again");
    lab.server.drain().await;
}

#[tokio::test]
async fn more_engines_than_allowed_wait_until_one_goes() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("engines.txt");
    let engines = [engine().await, engine().await, engine().await];
    let mut urls: Vec<_> = engines.iter().map(Canned::url).collect();
    urls.sort_unstable();
    std::fs::write(&file, urls.join("\n")).unwrap();
    let lab = Lab::start_with(|adoption| quick(adoption, format!("file://{}", file.display())));
    serves(&lab, &urls[..2]).await;
    let full = "refrain_worker_adoptions_total{outcome=\"engines_max\"}";
    assert!(lab.figure(full) >= Some(1.0));
    std::fs::write(&file, urls[1..].join("\n")).unwrap();
    serves(&lab, &urls[1..]).await;
    lab.server.drain().await;
}

#[tokio::test]
async fn the_api_of_a_cluster_names_services_pods_and_pools() {
    let folder = tempfile::tempdir().unwrap();
    for (file, text) in [("token", "secret-token\n"), ("namespace", "inference")] {
        std::fs::write(folder.path().join(file), text).unwrap();
    }
    let engine = engine().await;
    let port: u16 = engine.url().rsplit_once(':').unwrap().1.parse().unwrap();
    let pods = "/api/v1/namespaces/inference/pods?labelSelector=app%3Dvllm&limit=1000";
    let pod = |ip: &str, ready: &str, metadata: &str| {
        format!(
            r#"{{"metadata":{metadata},"status":{{"podIP":"{ip}","conditions":[
                {{"type":"Initialized","status":"True"}},{{"type":"Ready","status":"{ready}"}}]}}}}"#
        )
    };
    let items = [
        pod("127.0.0.1", "True", "{}"),
        pod("127.0.0.2", "False", "{}"),
        pod(
            "127.0.0.3",
            "True",
            r#"{"deletionTimestamp":"2026-01-01T00:00:00Z"}"#,
        ),
        r#"{"metadata":{},"status":{}}"#.to_owned(),
    ];
    let slices = "/apis/discovery.k8s.io/v1/namespaces/inference/endpointslices\
        ?labelSelector=kubernetes.io%2Fservice-name%3Dvllm&limit=1000";
    let pool = "/apis/inference.networking.k8s.io/v1/namespaces/inference/inferencepools/vllm";
    let api = Canned::start(&[
        (pods, json(&format!(r#"{{"items":[{}]}}"#, items.join(",")))),
        (
            slices,
            json(
                r#"{"items":[{"addressType":"IPv4","endpoints":null},
                    {"addressType":"IPv6","endpoints":[{"addresses":["::1"]}]},{"addressType":"IPv4","endpoints":[
                    {"addresses":["127.0.0.1"],"conditions":{"ready":true}},
                    {"addresses":["127.0.0.2"],"conditions":{"ready":false}}]}]}"#,
            ),
        ),
        (
            pool,
            json(&format!(
                r#"{{"spec":{{"selector":{{"matchLabels":{{"app":"vllm"}}}},"targetPorts":[{{"number":{port}}}]}}}}"#
            )),
        ),
    ])
    .await;
    for source in [
        format!("kubernetes://inference/services/vllm?port={port}"),
        format!("kubernetes:///pods?port={port}&selector=app=vllm"),
        "kubernetes:///inferencepools/vllm".to_owned(),
    ] {
        let lab = Lab::start_with(|adoption| {
            quick(adoption, source);
            adoption.cluster = Some((api.url().to_owned(), folder.path().to_owned()));
        });
        serves(&lab, &[engine.url()]).await;
        lab.server.drain().await;
    }
    let calls = api.received(pods);
    assert!(!calls.is_empty());
    let has_token = |call: &String| {
        call.to_lowercase()
            .contains("authorization: bearer secret-token")
    };
    assert!(calls.iter().all(has_token));
    // A process without the right to ask keeps what it has, and says so.
    let source = "kubernetes:///pods?port=1&selector=app=other".to_owned();
    let refused = "/api/v1/namespaces/inference/pods?labelSelector=app%3Dother&limit=1000";
    api.set(
        refused,
        Response(403, "application/json", "{}".to_owned(), false),
    );
    let lab = Lab::start_with(|adoption| {
        quick(adoption, source.clone());
        adoption.cluster = Some((api.url().to_owned(), folder.path().to_owned()));
    });
    let faults = format!("refrain_worker_discovery_faults_total{{source=\"{source}\"}}");
    let waited = tokio::time::timeout(PATIENCE, async {
        while lab.figure(&faults) < Some(1.0) {
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
    });
    waited.await.expect("a refusal is counted");
    assert!(lab.engines().await.is_empty());
    lab.server.drain().await;
}
