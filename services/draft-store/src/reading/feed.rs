//! Reading the changes of a namespace or a group.

use std::collections::HashSet;

use refrain_protocol::document::{
    DocumentUpdate, FeedCursor, FeedDelta, FeedEvent, StreamPosition,
};
use refrain_protocol::{ApiError, DocumentId, NamespaceId};

use crate::catalog::{Catalog, FeedChange, GroupReader};
use crate::log::RecordLog;
use crate::reading::answer_budget::AnswerBudget;
use crate::reading::document_text::{self, TextError};
use crate::record::{DocumentKey, finish_of};
use crate::shared_store::{OpenStore, SharedStore, unavailable};

/// The changes of a feed, and the documents that were found damaged.
pub(crate) struct FeedRead {
    pub(crate) delta: FeedDelta,
    pub(crate) damaged: HashSet<DocumentKey>,
}

/// The feed that is read.
#[derive(Clone, Copy)]
pub(crate) enum FeedSource<'a> {
    /// A namespace, without the growth of the reader's own documents.
    Namespace(NamespaceId, &'a HashSet<DocumentId>),
    Group(&'a GroupReader<'a>),
}

impl FeedSource<'_> {
    fn namespace(self) -> NamespaceId {
        match self {
            FeedSource::Namespace(namespace, _) => namespace,
            FeedSource::Group(reader) => reader.group.0,
        }
    }

    fn position(self, catalog: &Catalog, cursor: FeedCursor) -> Option<u64> {
        match self {
            FeedSource::Namespace(namespace, _) => catalog.position(namespace, cursor),
            FeedSource::Group(reader) => catalog.group_position(reader.group, cursor),
        }
    }

    fn next_change(self, catalog: &Catalog, after: u64) -> Option<(u64, FeedChange)> {
        match self {
            FeedSource::Namespace(namespace, own) => catalog.next_change(namespace, after, own),
            FeedSource::Group(reader) => catalog.next_group_change(reader, after),
        }
    }

    /// The position at the end, for a reader that has everything up to `position`.
    fn end(self, catalog: &Catalog, position: u64) -> u64 {
        match self {
            FeedSource::Namespace(namespace, _) => catalog.last_change(namespace).max(position),
            FeedSource::Group(reader) => catalog.group_end(reader.group).max(position),
        }
    }

    /// The message of the stream up to which a reader at the end has everything.
    fn seen(self, catalog: &Catalog) -> StreamPosition {
        match self {
            FeedSource::Namespace(namespace, _) => catalog.seen(namespace),
            // A reader of a group's log begins anew at another replica: a group is small.
            FeedSource::Group(_) => StreamPosition::default(),
        }
    }

    fn cursor(self, catalog: &Catalog, sequence: u64) -> FeedCursor {
        match self {
            FeedSource::Namespace(namespace, _) => catalog.cursor(namespace, sequence),
            FeedSource::Group(reader) => catalog.group_cursor(reader.group, sequence),
        }
    }
}

/// Reads the changes of a feed after a cursor while the answer has room. `seen` gets each change that is read, with
/// the catalog at that moment.
///
/// Blocks on the disk and on the writer, so call it from blocking threads only.
pub(crate) fn read(
    shared: &SharedStore,
    source: FeedSource<'_>,
    after: FeedCursor,
    budget: &mut AnswerBudget,
    mut seen: impl FnMut(&Catalog, u64),
) -> Result<FeedRead, ApiError> {
    let namespace = source.namespace();
    let mut reset = false;
    let mut cursor = after;
    // Until the end is reached, the reader has no more than before.
    let mut seen_position = after.seen;
    let mut events = Vec::new();
    let mut damaged = HashSet::new();
    let caught_up = loop {
        let open = shared.read()?;
        let OpenStore { catalog, log } = &*open;
        let position = match source.position(catalog, cursor) {
            Some(position) => position,
            None if events.is_empty() => {
                reset = true;
                seen_position = StreamPosition::default();
                0
            }
            // The feed was reset during the read. The next call handles it.
            None => break false,
        };
        let Some((sequence, change)) = source.next_change(catalog, position) else {
            // The end of this feed. The store's last change would reveal activity in other namespaces.
            cursor = source.cursor(catalog, source.end(catalog, position));
            seen_position = source.seen(catalog);
            break true;
        };
        let size = match &change {
            FeedChange::Range { start, end, .. } => (end - start) as usize,
            FeedChange::Removed(_) => 0,
        };
        if !budget.admits(size) {
            break false;
        }
        match event(catalog, &**log, namespace, change) {
            Ok(Some(event)) => {
                budget.take(&event);
                events.push(event);
            }
            Ok(None) => {}
            Err(TextError::Damaged(_)) => {
                if let FeedChange::Range { document, .. } = change {
                    damaged.insert(DocumentKey::new(namespace, document));
                }
            }
            Err(TextError::Log(error)) => return Err(unavailable().with_detail(error)),
        }
        seen(catalog, sequence);
        cursor = source.cursor(catalog, sequence);
    };
    Ok(FeedRead {
        delta: FeedDelta {
            reset,
            events,
            cursor: FeedCursor {
                seen: seen_position,
                ..cursor
            },
            caught_up,
        },
        damaged,
    })
}

/// The event of a change. `None` if nothing is left of it.
fn event(
    catalog: &Catalog,
    log: &dyn RecordLog,
    namespace: NamespaceId,
    change: FeedChange,
) -> Result<Option<FeedEvent>, TextError> {
    let (document, start, end, last) = match change {
        FeedChange::Removed(document) => return Ok(Some(FeedEvent::Remove(document))),
        FeedChange::Range {
            document,
            start,
            end,
            last,
        } => (document, start, end, last),
    };
    let key = DocumentKey::new(namespace, document);
    let Some(known) = catalog.document(key) else {
        return Ok(None);
    };
    if start == end && !last {
        return Ok(None);
    }
    Ok(Some(FeedEvent::Update(DocumentUpdate {
        document,
        epoch: known.state.epoch,
        prev_len: start,
        tokens: document_text::read(catalog, log, key, start, end)?,
        head: document_text::head(catalog, log, key)?,
        finish: if last {
            finish_of(known.state.finish)
        } else {
            None
        },
    })))
}

/// Reads the changes of a namespace, for tests.
#[cfg(test)]
pub(crate) fn read_feed(
    shared: &SharedStore,
    namespace: NamespaceId,
    after: FeedCursor,
    own: &HashSet<DocumentId>,
    tokens_max: usize,
) -> Result<FeedRead, ApiError> {
    let source = FeedSource::Namespace(namespace, own);
    let mut budget = AnswerBudget::new(tokens_max, usize::MAX);
    read(shared, source, after, &mut budget, |_, _| {})
}
