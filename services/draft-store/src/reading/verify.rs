//! Checking everything that is stored, for operators. It reads a little at a time, so that the writer goes on
//! meanwhile.

use refrain_protocol::ApiError;
use refrain_protocol::admin::{DAMAGE_LISTED_MAX, Damage, NamespaceSum, VerifyReply};
use refrain_protocol::document::DocumentUpdate;
use xxhash_rust::xxh3::Xxh3;

use crate::codec;
use crate::log::LogError;
use crate::message::{head_bytes, text_checksum};
use crate::reading::document_text::{Piece, TextError, read_document};
use crate::reading::selection;
use crate::record::replication::{
    CheckpointsRecord, LastMessageRecord, OutboxRecord, PositionRecord, RevisionRecord,
    StreamErasureRecord,
};
use crate::record::tenants::TenantPartRecord;
use crate::record::usage::{UsageErasureRecord, UsageRecord};
use crate::record::{
    AcceptanceStatisticsRecord, DocumentKey, ErasedRecord, ErasureRecord, FeedRecord, HeadRecord,
    MarksRecord, NamespaceRecord, RecordKind, SegmentId, SegmentRecord, StateRecord, StoreRecord,
    TombstoneRecord, document_of, finish_code, piece_start_of,
};
use crate::segments::SegmentFile;
use crate::shared_store::{SharedStore, unavailable};

/// Records that are checked under one lock.
const RECORDS_PER_LOCK: usize = 256;

/// Reads everything, and reports what cannot be read.
pub(crate) fn verify(shared: &SharedStore) -> Result<VerifyReply, ApiError> {
    let mut reply = VerifyReply::default();
    verify_records(shared, &mut reply)?;
    verify_segments(shared, &mut reply)?;
    let namespaces = {
        let open = shared.read()?;
        let position = open.catalog.replication.position;
        reply.feed_sequence = position.map(|position| position.sequence);
        open.catalog.namespaces()
    };
    for (namespace, _) in namespaces {
        let mut sum = NamespaceSum {
            namespace,
            ..NamespaceSum::default()
        };
        let mut checksum = 0u64;
        for key in selection::by_state(shared, namespace, |_| true)? {
            let open = shared.read()?;
            // Removed since it was listed.
            if open.catalog.document(key).is_none() {
                continue;
            }
            match read_document(&open, key) {
                Ok(update) => {
                    sum.documents += 1;
                    sum.tokens += update.tokens.len() as u64;
                    checksum = checksum.wrapping_add(document_checksum(&update));
                }
                Err(TextError::Damaged(damage)) => note(&mut reply, name(key), damage),
                Err(TextError::Log(error)) => return Err(unavailable().with_detail(error)),
            }
        }
        if sum.documents > 0 {
            reply.documents += sum.documents;
            reply.tokens += sum.tokens;
            sum.checksum = format!("{checksum:016x}");
            reply.namespaces.push(sum);
        }
    }
    Ok(reply)
}

/// A checksum of a document's text and of what replicas agree on besides.
fn document_checksum(update: &DocumentUpdate) -> u64 {
    let mut hash = Xxh3::new();
    hash.update(&update.document.0.to_le_bytes());
    hash.update(&update.epoch.to_le_bytes());
    hash.update(&[finish_code(update.finish)]);
    hash.update(&text_checksum(&update.tokens).to_le_bytes());
    hash.update(&head_bytes(&update.head));
    hash.digest()
}

/// Checks every segment again from its file, as at start.
fn verify_segments(shared: &SharedStore, reply: &mut VerifyReply) -> Result<(), ApiError> {
    let segments: Vec<_> = {
        let open = shared.read()?;
        open.catalog.segments().files().cloned().collect()
    };
    for sealed in segments {
        verify_segment(shared, &sealed, reply)?;
    }
    Ok(())
}

/// Checks a segment that was mounted a moment ago.
pub(crate) fn verify_segment(
    shared: &SharedStore,
    sealed: &SegmentFile,
    reply: &mut VerifyReply,
) -> Result<(), ApiError> {
    match sealed.check() {
        Ok(()) => reply.records += u64::from(sealed.documents()),
        // It was merged or rewritten since then, and its file is deleted.
        Err(_) if !is_mounted(shared, sealed.id) => {}
        Err(LogError::Corrupt(why)) => {
            let what = format!("segment {} of namespace {}", sealed.id, sealed.namespace);
            note(reply, what, why);
        }
        Err(error) => return Err(unavailable().with_detail(error)),
    }
    Ok(())
}

fn is_mounted(shared: &SharedStore, segment: SegmentId) -> bool {
    let open = shared.read();
    open.is_ok_and(|open| open.catalog.segments().get(segment).is_some())
}

pub(crate) fn note(reply: &mut VerifyReply, what: String, why: impl ToString) {
    reply.damaged += 1;
    if reply.damage.len() < DAMAGE_LISTED_MAX {
        reply.damage.push(Damage {
            what,
            why: why.to_string(),
        });
    }
}

fn name(key: DocumentKey) -> String {
    format!("document {} of namespace {}", key.document, key.namespace)
}

/// Checks the envelope of every record, and that it decodes to the kind that its key says.
fn verify_records(shared: &SharedStore, reply: &mut VerifyReply) -> Result<(), ApiError> {
    let mut next = Some(vec![0]);
    while let Some(from) = next.take() {
        let open = shared.read()?;
        let mut seen = 0;
        open.log
            .scan(&from, &[u8::MAX], &mut |key, value| {
                seen += 1;
                reply.records += 1;
                if let Err(damage) = check(key, value) {
                    note(reply, record_name(key), damage);
                }
                if seen == RECORDS_PER_LOCK {
                    next = Some([key, &[0]].concat());
                }
                next.is_none()
            })
            .map_err(|error| unavailable().with_detail(error))?;
    }
    Ok(())
}

fn check(key: &[u8], value: &[u8]) -> Result<(), codec::Damage> {
    match RecordKind::of(key).ok_or(codec::Damage::Magic)? {
        RecordKind::Store => codec::open::<StoreRecord>(key, value).map(drop),
        RecordKind::Namespace => codec::open::<NamespaceRecord>(key, value).map(drop),
        RecordKind::Feed => codec::open::<FeedRecord>(key, value).map(drop),
        RecordKind::State => codec::open::<StateRecord>(key, value).map(drop),
        RecordKind::Head => codec::open::<HeadRecord>(key, value).map(drop),
        RecordKind::Piece => Piece::open(key, value).map(drop),
        RecordKind::Tombstone => codec::open::<TombstoneRecord>(key, value).map(drop),
        RecordKind::Erasure => codec::open::<ErasureRecord>(key, value).map(drop),
        RecordKind::Erased => codec::open::<ErasedRecord>(key, value).map(drop),
        RecordKind::Segment => codec::open::<SegmentRecord>(key, value).map(drop),
        RecordKind::Marks => codec::open::<MarksRecord>(key, value).map(drop),
        RecordKind::Statistics => codec::open::<AcceptanceStatisticsRecord>(key, value).map(drop),
        RecordKind::Position => codec::open::<PositionRecord>(key, value).map(drop),
        RecordKind::Outbox => codec::open::<OutboxRecord>(key, value).map(drop),
        RecordKind::Revision => codec::open::<RevisionRecord>(key, value).map(drop),
        RecordKind::StreamErasure => codec::open::<StreamErasureRecord>(key, value).map(drop),
        RecordKind::Checkpoints => codec::open::<CheckpointsRecord>(key, value).map(drop),
        RecordKind::LastMessage => codec::open::<LastMessageRecord>(key, value).map(drop),
        RecordKind::Tenant => codec::open::<TenantPartRecord>(key, value).map(drop),
        RecordKind::Usage => codec::open::<UsageRecord>(key, value).map(drop),
        RecordKind::UsageErasure => codec::open::<UsageErasureRecord>(key, value).map(drop),
    }
}

/// A description of a record.
fn record_name(key: &[u8]) -> String {
    let kind = RecordKind::of(key).map_or_else(|| "unknown".to_owned(), |kind| format!("{kind:?}"));
    let kind = kind.to_lowercase();
    match (document_of(key), piece_start_of(key)) {
        (Some(id), Some(start)) => format!("{kind} record at token {start} of {}", name(id)),
        (Some(id), None) => format!("{kind} record of {}", name(id)),
        (None, _) => {
            let hex: String = key.iter().map(|byte| format!("{byte:02x}")).collect();
            format!("{kind} record {hex}")
        }
    }
}
