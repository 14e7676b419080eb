//! Reading what is to be sent to other replicas.

use crate::catalog::{Catalog, EntryVersion, SentText};
use crate::message::{DocumentPart, PartProperties, Removals, StreamChange, StreamMessage};
use crate::reading::document_text::{TextError, head, read};
use crate::record::replication::OutboxRecord;
use crate::record::{DocumentKey, STATIC};
use crate::shared_store::OpenStore;

/// Tokens of documents that are enough for one look, so that it does not hold much memory.
const TOKENS_PER_LOOK: usize = 1 << 20;

/// Most removals in one message.
const REMOVALS_MAX: usize = 1_024;

/// Messages of one entry, or of several removals.
#[derive(Debug)]
pub(crate) struct Outgoing {
    pub(crate) entries: Vec<EntryVersion>,
    /// They have to arrive in this order. There is none if the document is gone.
    pub(crate) messages: Vec<StreamMessage>,
    /// The document and what the stream has of it then, if it still grows.
    pub(crate) sent: Option<(DocumentKey, SentText)>,
    /// The document, with the sequence of its last change.
    pub(crate) document: Option<(DocumentKey, u64)>,
}

impl Outgoing {
    /// Tokens of its messages.
    fn tokens(&self) -> usize {
        let parts = self.messages.iter().map(|message| match &message.change {
            StreamChange::Document(part) => part.token_count(),
            _ => 0,
        });
        parts.sum()
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
    let mut next = NextOutgoing::default();
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
                        next.outgoing.push(outgoing);
                    }
                    Err(TextError::Damaged(_)) => next.damaged.push(key),
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
                    last.entries.push(entry);
                    Some(())
                });
                if added.is_none() {
                    let change = StreamChange::Removals(Removals {
                        namespace: *namespace,
                        documents: vec![*document],
                        is_erasure: *is_erased,
                    });
                    next.outgoing.push(single(catalog, entry, change));
                }
            }
            OutboxRecord::Erasure(mark) => {
                let change = StreamChange::Erasure(mark.clone());
                next.outgoing.push(single(catalog, entry, change));
            }
        }
    }
    Ok(next)
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
        entries: vec![entry],
        messages: vec![message(catalog, change)],
        sent: None,
        document: None,
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
    let mut outgoing = Outgoing {
        entries: vec![entry],
        messages: Vec::new(),
        sent: None,
        document: None,
    };
    let Some(properties) = properties(open, key)? else {
        return Ok(outgoing);
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
    outgoing.messages = parts(open, key, &properties, start, part_tokens_max)?;
    outgoing.sent = (properties.finish == 0).then_some((key, now));
    outgoing.document = Some((key, properties.sequence));
    Ok(outgoing)
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
