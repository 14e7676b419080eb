//! One committed file of every format on disk. Today's code must read each of them with the same contents.
//!
//! If a test fails here, stores written by an earlier version can no longer be read. With `REFRAIN_WRITE_FIXTURES`
//! set, the tests write the files instead. Use that for the file of a new format version only, under a new name.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Debug;
use std::fs;
use std::path::{Path, PathBuf};

use bincode::{Decode, Encode};
use refrain_protocol::document::{DocumentHead, FinishReason};
use refrain_protocol::history::PromptHash;
use refrain_protocol::{DocumentId, Namespace};

use crate::catalog::Catalog;
use crate::codec::{self, PieceRecord};
use crate::directory::{Loss, Manifest};
use crate::log::Batch;
use crate::log::journal::{self, Journal, JournalPosition};
use crate::record::{
    AcceptanceStatisticsRecord, DocumentKey, ErasedRecord, ErasureRecord, FeedRecord, GONE,
    HeadRecord, MarksRecord, NamespaceRecord, RecordKind, STATIC, SegmentRecord, StateRecord,
    StoreRecord, TombstoneRecord, acceptance_statistics_key, document_key, erasure_key,
    finish_code, marks_key, namespace_key, piece_key, segment_key, store_key, tombstone_key,
};
use crate::segments::{self, SegmentEntry, SegmentFile};

const SEGMENT: u64 = 7;

/// The path of a fixture.
pub(crate) fn fixture(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("fixtures")
        .join(name)
}

/// Whether the fixtures are to be written instead of read.
pub(crate) fn is_writing() -> bool {
    std::env::var_os("REFRAIN_WRITE_FIXTURES").is_some()
}

fn names() -> Namespace {
    Namespace {
        tenant: "acme".into(),
        model: "tiny".into(),
        tokenizer: "bpe".into(),
    }
}

fn head() -> DocumentHead {
    DocumentHead {
        session: Some("session".into()),
        group: Some("group".into()),
        choice: 3,
        weight_version: 9,
        created_ms: 1_700_000_000_123,
        left_context: vec![1, 70_000, 3],
        prompt_hash: None,
    }
}

/// A head as today's writers send it, with the hash of its prompt.
fn head_with_prompt() -> DocumentHead {
    DocumentHead {
        prompt_hash: Some(PromptHash(0x0123_4567_89ab_cdef_0011_2233_4455_6677)),
        ..head()
    }
}

fn state(len: u32) -> StateRecord {
    StateRecord {
        epoch: 2,
        epoch_start: 4,
        len,
        finish: finish_code(Some(FinishReason::Stop)) | STATIC,
        sequence: 11,
        stored_ms: 1_700_000_000_456,
        used_ms: 1_700_000_009_000,
        tail_start: len,
        tail_pieces: 0,
        bytes: 0,
    }
}

/// Tokens that fill a piece which is compressed.
fn tokens() -> Vec<u32> {
    (0..600).map(|at| at * 7_919 % 128_000).collect()
}

/// The records of a log: checked if they were read, otherwise gathered to be written.
enum Records {
    Read(BTreeMap<Vec<u8>, Vec<u8>>),
    Written(Batch),
}

impl Records {
    fn each<T: Encode + Decode<()> + PartialEq + Debug>(&mut self, key: Vec<u8>, record: T) {
        match self {
            Records::Read(values) => {
                let value = values.get(&key).expect("the fixture has the key");
                assert_eq!(codec::open::<T>(&key, value), Ok(record));
            }
            Records::Written(batch) => {
                let value = codec::seal(&key, &record);
                batch.put(key, value);
            }
        }
    }

    /// One record of each kind, with this head.
    fn all(&mut self, head: DocumentHead) {
        let namespace = names().id();
        let key = DocumentKey::new(namespace, DocumentId(5));
        let store = StoreRecord {
            generation: 0x0123_4567_89ab_cdef,
            sequence_reserved: 65_536,
        };
        self.each(store_key(), store);
        let named = NamespaceRecord(names());
        self.each(namespace_key(RecordKind::Namespace, namespace), named);
        let feed = FeedRecord {
            floor: 3,
            trims: 2,
            era: 1,
        };
        self.each(namespace_key(RecordKind::Feed, namespace), feed);
        self.each(document_key(RecordKind::State, key), state(600));
        self.each(document_key(RecordKind::Head, key), HeadRecord(head));
        self.each(piece_key(key, 0), PieceRecord::new(&tokens()));
        self.each(
            tombstone_key(namespace, 12),
            TombstoneRecord { document: 6 },
        );
        let erasure = ErasureRecord {
            tenant: Some("acme".into()),
            model: None,
            session: Some("session".into()),
            from_ms: Some(1),
            until_ms: None,
            at_ms: 1_700_000_010_000,
        };
        self.each(erasure_key(erasure.id()), erasure);
        let erased = ErasedRecord {
            at_ms: 1_700_000_010_000,
        };
        self.each(document_key(RecordKind::Erased, key), erased);
        let segment = SegmentRecord {
            namespace: namespace.0,
            checksum: 77,
        };
        self.each(segment_key(SEGMENT), segment);
        let mut marks = vec![0; 512];
        (marks[1], marks[2]) = (1_700_000_000, GONE);
        self.each(marks_key(SEGMENT, 0), MarksRecord(marks));
        let statistics = AcceptanceStatisticsRecord(statistics());
        self.each(acceptance_statistics_key(namespace, 0), statistics);
    }
}

/// The number of a table, and bytes that the store does not look into.
fn statistics() -> Vec<u8> {
    (1..=40).collect()
}

#[test]
fn records_without_prompts_are_read() {
    records_are_read("records_v1.journal", head(), false);
}

#[test]
fn records_with_prompts_are_read() {
    records_are_read("records_v2.journal", head_with_prompt(), true);
}

fn records_are_read(name: &str, head: DocumentHead, is_written: bool) {
    let dir = tempfile::tempdir().unwrap();
    let (path, fixture) = (journal::path_in(dir.path()), fixture(name));
    if is_writing() && is_written {
        let mut records = Records::Written(Batch::default());
        records.all(head.clone());
        let Records::Written(batch) = records else {
            unreachable!();
        };
        let mut journal = Journal::create(dir.path(), 7).unwrap();
        journal.append(&batch).unwrap();
        journal.install().unwrap();
        fs::copy(&path, &fixture).unwrap();
    }
    fs::copy(&fixture, &path).unwrap();
    let mut values = BTreeMap::new();
    let found = journal::scan(dir.path(), 0, &mut |scanned| {
        let writes = scanned.batch.writes();
        values.extend(writes.map(|(key, value)| (key.clone(), value.unwrap().clone())));
        Ok(())
    });
    let found = found.unwrap();
    assert_eq!((found.name, found.damage.len()), (Some(7), 0));
    let kinds: BTreeSet<u8> = values.keys().map(|key| key[0]).collect();
    assert_eq!(kinds.len(), 12, "one record of each kind");
    let statistics_key = acceptance_statistics_key(names().id(), 0);
    let value = &values[&statistics_key];
    let AcceptanceStatisticsRecord(bytes) = codec::open(&statistics_key, value).unwrap();
    assert_eq!(bytes, statistics());
    Records::Read(values).all(head);
}

#[test]
fn the_position_in_a_journal_keeps_its_encoding() {
    let position = JournalPosition {
        journal: 0x0807_0605_0403_0201,
        end: 0x100f,
    };
    let bytes = [1, 2, 3, 4, 5, 6, 7, 8, 0x0f, 0x10, 0, 0, 0, 0, 0, 0];
    assert_eq!(position.to_bytes(), bytes);
    assert_eq!(JournalPosition::from_bytes(&bytes), Some(position));
}

fn entries(head: DocumentHead) -> Vec<SegmentEntry> {
    let nameless = DocumentHead {
        session: None,
        group: None,
        left_context: Vec::new(),
        ..head
    };
    [(4, tokens(), nameless), (5, vec![1, 2, 3, 2, 3], head)]
        .into_iter()
        .map(|(document, tokens, head)| SegmentEntry {
            document: DocumentId(document),
            state: state(tokens.len() as u32),
            head,
            tokens,
        })
        .collect()
}

#[test]
fn segment_files_of_all_versions_are_read() {
    segment_is_read("segment_v2.segment", head(), false);
    segment_is_read("segment_v3.segment", head_with_prompt(), true);
}

fn segment_is_read(name: &str, head: DocumentHead, is_written: bool) {
    let dir = tempfile::tempdir().unwrap();
    let (path, fixture) = (segments::path(dir.path(), SEGMENT), fixture(name));
    fs::create_dir(segments::directory(dir.path())).unwrap();
    if is_writing() && is_written {
        let namespace = names().id();
        let written = segments::write(
            dir.path(),
            SEGMENT,
            namespace,
            Some(&names()),
            entries(head.clone()),
            &mut || Ok(()),
        );
        drop(written.unwrap());
        fs::copy(&path, &fixture).unwrap();
    }
    fs::copy(&fixture, &path).unwrap();
    segments::check_versions(dir.path()).unwrap();
    let file = SegmentFile::open(dir.path(), SEGMENT).unwrap();
    assert_eq!(
        (file.namespace, file.names.as_ref()),
        (names().id(), Some(&names()))
    );
    assert_eq!((file.documents(), file.tokens), (2, 605));
    for (number, expected) in (0..).zip(entries(head)) {
        let read = file.entry(number).unwrap();
        let state = StateRecord {
            bytes: 0,
            ..read.state
        };
        assert_eq!((read.document, state), (expected.document, expected.state));
        assert_eq!((read.head, read.tokens), (expected.head, expected.tokens));
    }
}

#[test]
fn manifests_of_all_versions_are_read() {
    let mut catalog = Catalog::new(0xabcd, 40);
    let key = DocumentKey::new(names().id(), DocumentId(5));
    catalog.put(key, state(600), None);
    let store = StoreRecord {
        generation: 0xabcd,
        sequence_reserved: 65_536,
    };
    let loss = Loss {
        expected: 100,
        found: 1,
    };
    let newest = Manifest::new(3, store, &catalog, true).with(Some(loss), 1_700_000_000_000);
    let first = Manifest::new(0, store, &catalog, true);
    for (name, expected) in [("manifest_v1.json", first), ("manifest_v2.json", newest)] {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("manifest.json");
        if is_writing() && name == "manifest_v2.json" {
            expected.write(dir.path()).unwrap();
            fs::copy(&path, fixture(name)).unwrap();
        }
        fs::copy(fixture(name), &path).unwrap();
        assert_eq!(Manifest::read(dir.path()), Some(expected), "{name}");
    }
}
