//! Reading what is to be sent to other replicas.

use std::collections::HashMap;

use refrain_protocol::NamespaceId;

use crate::catalog::{Catalog, EntryVersion, SentText};
use crate::message::{
    DOCUMENTS_MAX, DocumentPart, PartProperties, Removals, StreamChange, StreamMessage,
};
use crate::reading::document_text::{TextError, head, read};
use crate::record::replication::OutboxRecord;
use crate::record::{DocumentKey, STATIC};
use crate::shared_store::OpenStore;

/// Tokens of documents that are enough for one look, so that it does not hold much memory.
const TOKENS_PER_LOOK: usize = 1 << 20;

/// Most removals in one message.
const REMOVALS_MAX: usize = 1_024;

/// A document as it was read to be sent.
#[derive(Clone, Copy, Debug)]
pub(crate) struct SentDocument {
    pub(crate) key: DocumentKey,
    /// Sequence of its last change.
    pub(crate) sequence: u64,
    /// The beginning of it that the stream has then, if it still grows.
    pub(crate) text: Option<SentText>,
}

/// Messages of one entry, or of several documents or removals.
#[derive(Debug)]
pub(crate) struct Outgoing {
    /// The entries, with the documents that they are about. Removed ones are missing.
    pub(crate) entries: Vec<(EntryVersion, Option<SentDocument>)>,
    /// They have to arrive in this order. There is none if the document is gone.
    pub(crate) messages: Vec<StreamMessage>,
}

impl Outgoing {
    /// Tokens of its messages.
    fn tokens(&self) -> usize {
        let changes = self.messages.iter().map(|message| &message.change);
        let parts = changes.flat_map(StreamChange::documents);
        parts.map(DocumentPart::token_count).sum()
    }

    /// Its only document, if that has ended and is here as a whole. Such ones may share a message. If an erasure
    /// deletes the message because of another one, this one is sent again, and whatever follows of a document that
    /// had ended begins with all of it.
    fn whole_document(&self) -> Option<&DocumentPart> {
        match (&self.messages[..], &self.entries[..]) {
            ([message], [(_, Some(document))]) if document.text.is_none() => {
                match &message.change {
                    StreamChange::Document(part) if part.start == 0 => Some(part),
                    _ => None,
                }
            }
            _ => None,
        }
    }
}

/// Outgoing messages in order, with small documents of a namespace in one.
struct Gathered {
    outgoing: Vec<Outgoing>,
    /// The last message of each namespace that documents may be added to, and its tokens. Documents may overtake each
    /// other, and not removals.
    open: HashMap<NamespaceId, (usize, usize)>,
    tokens_max: usize,
}

impl Gathered {
    /// Adds a document: to an earlier message, if there is room.
    fn add_document(&mut self, outgoing: Outgoing) {
        let Some(document) = outgoing.whole_document() else {
            self.outgoing.push(outgoing);
            return;
        };
        let (namespace, tokens) = (document.key().namespace, document.token_count());
        if let Some((at, gathered)) = self.open.get_mut(&namespace)
            && *gathered + tokens <= self.tokens_max
            && let Some(open) = self.outgoing.get_mut(*at)
            && open.entries.len() < DOCUMENTS_MAX
        {
            *gathered += tokens;
            open.join(outgoing);
            return;
        }
        self.open.insert(namespace, (self.outgoing.len(), tokens));
        self.outgoing.push(outgoing);
    }

    /// Adds something that no later document may overtake.
    fn add_other(&mut self, outgoing: Outgoing) {
        self.open.clear();
        self.outgoing.push(outgoing);
    }
}

impl Outgoing {
    /// Adds the document of another one. Both have one message.
    fn join(&mut self, other: Outgoing) {
        let Some(message) = self.messages.first_mut() else {
            return;
        };
        let change = std::mem::replace(&mut message.change, StreamChange::Start);
        let mut documents = change.into_documents();
        for added in other.messages {
            documents.extend(added.change.into_documents());
        }
        message.change = StreamChange::Documents(documents);
        self.entries.extend(other.entries);
    }
}

/// The entries to be sent, and documents that cannot be read.
#[derive(Debug, Default)]
pub(crate) struct NextOutgoing {
    pub(crate) outgoing: Vec<Outgoing>,
    pub(crate) damaged: Vec<DocumentKey>,
}

/// The next entries of the outbox that are not on the way, with what they say now. A part of a document has at most
/// `part_tokens_max` tokens.
pub(crate) fn next_outgoing(
    open: &OpenStore,
    entries_max: usize,
    part_tokens_max: usize,
    is_on_the_way: impl Fn(u64) -> bool,
) -> Result<NextOutgoing, TextError> {
    let mut next = Gathered {
        outgoing: Vec::new(),
        open: HashMap::new(),
        tokens_max: part_tokens_max,
    };
    let mut damaged = Vec::new();
    let catalog = &open.catalog;
    let waiting = catalog.replication.outbox.to_send();
    let waiting = waiting.filter(|(entry, _)| !is_on_the_way(entry.number));
    let mut tokens = 0;
    for (entry, record) in waiting.take(entries_max) {
        if tokens >= TOKENS_PER_LOOK {
            break;
        }
        match record {
            OutboxRecord::Document { .. } => {
                let Some(key) = record.key() else { continue };
                match document(open, entry, key, part_tokens_max) {
                    Ok(outgoing) => {
                        tokens += outgoing.tokens();
                        next.add_document(outgoing);
                    }
                    Err(TextError::Damaged(_)) => damaged.push(key),
                    Err(error) => return Err(error),
                }
            }
            OutboxRecord::Removal {
                namespace,
                document,
                is_erased,
            } => {
                let added = next.outgoing.last_mut().and_then(|last| {
                    let removals = removals_of(last)?;
                    let is_same =
                        removals.namespace == *namespace && removals.is_erasure == *is_erased;
                    (is_same && removals.documents.len() < REMOVALS_MAX)
                        .then(|| removals.documents.push(*document))?;
                    last.entries.push((entry, None));
                    Some(())
                });
                if added.is_none() {
                    let change = StreamChange::Removals(Removals {
                        namespace: *namespace,
                        documents: vec![*document],
                        is_erasure: *is_erased,
                    });
                    next.add_other(single(catalog, entry, change));
                }
            }
            OutboxRecord::Erasure(mark) => {
                let change = StreamChange::Erasure(mark.clone());
                next.add_other(single(catalog, entry, change));
            }
        }
    }
    Ok(NextOutgoing {
        outgoing: next.outgoing,
        damaged,
    })
}

fn removals_of(outgoing: &mut Outgoing) -> Option<&mut Removals> {
    match &mut outgoing.messages.first_mut()?.change {
        StreamChange::Removals(removals) => Some(removals),
        _ => None,
    }
}

fn message(catalog: &Catalog, change: StreamChange) -> StreamMessage {
    StreamMessage {
        origin: catalog.generation(),
        seen: catalog.replication.seen(),
        change,
    }
}

fn single(catalog: &Catalog, entry: EntryVersion, change: StreamChange) -> Outgoing {
    Outgoing {
        entries: vec![(entry, None)],
        messages: vec![message(catalog, change)],
    }
}

/// A document as messages of its parts. There are none if it is gone.
pub(crate) fn whole_document(
    open: &OpenStore,
    key: DocumentKey,
    part_tokens_max: usize,
) -> Result<Vec<StreamMessage>, TextError> {
    Ok(match properties(open, key)? {
        Some(properties) => parts(open, key, &properties, 0, part_tokens_max)?,
        None => Vec::new(),
    })
}

fn document(
    open: &OpenStore,
    entry: EntryVersion,
    key: DocumentKey,
    part_tokens_max: usize,
) -> Result<Outgoing, TextError> {
    let catalog = &open.catalog;
    let Some(properties) = properties(open, key)? else {
        return Ok(Outgoing {
            entries: vec![(entry, None)],
            messages: Vec::new(),
        });
    };
    let len = catalog.document(key).map_or(0, |known| known.state.len);
    let now = SentText {
        epoch: properties.epoch,
        revision: properties.revision,
        len,
    };
    let sent = catalog.replication.outbox.sent(key).filter(|sent| {
        (sent.epoch, sent.revision) == (now.epoch, now.revision) && sent.len <= now.len
    });
    let start = sent.map_or(0, |sent| sent.len);
    let document = SentDocument {
        key,
        sequence: properties.sequence,
        text: (properties.finish == 0).then_some(now),
    };
    Ok(Outgoing {
        entries: vec![(entry, Some(document))],
        messages: parts(open, key, &properties, start, part_tokens_max)?,
    })
}

/// The properties of a document besides its text. `None` if it is gone.
fn properties(open: &OpenStore, key: DocumentKey) -> Result<Option<PartProperties>, TextError> {
    let catalog = &open.catalog;
    // A namespace without names was damaged. The next call for it brings them again.
    let (Some(known), Some(names)) = (catalog.document(key), catalog.names(key.namespace)) else {
        return Ok(None);
    };
    let state = &known.state;
    Ok(Some(PartProperties {
        names: names.clone(),
        document: key.document,
        epoch: state.epoch,
        revision: catalog.replication.revision(key),
        finish: state.finish & !STATIC,
        is_static: state.is_static(),
        stored_ms: state.stored_ms,
        head: head(catalog, &*open.log, key)?,
        sequence: state.sequence,
    }))
}

fn parts(
    open: &OpenStore,
    key: DocumentKey,
    properties: &PartProperties,
    start: u32,
    part_tokens_max: usize,
) -> Result<Vec<StreamMessage>, TextError> {
    let catalog = &open.catalog;
    let len = catalog.document(key).map_or(0, |known| known.state.len);
    let text = read(catalog, &*open.log, key, 0, len)?;
    let parts = DocumentPart::split(properties, &text, start, part_tokens_max);
    Ok(parts
        .into_iter()
        .map(|part| message(catalog, StreamChange::Document(Box::new(part))))
        .collect())
}
