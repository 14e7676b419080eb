//! The choice of the next segment to make.

use std::cmp::Reverse;

use refrain_protocol::NamespaceId;

use crate::config::DraftStoreConfig;
use crate::record::DocumentKey;
use crate::segments::{SegmentPolicy, SegmentSource, Urgency};
use crate::shared_store::OpenStore;

/// A document without a finish reason counts as ended after it was silent for this long, at least.
const SILENCE_MS_MIN: u64 = 3_600 * 1_000;

/// Documents of one seal. The commit that installs the segment forgets the unsealed copies of all of them.
const SEAL_DOCUMENTS_MAX: usize = 4_096;

/// Bytes that a sealed document takes in its segment and, since it is removed there, in the log.
const SEALED_DOCUMENT_BYTES: u64 = 400;

/// Bytes that each token of a sealed document takes in its segment.
const SEALED_TOKEN_BYTES: u64 = 9;

/// A segment to be made, of one namespace.
pub(super) struct PlannedSegment {
    pub(super) namespace: NamespaceId,
    pub(super) source: SegmentSource,
}

impl PlannedSegment {
    /// Most bytes that making it takes before anything that it replaces is deleted.
    pub(super) fn bytes_max(&self, open: &OpenStore) -> u64 {
        match &self.source {
            SegmentSource::Segments(segments) => {
                let mounted = segments
                    .iter()
                    .filter_map(|segment| open.catalog.segments().get(*segment));
                mounted.map(|mounted| mounted.file.file_bytes()).sum()
            }
            SegmentSource::Log(documents) => documents
                .iter()
                .filter_map(|document| {
                    open.catalog
                        .document(DocumentKey::new(self.namespace, *document))
                })
                .map(|known| {
                    SEALED_DOCUMENT_BYTES + SEALED_TOKEN_BYTES * u64::from(known.state.len)
                })
                .sum(),
        }
    }
}

/// The policy that a configuration asks for.
pub(super) fn policy(config: &DraftStoreConfig) -> SegmentPolicy {
    SegmentPolicy {
        seal_tokens: config.seal_tokens,
        seal_documents: SEAL_DOCUMENTS_MAX,
        segments_max: config.tuning.segments_max,
        segment_tokens_max: config.tuning.segment_tokens_max,
    }
}

/// The documents to seal next: those that `rest` says have ended.
pub(super) fn next_seal(
    policy: SegmentPolicy,
    open: &OpenStore,
    urgency: Urgency,
    rest: RestTimes,
) -> Option<PlannedSegment> {
    let catalog = &open.catalog;
    let mut unsealed = catalog.segments().unsealed();
    unsealed.find_map(|(namespace, unsealed)| {
        if !policy.may_seal(unsealed.tokens, unsealed.documents.len(), urgency) {
            return None;
        }
        let candidates = catalog.at_rest(namespace, rest.finished_ms, rest.silent_ms);
        let source = SegmentSource::Log(policy.seal(candidates, urgency)?);
        Some(PlannedSegment { namespace, source })
    })
}

/// The segments to merge next.
pub(super) fn next_merge(policy: SegmentPolicy, open: &OpenStore) -> Option<PlannedSegment> {
    let by_namespace = open.catalog.segments().by_namespace();
    let mut namespaces: Vec<_> = by_namespace.into_iter().collect();
    // The namespace with the most removed tokens comes first.
    namespaces.sort_by_key(|(_, segments)| {
        let masked = segments.iter().map(|(_, stats)| stats.masked_tokens);
        Reverse(masked.sum::<u64>())
    });
    namespaces.into_iter().find_map(|(namespace, segments)| {
        let source = SegmentSource::Segments(policy.merge(&segments)?);
        Some(PlannedSegment { namespace, source })
    })
}

/// The times that decide whether a document has ended and may be sealed.
#[derive(Clone, Copy)]
pub(super) struct RestTimes {
    /// A finished document must have been stored before this time, in Unix milliseconds.
    pub(super) finished_ms: u64,
    /// A document without a finish reason must have been silent since this time, in Unix milliseconds.
    pub(super) silent_ms: u64,
}

impl RestTimes {
    pub(super) fn new(config: &DraftStoreConfig, finished_ms: u64, now_ms: u64) -> Self {
        let seal_after_ms = config.seal_after_s.saturating_mul(1_000);
        RestTimes {
            finished_ms,
            silent_ms: now_ms.saturating_sub(seal_after_ms.max(SILENCE_MS_MIN)),
        }
    }
}
