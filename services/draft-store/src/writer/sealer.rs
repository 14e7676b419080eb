//! Which segment is made next: one that an operator's purge wants, one of documents that have ended, or one of
//! segments that are merged. It decides, and does nothing itself.
//!
//! A *purge* rewrites every segment that still holds removed documents, and may seal what has ended.

use std::cmp::Reverse;
use std::collections::VecDeque;
use std::time::{Duration, Instant};

use refrain_protocol::NamespaceId;

use crate::config::DraftStoreConfig;
use crate::log::LogError;
use crate::record::{DocumentKey, SegmentId};
use crate::segments::{SegmentPolicy, SegmentSource, Urgency};
use crate::shared_store::OpenStore;
use crate::writer::errors::{RETRY_AFTER, disk_refused, no_room_for_a_copy, outdated};
use crate::writer::requests::Reply;

/// A document without a finish reason counts as ended after it was silent for this long, at least.
const SILENCE_MS_MIN: u64 = 3_600 * 1_000;

/// Documents of one seal. The commit that installs the segment forgets the unsealed copies of all of them.
const SEAL_DOCUMENTS_MAX: usize = 4_096;

/// Bytes that a sealed document takes in its segment and, since it is removed there, in the log.
const SEALED_DOCUMENT_BYTES: u64 = 400;

/// Bytes that each token of a sealed document takes in its segment.
const SEALED_TOKEN_BYTES: u64 = 9;

/// All namespaces are searched for old documents at least this often.
const AGE_INTERVAL_MAX: Duration = Duration::from_secs(60);

/// A segment to be made, of one namespace.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct PlannedSegment {
    pub(super) namespace: NamespaceId,
    pub(super) source: SegmentSource,
}

impl PlannedSegment {
    /// Most bytes that making it takes before anything that it replaces is deleted.
    fn bytes_max(&self, open: &OpenStore) -> u64 {
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

/// The store as a decision sees it.
pub(super) struct SealView<'a> {
    /// `None` while the store is closed.
    pub(super) open: Option<&'a OpenStore>,
    /// How often the store was opened.
    pub(super) openings: u64,
    pub(super) now: Instant,
    pub(super) now_ms: u64,
    /// Whether the disk has space for this many bytes.
    pub(super) has_room: &'a dyn Fn(u64) -> bool,
    /// Deletes the files of segments that are not in use, which could not be deleted earlier.
    pub(super) clear_orphans: &'a dyn Fn(&OpenStore) -> Result<(), LogError>,
}

/// A purge in progress.
struct Purge {
    /// The opening of the store that it belongs to. After another opening its list is invalid.
    openings: u64,
    left: VecDeque<SegmentId>,
    /// Seal documents that ended before this time, in Unix milliseconds.
    seals_before_ms: Option<u64>,
    waiters: Vec<Reply<()>>,
}

/// Requested work on segments, and what was done last; see the module.
pub(super) struct Sealer {
    policy: SegmentPolicy,
    seal_after_ms: u64,
    seal_age: Duration,
    unsealed_tokens_max: u64,
    purge: Option<Purge>,
    /// Callers of the next purge, and whether they want to seal. The running job may have read what they want gone.
    waiters: Vec<(Reply<()>, bool)>,
    not_before: Option<Instant>,
    /// The last job sealed, so merging has its turn next.
    merges_next: bool,
    /// When all namespaces were last searched for old documents, which is too expensive for every tick.
    aged_at: Option<Instant>,
    /// The last segment number used by this process. It is never reused, whatever came of it.
    last: SegmentId,
}

impl Sealer {
    pub(super) fn new(config: &DraftStoreConfig) -> Self {
        let tuning = &config.tuning;
        Sealer {
            policy: SegmentPolicy {
                seal_tokens: config.seal_tokens,
                seal_documents: SEAL_DOCUMENTS_MAX,
                segments_max: tuning.segments_max,
                segment_tokens_max: tuning.segment_tokens_max,
            },
            seal_after_ms: config.seal_after_s.saturating_mul(1_000),
            seal_age: Duration::from_secs(tuning.seal_age_s),
            unsealed_tokens_max: tuning.unsealed_tokens_max,
            purge: None,
            waiters: Vec::new(),
            not_before: None,
            merges_next: false,
            aged_at: None,
            last: 0,
        }
    }

    /// Has all segments with removed documents rewritten, and with `seals` the documents sealed that have ended.
    pub(super) fn request_purge(&mut self, seals: bool, waiter: Reply<()>) {
        self.waiters.push((waiter, seals));
    }

    /// Drops all requests: their callers learn that nothing comes of them.
    pub(super) fn give_up(&mut self) {
        self.waiters.clear();
        self.purge = None;
    }

    /// A number that no segment has or had.
    pub(super) fn next_id(&mut self, open: &OpenStore) -> SegmentId {
        let highest = open.catalog.segments().iter().map(|(id, _)| id).max();
        self.last = self.last.max(highest.unwrap_or(0)) + 1;
        self.last
    }

    /// The next segment to make.
    pub(super) fn next(&mut self, view: &SealView) -> Option<PlannedSegment> {
        let fits = |planned: &PlannedSegment| {
            let bytes = view.open.map_or(0, |open| planned.bytes_max(open));
            (view.has_room)(bytes)
        };
        let purged = self.next_purged(view).filter(fits);
        if purged.is_none() && self.purge.is_some() {
            // Even an operator's request must not fill the disk: the log could not be opened again.
            self.end_purge(Err(no_room_for_a_copy()));
        }
        let waits = self.not_before.is_some_and(|until| view.now < until);
        let due = purged.or_else(|| match waits {
            true => None,
            false => self.next_due(view, &fits),
        })?;
        self.merges_next = matches!(due.source, SegmentSource::Log(_));
        Some(due)
    }

    /// Notes that a segment could not be made. The purge that wanted it fails.
    pub(super) fn failed(&mut self, error: LogError, now: Instant) {
        self.not_before = Some(now + RETRY_AFTER);
        self.end_purge(Err(error));
    }

    /// The next segment of the purge, which begins now if callers wait for one.
    fn next_purged(&mut self, view: &SealView) -> Option<PlannedSegment> {
        loop {
            if self.purge.is_none() && !self.waiters.is_empty() {
                self.begin_purge(view);
            }
            let purge = self.purge.as_mut()?;
            let open = view.open.filter(|_| purge.openings == view.openings);
            let Some(open) = open else {
                self.end_purge(Err(outdated()));
                continue;
            };
            let Some(segment) = purge.left.pop_front() else {
                let before_ms = purge.seals_before_ms;
                let rest = before_ms.map(|before_ms| self.rest(before_ms, view.now_ms));
                let due = rest.and_then(|rest| self.next_seal(open, Urgency::Crowded, rest));
                if due.is_some() {
                    return due;
                }
                self.end_purge(Ok(()));
                continue;
            };
            // A segment that was merged by another purge is gone.
            if let Some(mounted) = open.catalog.segments().get(segment) {
                return Some(PlannedSegment {
                    namespace: mounted.file.namespace,
                    source: SegmentSource::Segments(vec![segment]),
                });
            }
        }
    }

    fn begin_purge(&mut self, view: &SealView) {
        let waiters = std::mem::take(&mut self.waiters);
        let seals = waiters.iter().any(|(_, seals)| *seals);
        let worn = view.open.into_iter().flat_map(|open| {
            let segments = open.catalog.segments().iter();
            segments.filter(|(_, mounted)| mounted.is_worn())
        });
        self.purge = Some(Purge {
            openings: view.openings,
            left: worn.map(|(segment, _)| segment).collect(),
            // This includes documents stored in the current millisecond.
            seals_before_ms: seals.then_some(view.now_ms + 1),
            waiters: waiters.into_iter().map(|(waiter, _)| waiter).collect(),
        });
        // Files that could not be deleted earlier must be gone now.
        if let Some(Err(error)) = view.open.map(view.clear_orphans) {
            self.end_purge(Err(error));
        }
    }

    fn end_purge(&mut self, outcome: Result<(), LogError>) {
        for waiter in self
            .purge
            .take()
            .into_iter()
            .flat_map(|purge| purge.waiters)
        {
            let _ = waiter.send(outcome.clone().map_err(|error| disk_refused(&error)));
        }
    }

    /// The segment that is due without anybody's request.
    fn next_due(
        &mut self,
        view: &SealView,
        fits: &dyn Fn(&PlannedSegment) -> bool,
    ) -> Option<PlannedSegment> {
        let open = view.open?;
        let mut rest = self.rest(view.now_ms.saturating_sub(self.seal_after_ms), view.now_ms);
        let looks_at_age = self.aged_at.is_none_or(|at| {
            view.now.saturating_duration_since(at) >= self.seal_age.min(AGE_INTERVAL_MAX)
        });
        let urgency = if open.catalog.segments().unsealed_tokens() > self.unsealed_tokens_max {
            // Finished documents seldom continue, and those that do come back from their segment.
            rest.finished_ms = view.now_ms;
            Urgency::Crowded
        } else if looks_at_age {
            let age_ms = self.seal_age.as_millis() as u64;
            let before_ms = view.now_ms.saturating_sub(age_ms);
            Urgency::Aged { before_ms }
        } else {
            Urgency::Usual
        };
        // Sealing and merging take turns. A store that always has something to seal would otherwise never free space,
        // nor seal if it always has something to merge.
        let merge = self.next_merge(open).filter(fits);
        if merge.is_some() && self.merges_next {
            return merge;
        }
        let seal = self.next_seal(open, urgency, rest).filter(fits);
        if seal.is_none() && looks_at_age {
            self.aged_at = Some(view.now);
        }
        seal.or(merge)
    }

    /// The documents to seal next: those that `rest` says have ended.
    fn next_seal(
        &self,
        open: &OpenStore,
        urgency: Urgency,
        rest: RestTimes,
    ) -> Option<PlannedSegment> {
        let catalog = &open.catalog;
        let mut unsealed = catalog.segments().unsealed();
        unsealed.find_map(|(namespace, unsealed)| {
            let (tokens, documents) = (unsealed.tokens, unsealed.documents.len());
            if !self.policy.may_seal(tokens, documents, urgency) {
                return None;
            }
            let candidates = catalog.at_rest(namespace, rest.finished_ms, rest.silent_ms);
            let source = SegmentSource::Log(self.policy.seal(candidates, urgency)?);
            Some(PlannedSegment { namespace, source })
        })
    }

    /// The segments to merge next.
    fn next_merge(&self, open: &OpenStore) -> Option<PlannedSegment> {
        let by_namespace = open.catalog.segments().by_namespace();
        let mut namespaces: Vec<_> = by_namespace.into_iter().collect();
        // The namespace with the most removed tokens comes first.
        namespaces.sort_by_key(|(_, segments)| {
            let masked = segments.iter().map(|(_, stats)| stats.masked_tokens);
            Reverse(masked.sum::<u64>())
        });
        namespaces.into_iter().find_map(|(namespace, segments)| {
            let source = SegmentSource::Segments(self.policy.merge(&segments)?);
            Some(PlannedSegment { namespace, source })
        })
    }

    fn rest(&self, finished_ms: u64, now_ms: u64) -> RestTimes {
        RestTimes {
            finished_ms,
            silent_ms: now_ms.saturating_sub(self.seal_after_ms.max(SILENCE_MS_MIN)),
        }
    }
}

/// The times that decide whether a document has ended and may be sealed.
#[derive(Clone, Copy)]
struct RestTimes {
    /// A finished document must have been stored before this time, in Unix milliseconds.
    finished_ms: u64,
    /// A document without a finish reason must have been silent since this time, in Unix milliseconds.
    silent_ms: u64,
}
