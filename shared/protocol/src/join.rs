//! How a replica of the draft store takes the documents of another one over, before it follows their stream.
//!
//! These types travel in bincode, so no field may be skipped in serialisation.

use serde::{Deserialize, Serialize};

use crate::{DocumentId, NamespaceId};

/// The progress of a replica.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct ReplicaState {
    /// A number that no other store has.
    pub generation: u64,
    /// The last message of the stream that it has applied.
    pub sequence: u64,
    /// The last message up to which it has also carried out all erasures.
    pub erased_sequence: u64,
    /// Its quarantined logs and segments that could not be read completely, and may contain documents that were
    /// erased.
    #[serde(default)]
    pub quarantines: u64,
}

/// Asks a replica for what it could hand over.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct JoinOfferRequest {
    /// Number of the shard.
    pub shard: u32,
}

/// The offer of a replica.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct JoinOffer {
    /// A number that no other store has.
    pub generation: u64,
    /// When the stream was created that the replica follows, in Unix nanoseconds.
    pub stream: u64,
    /// The last message of the stream that the replica has applied. One that has taken everything over follows from
    /// there.
    pub sequence: u64,
    /// The namespaces that have documents.
    pub namespaces: Vec<NamespaceId>,
    /// Documents of all namespaces, for the progress of a join.
    pub documents: u64,
    /// Their tokens.
    pub tokens: u64,
    /// The erasures that replicas remember.
    pub erasures: Vec<JoinedErasure>,
}

/// An erasure that a replica remembers.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct JoinedErasure {
    /// Sequence of its message.
    pub sequence: u64,
    /// The message, as it is in the stream.
    pub message: Vec<u8>,
}

/// Asks a replica for what it has in a namespace, page by page.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct JoinListRequest {
    /// The namespace.
    pub namespace: NamespaceId,
    /// List documents in segments with their files, which can be taken over as a whole. Later pages list no files.
    pub with_segments: bool,
    /// The last document of the page before. `None` asks for the first page.
    pub after: Option<DocumentId>,
    /// The files of the first page, by their checksums. Later pages do not list what they hand over.
    pub handed_over: Vec<u64>,
    /// Most documents of the page, beyond those in files.
    pub documents_max: u32,
}

/// A page of the documents of a namespace. The first one has the files of segments that can be taken over. All other
/// documents are listed by their ids.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct JoinList {
    /// The last message up to which the replica had applied everything, and had carried out all erasures.
    pub seen: u64,
    /// The files. Empty unless the request asked for them.
    pub segments: Vec<JoinSegment>,
    /// The next documents that no file hands over, in order.
    pub documents: Vec<DocumentId>,
    /// There are more, on another page.
    pub has_more: bool,
}

/// A segment that can be taken over as a file.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct JoinSegment {
    /// The checksum in its footer, by which it is asked for.
    pub checksum: u64,
    /// Length of the file.
    pub bytes: u64,
    /// Tokens of the documents that it hands over.
    pub tokens: u64,
    /// Numbers of the documents that it does not hand over, in order. Some of them are removed. Others have changed,
    /// and are listed by their ids.
    pub gone: Vec<u32>,
    /// When each document was last used, by its number, in Unix seconds. 0 where that is unknown.
    pub used_s: Vec<u32>,
}

/// Asks a replica for a piece of a segment's file.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct JoinPieceRequest {
    /// The namespace of the segment.
    pub namespace: NamespaceId,
    /// [`JoinSegment::checksum`].
    pub segment: u64,
    /// Position of the first byte.
    pub offset: u64,
    /// Most bytes of the answer.
    pub bytes_max: u32,
}

/// A piece of a segment's file.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct JoinPiece {
    /// The bytes. There are none beyond the end of the file.
    #[serde(with = "raw_bytes")]
    pub bytes: Vec<u8>,
    /// xxh3 of the bytes.
    pub checksum: u64,
}

/// Bytes as one value. serde takes them one by one otherwise, which is slow for a file.
mod raw_bytes {
    use std::fmt;

    use serde::de::{Error, Visitor};
    use serde::{Deserializer, Serializer};

    pub(super) fn serialize<S: Serializer>(bytes: &[u8], serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_bytes(bytes)
    }

    pub(super) fn deserialize<'de, D: Deserializer<'de>>(
        deserializer: D,
    ) -> Result<Vec<u8>, D::Error> {
        deserializer.deserialize_byte_buf(Bytes)
    }

    struct Bytes;

    impl Visitor<'_> for Bytes {
        type Value = Vec<u8>;

        fn expecting(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
            formatter.write_str("bytes")
        }

        fn visit_bytes<E: Error>(self, bytes: &[u8]) -> Result<Vec<u8>, E> {
            Ok(bytes.to_vec())
        }

        fn visit_byte_buf<E: Error>(self, bytes: Vec<u8>) -> Result<Vec<u8>, E> {
            Ok(bytes)
        }
    }
}

/// Asks a replica for documents as they are now.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct JoinDocumentsRequest {
    /// The namespace.
    pub namespace: NamespaceId,
    /// The documents. Those that do not exist any more are left out.
    pub documents: Vec<DocumentId>,
    /// Most tokens of the answer, which has at least one document.
    pub max_tokens: u32,
}

/// Documents as they are now.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct JoinDocuments {
    /// The documents, in order.
    pub documents: Vec<JoinedDocument>,
    /// How many of the documents that were asked for are answered. Ask again for the others.
    pub covered: u32,
}

/// A document that is handed over.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct JoinedDocument {
    /// Its parts, as they would be in the stream. Each has a checksum.
    pub messages: Vec<Vec<u8>>,
    /// It has changes that are not in the stream yet. The replica that takes them over sends them, too.
    pub is_unsent: bool,
}
