//! Records of a replica: how far it has applied the stream, and what others do not have yet.

use bincode::{Decode, Encode};
use refrain_protocol::{DocumentId, NamespaceId};

use crate::record::{DocumentKey, ErasureRecord, RecordKind, key};

/// How far the store has applied the stream of its shard.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Encode, Decode)]
pub(crate) struct PositionRecord {
    /// When the stream was created, in Unix nanoseconds. A stream that was deleted and created anew has another time.
    /// 0 before the store has seen a stream.
    pub(crate) stream: u64,
    /// Sequence of the last message that was applied.
    pub(crate) sequence: u64,
    /// Checksum of that message; 0 where it is not known. By it a replica notices that the brokers count otherwise.
    pub(crate) checksum: u64,
}

/// A change that other replicas do not have yet. It names the document, not the text: what is sent is read when it is
/// sent. So an erased text is in no such record, and a document that changes twice is sent once.
#[derive(Clone, Debug, PartialEq, Eq, Encode, Decode)]
pub(crate) enum OutboxRecord {
    /// The document changed.
    Document { namespace: u128, document: u128 },
    /// The document was removed.
    Removal {
        namespace: u128,
        document: u128,
        is_erased: bool,
    },
    /// An operator erased a scope.
    Erasure(ErasureRecord),
}

/// How often the text of a document was corrected within its epoch; see `writer/join.rs`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Encode, Decode)]
pub(crate) struct RevisionRecord(pub(crate) u32);

/// An erasure that came by the stream.
#[derive(Clone, Debug, PartialEq, Eq, Encode, Decode)]
pub(crate) struct StreamErasureRecord {
    /// Sequence of its message.
    pub(crate) sequence: u64,
    pub(crate) mark: ErasureRecord,
    /// When it was applied here, in Unix milliseconds. Later documents were stored by those who knew it.
    pub(crate) applied_ms: u64,
    /// This replica was asked for it, so it also clears the stream.
    pub(crate) is_own: bool,
    /// The documents that it hits are gone from every file of this replica.
    pub(crate) is_done: bool,
}

/// A moment of a replica; see `catalog/moves.rs`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Encode, Decode)]
pub(crate) struct Checkpoint {
    /// Sequence of the last message that was applied.
    pub(crate) stream: u64,
    /// All that this replica has beyond the stream up to there comes after this sequence of its feed.
    pub(crate) feed: u64,
    /// Unix milliseconds.
    pub(crate) at_ms: u64,
}

/// The checkpoints of a replica, in order.
#[derive(Clone, Debug, Default, PartialEq, Eq, Encode, Decode)]
pub(crate) struct CheckpointsRecord(pub(crate) Vec<Checkpoint>);

/// Sequence of the last message of a namespace that was applied.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Encode, Decode)]
pub(crate) struct LastMessageRecord(pub(crate) u64);

impl OutboxRecord {
    /// The record of a changed document.
    pub(crate) fn document(of: DocumentKey) -> Self {
        OutboxRecord::Document {
            namespace: of.namespace.0,
            document: of.document.0,
        }
    }

    /// The record of a removed document.
    pub(crate) fn removal(of: DocumentKey, is_erased: bool) -> Self {
        OutboxRecord::Removal {
            namespace: of.namespace.0,
            document: of.document.0,
            is_erased,
        }
    }

    /// The document that changed or was removed.
    pub(crate) fn key(&self) -> Option<DocumentKey> {
        match *self {
            OutboxRecord::Document {
                namespace,
                document,
            }
            | OutboxRecord::Removal {
                namespace,
                document,
                ..
            } => Some(DocumentKey::new(
                NamespaceId(namespace),
                DocumentId(document),
            )),
            OutboxRecord::Erasure(_) => None,
        }
    }
}

/// Key of the one [`PositionRecord`].
pub(crate) fn position_key() -> Vec<u8> {
    key(RecordKind::Position, &[])
}

/// Key of the one [`CheckpointsRecord`].
pub(crate) fn checkpoints_key() -> Vec<u8> {
    key(RecordKind::Checkpoints, &[])
}

/// Key of the entry of the outbox with this number.
pub(crate) fn outbox_key(number: u64) -> Vec<u8> {
    key(RecordKind::Outbox, &[&number.to_be_bytes()])
}

/// Key of the erasure of a scope that came by the stream.
pub(crate) fn stream_erasure_key(id: u128) -> Vec<u8> {
    key(RecordKind::StreamErasure, &[&id.to_be_bytes()])
}

/// The number in the key of an entry of the outbox.
pub(crate) fn outbox_number_of(key: &[u8]) -> Option<u64> {
    key.get(1..)?.first_chunk().copied().map(u64::from_be_bytes)
}
