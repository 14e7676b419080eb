//! Which documents are sealed, and where.

use std::sync::Arc;

use refrain_protocol::{Namespace, NamespaceId};

use super::{Catalog, counted};
use crate::record::{DocumentKey, Place, SegmentId};
use crate::segments::{Candidates, Sealed, Segments};

impl Catalog {
    /// The segments.
    pub(crate) fn segments(&self) -> &Segments {
        &self.segments
    }

    /// Where a document is sealed; `None` when it is in the log or nowhere.
    pub(crate) fn sealed(&self, key: DocumentKey) -> Option<(&Sealed, Place)> {
        let place = self.document(key)?.place?;
        Some((&*self.segments.get(place.segment)?.sealed, place))
    }

    /// Takes in a segment without any documents.
    pub(crate) fn mount(&mut self, sealed: Arc<Sealed>) {
        self.segments.mount(sealed);
    }

    /// Drops a segment that no document is in any more.
    pub(crate) fn unmount(&mut self, segment: SegmentId) {
        self.segments.unmount(segment);
    }

    /// Notes where a document stands from now on, and the bytes that it takes there.
    pub(crate) fn settle_in(&mut self, key: DocumentKey, place: Option<Place>, bytes: u32) {
        let Some(document) = self.document_mut(key) else {
            return;
        };
        let before = counted(key, document);
        document.place = place;
        document.state.bytes = bytes;
        let after = counted(key, document);
        self.segments.count(before, false);
        self.segments.count(after, true);
        self.totals.bytes = self.totals.bytes + u64::from(bytes) - u64::from(before.bytes);
    }

    /// The names of a namespace, where they are known.
    pub(crate) fn names(&self, namespace: NamespaceId) -> Option<&Namespace> {
        self.namespaces.get(&namespace)?.names.as_ref()
    }

    /// The documents of a namespace that are in the log and will not go on, as far as can be told: finished and
    /// stored before `finished_ms`, or not heard of since `silent_ms`.
    pub(crate) fn at_rest(
        &self,
        namespace: NamespaceId,
        finished_ms: u64,
        silent_ms: u64,
    ) -> Candidates {
        let unsealed = self.segments.unsealed_of(namespace);
        let mut oldest_ms = u64::MAX;
        let documents = unsealed
            .map(|unsealed| &unsealed.documents)
            .into_iter()
            .flatten()
            .filter_map(|document| {
                let known = self.document(DocumentKey {
                    namespace,
                    document: *document,
                })?;
                let state = &known.state;
                let rests = if state.finish == 0 {
                    state.used_ms < silent_ms
                } else {
                    state.stored_ms < finished_ms
                };
                oldest_ms = oldest_ms.min(if rests { state.stored_ms } else { u64::MAX });
                rests.then_some((state.sequence, *document, state.len))
            })
            .collect();
        Candidates {
            namespace,
            documents,
            oldest_ms,
        }
    }
}
