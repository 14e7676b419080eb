//! Reading the changes of a namespace.

use std::collections::HashSet;

use refrain_protocol::document::{DocumentUpdate, FeedCursor, FeedEvent, FollowReply};
use refrain_protocol::{ApiError, NamespaceId};

use crate::catalog::{Catalog, FeedChange};
use crate::log::RecordLog;
use crate::reading::document_text::{self, TextError};
use crate::record::{DocumentKey, finish_of};
use crate::shared_store::{OpenStore, SharedStore, unavailable};

/// Most events of one answer. Tombstones have no tokens, so the limit of tokens does not bound them.
const EVENTS_MAX: usize = 65_536;

/// An answer to `follow`, and the documents that were found damaged.
pub(crate) struct FeedRead {
    pub(crate) reply: FollowReply,
    pub(crate) damaged: HashSet<DocumentKey>,
}

/// Reads the changes of a namespace after a cursor. It returns at least one if there is one, and at most
/// `tokens_max` tokens unless the first change has more.
///
/// Blocks on the disk and on the writer, so call it from blocking threads only.
pub(crate) fn read_feed(
    shared: &SharedStore,
    namespace: NamespaceId,
    after: FeedCursor,
    tokens_max: usize,
) -> Result<FeedRead, ApiError> {
    let mut reset = false;
    let mut cursor = after;
    let mut events = Vec::new();
    let mut tokens = 0;
    let mut damaged = HashSet::new();
    let caught_up = loop {
        let open = shared.read()?;
        let OpenStore { catalog, log } = &*open;
        let position = match catalog.position(namespace, cursor) {
            Some(position) => position,
            None if events.is_empty() => {
                reset = true;
                0
            }
            // The feed was reset during the read. The next call handles it.
            None => break false,
        };
        let Some((sequence, change)) = catalog.next_change(namespace, position) else {
            // The end of this feed. The store's last change would reveal activity in other namespaces.
            cursor = catalog.cursor(namespace, position);
            break true;
        };
        let size = match &change {
            FeedChange::Range { start, end, .. } => (end - start) as usize,
            FeedChange::Removed(_) => 0,
        };
        if !events.is_empty() && (tokens + size > tokens_max || events.len() >= EVENTS_MAX) {
            break false;
        }
        match event(catalog, &**log, namespace, change) {
            Ok(Some(event)) => {
                tokens += size;
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
        cursor = catalog.cursor(namespace, sequence);
    };
    Ok(FeedRead {
        reply: FollowReply {
            reset,
            events,
            cursor,
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
