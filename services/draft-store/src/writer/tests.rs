//! The core on a log in memory: scripts of calls, and random operations compared with a plain model.

mod acceptance_statistics;
mod adopted;
mod model;
mod replicas;
mod scripts;
mod sealer;
mod sealing;
mod tenants;

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

use refrain_protocol::document::{
    DocumentHead, DocumentUpdate, FENCED_LEN, FeedCursor, FeedEvent, FinishReason,
};
use refrain_protocol::{DocumentId, Namespace, NamespaceId, TokenId};
use tempfile::TempDir;

use crate::background::seal::{self, NewSegment, SealHost, SealJob, SealReport, SealStep};
use crate::catalog::{Catalog, load};
use crate::codec;
use crate::config::DraftStoreConfig;
use crate::log::LogError;
use crate::log::memory::MemoryLog;
use crate::reading::document_text;
use crate::reading::feed::read_feed;
use crate::record::{DocumentKey, SegmentId, StoreRecord, store_key};
use crate::segments::{self, SegmentSource, find};
use crate::shared_store::{OpenStore, SharedStore};
use crate::writer::core::WriterCore;
use crate::writer::outcome::CommitOutcome;
use crate::writer::requests::{Append, UpdateAuthor};

/// The core with a clock that tests move.
struct Store {
    log: Arc<MemoryLog>,
    config: DraftStoreConfig,
    shared: SharedStore,
    core: WriterCore,
    now_ms: u64,
    damaged_records: u64,
    /// Directory of the segments.
    dir: Arc<TempDir>,
    /// The last segment's number.
    segment: SegmentId,
}

fn names(tenant: &str) -> Namespace {
    Namespace {
        tenant: tenant.into(),
        model: "m".into(),
        tokenizer: "t".into(),
    }
}

fn update(document: u128, epoch: u64, prev_len: u32, tokens: &[TokenId]) -> DocumentUpdate {
    DocumentUpdate {
        document: DocumentId(document),
        epoch,
        prev_len,
        tokens: tokens.to_vec(),
        head: DocumentHead {
            session: Some("s".into()),
            ..DocumentHead::default()
        },
        finish: None,
    }
}

fn finished(update: DocumentUpdate) -> DocumentUpdate {
    DocumentUpdate {
        finish: Some(FinishReason::Stop),
        ..update
    }
}

impl Store {
    fn new(config: DraftStoreConfig) -> Self {
        Store::with_generation(config, 7)
    }

    fn with_generation(config: DraftStoreConfig, generation: u64) -> Self {
        let store = StoreRecord {
            generation,
            sequence_reserved: 0,
        };
        let log = MemoryLog::default();
        let value = codec::seal(&store_key(), &store);
        log.records().insert(store_key(), value);
        let dir = Arc::new(tempfile::tempdir().unwrap());
        Store::open(Arc::new(log), dir, config, 1_000_000_000_000)
    }

    fn open(log: Arc<MemoryLog>, dir: Arc<TempDir>, config: DraftStoreConfig, now_ms: u64) -> Self {
        let stored = log.records()[&store_key()].clone();
        let store = codec::open::<StoreRecord>(&store_key(), &stored).unwrap();
        // Another one for each run, as random numbers would be.
        static OPENINGS: AtomicU32 = AtomicU32::new(1);
        let random = OPENINGS
            .fetch_add(1, Ordering::Relaxed)
            .wrapping_mul(65_537);
        let found = find(dir.path(), &*log, false).unwrap();
        let loaded = load(&*log, store, found, random).unwrap();
        let mut core = WriterCore::new(
            log.clone(),
            config.clone(),
            store,
            loaded.repairs,
            loaded.damaged,
        );
        let mut catalog = loaded.catalog;
        core.prepare_replication(&mut catalog);
        let shared = SharedStore::default();
        *shared.write() = Some(OpenStore {
            catalog,
            log: log.clone(),
        });
        let damaged_records = loaded.damaged_records;
        Store {
            log,
            config,
            shared,
            core,
            now_ms,
            damaged_records,
            segment: segments::list(dir.path()).unwrap().0.pop().unwrap_or(0),
            dir,
        }
    }

    fn reopen(self) -> Self {
        Store::open(self.log, self.dir, self.config, self.now_ms)
    }

    /// Makes a segment. `meanwhile` may change the store once everything is read.
    fn make(
        &mut self,
        tenant: &str,
        source: SegmentSource,
        meanwhile: impl Fn(&mut WriterCore, &mut Catalog),
    ) -> SealReport {
        self.segment += 1;
        let plan = SealJob {
            dir: self.dir.path().to_owned(),
            id: self.segment,
            namespace: names(tenant).id(),
            names: Some(names(tenant)),
            source,
            stop: Arc::default(),
        };
        let host = CoreHost {
            core: RefCell::new(&mut self.core),
            shared: &self.shared,
            now_ms: self.now_ms,
        };
        seal::run(&plan, &self.shared, &host, &|step| {
            if step == SealStep::Read {
                host.change(&meanwhile);
            }
            Ok(())
        })
        .unwrap()
    }

    /// Seals all documents of a tenant that are in the log.
    fn seal(&mut self, tenant: &str) -> SealReport {
        let documents = {
            let open = self.shared.read().unwrap();
            let segments = open.catalog.segments();
            let unsealed = segments.unsealed_of(names(tenant).id());
            unsealed
                .into_iter()
                .flat_map(|unsealed| unsealed.documents.iter().copied())
                .collect()
        };
        self.make(tenant, SegmentSource::Log(documents), |_, _| {})
    }

    /// Merges all segments into one.
    fn merge(&mut self, tenant: &str) -> SealReport {
        let all = self.segments();
        self.make(tenant, SegmentSource::Segments(all), |_, _| {})
    }

    fn segments(&self) -> Vec<SegmentId> {
        let open = self.shared.read().unwrap();
        let segments = open.catalog.segments();
        segments.iter().map(|(segment, _)| segment).collect()
    }

    fn append(&mut self, tenant: &str, updates: &[DocumentUpdate]) -> Vec<u32> {
        let append = Append {
            namespace: names(tenant).id(),
            names: names(tenant),
            updates: updates.to_vec(),
            waited_ms: 0,
            author: UpdateAuthor::Worker,
        };
        let now_ms = self.now_ms;
        let outcome = self.run(|core, catalog| core.append(catalog, &[append], &[], now_ms));
        outcome.lengths[0].clone().unwrap()
    }

    fn run(
        &mut self,
        action: impl FnOnce(&mut WriterCore, &mut Catalog) -> Result<CommitOutcome, LogError>,
    ) -> CommitOutcome {
        let mut open = self.shared.write();
        let catalog = &mut open.as_mut().unwrap().catalog;
        action(&mut self.core, catalog).unwrap()
    }

    fn tick(&mut self, elapsed_ms: u64) -> CommitOutcome {
        self.now_ms += elapsed_ms;
        let mut open = self.shared.write();
        self.core
            .tick(&mut open.as_mut().unwrap().catalog, self.now_ms)
            .unwrap()
    }

    fn touch(&mut self, tenant: &str, document: u128) {
        let mut open = self.shared.write();
        let catalog = &mut open.as_mut().unwrap().catalog;
        self.core
            .touch(catalog, &[key(tenant, document)], self.now_ms);
    }

    fn text(&self, tenant: &str, document: u128) -> Option<Vec<TokenId>> {
        let open = self.shared.read().unwrap();
        let key = key(tenant, document);
        let catalog = &open.catalog;
        let len = catalog.document(key)?.state.len;
        Some(document_text::read(catalog, &*self.log, key, 0, len).unwrap())
    }

    fn documents(&self, tenant: &str) -> Vec<u128> {
        (0..100)
            .filter(|document| self.text(tenant, *document).is_some())
            .collect()
    }

    fn pieces(&self, tenant: &str, document: u128) -> usize {
        let prefix =
            crate::record::document_key(crate::record::RecordKind::Piece, key(tenant, document));
        self.log
            .records()
            .keys()
            .filter(|key| key.starts_with(&prefix))
            .count()
    }
}

/// The core without its actor, as the owner of the store for a seal job.
struct CoreHost<'a> {
    core: RefCell<&'a mut WriterCore>,
    shared: &'a SharedStore,
    now_ms: u64,
}

impl CoreHost<'_> {
    fn change(&self, change: impl Fn(&mut WriterCore, &mut Catalog)) {
        let mut open = self.shared.write();
        change(
            &mut self.core.borrow_mut(),
            &mut open.as_mut().unwrap().catalog,
        );
    }
}

impl SealHost for CoreHost<'_> {
    fn install(&self, segment: NewSegment) -> Result<(), LogError> {
        let mut open = self.shared.write();
        let catalog = &mut open.as_mut().unwrap().catalog;
        let mut core = self.core.borrow_mut();
        core.install(catalog, segment, self.now_ms).map(drop)
    }
}

fn key(tenant: &str, document: u128) -> DocumentKey {
    DocumentKey::new(names(tenant).id(), DocumentId(document))
}

/// A follower's copy of one document.
#[derive(Clone, Debug, PartialEq)]
struct Copy {
    epoch: u64,
    tokens: Vec<TokenId>,
    finish: Option<FinishReason>,
}

/// A follower that applies events exactly as documented, and fails on any gap.
#[derive(Default)]
struct Follower {
    cursor: FeedCursor,
    documents: BTreeMap<DocumentId, Copy>,
    resets: usize,
    events: usize,
    tokens: usize,
}

impl Follower {
    /// Reads once. Returns whether that was the end of the feed.
    fn poll(&mut self, store: &Store, namespace: NamespaceId, tokens_max: usize) -> bool {
        let read = read_feed(
            &store.shared,
            namespace,
            self.cursor,
            &Default::default(),
            tokens_max,
        )
        .unwrap();
        assert!(read.damaged.is_empty());
        if read.delta.reset {
            self.resets += 1;
            self.documents.clear();
        }
        for event in read.delta.events {
            self.events += 1;
            match event {
                FeedEvent::Remove(document) => {
                    self.documents.remove(&document);
                }
                FeedEvent::Update(update) => self.apply(update),
            }
        }
        self.cursor = read.delta.cursor;
        read.delta.caught_up
    }

    fn apply(&mut self, update: DocumentUpdate) {
        self.tokens += update.tokens.len();
        let copy = self.documents.entry(update.document).or_insert(Copy {
            epoch: update.epoch,
            tokens: Vec::new(),
            finish: None,
        });
        let (start, len) = (update.prev_len as usize, copy.tokens.len());
        assert!(
            update.epoch >= copy.epoch,
            "the feed went back to an older epoch"
        );
        assert!(
            start <= len,
            "gap: {start} after {len} of {:?}",
            update.document
        );
        if update.epoch > copy.epoch {
            copy.epoch = update.epoch;
            copy.tokens.truncate(start);
        }
        let overlap = (copy.tokens.len() - start).min(update.tokens.len());
        assert_eq!(
            copy.tokens[start..start + overlap],
            update.tokens[..overlap]
        );
        copy.tokens.extend_from_slice(&update.tokens[overlap..]);
        if start + update.tokens.len() == copy.tokens.len() {
            copy.finish = update.finish;
        }
    }

    fn catch_up(&mut self, store: &Store, tenant: &str, tokens_max: usize) {
        for _ in 0..10_000 {
            if self.poll(store, names(tenant).id(), tokens_max) {
                return;
            }
        }
        panic!("never caught up");
    }

    fn texts(&self) -> BTreeMap<u128, Vec<TokenId>> {
        self.documents
            .iter()
            .map(|(id, copy)| (id.0, copy.tokens.clone()))
            .collect()
    }
}
