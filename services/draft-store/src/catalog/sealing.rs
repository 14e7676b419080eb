//! Which documents are sealed, where, and which could be sealed next.

use std::sync::Arc;

use refrain_protocol::{DocumentId, Namespace, NamespaceId};

use crate::catalog::state::Catalog;
use crate::record::{DocumentKey, SegmentId, SegmentSlot, StateRecord};
use crate::segments::{ActiveSegment, SealCandidates, SegmentFile, Segments};

impl Catalog {
    /// All segments in use.
    pub(crate) fn segments(&self) -> &Segments {
        &self.segments
    }

    /// The segment and the position of a sealed document. `None` if it is in the log, or unknown.
    pub(crate) fn sealed(&self, key: DocumentKey) -> Option<(&SegmentFile, SegmentSlot)> {
        let slot = self.document(key)?.slot?;
        Some((&*self.segments.get(slot.segment)?.file, slot))
    }

    /// Adds a segment, still without documents.
    pub(crate) fn mount(&mut self, sealed: Arc<SegmentFile>) {
        self.segments.mount(sealed);
    }

    /// Removes a segment without documents.
    pub(crate) fn unmount(&mut self, segment: SegmentId) {
        self.segments.unmount(segment);
    }

    /// Records the new position of a document, and the bytes that it takes there.
    pub(crate) fn move_document(
        &mut self,
        key: DocumentKey,
        slot: Option<SegmentSlot>,
        bytes: u32,
    ) {
        let Some(document) = self.document_mut(key) else {
            return;
        };
        let before = document.counted(key);
        document.slot = slot;
        document.state.bytes = bytes;
        let after = document.counted(key);
        self.recount(Some(before), Some(after));
    }

    /// The names of a namespace, if they are known.
    pub(crate) fn names(&self, namespace: NamespaceId) -> Option<&Namespace> {
        self.namespaces.get(&namespace)?.names.as_ref()
    }

    /// The segments of a namespace, oldest first, each with the numbers of its removed documents. Also the documents
    /// in no segment, the ones unchanged for longest first. The cost is a look at each of those.
    pub(crate) fn sealed_and_others(
        &self,
        namespace: NamespaceId,
    ) -> (Vec<(&ActiveSegment, Vec<u32>)>, Vec<DocumentId>) {
        let segments = self.segments.iter();
        let sealed = segments
            .filter(|(_, mounted)| mounted.file.namespace == namespace)
            .map(|(_, mounted)| (mounted, mounted.gone()));
        let unsealed = self.segments.unsealed_of(namespace);
        let mut others: Vec<(u64, DocumentId)> = unsealed
            .map(|unsealed| &unsealed.documents)
            .into_iter()
            .flatten()
            .filter_map(|&document| {
                let known = self.document(DocumentKey::new(namespace, document))?;
                Some((known.state.sequence, document))
            })
            .collect();
        others.sort_unstable();
        let others = others.into_iter().map(|(_, document)| document).collect();
        (sealed.collect(), others)
    }

    /// The documents of a namespace that are in the log, in order of their ids.
    pub(super) fn unsealed_states(&self, namespace: NamespaceId) -> Vec<(DocumentId, StateRecord)> {
        let unsealed = self.segments.unsealed_of(namespace).into_iter();
        let documents = unsealed.flat_map(|unsealed| &unsealed.documents);
        let mut states: Vec<_> = documents
            .filter_map(|&document| {
                let known = self.document(DocumentKey::new(namespace, document))?;
                Some((document, known.state))
            })
            .collect();
        states.sort_unstable_by_key(|(document, _)| *document);
        states
    }

    /// The documents of a namespace in the log that will probably not continue: finished ones stored before
    /// `finished_ms`, and others that are silent since `silent_ms`.
    pub(crate) fn at_rest(
        &self,
        namespace: NamespaceId,
        finished_ms: u64,
        silent_ms: u64,
    ) -> SealCandidates {
        let unsealed = self.segments.unsealed_of(namespace);
        let mut oldest_ms = u64::MAX;
        let documents = unsealed
            .map(|unsealed| &unsealed.documents)
            .into_iter()
            .flatten()
            .filter_map(|document| {
                let known = self.document(DocumentKey::new(namespace, *document))?;
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
        SealCandidates {
            documents,
            oldest_ms,
        }
    }
}
