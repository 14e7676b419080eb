//! Starts that are interrupted at every call to the disk. Whatever fails, the next start has everything that was
//! acknowledged.

#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    reason = "a test that panics has failed"
)]

mod disk;
#[path = "../support/files.rs"]
mod files;
#[path = "../support/logs.rs"]
mod logs;

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::time::Duration;

use disk::{Fault, arm, disarm};
use files::copy;
use logs::{catalog, make_earlier};
use refrain_draft_store::{DraftStoreConfig, DraftStoreServer, StoreTuning, start};
use refrain_protocol::admin::ImportRequest;
use refrain_protocol::document::{DocumentHead, DocumentUpdate, FeedEvent, FinishReason};
use refrain_protocol::{DocumentId, Namespace};
use refrain_rpc::StoreAdmin as _;
use refrain_rpc::testing::ScopeReader;
use refrain_service_kit::mesh::{MeshAuth, MeshConfig, NamespaceSigner};
use refrain_service_kit::telemetry::Metrics;

const DOCUMENTS: u128 = 80;
const FAULTS: [Fault; 5] = [
    Fault::Full,
    Fault::PowerCut,
    Fault::ErrorOnce,
    Fault::PowerCutInPart,
    Fault::Error,
];

fn names() -> Namespace {
    let [tenant, model, tokenizer] = ["a", "m", "t"].map(str::to_owned);
    Namespace {
        tenant,
        model,
        tokenizer,
    }
}

fn text(document: u128) -> Vec<u32> {
    (0..300)
        .map(|at| (at * 7919 + document as u32) % 30_000)
        .collect()
}

struct Store {
    server: DraftStoreServer,
    metrics: Metrics,
    mesh: MeshConfig,
}

impl Store {
    async fn start(dir: &Path) -> anyhow::Result<Self> {
        let (mesh, metrics) = (MeshConfig::generate()?, Metrics::new()?);
        let config = DraftStoreConfig {
            data_dir: dir.to_owned(),
            disk_reserve_bytes: 0,
            tuning: StoreTuning {
                commit_interval_ms: 0,
                tick_ms: 10,
                ..StoreTuning::default()
            },
            ..DraftStoreConfig::default()
        };
        let server = start(config, MeshAuth::new(&mesh)?, &metrics).await?;
        Ok(Store {
            server,
            metrics,
            mesh,
        })
    }

    async fn store(&self, document: u128) -> bool {
        let request = ImportRequest {
            namespace: names(),
            updates: vec![DocumentUpdate {
                document: DocumentId(document),
                epoch: 1,
                prev_len: 0,
                tokens: text(document),
                head: DocumentHead::default(),
                finish: Some(FinishReason::Stop),
            }],
            is_static: false,
        };
        self.server.handle().import(request).await.is_ok()
    }

    async fn texts(&self) -> BTreeMap<u128, Vec<u32>> {
        let signer = NamespaceSigner::new(&self.mesh).unwrap();
        let reader = ScopeReader::new(signer.sign(names()));
        let reply = reader.read(&self.server.handle()).await.unwrap();
        assert!(reply.caught_up);
        let mut texts = BTreeMap::new();
        for event in reply.events {
            if let FeedEvent::Update(update) = event {
                texts.insert(update.document.0, update.tokens);
            }
        }
        texts
    }

    fn quarantines(&self) -> bool {
        let text = String::from_utf8(self.metrics.render()).unwrap();
        !text.contains("refrain_draft_store_quarantines_total 0")
    }

    async fn stop(self) {
        self.server.drain(Duration::from_secs(5)).await;
    }
}

/// Data directories in several states, by name.
async fn images(dir: &Path) -> Vec<(&'static str, PathBuf)> {
    let live = dir.join("live");
    let store = Store::start(&live).await.unwrap();
    for document in 0..DOCUMENTS {
        assert!(store.store(document).await);
    }
    // The state after a kill: sled has not written everything.
    copy(&live, &dir.join("killed"));
    store.stop().await;
    copy(&live, &dir.join("closed"));
    copy(&live, &dir.join("spoilt"));
    let catalog = catalog(&dir.join("spoilt/log"));
    fs::write(catalog.join("db"), vec![0x5a; 300_000]).unwrap();
    copy(&live, &dir.join("earlier-version"));
    make_earlier(&dir.join("earlier-version/log"), true);
    copy(&live, &dir.join("first-version"));
    make_earlier(&dir.join("first-version/log"), false);
    copy(
        &dir.join("earlier-version"),
        &dir.join("lossy-earlier-version"),
    );
    // The journal is damaged, and sled has what was there.
    let journal = dir.join("lossy-earlier-version/log/journal");
    let mut bytes = fs::read(&journal).unwrap();
    let middle = bytes.len() / 2;
    bytes[middle] ^= 1;
    fs::write(&journal, bytes).unwrap();
    [
        "killed",
        "closed",
        "spoilt",
        "earlier-version",
        "first-version",
        "lossy-earlier-version",
    ]
    .map(|name| (name, dir.join(name)))
    .to_vec()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_start_that_fails_anywhere_loses_nothing() {
    let dir = tempfile::tempdir().unwrap();
    let (mut places, mut failed_starts) = (0, 0);
    for (number, (name, image)) in images(dir.path()).await.into_iter().enumerate() {
        for place in 0.. {
            let fault = FAULTS[(place as usize + number) % FAULTS.len()];
            let data = dir.path().join(format!("{name}-{place}"));
            copy(&image, &data);
            arm(&data, fault, place);
            let mut acknowledged = DOCUMENTS;
            match Store::start(&data).await {
                Ok(store) => {
                    if store.store(DOCUMENTS).await {
                        acknowledged += 1;
                    }
                    store.stop().await;
                }
                Err(_) => failed_starts += 1,
            }
            let (calls, has_failed) = disarm();
            let case = format!("{name}, {fault:?} at call {place} of {calls}");
            let store = Store::start(&data).await.expect(&case);
            let texts = store.texts().await;
            for document in 0..acknowledged {
                let is_there = texts.get(&document) == Some(&text(document));
                assert!(is_there, "{case}: document {document}");
            }
            assert!(!store.quarantines(), "{case}");
            assert_eq!(store.server.handle().readiness(), Ok(()), "{case}");
            store.stop().await;
            fs::remove_dir_all(&data).unwrap();
            places += u64::from(has_failed);
            // A full disk refuses only calls that grow a file. Any other fault that did not happen is past the end.
            if !has_failed && fault != Fault::Full {
                break;
            }
        }
    }
    println!("{places} places, {failed_starts} starts failed");
    assert!(
        places >= 100 && failed_starts > 30,
        "{places}, {failed_starts}"
    );
}
