//! Reading the catalog back from the log at start.

use std::collections::HashMap;

use refrain_protocol::{DocumentId, NamespaceId};

use crate::catalog::state::Catalog;
use crate::codec;
use crate::log::{Batch, LogError, RecordLog};
use crate::record::{
    self, DocumentKey, ErasedRecord, ErasureRecord, FeedRecord, MarksRecord, NamespaceRecord,
    RecordKind, SegmentSlot, StateRecord, StoreRecord, TombstoneRecord,
};
use crate::segments::{FoundSegments, Marks};

/// The catalog as it was read, and what was damaged.
pub(crate) struct LoadedCatalog {
    pub(crate) catalog: Catalog,
    /// Documents whose state is damaged. They must be removed, and their followers told.
    pub(crate) damaged: Vec<DocumentKey>,
    /// Damaged records of any kind.
    pub(crate) damaged_records: u64,
    /// Segments whose file is missing or damaged.
    pub(crate) lost_segments: usize,
    /// Writes that repair or remove damaged records, for the next commit.
    pub(crate) repairs: Batch,
}

/// Reads everything but the text. `found` are the segments in use. `random` gives a damaged feed an era that no
/// cursor has.
pub(crate) fn load(
    log: &dyn RecordLog,
    store: StoreRecord,
    found: FoundSegments,
    random: u32,
) -> Result<LoadedCatalog, LogError> {
    let mut loaded = LoadedCatalog {
        catalog: Catalog::new(store.generation, 0),
        damaged: Vec::new(),
        damaged_records: found.damaged_records,
        lost_segments: found.lost.len(),
        repairs: Batch::default(),
    };
    load_namespaces(log, &mut loaded)?;
    load_feeds(log, &mut loaded, random)?;
    load_documents(log, found, &mut loaded, random)?;
    load_tombstones(log, &mut loaded)?;
    load_erasures(log, &mut loaded)?;
    load_statistics(log, &mut loaded)?;
    loaded.catalog.skip_to(store.sequence_reserved);
    Ok(loaded)
}

/// Reads all records of one kind. `visit` gets the key and the record, or `None` for a damaged one.
fn each<T: bincode::Decode<()>>(
    log: &dyn RecordLog,
    kind: RecordKind,
    loaded: &mut LoadedCatalog,
    mut visit: impl FnMut(&mut LoadedCatalog, &[u8], Option<T>),
) -> Result<(), LogError> {
    let (from, to) = kind.range();
    log.scan(&from, &to, &mut |key, value| {
        let record = codec::open(key, value);
        loaded.damaged_records += u64::from(record.is_err());
        visit(loaded, key, record.ok());
        true
    })
}

fn load_namespaces(log: &dyn RecordLog, loaded: &mut LoadedCatalog) -> Result<(), LogError> {
    each::<NamespaceRecord>(log, RecordKind::Namespace, loaded, |loaded, key, record| {
        match (record::namespace_of(key), record) {
            (Some(id), Some(NamespaceRecord(names))) => {
                loaded.catalog.introduce(id, &names);
            }
            // The next call for the namespace brings its names again.
            _ => loaded.repairs.remove(key.to_vec()),
        }
    })
}

fn load_feeds(
    log: &dyn RecordLog,
    loaded: &mut LoadedCatalog,
    random: u32,
) -> Result<(), LogError> {
    each::<FeedRecord>(log, RecordKind::Feed, loaded, |loaded, key, record| {
        let Some(id) = record::namespace_of(key) else {
            loaded.repairs.remove(key.to_vec());
            return;
        };
        // Without the record nobody knows which tombstones were trimmed, so all followers start over.
        let record = record.unwrap_or_else(|| {
            let record = FeedRecord {
                floor: 0,
                trims: 0,
                era: random,
            };
            loaded.repairs.put_record(key.to_vec(), &record);
            record
        });
        loaded.catalog.head = loaded.catalog.head.max(record.floor);
        loaded.catalog.feed_mut(id).restore(record);
    })?;
    Ok(())
}

/// Counts the records of acceptance statistics. Damage in them is found when they are read.
fn load_statistics(log: &dyn RecordLog, loaded: &mut LoadedCatalog) -> Result<(), LogError> {
    let (from, to) = RecordKind::Statistics.range();
    log.scan(&from, &to, &mut |key, value| {
        match record::namespace_of(key) {
            Some(id) => {
                let bytes = (key.len() + value.len()) as u64;
                loaded.catalog.statistics.found(id, bytes);
                // Its names may be lost, and it may have no documents. An erasure must find it all the same.
                loaded.catalog.introduce_nameless(id);
            }
            None => loaded.repairs.remove(key.to_vec()),
        }
        true
    })
}

fn load_erasures(log: &dyn RecordLog, loaded: &mut LoadedCatalog) -> Result<(), LogError> {
    each::<ErasureRecord>(
        log,
        RecordKind::Erasure,
        loaded,
        |loaded, key, record| match record {
            Some(record) => loaded.catalog.erasures.mark(record),
            None => loaded.repairs.remove(key.to_vec()),
        },
    )?;
    each::<ErasedRecord>(
        log,
        RecordKind::Erased,
        loaded,
        |loaded, key, record| match (record::document_of(key), record) {
            (Some(id), Some(record)) => loaded.catalog.erasures.erase(id, record.at_ms),
            _ => loaded.repairs.remove(key.to_vec()),
        },
    )?;
    loaded.catalog.erasures.sort();
    Ok(())
}

/// Marks of all segments.
fn load_marks(log: &dyn RecordLog, loaded: &mut LoadedCatalog) -> Result<Marks, LogError> {
    let mut marks = Marks::default();
    each::<MarksRecord>(
        log,
        RecordKind::Marks,
        loaded,
        |loaded, key, record| match (record::segment_of(key), record::chunk_of(key), record) {
            (Some(segment), Some(chunk), Some(MarksRecord(marked))) => {
                marks.chunks.insert((segment, chunk), marked);
            }
            // Documents that were evicted come back, and are evicted again. Erased ones do not: their segment was
            // rewritten before the erasure was answered.
            _ => loaded.repairs.remove(key.to_vec()),
        },
    )?;
    Ok(marks)
}

/// Prepares the repairs of the log's segment names: adopted segments are named, lost ones are not.
fn adopt_segments(found: &FoundSegments, loaded: &mut LoadedCatalog, random: u32) {
    for sealed in &found.in_use {
        if let Some(names) = &sealed.names
            && loaded.catalog.introduce(sealed.namespace, names)
        {
            let key = record::namespace_key(RecordKind::Namespace, sealed.namespace);
            let record = NamespaceRecord(names.clone());
            loaded.repairs.put_record(key, &record);
        }
        if found.adopted.contains(&sealed.id) {
            let key = record::segment_key(sealed.id);
            loaded.repairs.put_record(key, &sealed.manifest());
        }
        loaded.catalog.mount(sealed.clone());
    }
    for (segment, namespace) in &found.lost {
        loaded.repairs.remove(record::segment_key(*segment));
        // The followers of a lost segment hold documents that nobody will tell them to drop, so they start over. If
        // its namespace is unknown, all followers do.
        let namespaces: Vec<NamespaceId> = match namespace {
            Some(namespace) => vec![*namespace],
            None => loaded.catalog.namespaces.keys().copied().collect(),
        };
        for namespace in namespaces {
            let feed = loaded.catalog.feed_mut(namespace);
            let record = FeedRecord {
                era: random,
                ..feed.record()
            };
            feed.restore(record);
            let key = record::namespace_key(RecordKind::Feed, namespace);
            loaded.repairs.put_record(key, &record);
        }
    }
}

/// The documents in segments, as their marks have changed them.
fn sealed_documents<'a>(
    found: &'a FoundSegments,
    marks: &'a Marks,
) -> impl Iterator<Item = (DocumentKey, StateRecord, SegmentSlot)> + 'a {
    found.in_use.iter().flat_map(move |sealed| {
        sealed
            .states()
            .filter_map(move |(number, document, state)| {
                let slot = SegmentSlot {
                    segment: sealed.id,
                    number,
                };
                let used_s = match marks.get(slot) {
                    record::GONE => return None,
                    used_s => used_s,
                };
                let key = DocumentKey::new(sealed.namespace, document);
                let used_ms = state.used_ms.max(u64::from(used_s) * 1_000);
                Some((key, StateRecord { used_ms, ..state }, slot))
            })
    })
}

fn load_documents(
    log: &dyn RecordLog,
    found: FoundSegments,
    loaded: &mut LoadedCatalog,
    random: u32,
) -> Result<(), LogError> {
    let marks = load_marks(log, loaded)?;
    for &(segment, chunk) in marks.chunks.keys() {
        if !found.in_use.iter().any(|sealed| sealed.id == segment) {
            loaded.repairs.remove(record::marks_key(segment, chunk));
        }
    }
    adopt_segments(&found, loaded, random);
    let mut states: Vec<(DocumentKey, StateRecord, Option<SegmentSlot>)> = Vec::new();
    each::<StateRecord>(
        log,
        RecordKind::State,
        loaded,
        |loaded, key, record| match (record::document_of(key), record) {
            (Some(id), Some(state)) => states.push((id, state, None)),
            (Some(id), None) => loaded.damaged.push(id),
            (None, _) => loaded.repairs.remove(key.to_vec()),
        },
    )?;
    let sealed = sealed_documents(&found, &marks);
    states.extend(sealed.map(|(key, state, slot)| (key, state, Some(slot))));
    // Only salvaged or adopted documents can occur twice. The later change wins. If the same change has two copies,
    // the one in the newer segment wins, since the sort puts it last.
    states.sort_by_key(|(key, state, slot)| (*key, state.sequence, slot.map(|slot| slot.segment)));
    states.dedup_by(|later, earlier| {
        let same = later.0 == earlier.0;
        if same {
            *earlier = *later;
        }
        same
    });
    // The order of use, as far as it was stored.
    states.sort_unstable_by_key(|(_, state, _)| (state.used_ms, state.sequence));
    for (key, state, slot) in states {
        loaded.catalog.head = loaded.catalog.head.max(state.sequence);
        loaded.catalog.put(key, state, None);
        if slot.is_some() {
            loaded.catalog.move_document(key, slot, state.bytes);
        }
        // Each document gets one feed entry, at its last change. The earlier ones are not needed.
        let entry = loaded.catalog.introduce_nameless(key.namespace);
        if let Some(document) = entry.documents.get_mut(&key.document) {
            document.boundaries = vec![(state.sequence, 0)];
            entry.feed.put(state.sequence, key.document, 0);
        }
    }
    Ok(())
}

fn load_tombstones(log: &dyn RecordLog, loaded: &mut LoadedCatalog) -> Result<(), LogError> {
    let mut lost: HashMap<NamespaceId, u64> = HashMap::new();
    each::<TombstoneRecord>(log, RecordKind::Tombstone, loaded, |loaded, key, record| {
        let (Some(id), Some(sequence)) = (
            record::namespace_of(key),
            record::tombstone_sequence_of(key),
        ) else {
            loaded.repairs.remove(key.to_vec());
            return;
        };
        loaded.catalog.head = loaded.catalog.head.max(sequence);
        match record {
            Some(record) => {
                let document = DocumentId(record.document);
                loaded
                    .catalog
                    .add_tombstone(DocumentKey::new(id, document), sequence);
            }
            None => {
                lost.insert(id, sequence);
                loaded.repairs.remove(key.to_vec());
            }
        }
    })?;
    // A follower that has not passed a lost tombstone starts over, as after a trim.
    for (namespace, sequence) in lost {
        let feed = loaded.catalog.feed_mut(namespace);
        feed.forget_until(sequence);
        let key = record::namespace_key(RecordKind::Feed, namespace);
        let record = feed.record();
        loaded.repairs.put_record(key, &record);
    }
    Ok(())
}
