//! Reading the catalog back from the log at start.

use std::collections::{BTreeMap, HashMap, HashSet};

use refrain_protocol::usage::UsageTotal;
use refrain_protocol::{DocumentId, NamespaceId};

use crate::catalog::state::Catalog;
use crate::catalog::tenants::TenantParts;
use crate::codec;
use crate::log::{Batch, LogError, RecordLog};
use crate::record::replication::{
    CheckpointsRecord, LastMessageRecord, OutboxRecord, PositionRecord, RevisionRecord,
    StreamErasureRecord, outbox_key, outbox_number_of,
};
use crate::record::tenants::{TenantPartRecord, tenant_part_of};
use crate::record::usage::{UsageErasureRecord, UsageRecord, usage_erasure_of, usage_of};
use crate::record::{
    self, DocumentKey, ErasedRecord, ErasureRecord, FeedRecord, HeadRecord, MarksRecord,
    NamespaceRecord, RecordKind, SegmentSlot, StateRecord, StoreRecord, TombstoneRecord,
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
///
/// It also sets the sequences of a replica apart from those of any earlier run. A replica that was restored from an
/// old copy would else give numbers again that it has sent before, and take its own old messages for what it has now.
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
    clear_remains(log, &mut loaded)?;
    load_tombstones(log, &mut loaded)?;
    load_erasures(log, &mut loaded)?;
    load_statistics(log, &mut loaded)?;
    load_tenants(log, &mut loaded)?;
    load_usage(log, &mut loaded)?;
    load_replication(log, &mut loaded)?;
    let apart = match loaded.catalog.replication.position {
        Some(_) => u64::from(random),
        None => 0,
    };
    loaded
        .catalog
        .skip_to(store.sequence_reserved.saturating_add(apart));
    let settled_head = loaded.catalog.settled_head();
    loaded.catalog.replication.moves.open(settled_head);
    Ok(loaded)
}

/// Reads all records of one kind. `visit` gets what `read` finds in the key, and the record, or `None` for a damaged
/// one. A record is removed if its key cannot be read, or if `visit` does not want it kept.
fn each<K, T: bincode::Decode<()>>(
    log: &dyn RecordLog,
    kind: RecordKind,
    loaded: &mut LoadedCatalog,
    read: impl Fn(&[u8]) -> Option<K>,
    mut visit: impl FnMut(&mut LoadedCatalog, K, Option<T>) -> bool,
) -> Result<(), LogError> {
    let (from, to) = kind.range();
    log.scan(&from, &to, &mut |key, value| {
        let record = codec::open(key, value);
        loaded.damaged_records += u64::from(record.is_err());
        let is_kept = read(key).is_some_and(|found| visit(loaded, found, record.ok()));
        if !is_kept {
            loaded.repairs.remove(key.to_vec());
        }
        true
    })
}

fn load_namespaces(log: &dyn RecordLog, loaded: &mut LoadedCatalog) -> Result<(), LogError> {
    let visit = |loaded: &mut LoadedCatalog, id, record| {
        // The next call for a namespace brings its names again.
        let Some(NamespaceRecord(names)) = record else {
            return false;
        };
        loaded.catalog.introduce(id, &names);
        true
    };
    let kind = RecordKind::Namespace;
    each(log, kind, loaded, record::namespace_of, visit)
}

fn load_feeds(
    log: &dyn RecordLog,
    loaded: &mut LoadedCatalog,
    random: u32,
) -> Result<(), LogError> {
    let visit = |loaded: &mut LoadedCatalog, id, record: Option<FeedRecord>| {
        // Without the record nobody knows which tombstones were trimmed, so all followers start over.
        let record = record.unwrap_or_else(|| {
            let record = FeedRecord {
                floor: 0,
                trims: 0,
                era: random,
            };
            let key = record::namespace_key(RecordKind::Feed, id);
            loaded.repairs.put_record(key, &record);
            record
        });
        loaded.catalog.head = loaded.catalog.head.max(record.floor);
        loaded.catalog.feed_mut(id).restore(record);
        true
    };
    let kind = RecordKind::Feed;
    each(log, kind, loaded, record::namespace_of, visit)
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

/// Reads the tenants. One of which a part is damaged is gone: its keys open nothing until an operator adds it again.
fn load_tenants(log: &dyn RecordLog, loaded: &mut LoadedCatalog) -> Result<(), LogError> {
    let mut found: BTreeMap<Vec<u8>, TenantParts> = BTreeMap::new();
    // The parts of one tenant have the same key, apart from their numbers.
    let place_of = |key: &[u8]| tenant_part_of(key).map(|_| key[..key.len() - 2].to_vec());
    let visit = |_: &mut LoadedCatalog, place, record: Option<TenantPartRecord>| {
        let parts = found.entry(place).or_default();
        let is_kept = record.is_some();
        if let Some(part) = record {
            parts.push(part);
        }
        is_kept
    };
    each(log, RecordKind::Tenant, loaded, place_of, visit)?;
    let tenants = &mut loaded.catalog.tenants;
    for (place, parts) in found {
        match parts.whole() {
            Some((name, version, entry)) => tenants.set(&name, version, Some(entry)),
            None => {
                tracing::error!(
                    "a tenant in the draft store is damaged, and was removed with its keys"
                );
                let above = [&place[..], &[u8::MAX; 3]].concat();
                log.scan(&place, &above, &mut |key, _| {
                    loaded.repairs.remove(key.to_vec());
                    true
                })?;
            }
        }
    }
    Ok(())
}

/// Reads erasures of usage, and counts its rows.
fn load_usage(log: &dyn RecordLog, loaded: &mut LoadedCatalog) -> Result<(), LogError> {
    let visit = |loaded: &mut LoadedCatalog, tenant, record: Option<UsageErasureRecord>| {
        let is_kept = record.is_some();
        if let Some(UsageErasureRecord { at_ms }) = record {
            loaded.catalog.usage.erase(tenant, at_ms);
        }
        is_kept
    };
    let kind = RecordKind::UsageErasure;
    each(log, kind, loaded, usage_erasure_of, visit)?;
    let (from, to) = RecordKind::Usage.range();
    log.scan(&from, &to, &mut |key, value| {
        let total = codec::open::<UsageRecord>(key, value).map(UsageTotal::from);
        loaded.damaged_records += u64::from(total.is_err());
        // Its gateway sends a damaged row again with the next change.
        let (Some(id), Ok(total)) = (usage_of(key), total) else {
            loaded.repairs.remove(key.to_vec());
            return true;
        };
        let usage = &mut loaded.catalog.usage;
        usage.add_row(id.hour, (key.len() + value.len()) as u64);
        usage.spend(&id, total.counts.tokens());
        true
    })
}

/// Reads what a replica knows of the stream, and its outbox.
fn load_replication(log: &dyn RecordLog, loaded: &mut LoadedCatalog) -> Result<(), LogError> {
    let visit = |loaded: &mut LoadedCatalog, (), record: Option<PositionRecord>| {
        let is_kept = record.is_some();
        let replication = &mut loaded.catalog.replication;
        replication.position = record;
        replication.moves.begin(replication.sequence());
        is_kept
    };
    each(log, RecordKind::Position, loaded, |_| Some(()), visit)?;
    let visit = |loaded: &mut LoadedCatalog, (), record: Option<CheckpointsRecord>| {
        let replication = &mut loaded.catalog.replication;
        let record = record.filter(|_| replication.position.is_some());
        let is_kept = record.is_some();
        if let Some(CheckpointsRecord(checkpoints)) = record {
            replication.moves.restore(checkpoints);
        }
        is_kept
    };
    each(log, RecordKind::Checkpoints, loaded, |_| Some(()), visit)?;
    let visit = |loaded: &mut LoadedCatalog, namespace, record: Option<LastMessageRecord>| {
        let record = record.filter(|_| loaded.catalog.namespaces.contains_key(&namespace));
        let is_kept = record.is_some();
        if let Some(LastMessageRecord(sequence)) = record {
            loaded
                .catalog
                .replication
                .moves
                .applied(namespace, sequence);
        }
        is_kept
    };
    let kind = RecordKind::LastMessage;
    each(log, kind, loaded, record::namespace_of, visit)?;
    let visit = |loaded: &mut LoadedCatalog, number, record: Option<OutboxRecord>| {
        let is_kept = record.is_some();
        if let Some(record) = record {
            let outbox = &mut loaded.catalog.replication.outbox;
            if let Some(earlier) = outbox.restore(number, record) {
                loaded.repairs.remove(outbox_key(earlier));
            }
        } else {
            // Nobody knows which change would not be sent, so all documents are sent again.
            loaded.catalog.replication.position = None;
        }
        is_kept
    };
    each(log, RecordKind::Outbox, loaded, outbox_number_of, visit)?;
    // Each document is in the feed once, at its last change. A reader who moves here drops those that were removed.
    let catalog = &mut loaded.catalog;
    let unsent = catalog.replication.outbox.documents();
    let first = unsent
        .filter_map(|key| catalog.document(key))
        .map(|known| known.state.sequence.saturating_sub(1))
        .min();
    let before = first.map_or(catalog.head, |first| first.min(catalog.head));
    catalog.replication.outbox.restored(before);
    let visit = |loaded: &mut LoadedCatalog, key, record: Option<RevisionRecord>| {
        let known = loaded.catalog.document(key).is_some();
        let revision = record.filter(|_| known);
        let is_kept = revision.is_some();
        if let Some(RevisionRecord(revision)) = revision {
            loaded.catalog.replication.set_revision(key, revision);
        }
        is_kept
    };
    let kind = RecordKind::Revision;
    each(log, kind, loaded, record::document_of, visit)?;
    let visit = |loaded: &mut LoadedCatalog, (), record: Option<StreamErasureRecord>| {
        let is_kept = record.is_some();
        if let Some(erasure) = record {
            loaded.catalog.replication.note_erasure(erasure);
        }
        is_kept
    };
    each(log, RecordKind::StreamErasure, loaded, |_| Some(()), visit)
}

fn load_erasures(log: &dyn RecordLog, loaded: &mut LoadedCatalog) -> Result<(), LogError> {
    let visit = |loaded: &mut LoadedCatalog, (), record: Option<ErasureRecord>| {
        let is_kept = record.is_some();
        if let Some(mark) = record {
            loaded.catalog.erasures.mark(mark);
        }
        is_kept
    };
    each(log, RecordKind::Erasure, loaded, |_| Some(()), visit)?;
    let visit = |loaded: &mut LoadedCatalog, key, record| {
        let Some(ErasedRecord { at_ms }) = record else {
            return false;
        };
        loaded.catalog.erasures.erase(key, at_ms);
        true
    };
    let kind = RecordKind::Erased;
    each(log, kind, loaded, record::document_of, visit)?;
    loaded.catalog.erasures.sort();
    Ok(())
}

/// Marks of all segments.
fn load_marks(log: &dyn RecordLog, loaded: &mut LoadedCatalog) -> Result<Marks, LogError> {
    let mut marks = Marks::default();
    let chunk_of = |key: &[u8]| Some((record::segment_of(key)?, record::chunk_of(key)?));
    let visit = |_: &mut LoadedCatalog, chunk, record| {
        // Documents that were evicted come back, and are evicted again. Erased ones do not: their segment was
        // rewritten before the erasure was answered.
        let Some(MarksRecord(marked)) = record else {
            return false;
        };
        marks.chunks.insert(chunk, marked);
        true
    };
    each(log, RecordKind::Marks, loaded, chunk_of, visit)?;
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
    let visit = |loaded: &mut LoadedCatalog, key, record| {
        match record {
            Some(state) => states.push((key, state, None)),
            None => loaded.damaged.push(key),
        }
        true
    };
    each(log, RecordKind::State, loaded, record::document_of, visit)?;
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
    load_prompts(log, &found, loaded)
}

/// Removes what is left of documents that do not exist or are sealed. A salvaged log has such records.
fn clear_remains(log: &dyn RecordLog, loaded: &mut LoadedCatalog) -> Result<(), LogError> {
    let damaged: HashSet<DocumentKey> = loaded.damaged.iter().copied().collect();
    for kind in [RecordKind::State, RecordKind::Head, RecordKind::Piece] {
        let (from, to) = kind.range();
        log.scan(&from, &to, &mut |key, _| {
            let of = record::document_of(key).filter(|of| !damaged.contains(of));
            let known = of.and_then(|of| loaded.catalog.document(of));
            if of.is_some() && known.is_none_or(|known| known.slot.is_some()) {
                loaded.repairs.remove(key.to_vec());
            }
            true
        })?;
    }
    Ok(())
}

/// Reads the prompts of all documents, from their heads in the log and from segments.
fn load_prompts(
    log: &dyn RecordLog,
    found: &FoundSegments,
    loaded: &mut LoadedCatalog,
) -> Result<(), LogError> {
    for sealed in &found.in_use {
        for (number, document, prompt) in sealed.prompts() {
            let key = DocumentKey::new(sealed.namespace, document);
            let slot = SegmentSlot {
                segment: sealed.id,
                number,
            };
            let known = loaded.catalog.document(key);
            if known.is_some_and(|known| known.slot == Some(slot)) {
                loaded.catalog.set_prompt(key, prompt);
            }
        }
    }
    let (from, to) = RecordKind::Head.range();
    // A damaged head is found when it is read; its document has no known prompt until then.
    log.scan(&from, &to, &mut |key, value| {
        let head = codec::open::<HeadRecord>(key, value).ok();
        let prompt = head.and_then(|HeadRecord(head)| head.prompt_hash);
        if let (Some(key), Some(prompt)) = (record::document_of(key), prompt) {
            let known = loaded.catalog.document(key);
            if known.is_some_and(|known| known.slot.is_none()) {
                loaded.catalog.set_prompt(key, prompt);
            }
        }
        true
    })
}

fn load_tombstones(log: &dyn RecordLog, loaded: &mut LoadedCatalog) -> Result<(), LogError> {
    let mut lost: HashMap<NamespaceId, u64> = HashMap::new();
    let key_of = |key: &[u8]| {
        let namespace = record::namespace_of(key)?;
        Some((namespace, record::tombstone_sequence_of(key)?))
    };
    let visit = |loaded: &mut LoadedCatalog, (namespace, sequence), record| {
        loaded.catalog.head = loaded.catalog.head.max(sequence);
        let Some(TombstoneRecord { document }) = record else {
            lost.insert(namespace, sequence);
            return false;
        };
        let key = DocumentKey::new(namespace, DocumentId(document));
        loaded.catalog.add_tombstone(key, sequence);
        true
    };
    each(log, RecordKind::Tombstone, loaded, key_of, visit)?;
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
