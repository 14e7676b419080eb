//! What is stored: keys and records.
//!
//! One sled tree, so that every commit is one atomic batch (two trees need an optimistic transaction, which
//! costs a third of the rate). The first byte of a key is the kind; integers are big-endian, so that a scan
//! meets a document's pieces in order of position.

use bincode::{Decode, Encode};
use refrain_protocol::document::{DocumentHead, FinishReason};
use refrain_protocol::{DocumentId, Namespace, NamespaceId};

/// Which document of which namespace.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(crate) struct DocumentKey {
    pub(crate) namespace: NamespaceId,
    pub(crate) document: DocumentId,
}

/// What a record is, told by the first byte of its key.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum RecordKind {
    /// [`StoreRecord`], one.
    Store,
    /// [`NamespaceRecord`], one per namespace.
    Namespace,
    /// [`FeedRecord`], one per namespace whose tombstones were ever trimmed.
    Feed,
    /// [`StateRecord`], one per document.
    State,
    /// [`HeadRecord`], one per document.
    Head,
    /// [`crate::codec::PieceRecord`], the text of a document in order.
    Piece,
    /// [`TombstoneRecord`], one per removal that followers may not have seen.
    Tombstone,
    /// [`ErasureRecord`], one per thing that was erased.
    Erasure,
    /// [`ErasedRecord`], one per document that was erased and that somebody may still send.
    Erased,
    /// [`SegmentRecord`], one per segment: the files that count.
    Segment,
    /// [`MarksRecord`], one per [`MARKS_DOCUMENTS`] documents of a segment of which something is to be told.
    Marks,
    /// [`AcceptanceStatisticsRecord`], a few per namespace in which drafts were verified.
    AcceptanceStatistics,
}

impl RecordKind {
    pub(crate) const fn byte(self) -> u8 {
        match self {
            RecordKind::Store => b'm',
            RecordKind::Namespace => b'n',
            RecordKind::Feed => b'f',
            RecordKind::State => b'd',
            RecordKind::Head => b'h',
            RecordKind::Piece => b'p',
            RecordKind::Tombstone => b't',
            RecordKind::Erasure => b'e',
            RecordKind::Erased => b'x',
            RecordKind::Segment => b's',
            RecordKind::Marks => b'k',
            RecordKind::AcceptanceStatistics => b'c',
        }
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
            RecordKind::AcceptanceStatistics,
        ];
        let byte = *key.first()?;
        all.into_iter().find(|kind| kind.byte() == byte)
    }

    /// The key below all of this kind, and the one above all.
    pub(crate) fn range(self) -> (Vec<u8>, Vec<u8>) {
        (vec![self.byte()], vec![self.byte() + 1])
    }
}

/// Identity and the sequence reservation: nothing at or above it was ever given to a follower.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Encode, Decode)]
pub(crate) struct StoreRecord {
    pub(crate) generation: u64,
    pub(crate) sequence_reserved: u64,
}

/// Names, stored once for all documents of a namespace.
#[derive(Clone, Debug, PartialEq, Eq, Encode, Decode)]
pub(crate) struct NamespaceRecord {
    pub(crate) tenant: String,
    pub(crate) model: String,
    pub(crate) tokenizer: String,
}

impl From<&Namespace> for NamespaceRecord {
    fn from(names: &Namespace) -> Self {
        NamespaceRecord {
            tenant: names.tenant.clone(),
            model: names.model.clone(),
            tokenizer: names.tokenizer.clone(),
        }
    }
}

/// How far a namespace's tombstones reach back; see [`crate::catalog`].
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Encode, Decode)]
pub(crate) struct FeedRecord {
    pub(crate) floor: u64,
    pub(crate) trims: u16,
    pub(crate) era: u32,
}

/// What changes with every append. Small, since it is written again each time.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Encode, Decode)]
pub(crate) struct StateRecord {
    pub(crate) epoch: u64,
    /// From here on the text is known to be of `epoch`.
    pub(crate) epoch_start: u32,
    pub(crate) len: u32,
    pub(crate) finish: u8,
    /// Of the last change.
    pub(crate) sequence: u64,
    /// The store's own clock at the first append. Retention goes by it: a worker's clock may be wrong.
    pub(crate) stored_ms: u64,
    pub(crate) used_ms: u64,
    /// Pieces from here on are small ones, not merged yet.
    pub(crate) tail_start: u32,
    pub(crate) tail_pieces: u16,
    /// Bytes of keys and values of the head and the pieces.
    pub(crate) bytes: u32,
}

/// What is known when a document starts; written once.
#[derive(Clone, Debug, PartialEq, Encode, Decode)]
pub(crate) struct HeadRecord(#[bincode(with_serde)] pub(crate) DocumentHead);

/// A document is gone.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Encode, Decode)]
pub(crate) struct TombstoneRecord {
    pub(crate) document: u128,
}

/// What an erasure was to hit, and when; see [`crate::catalog`].
#[derive(Clone, Debug, Default, PartialEq, Eq, Encode, Decode)]
pub(crate) struct ErasureRecord {
    pub(crate) tenant: Option<String>,
    pub(crate) model: Option<String>,
    pub(crate) session: Option<String>,
    pub(crate) from_ms: Option<u64>,
    pub(crate) until_ms: Option<u64>,
    pub(crate) at_ms: u64,
}

/// When a document was erased.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Encode, Decode)]
pub(crate) struct ErasedRecord {
    pub(crate) at_ms: u64,
}

/// Number of a segment, never given twice while its file may exist.
pub(crate) type SegmentId = u64;

/// Where a sealed document stands.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct SegmentSlot {
    pub(crate) segment: SegmentId,
    /// Among the segment's documents in order of their ids.
    pub(crate) number: u32,
}

/// A segment's file counts, if it is the one meant.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Encode, Decode)]
pub(crate) struct SegmentRecord {
    pub(crate) namespace: u128,
    pub(crate) checksum: u64,
}

/// Documents that share a [`MarksRecord`].
pub(crate) const MARKS_DOCUMENTS: u32 = 512;

/// The mark of a document that is not in its segment any more.
pub(crate) const GONE: u32 = u32::MAX;

/// What changed of some documents of a segment since it was made: for each when it was last used, in Unix
/// seconds, 0 for as recorded in the file, or [`GONE`].
#[derive(Clone, Debug, PartialEq, Eq, Encode, Decode)]
pub(crate) struct MarksRecord(pub(crate) Vec<u32>);

/// A part of what drafts are worth in a namespace, as `refrain_speculation` writes it.
#[derive(Clone, Debug, PartialEq, Eq, Encode, Decode)]
pub(crate) struct AcceptanceStatisticsRecord(pub(crate) Vec<u8>);

/// Beside the reason: the document is part of a static corpus, which nothing but an erasure removes.
pub(crate) const STATIC: u8 = 0x80;

impl StateRecord {
    /// See [`STATIC`].
    pub(crate) fn is_static(&self) -> bool {
        self.finish & STATIC != 0
    }
}

/// The reason as stored; 0 is none.
pub(crate) fn finish_code(finish: Option<FinishReason>) -> u8 {
    match finish {
        None => 0,
        Some(FinishReason::Stop) => 1,
        Some(FinishReason::Length) => 2,
        Some(FinishReason::Cancelled) => 3,
        Some(FinishReason::Failed) => 4,
    }
}

/// The reason behind a stored code.
pub(crate) fn finish_of(code: u8) -> Option<FinishReason> {
    match code & !STATIC {
        1 => Some(FinishReason::Stop),
        2 => Some(FinishReason::Length),
        3 => Some(FinishReason::Cancelled),
        4 => Some(FinishReason::Failed),
        _ => None,
    }
}

fn prefixed(kind: RecordKind, namespace: NamespaceId) -> Vec<u8> {
    let mut key = Vec::with_capacity(37);
    key.push(kind.byte());
    key.extend_from_slice(&namespace.0.to_be_bytes());
    key
}

/// Key of the one [`StoreRecord`].
pub(crate) fn store_key() -> Vec<u8> {
    vec![RecordKind::Store.byte()]
}

/// Key of a record of a namespace.
pub(crate) fn namespace_key(kind: RecordKind, namespace: NamespaceId) -> Vec<u8> {
    prefixed(kind, namespace)
}

/// Key of a record of a document.
pub(crate) fn document_key(kind: RecordKind, key: DocumentKey) -> Vec<u8> {
    let mut bytes = prefixed(kind, key.namespace);
    bytes.extend_from_slice(&key.document.0.to_be_bytes());
    bytes
}

/// Key of the piece that starts at `start`.
pub(crate) fn piece_key(key: DocumentKey, start: u32) -> Vec<u8> {
    let mut bytes = document_key(RecordKind::Piece, key);
    bytes.extend_from_slice(&start.to_be_bytes());
    bytes
}

/// Key of a part of what drafts are worth in a namespace.
pub(crate) fn acceptance_statistics_key(namespace: NamespaceId, part: u8) -> Vec<u8> {
    let mut bytes = prefixed(RecordKind::AcceptanceStatistics, namespace);
    bytes.push(part);
    bytes
}

/// The keys of all parts: from the first, to one above all.
pub(crate) fn acceptance_statistics_range(namespace: NamespaceId) -> (Vec<u8>, Vec<u8>) {
    let mut above = acceptance_statistics_key(namespace, u8::MAX);
    above.push(0);
    (acceptance_statistics_key(namespace, 0), above)
}

/// Key of a tombstone.
pub(crate) fn tombstone_key(namespace: NamespaceId, sequence: u64) -> Vec<u8> {
    let mut bytes = prefixed(RecordKind::Tombstone, namespace);
    bytes.extend_from_slice(&sequence.to_be_bytes());
    bytes
}

fn u128_at(key: &[u8], at: usize) -> Option<u128> {
    Some(u128::from_be_bytes(key.get(at..at + 16)?.try_into().ok()?))
}

/// Key of an erasure.
pub(crate) fn erasure_key(id: u128) -> Vec<u8> {
    let mut bytes = vec![RecordKind::Erasure.byte()];
    bytes.extend_from_slice(&id.to_be_bytes());
    bytes
}

/// Key of a segment.
pub(crate) fn segment_key(segment: SegmentId) -> Vec<u8> {
    let mut bytes = vec![RecordKind::Segment.byte()];
    bytes.extend_from_slice(&segment.to_be_bytes());
    bytes
}

/// Key of the marks number `chunk` of a segment.
pub(crate) fn marks_key(segment: SegmentId, chunk: u32) -> Vec<u8> {
    let mut bytes = vec![RecordKind::Marks.byte()];
    bytes.extend_from_slice(&segment.to_be_bytes());
    bytes.extend_from_slice(&chunk.to_be_bytes());
    bytes
}

/// The segment in a key.
pub(crate) fn segment_of(key: &[u8]) -> Option<SegmentId> {
    Some(u64::from_be_bytes(key.get(1..9)?.try_into().ok()?))
}

/// Which of its marks a key stands for.
pub(crate) fn chunk_of(key: &[u8]) -> Option<u32> {
    Some(u32::from_be_bytes(key.get(9..13)?.try_into().ok()?))
}

/// The namespace in a key.
pub(crate) fn namespace_of(key: &[u8]) -> Option<NamespaceId> {
    u128_at(key, 1).map(NamespaceId)
}

/// The document in a key.
pub(crate) fn document_of(key: &[u8]) -> Option<DocumentKey> {
    Some(DocumentKey {
        namespace: namespace_of(key)?,
        document: DocumentId(u128_at(key, 17)?),
    })
}

/// Where a piece starts.
pub(crate) fn piece_start_of(key: &[u8]) -> Option<u32> {
    Some(u32::from_be_bytes(key.get(33..37)?.try_into().ok()?))
}

/// The sequence in a tombstone's key.
pub(crate) fn tombstone_sequence_of(key: &[u8]) -> Option<u64> {
    Some(u64::from_be_bytes(key.get(17..25)?.try_into().ok()?))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn keys_sort_by_position_and_read_back() {
        let key = DocumentKey {
            namespace: NamespaceId(7),
            document: DocumentId(9),
        };
        assert!(piece_key(key, 255) < piece_key(key, 256));
        assert_eq!(document_of(&piece_key(key, 3)), Some(key));
        assert_eq!(piece_start_of(&piece_key(key, 70_000)), Some(70_000));
        assert_eq!(
            tombstone_sequence_of(&tombstone_key(NamespaceId(1), 5)),
            Some(5)
        );
        assert_eq!(document_of(b"short"), None);
    }

    #[test]
    fn finish_codes_round_trip() {
        for code in 0..=4 {
            assert_eq!(finish_code(finish_of(code)), code);
            assert_eq!(finish_of(code | STATIC), finish_of(code));
        }
    }
}
