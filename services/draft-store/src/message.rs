//! The messages by which replicas of a shard tell each other what changed; docs/replication.md has the whole design.
//!
//! A message consists of magic (2 bytes), version (1), flags (1), xxh3 of all that follows and of the first four
//! bytes (8), and the payload: bincode with fixed-width little-endian integers, compressed with zstd if that makes it
//! smaller. A message of a later version is told apart from damage, since a replica may skip damage but not a change.

#[cfg(test)]
mod tests;

use bincode::{Decode, Encode};
use refrain_protocol::document::DocumentHead;
use refrain_protocol::{DocumentId, Namespace, NamespaceId, TokenId};
use xxhash_rust::xxh3::Xxh3;

use crate::codec::{Compression, Damage, PieceRecord, compress, decompress};
use crate::record::{DocumentKey, ErasureRecord, HeadRecord};

/// Most tokens of one message. A longer document is sent in parts. Any ids and any head stay below a megabyte, the
/// broker's usual limit.
pub(crate) const PART_TOKENS_MAX: usize = 64 << 10;

/// Largest message that is read, in bytes.
pub(crate) const MESSAGE_BYTES_MAX: usize = 1 << 20;

/// Largest payload after decompression.
const PAYLOAD_BYTES_MAX: usize = 4 << 20;
const MAGIC: [u8; 2] = *b"RF";
const VERSION: u8 = 2;
const FLAG_ZSTD: u8 = 1;
const HEADER_BYTES: usize = 4;
const ENVELOPE_BYTES: usize = HEADER_BYTES + 8;

/// Messages are written once and read soon, so a fast level is enough. Below some size the zstd frame costs more than
/// compression gains.
const COMPRESSION: Compression = Compression {
    level: 1,
    from_bytes: 64,
};

/// Most documents in one message.
pub(crate) const DOCUMENTS_MAX: usize = 32;

/// One message of the stream.
#[derive(Clone, Debug, PartialEq, Encode, Decode)]
pub(crate) struct StreamMessage {
    /// The generation of the store that sent it.
    pub(crate) origin: u64,
    /// The last sequence up to which the sender had applied everything when it made the message, and had carried out
    /// all erasures.
    pub(crate) seen: u64,
    pub(crate) change: StreamChange,
}

/// The change that a message carries.
#[derive(Clone, Debug, PartialEq, Encode, Decode)]
pub(crate) enum StreamChange {
    /// Nothing. It is the first message of a stream: as long as it is there, no message is gone because of its age.
    Start,
    /// A document as the sender has it, or a part of it.
    Document(Box<DocumentPart>),
    /// Several documents of a namespace, each of them whole.
    Documents(Vec<DocumentPart>),
    /// Documents that were removed.
    Removals(Removals),
    /// Documents that were used.
    Uses(Uses),
    /// An operator erased a scope. Nothing that began in it before comes back.
    Erasure(ErasureRecord),
}

/// A part of a document's text, with the properties of the whole document.
#[derive(Clone, Debug, PartialEq, Encode, Decode)]
pub(crate) struct DocumentPart {
    #[bincode(with_serde)]
    pub(crate) names: Namespace,
    pub(crate) document: u128,
    pub(crate) epoch: u64,
    pub(crate) revision: u32,
    /// Position of the part's first token.
    pub(crate) start: u32,
    /// [`text_checksum`] of the text before it.
    pub(crate) before: u64,
    tokens: PieceRecord,
    /// The stored code of the finish reason, in the last part; 0 in others.
    pub(crate) finish: u8,
    pub(crate) is_static: bool,
    /// When the document was first stored anywhere, in Unix milliseconds.
    pub(crate) stored_ms: u64,
    #[bincode(with_serde)]
    head: DocumentHead,
    /// The sender's sequence of the document's last change. By it the sender knows whether the document has changed
    /// since.
    pub(crate) sequence: u64,
}

/// Documents of a namespace that were removed.
#[derive(Clone, Debug, PartialEq, Encode, Decode)]
pub(crate) struct Removals {
    pub(crate) namespace: u128,
    pub(crate) documents: Vec<u128>,
    /// They were erased, and not evicted.
    pub(crate) is_erasure: bool,
}

/// Documents of a namespace that were used, with the times of use in Unix milliseconds.
#[derive(Clone, Debug, PartialEq, Encode, Decode)]
pub(crate) struct Uses {
    pub(crate) namespace: u128,
    pub(crate) documents: Vec<(u128, u64)>,
}

/// The properties that a part says of its document, besides the text.
pub(crate) struct PartProperties {
    pub(crate) names: Namespace,
    pub(crate) document: DocumentId,
    pub(crate) epoch: u64,
    pub(crate) revision: u32,
    pub(crate) finish: u8,
    pub(crate) is_static: bool,
    pub(crate) stored_ms: u64,
    pub(crate) head: DocumentHead,
    pub(crate) sequence: u64,
}

impl DocumentPart {
    /// The parts of a document from `start` on, of at most `tokens_max` tokens. There is one even if the text is
    /// empty.
    pub(crate) fn split(
        of: &PartProperties,
        text: &[TokenId],
        start: u32,
        tokens_max: usize,
    ) -> Vec<Self> {
        let mut at = (start as usize).min(text.len());
        let mut before = Xxh3::new();
        update(&mut before, &text[..at]);
        let mut parts = Vec::new();
        loop {
            let end = text.len().min(at + tokens_max);
            let is_last = end == text.len();
            parts.push(DocumentPart {
                names: of.names.clone(),
                document: of.document.0,
                epoch: of.epoch,
                revision: of.revision,
                start: at as u32,
                before: before.digest(),
                tokens: PieceRecord::new(&text[at..end]),
                finish: if is_last { of.finish } else { 0 },
                is_static: of.is_static,
                stored_ms: of.stored_ms,
                head: of.head.clone(),
                sequence: of.sequence,
            });
            if is_last {
                return parts;
            }
            update(&mut before, &text[at..end]);
            at = end;
        }
    }

    pub(crate) fn key(&self) -> DocumentKey {
        DocumentKey::new(self.names.id(), DocumentId(self.document))
    }

    pub(crate) fn tokens(&self) -> Result<Vec<TokenId>, Damage> {
        self.tokens.tokens()
    }

    /// Number of its tokens.
    pub(crate) fn token_count(&self) -> usize {
        self.tokens.len()
    }

    pub(crate) fn head(&self) -> &DocumentHead {
        &self.head
    }
}

impl StreamChange {
    /// The documents or the part of one that it carries.
    pub(crate) fn documents(&self) -> &[DocumentPart] {
        match self {
            StreamChange::Document(part) => std::slice::from_ref(part),
            StreamChange::Documents(documents) => documents,
            _ => &[],
        }
    }

    pub(crate) fn into_documents(self) -> Vec<DocumentPart> {
        match self {
            StreamChange::Document(part) => vec![*part],
            StreamChange::Documents(documents) => documents,
            _ => Vec::new(),
        }
    }
}

impl StreamMessage {
    /// The namespace that it is about. `None` if it is about several.
    pub(crate) fn namespace(&self) -> Option<NamespaceId> {
        match &self.change {
            StreamChange::Document(part) => Some(part.names.id()),
            StreamChange::Documents(documents) => documents.first().map(|part| part.names.id()),
            StreamChange::Removals(removals) => Some(NamespaceId(removals.namespace)),
            StreamChange::Uses(uses) => Some(NamespaceId(uses.namespace)),
            StreamChange::Start | StreamChange::Erasure(_) => None,
        }
    }
}

fn update(hash: &mut Xxh3, tokens: &[TokenId]) {
    let mut bytes = [0; 1024];
    for tokens in tokens.chunks(bytes.len() / 4) {
        for (bytes, token) in bytes.chunks_exact_mut(4).zip(tokens) {
            bytes.copy_from_slice(&token.to_le_bytes());
        }
        hash.update(&bytes[..tokens.len() * 4]);
    }
}

/// The checksum of a text.
pub(crate) fn text_checksum(tokens: &[TokenId]) -> u64 {
    let mut hash = Xxh3::new();
    update(&mut hash, tokens);
    hash.digest()
}

/// The bytes by which heads are compared and hashed.
pub(crate) fn head_bytes(head: &DocumentHead) -> Vec<u8> {
    encoded(&HeadRecord(head.clone()))
}

/// Why a message cannot be applied.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub(crate) enum MessageError {
    /// It is no message of this project, or it is damaged. All replicas see the same bytes, so all skip it.
    #[error("the message is damaged or foreign: {0}")]
    Damaged(Damage),
    /// A later version wrote it. Skipping it would make this replica differ from the others.
    #[error("the message has version {0}, which this version of the draft store cannot read")]
    Later(u8),
}

fn config() -> impl bincode::config::Config {
    bincode::config::legacy().with_limit::<PAYLOAD_BYTES_MAX>()
}

/// The plain bytes of a value. All values here are far below the limit, so encoding cannot fail.
fn encoded(value: &impl Encode) -> Vec<u8> {
    bincode::encode_to_vec(value, config()).unwrap_or_default()
}

fn checksum(header: &[u8], payload: &[u8]) -> [u8; 8] {
    let mut hash = Xxh3::new();
    hash.update(header);
    hash.update(payload);
    hash.digest().to_le_bytes()
}

/// The bytes of a message.
pub(crate) fn encode(message: &StreamMessage) -> Vec<u8> {
    envelope(encoded(message))
}

/// The id of a message, by which the broker drops its repetition, and its bytes.
pub(crate) fn encode_with_id(message: &StreamMessage) -> (String, Vec<u8>) {
    let plain = encoded(message);
    (id_of(message, &plain), envelope(plain))
}

fn envelope(plain: Vec<u8>) -> Vec<u8> {
    let (flags, payload) = match compress(&plain, COMPRESSION) {
        Some(compressed) => (FLAG_ZSTD, compressed),
        None => (0, plain),
    };
    let header = [MAGIC[0], MAGIC[1], VERSION, flags];
    let mut bytes = Vec::with_capacity(ENVELOPE_BYTES + payload.len());
    bytes.extend_from_slice(&header);
    bytes.extend_from_slice(&checksum(&header, &payload));
    bytes.extend_from_slice(&payload);
    bytes
}

/// Reads a message.
pub(crate) fn decode(bytes: &[u8]) -> Result<StreamMessage, MessageError> {
    let damaged = MessageError::Damaged;
    if bytes.len() < ENVELOPE_BYTES || bytes.len() > MESSAGE_BYTES_MAX {
        return Err(damaged(Damage::Length));
    }
    let (header, rest) = bytes.split_at(HEADER_BYTES);
    let (sum, payload) = rest.split_at(8);
    if header[..2] != MAGIC {
        return Err(damaged(Damage::Magic));
    }
    if sum != checksum(header, payload) {
        return Err(damaged(Damage::Checksum));
    }
    if header[2] > VERSION {
        return Err(MessageError::Later(header[2]));
    }
    if header[2] != VERSION || header[3] & !FLAG_ZSTD != 0 {
        return Err(damaged(Damage::Version));
    }
    let unpacked;
    let plain = if header[3] & FLAG_ZSTD != 0 {
        unpacked = decompress(payload, PAYLOAD_BYTES_MAX).ok_or(damaged(Damage::Payload))?;
        &unpacked[..]
    } else {
        payload
    };
    match bincode::decode_from_slice(plain, config()) {
        Ok((message, used)) if used == plain.len() => Ok(message),
        _ => Err(damaged(Damage::Payload)),
    }
}

/// The document, the epoch and the length that it ends at, with the sender's change that it describes and a checksum
/// of what a change may leave out. `seen` is not in it, since a repetition may know more.
fn id_of(message: &StreamMessage, plain: &[u8]) -> String {
    // A message begins with the origin and with `seen`, of eight bytes each.
    let mut hash = Xxh3::new();
    hash.update(plain.get(..8).unwrap_or_default());
    hash.update(plain.get(16..).unwrap_or_default());
    let hash = hash.digest();
    let origin = message.origin;
    match &message.change {
        StreamChange::Document(part) => {
            let (document, epoch, sequence) = (part.document, part.epoch, part.sequence);
            let end = part.start as usize + part.tokens.len();
            format!("{document:032x}.{epoch}.{end}.{origin:x}.{sequence}.{hash:x}")
        }
        _ => format!("{origin:x}.{hash:x}"),
    }
}
