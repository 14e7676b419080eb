//! Finding the documents that an erasure hits.

use refrain_protocol::ApiError;

use crate::reading::selection;
use crate::record::{DocumentKey, ErasureRecord};
use crate::shared_store::SharedStore;

/// The documents that an erasure hits. With `known_ms`, also those that came after the erasure and before that time,
/// and began before the erasure by the clock of their worker: who took them did not know the erasure.
///
/// Blocks on the disk and on the writer, so call it from blocking threads only.
pub(crate) fn documents_hit(
    shared: &SharedStore,
    mark: &ErasureRecord,
    known_ms: Option<u64>,
) -> Result<Vec<DocumentKey>, ApiError> {
    let mut found = Vec::new();
    let namespaces = shared.read()?.catalog.namespaces();
    for (namespace, names) in namespaces {
        if !mark.hits_namespace(names.as_ref()) {
            continue;
        }
        let keys = selection::by_state(shared, namespace, |state| mark.hits_time(state.stored_ms))?;
        found.extend(match mark.session {
            None => keys,
            // A head that cannot be read may belong to that session.
            Some(_) => selection::by_head(shared, keys, |head| {
                head.is_none_or(|head| mark.hits_session(head.session.as_deref()))
            })?,
        });
        if let Some(known_ms) = known_ms {
            let is_late = |stored_ms| stored_ms > mark.at_ms && stored_ms <= known_ms;
            let keys = selection::by_state(shared, namespace, |state| is_late(state.stored_ms))?;
            found.extend(selection::by_head(shared, keys, |head| {
                head.is_none_or(|head| {
                    mark.hits_session(head.session.as_deref())
                        && head.created_ms > 0
                        && mark.hits_time(head.created_ms)
                })
            })?);
        }
    }
    Ok(found)
}
