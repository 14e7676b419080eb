use super::*;

use refrain_protocol::document::{DocumentHead, DocumentUpdate};
use refrain_protocol::{DocumentId, ErrorKind, Namespace};
use refrain_service_kit::telemetry::Metrics;

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
    let writer = WriterActor::open(config, shared.clone(), Arc::default(), metrics).unwrap();
    (writer, shared)
}

impl WriterActor {
    /// Begins a purge with one segment left. Returns the caller's side.
    fn purge_in_progress(&mut self) -> oneshot::Receiver<Result<(), ApiError>> {
        let (waiter, waits) = oneshot::channel();
        self.sealing.waiters.push((waiter, false));
        self.begin_purge();
        let purge = self.sealing.purge.as_mut();
        purge.unwrap().left.push_back(7);
        waits
    }

    fn go_on_purging(&mut self) {
        assert!(self.next_purged().is_none());
    }
}

#[test]
fn a_purge_fails_if_the_store_was_closed_meanwhile() {
    let dir = tempfile::tempdir().unwrap();
    let (mut writer, _) = open(dir.path());
    for reopens in [false, true] {
        let mut waits = writer.purge_in_progress();
        let boom =
            |_: &mut WriterCore, _: &mut Catalog, _| std::panic::resume_unwind(Box::new("boom"));
        assert!(writer.run(boom).is_err());
        if reopens {
            writer.reopen().unwrap();
        }
        writer.go_on_purging();
        let answer = waits.try_recv().unwrap();
        assert!(answer.is_err(), "something may be left");
        if !reopens {
            writer.reopen().unwrap();
        }
    }
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
    let read = read_feed(&shared, kept[0].namespace, Default::default(), 100).unwrap();
    assert_eq!(read.reply.events.len(), 1);
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
