use super::*;

use refrain_protocol::document::{DocumentHead, DocumentUpdate};
use refrain_protocol::{DocumentId, ErrorKind, Namespace};
use refrain_service_kit::telemetry::Metrics;

use crate::log::Batch;
use crate::reading::feed::read_feed;
use crate::record::DocumentKey;
use crate::writer::requests::{Append, UpdateAuthor};

fn append(document: u128) -> Append {
    let names = Namespace {
        tenant: "a".into(),
        model: "m".into(),
        tokenizer: "t".into(),
    };
    let update = DocumentUpdate {
        document: DocumentId(document),
        epoch: 1,
        prev_len: 0,
        tokens: vec![1, 2, 3],
        head: DocumentHead::default(),
        finish: None,
    };
    Append {
        namespace: names.id(),
        names,
        updates: vec![update],
        waited_ms: 0,
        author: UpdateAuthor::Worker,
    }
}

fn open(dir: &std::path::Path) -> (WriterActor, Arc<SharedStore>) {
    let config = DraftStoreConfig {
        data_dir: dir.join("data"),
        ..DraftStoreConfig::default()
    };
    let shared = Arc::new(SharedStore::default());
    let metrics = StoreMetrics::new(&Metrics::new().unwrap()).unwrap();
    let writer = WriterActor::open(config, shared.clone(), metrics).unwrap();
    (writer, shared)
}

#[test]
fn after_a_panic_only_durable_changes_are_visible() {
    let dir = tempfile::tempdir().unwrap();
    let (mut writer, shared) = open(dir.path());
    let kept = [append(1)];
    writer
        .run(|core, catalog, now_ms| core.append(catalog, &kept, &[], now_ms))
        .unwrap();
    let error = writer
        .run(|_, catalog, _| {
            let sequence = catalog.advance();
            let key = DocumentKey::new(kept[0].namespace, DocumentId(9));
            catalog.add_tombstone(key, sequence);
            std::panic::resume_unwind(Box::new("boom"))
        })
        .unwrap_err();
    assert_eq!(error.kind, ErrorKind::Internal);
    assert!(!shared.is_open() && shared.read().is_err());
    assert!(writer.run(WriterCore::tick).is_err());
    writer.reopen().unwrap();
    let read = read_feed(
        &shared,
        kept[0].namespace,
        Default::default(),
        &Default::default(),
        100,
    )
    .unwrap();
    assert_eq!(read.delta.events.len(), 1);
    assert_eq!(
        (
            shared.stats().documents,
            writer.metrics.writer_restarts.get()
        ),
        (1, 1)
    );
    let more = [append(2)];
    writer
        .run(|core, catalog, now_ms| core.append(catalog, &more, &[], now_ms))
        .unwrap();
    assert_eq!(shared.stats().documents, 2);
}

/// A log whose catalogue can take nothing.
struct FaultyLog(Arc<dyn RecordLog>);

impl RecordLog for FaultyLog {
    fn commit(&self, _batch: &Batch) -> Result<(), LogError> {
        self.fault().map_or(Ok(()), Err)
    }

    fn get(&self, key: &[u8]) -> Result<Option<Vec<u8>>, LogError> {
        self.0.get(key)
    }

    fn scan(
        &self,
        from: &[u8],
        to: &[u8],
        visit: &mut dyn FnMut(&[u8], &[u8]) -> bool,
    ) -> Result<(), LogError> {
        self.0.scan(from, to, visit)
    }

    fn disk_bytes(&self) -> u64 {
        self.0.disk_bytes()
    }

    fn blob_files(&self) -> u64 {
        self.0.blob_files()
    }

    fn fault(&self) -> Option<LogError> {
        Some(LogError::Refused("the catalogue is full".into()))
    }
}

#[test]
fn a_log_that_has_failed_reopens_the_store_once_nobody_holds_it() {
    let dir = tempfile::tempdir().unwrap();
    let (mut writer, shared) = open(dir.path());
    for at_tick in [false, true] {
        assert!(!writer.close_faulty());
        let core = writer.core.as_mut().unwrap();
        let faulty = Arc::new(FaultyLog(core.log.clone()));
        core.log = faulty.clone();
        if at_tick {
            assert!(writer.close_faulty());
        } else {
            let new = [append(1)];
            let stored =
                writer.run(|core, catalog, now_ms| core.append(catalog, &new, &[], now_ms));
            assert_eq!(stored.unwrap_err().kind, ErrorKind::Unavailable);
        }
        assert!(!shared.is_open());
        // A rewrite could still put its files into use.
        assert!(matches!(writer.reopen(), Err(LogError::Refused(_))));
        drop(faulty);
        writer.reopen().unwrap();
    }
    assert_eq!(shared.stats().documents, 0, "the refused one");
    assert_eq!(writer.metrics.writer_restarts.get(), 2);
}

#[test]
fn the_manifest_follows_the_store_and_the_clock() {
    let at = Instant::now();
    let written = WrittenManifest { head: 5, at };
    let soon = at + MANIFEST_INTERVAL;
    assert!(!written.is_outdated(Some(6), at));
    assert!(written.is_outdated(Some(6), soon));
    assert!(!written.is_outdated(Some(5), soon) && !written.is_outdated(None, soon));
    assert!(written.is_outdated(Some(5), at + MANIFEST_AGE_MAX));
}
