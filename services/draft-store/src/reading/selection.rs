//! Finding documents by their state or head, without holding up the writer.

use refrain_protocol::document::DocumentHead;
use refrain_protocol::{ApiError, DocumentId, NamespaceId};

use crate::reading::document_text::{TextError, head};
use crate::record::{DocumentKey, StateRecord};
use crate::shared_store::{SharedStore, unavailable};

/// Heads that are read under one lock.
const HEADS_PER_LOCK: usize = 64;

/// The documents of a namespace whose state is wanted, in order of their last change.
pub(crate) fn by_state(
    shared: &SharedStore,
    namespace: NamespaceId,
    wanted: impl Fn(&StateRecord) -> bool,
) -> Result<Vec<DocumentKey>, ApiError> {
    let open = shared.read()?;
    let mut found: Vec<(u64, DocumentId)> = open
        .catalog
        .documents(namespace)
        .filter(|(_, known)| wanted(&known.state))
        .map(|(document, known)| (known.state.sequence, document))
        .collect();
    found.sort_unstable();
    Ok(found
        .into_iter()
        .map(|(_, document)| DocumentKey::new(namespace, document))
        .collect())
}

/// Those of the given documents whose head is wanted. `None` stands for a head that cannot be read. Documents that
/// are gone are left out.
///
/// Blocks on the disk and on the writer, so call it from blocking threads only.
pub(crate) fn by_head(
    shared: &SharedStore,
    keys: Vec<DocumentKey>,
    wanted: impl Fn(Option<&DocumentHead>) -> bool,
) -> Result<Vec<DocumentKey>, ApiError> {
    let mut found = Vec::new();
    for keys in keys.chunks(HEADS_PER_LOCK) {
        let open = shared.read()?;
        for key in keys {
            if open.catalog.document(*key).is_none() {
                continue;
            }
            let head = match head(&open.catalog, &*open.log, *key) {
                Ok(head) => Some(head),
                Err(TextError::Damaged(_)) => None,
                Err(TextError::Log(error)) => return Err(unavailable().with_detail(error)),
            };
            if wanted(head.as_ref()) {
                found.push(*key);
            }
        }
    }
    Ok(found)
}
