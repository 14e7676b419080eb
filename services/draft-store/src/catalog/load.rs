//! Reading the catalog back from the log at start.

use std::collections::HashMap;

use refrain_protocol::{DocumentId, Namespace, NamespaceId};

use super::Catalog;
use crate::codec;
use crate::log::{Batch, LogError, RecordLog};
use crate::record::{
    self, DocumentKey, ErasedRecord, ErasureRecord, FeedRecord, Kind, NamespaceRecord, StateRecord,
    StoreRecord, TombstoneRecord,
};

/// What was read.
pub(crate) struct Loaded {
    pub(crate) catalog: Catalog,
    /// Documents whose state could not be read: to be removed, and their followers told.
    pub(crate) damaged: Vec<DocumentKey>,
    /// Records that could not be read, of any kind.
    pub(crate) damaged_records: u64,
    /// Removals of what stands for damaged records, to go into the next commit.
    pub(crate) repairs: Batch,
}

/// Reads everything but the text. `random` makes feed eras unlike any before it where one is lost.
pub(crate) fn load(
    log: &dyn RecordLog,
    store: StoreRecord,
    random: u32,
) -> Result<Loaded, LogError> {
    let mut loaded = Loaded {
        catalog: Catalog::new(store.generation, 0),
        damaged: Vec::new(),
        damaged_records: 0,
        repairs: Batch::default(),
    };
    load_namespaces(log, &mut loaded)?;
    load_feeds(log, &mut loaded, random)?;
    load_documents(log, &mut loaded)?;
    load_tombstones(log, &mut loaded)?;
    load_erasures(log, &mut loaded)?;
    loaded.catalog.skip_to(store.sequence_reserved);
    Ok(loaded)
}

/// Reads all records of one kind; `visit` gets the key and the record, or `None` in place of a damaged one.
fn each<T: bincode::Decode<()>>(
    log: &dyn RecordLog,
    kind: Kind,
    visit: &mut dyn FnMut(&[u8], Option<T>),
) -> Result<u64, LogError> {
    let (from, to) = kind.range();
    let mut damaged = 0;
    log.scan(&from, &to, &mut |key, value| {
        let record = codec::open(key, value);
        damaged += u64::from(record.is_err());
        visit(key, record.ok());
        true
    })?;
    Ok(damaged)
}

fn load_namespaces(log: &dyn RecordLog, loaded: &mut Loaded) -> Result<(), LogError> {
    let Loaded {
        catalog,
        repairs,
        damaged_records,
        ..
    } = loaded;
    *damaged_records += each::<NamespaceRecord>(log, Kind::Namespace, &mut |key, record| {
        match (record::namespace_of(key), record) {
            (
                Some(id),
                Some(NamespaceRecord {
                    tenant,
                    model,
                    tokenizer,
                }),
            ) => {
                catalog.introduce(
                    id,
                    &Namespace {
                        tenant,
                        model,
                        tokenizer,
                    },
                );
            }
            // The next call for it brings the names again.
            _ => repairs.remove(key.to_vec()),
        }
    })?;
    Ok(())
}

fn load_feeds(log: &dyn RecordLog, loaded: &mut Loaded, random: u32) -> Result<(), LogError> {
    let Loaded {
        catalog,
        repairs,
        damaged_records,
        ..
    } = loaded;
    *damaged_records += each::<FeedRecord>(log, Kind::Feed, &mut |key, record| {
        let Some(id) = record::namespace_of(key) else {
            repairs.remove(key.to_vec());
            return;
        };
        // Without it nobody can tell which tombstones were trimmed: everybody starts over.
        let record = record.unwrap_or_else(|| {
            let record = FeedRecord {
                floor: 0,
                trims: 0,
                era: random,
            };
            repairs.put(key.to_vec(), codec::seal(key, &record));
            record
        });
        catalog.head = catalog.head.max(record.floor);
        catalog.feed_mut(id).restore(record);
    })?;
    Ok(())
}

fn load_erasures(log: &dyn RecordLog, loaded: &mut Loaded) -> Result<(), LogError> {
    let Loaded {
        catalog,
        repairs,
        damaged_records,
        ..
    } = loaded;
    *damaged_records +=
        each::<ErasureRecord>(log, Kind::Erasure, &mut |key, record| match record {
            Some(record) => catalog.erasures.mark(record),
            None => repairs.remove(key.to_vec()),
        })?;
    *damaged_records += each::<ErasedRecord>(log, Kind::Erased, &mut |key, record| match (
        record::document_of(key),
        record,
    ) {
        (Some(id), Some(record)) => catalog.erasures.erase(id, record.at_ms),
        _ => repairs.remove(key.to_vec()),
    })?;
    catalog.erasures.sort();
    Ok(())
}

fn load_documents(log: &dyn RecordLog, loaded: &mut Loaded) -> Result<(), LogError> {
    let Loaded {
        catalog,
        repairs,
        damaged_records,
        damaged,
    } = loaded;
    let mut states: Vec<(DocumentKey, StateRecord)> = Vec::new();
    *damaged_records += each::<StateRecord>(log, Kind::State, &mut |key, record| match (
        record::document_of(key),
        record,
    ) {
        (Some(id), Some(state)) => states.push((id, state)),
        (Some(id), None) => damaged.push(id),
        (None, _) => repairs.remove(key.to_vec()),
    })?;
    // The order of use, as far as it was stored.
    states.sort_unstable_by_key(|(_, state)| (state.used_ms, state.sequence));
    for (key, state) in states {
        catalog.head = catalog.head.max(state.sequence);
        catalog.put(key, state, None);
        // One entry each, at the last change: where the earlier ones were matters to nobody.
        let entry = catalog.introduce_nameless(key.namespace);
        if let Some(document) = entry.documents.get_mut(&key.document) {
            document.boundaries = vec![(state.sequence, 0)];
            entry.feed.put(state.sequence, key.document, 0);
        }
    }
    Ok(())
}

fn load_tombstones(log: &dyn RecordLog, loaded: &mut Loaded) -> Result<(), LogError> {
    let Loaded {
        catalog,
        repairs,
        damaged_records,
        ..
    } = loaded;
    let mut lost: HashMap<NamespaceId, u64> = HashMap::new();
    *damaged_records += each::<TombstoneRecord>(log, Kind::Tombstone, &mut |key, record| {
        let (Some(id), Some(sequence)) = (
            record::namespace_of(key),
            record::tombstone_sequence_of(key),
        ) else {
            repairs.remove(key.to_vec());
            return;
        };
        catalog.head = catalog.head.max(sequence);
        match record {
            Some(record) => {
                let document = DocumentId(record.document);
                catalog.bury(
                    DocumentKey {
                        namespace: id,
                        document,
                    },
                    sequence,
                );
            }
            None => {
                lost.insert(id, sequence);
                repairs.remove(key.to_vec());
            }
        }
    })?;
    // Who has not passed a lost tombstone starts over, as after a trim.
    for (namespace, sequence) in lost {
        let feed = catalog.feed_mut(namespace);
        feed.forget_until(sequence);
        let key = record::namespace_key(Kind::Feed, namespace);
        let value = codec::seal(&key, &feed.record());
        repairs.put(key, value);
    }
    Ok(())
}
