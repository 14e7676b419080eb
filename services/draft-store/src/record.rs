//! The records of the log and their keys.
//!
//! Records that are soon replaced or removed live in memory, and all others in one sled tree, so that a commit is
//! one atomic batch there. Two trees would need an optimistic transaction, which costs a third of the rate. The first
//! byte of a key is the kind. Integers in keys are big-endian, so that a scan meets the pieces of a document in order
//! of position. `record/replication.rs` has the records that only a replica of a cluster has, `record/tenants.rs`
//! those of tenants, and `record/usage.rs` those of usage.

pub(crate) mod replication;
pub(crate) mod tenants;
#[cfg(test)]
mod tests;
pub(crate) mod usage;

use bincode::de::Decoder;
use bincode::de::read::Reader as _;
use bincode::enc::Encoder;
use bincode::error::{DecodeError, EncodeError};
use bincode::{Decode, Encode};
use refrain_protocol::document::{DocumentHead, FinishReason};
use refrain_protocol::history::PromptHash;
use refrain_protocol::{DocumentId, Namespace, NamespaceId};

/// A document of a namespace.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(crate) struct DocumentKey {
    pub(crate) namespace: NamespaceId,
    pub(crate) document: DocumentId,
}

impl DocumentKey {
    pub(crate) fn new(namespace: NamespaceId, document: DocumentId) -> Self {
        DocumentKey {
            namespace,
            document,
        }
    }
}

/// The kind of a record, which is the first byte of its key.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub(crate) enum RecordKind {
    /// [`StoreRecord`], one.
    Store = b'm',
    /// [`NamespaceRecord`], one per namespace.
    Namespace = b'n',
    /// [`FeedRecord`], one per namespace whose tombstones were ever trimmed.
    Feed = b'f',
    /// [`StateRecord`], one per document.
    State = b'd',
    /// [`HeadRecord`], one per document.
    Head = b'h',
    /// [`crate::codec::PieceRecord`], the text of a document in order.
    Piece = b'p',
    /// [`TombstoneRecord`], one per removal that followers may not have seen.
    Tombstone = b't',
    /// [`ErasureRecord`], one per thing that was erased.
    Erasure = b'e',
    /// [`ErasedRecord`], one per document that was erased and that somebody may still send.
    Erased = b'x',
    /// [`SegmentRecord`], one per segment in use.
    Segment = b's',
    /// [`MarksRecord`], one per [`MARKS_DOCUMENTS`] documents of a segment in which something changed.
    Marks = b'k',
    /// [`AcceptanceStatisticsRecord`], a few per namespace in which drafts were verified.
    Statistics = b'c',
    /// [`replication::PositionRecord`], one if the store is a replica.
    Position = b'j',
    /// [`replication::OutboxRecord`], one per change that other replicas do not have yet.
    Outbox = b'o',
    /// [`replication::RevisionRecord`], one per document whose text was corrected within an epoch.
    Revision = b'v',
    /// [`replication::StreamErasureRecord`], one per erasure that came by the stream.
    StreamErasure = b'g',
    /// [`replication::CheckpointsRecord`], one if the store is a replica, and not while it joins.
    Checkpoints = b'w',
    /// [`replication::LastMessageRecord`], one per namespace of which a replica has applied a message.
    LastMessage = b'l',
    /// [`tenants::TenantPartRecord`], a few per tenant that gateways keep here.
    Tenant = b'a',
    /// [`usage::UsageRecord`], one per hour, tenant, key, model and gateway.
    Usage = b'u',
    /// [`usage::UsageErasureRecord`], one per tenant whose usage was erased.
    UsageErasure = b'y',
}

impl RecordKind {
    pub(crate) const fn byte(self) -> u8 {
        self as u8
    }

    /// The kind of a key.
    pub(crate) fn of(key: &[u8]) -> Option<RecordKind> {
        let all = [
            RecordKind::Store,
            RecordKind::Namespace,
            RecordKind::Feed,
            RecordKind::State,
            RecordKind::Head,
            RecordKind::Piece,
            RecordKind::Tombstone,
            RecordKind::Erasure,
            RecordKind::Erased,
            RecordKind::Segment,
            RecordKind::Marks,
            RecordKind::Statistics,
            RecordKind::Position,
            RecordKind::Outbox,
            RecordKind::Revision,
            RecordKind::StreamErasure,
            RecordKind::Checkpoints,
            RecordKind::LastMessage,
            RecordKind::Tenant,
            RecordKind::Usage,
            RecordKind::UsageErasure,
        ];
        let byte = *key.first()?;
        all.into_iter().find(|kind| kind.byte() == byte)
    }

    /// The kinds whose records are soon replaced or removed, in order of their keys: those of unsealed documents,
    /// text included, and what is to be sent. They stay in memory.
    pub(crate) const SHORT_LIVED: [RecordKind; 4] = [
        RecordKind::State,
        RecordKind::Head,
        RecordKind::Outbox,
        RecordKind::Piece,
    ];

    /// Whether a key is of one of the [`Self::SHORT_LIVED`] kinds.
    pub(crate) fn is_short_lived(key: &[u8]) -> bool {
        let kind = key.first();
        Self::SHORT_LIVED.iter().any(|of| Some(&of.byte()) == kind)
    }

    /// The lowest key of this kind, and a key above all of this kind.
    pub(crate) fn range(self) -> (Vec<u8>, Vec<u8>) {
        (vec![self.byte()], vec![self.byte() + 1])
    }
}

/// The store's identity and its sequence reservation. No sequence at or above the reservation was ever sent to a
/// follower.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Encode, Decode)]
pub(crate) struct StoreRecord {
    pub(crate) generation: u64,
    pub(crate) sequence_reserved: u64,
}

/// The names of a namespace, stored once for all its documents.
#[derive(Clone, Debug, PartialEq, Eq, Encode, Decode)]
pub(crate) struct NamespaceRecord(#[bincode(with_serde)] pub(crate) Namespace);

/// How far back a namespace's tombstones reach; see `catalog/feed.rs`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Encode, Decode)]
pub(crate) struct FeedRecord {
    pub(crate) floor: u64,
    pub(crate) trims: u16,
    pub(crate) era: u32,
}

/// The part of a document that changes with every append. It is small, since it is written again each time.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Encode, Decode)]
pub(crate) struct StateRecord {
    pub(crate) epoch: u64,
    /// The first position from which all text is known to belong to `epoch`.
    pub(crate) epoch_start: u32,
    pub(crate) len: u32,
    pub(crate) finish: u8,
    /// Sequence of the last change.
    pub(crate) sequence: u64,
    /// Time of the first append by the store's own clock, in Unix milliseconds. Retention uses it, since a worker's
    /// clock may be wrong.
    pub(crate) stored_ms: u64,
    pub(crate) used_ms: u64,
    /// Pieces from this position on are small and not merged yet.
    pub(crate) tail_start: u32,
    pub(crate) tail_pieces: u16,
    /// Bytes of keys and values of the head and the pieces.
    pub(crate) bytes: u32,
}

/// The part of a document that is known when it starts. It is written once.
///
/// The hash of the prompt is the last field, and is left out where it is not known. So records from before there were
/// such hashes are read, and a head without one has the same bytes as then.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct HeadRecord(pub(crate) DocumentHead);

impl Encode for HeadRecord {
    fn encode<E: Encoder>(&self, encoder: &mut E) -> Result<(), EncodeError> {
        let DocumentHead {
            session,
            group,
            choice,
            weight_version,
            created_ms,
            left_context,
            prompt_hash,
        } = &self.0;
        session.encode(encoder)?;
        group.encode(encoder)?;
        choice.encode(encoder)?;
        weight_version.encode(encoder)?;
        created_ms.encode(encoder)?;
        left_context.encode(encoder)?;
        match prompt_hash {
            Some(PromptHash(hash)) => hash.encode(encoder),
            None => Ok(()),
        }
    }
}

impl<C> Decode<C> for HeadRecord {
    fn decode<D: Decoder<Context = C>>(decoder: &mut D) -> Result<Self, DecodeError> {
        Ok(HeadRecord(DocumentHead {
            session: Decode::decode(decoder)?,
            group: Decode::decode(decoder)?,
            choice: Decode::decode(decoder)?,
            weight_version: Decode::decode(decoder)?,
            created_ms: Decode::decode(decoder)?,
            left_context: Decode::decode(decoder)?,
            prompt_hash: match decoder.reader().peek_read(1) {
                Some(_) => Some(PromptHash(Decode::decode(decoder)?)),
                None => None,
            },
        }))
    }
}

bincode::impl_borrow_decode!(HeadRecord);

/// A document was removed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Encode, Decode)]
pub(crate) struct TombstoneRecord {
    pub(crate) document: u128,
}

/// The scope and the time of an erasure; see `catalog/erasures.rs`.
#[derive(Clone, Debug, Default, PartialEq, Eq, Encode, Decode)]
pub(crate) struct ErasureRecord {
    pub(crate) tenant: Option<String>,
    pub(crate) model: Option<String>,
    pub(crate) session: Option<String>,
    pub(crate) from_ms: Option<u64>,
    pub(crate) until_ms: Option<u64>,
    pub(crate) at_ms: u64,
}

/// The time at which a document was erased.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Encode, Decode)]
pub(crate) struct ErasedRecord {
    pub(crate) at_ms: u64,
}

/// Number of a segment. A number is never reused while its file may exist.
pub(crate) type SegmentId = u64;

/// The position of a sealed document: a segment, and a number in it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct SegmentSlot {
    pub(crate) segment: SegmentId,
    /// The document's number in the segment, in order of document ids.
    pub(crate) number: u32,
}

/// Names a segment that is in use. The checksum tells its file from any other.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Encode, Decode)]
pub(crate) struct SegmentRecord {
    pub(crate) namespace: u128,
    pub(crate) checksum: u64,
}

/// Documents that share a [`MarksRecord`].
pub(crate) const MARKS_DOCUMENTS: u32 = 512;

/// The mark of a document that is no longer in its segment.
pub(crate) const GONE: u32 = u32::MAX;

/// Changes of some documents of a segment since it was made. Each entry is the last use in Unix seconds, 0 for the
/// time in the file, or [`GONE`].
#[derive(Clone, Debug, PartialEq, Eq, Encode, Decode)]
pub(crate) struct MarksRecord(pub(crate) Vec<u32>);

/// A part of the acceptance statistics of a namespace, as `refrain_speculation` encodes them.
#[derive(Clone, Debug, PartialEq, Eq, Encode, Decode)]
pub(crate) struct AcceptanceStatisticsRecord(pub(crate) Vec<u8>);

/// A bit beside the finish reason: the document is part of a static corpus, which only an erasure removes.
pub(crate) const STATIC: u8 = 0x80;

impl StateRecord {
    /// Whether the document is part of a static corpus; see [`STATIC`].
    pub(crate) fn is_static(&self) -> bool {
        self.finish & STATIC != 0
    }
}

/// The stored code of a finish reason. 0 means none.
pub(crate) fn finish_code(finish: Option<FinishReason>) -> u8 {
    match finish {
        None => 0,
        Some(FinishReason::Stop) => 1,
        Some(FinishReason::Length) => 2,
        Some(FinishReason::Cancelled) => 3,
        Some(FinishReason::Failed) => 4,
    }
}

/// The finish reason of a stored code.
pub(crate) fn finish_of(code: u8) -> Option<FinishReason> {
    match code & !STATIC {
        1 => Some(FinishReason::Stop),
        2 => Some(FinishReason::Length),
        3 => Some(FinishReason::Cancelled),
        4 => Some(FinishReason::Failed),
        _ => None,
    }
}

fn key(kind: RecordKind, parts: &[&[u8]]) -> Vec<u8> {
    let mut key = vec![kind.byte()];
    key.extend(parts.iter().copied().flatten());
    key
}

/// Key of the one [`StoreRecord`].
pub(crate) fn store_key() -> Vec<u8> {
    key(RecordKind::Store, &[])
}

/// Key of a record of a namespace.
pub(crate) fn namespace_key(kind: RecordKind, namespace: NamespaceId) -> Vec<u8> {
    key(kind, &[&namespace.0.to_be_bytes()])
}

/// Key of a record of a document.
pub(crate) fn document_key(kind: RecordKind, of: DocumentKey) -> Vec<u8> {
    let (namespace, document) = (of.namespace.0.to_be_bytes(), of.document.0.to_be_bytes());
    key(kind, &[&namespace, &document])
}

/// Key of the piece that starts at `start`.
pub(crate) fn piece_key(of: DocumentKey, start: u32) -> Vec<u8> {
    let (namespace, document) = (of.namespace.0.to_be_bytes(), of.document.0.to_be_bytes());
    let parts: [&[u8]; 3] = [&namespace, &document, &start.to_be_bytes()];
    key(RecordKind::Piece, &parts)
}

/// Key of a part of the acceptance statistics of a namespace.
pub(crate) fn acceptance_statistics_key(namespace: NamespaceId, part: u8) -> Vec<u8> {
    key(
        RecordKind::Statistics,
        &[&namespace.0.to_be_bytes(), &[part]],
    )
}

/// The first key of all parts, and a key above all of them.
pub(crate) fn acceptance_statistics_range(namespace: NamespaceId) -> (Vec<u8>, Vec<u8>) {
    let mut above = acceptance_statistics_key(namespace, u8::MAX);
    above.push(0);
    (acceptance_statistics_key(namespace, 0), above)
}

/// Key of a tombstone.
pub(crate) fn tombstone_key(namespace: NamespaceId, sequence: u64) -> Vec<u8> {
    let parts: [&[u8]; 2] = [&namespace.0.to_be_bytes(), &sequence.to_be_bytes()];
    key(RecordKind::Tombstone, &parts)
}

/// Key of an erasure.
pub(crate) fn erasure_key(id: u128) -> Vec<u8> {
    key(RecordKind::Erasure, &[&id.to_be_bytes()])
}

/// Key of a segment.
pub(crate) fn segment_key(segment: SegmentId) -> Vec<u8> {
    key(RecordKind::Segment, &[&segment.to_be_bytes()])
}

/// Key of the marks in chunk `chunk` of a segment.
pub(crate) fn marks_key(segment: SegmentId, chunk: u32) -> Vec<u8> {
    let parts: [&[u8]; 2] = [&segment.to_be_bytes(), &chunk.to_be_bytes()];
    key(RecordKind::Marks, &parts)
}

/// The bytes of a number in a key.
fn bytes_at<const N: usize>(key: &[u8], at: usize) -> Option<[u8; N]> {
    key.get(at..)?.first_chunk().copied()
}

/// The segment in a key.
pub(crate) fn segment_of(key: &[u8]) -> Option<SegmentId> {
    bytes_at(key, 1).map(u64::from_be_bytes)
}

/// The chunk of marks in a key.
pub(crate) fn chunk_of(key: &[u8]) -> Option<u32> {
    bytes_at(key, 9).map(u32::from_be_bytes)
}

/// The namespace in a key.
pub(crate) fn namespace_of(key: &[u8]) -> Option<NamespaceId> {
    let id = bytes_at(key, 1)?;
    Some(NamespaceId(u128::from_be_bytes(id)))
}

/// The document in a key.
pub(crate) fn document_of(key: &[u8]) -> Option<DocumentKey> {
    Some(DocumentKey {
        namespace: namespace_of(key)?,
        document: DocumentId(u128::from_be_bytes(bytes_at(key, 17)?)),
    })
}

/// The start position of the piece in a key.
pub(crate) fn piece_start_of(key: &[u8]) -> Option<u32> {
    bytes_at(key, 33).map(u32::from_be_bytes)
}

/// The sequence in a tombstone's key.
pub(crate) fn tombstone_sequence_of(key: &[u8]) -> Option<u64> {
    bytes_at(key, 17).map(u64::from_be_bytes)
}
