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

/// Asks a replica for the ids of a namespace's documents.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct JoinListRequest {
    /// The namespace.
    pub namespace: NamespaceId,
}

/// The ids of a namespace's documents.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct JoinList {
    /// The documents, in no particular order.
    pub documents: Vec<DocumentId>,
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
