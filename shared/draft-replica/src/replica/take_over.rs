//! Taking over the store's segments of a namespace as they lie.
//!
//! A worker that meets a namespace fetches what the store has built, with a call for each few megabytes, instead of
//! receiving and indexing every document once more. Documents that are in no segment are fetched as documents, and
//! all changes since then come as news of the feed.
//!
//! The segments are mounted last, and the feed is followed at once: what was erased meanwhile must not be drafted
//! from. A call that the store does not answer is made again, for the part that is missing. Where anything else
//! fails, the feed from its beginning brings the same, only later.

mod retry;

use std::sync::atomic::Ordering;
use std::time::Duration;

use anyhow::Context as _;
use refrain_protocol::document::FeedCursor;
use refrain_protocol::segment::{
    DocumentsRequest, SegmentInfo, SegmentPieceRequest, SegmentsReply, SegmentsRequest,
};
use refrain_protocol::{ApiError, DocumentId, ErrorKind};
use refrain_service_kit::backoff::Backoff;
use refrain_suffix_index::{Segment, SegmentWords};
use tokio::time::Instant;

use super::capacity::IndexSize;
use super::draft_index::IncomingSegments;
use super::ingest::Ingest;

pub(super) use self::retry::TakeOverRetry;

/// Attempts at a take-over when segments are merged away meanwhile.
const ATTEMPTS_MAX: u32 = 3;
/// Failures in a row after which a call is given up because the store cannot be reached: some five minutes.
const FAILURES_MAX: u32 = 100;
/// The shortest and the longest pause after a failed call, without its random part.
const PAUSE_MIN: Duration = Duration::from_millis(50);
const PAUSE_MAX: Duration = Duration::from_secs(2);
/// Words of one answer: 4 MiB, which is what is held twice.
const PIECE_WORDS: u32 = 1 << 20;
/// Documents asked for with one call.
const DOCUMENTS_AT_ONCE: usize = 1_024;

impl Ingest {
    /// Takes over the segments that the store has. Returns the position where the feed goes on: its beginning where
    /// there is nothing to take over.
    pub(super) async fn take_over(&self) -> FeedCursor {
        for _ in 0..ATTEMPTS_MAX {
            match self.attempt().await {
                Ok(cursor) => {
                    let outcome = if cursor.is_some() { "done" } else { "nothing" };
                    self.count_take_over(outcome);
                    return cursor.unwrap_or_default();
                }
                // A segment was merged away.
                Err(error) if is_gone(&error) => {}
                Err(error) => {
                    tracing::warn!(
                        error = format!("{error:#}"),
                        "the segments of a namespace cannot be taken over; the feed brings its documents instead"
                    );
                    break;
                }
            }
        }
        // The feed brings everything, and what does not fit is evicted again.
        self.set_lacks_capacity(false);
        self.count_take_over("failed");
        FeedCursor::default()
    }

    /// Whether all that the store has would now fit, with some slack, where a part was left out or evicted. The store
    /// is asked now and then while requests of the namespace run: other namespaces have no claim to the capacity.
    pub(super) async fn would_fit(&self, retry: &mut TakeOverRetry) -> bool {
        let namespace = &self.namespace;
        let lacks_capacity = namespace.lacks_capacity.load(Ordering::Relaxed);
        let is_due = retry.is_due(lacks_capacity, Instant::now().into_std());
        if !is_due || !namespace.read().is_in_use() {
            return false;
        }
        retry.record_check(Instant::now().into_std());
        let request = SegmentsRequest {
            namespace: namespace.signed(),
        };
        let Ok(listed) = self.shared.store.segments(request).await else {
            self.shared.metrics.follow_failures.inc();
            return false;
        };
        let (own, unsealed) = {
            let index = namespace.read();
            let lens = listed.unsealed.iter();
            let lens = lens.filter_map(|document| index.len_of(*document));
            let own = index.size();
            (own, own.of_more(lens.map(u64::from).sum()))
        };
        let all = IndexSize::of_segments(&listed.segments) + unsealed;
        self.shared
            .capacity
            .would_fit(all.with_slack(), own, &self.shared.config)
    }

    /// Takes a namespace over once more. Groups keep their documents, so the feed goes on from `before`, if that is
    /// earlier: documents removed since then are to be removed from groups as well.
    pub(super) async fn take_over_again(&self, before: FeedCursor) -> FeedCursor {
        let namespace = &self.namespace;
        let own = namespace.read().size();
        self.shared.capacity.give_back(own, || {
            namespace.is_behind.store(true, Ordering::Relaxed);
            namespace.write().reset();
        });
        let again = self.take_over().await;
        let is_of_another_feed = again.generation != before.generation;
        match again != FeedCursor::default() && is_of_another_feed {
            // The store answers `before` with a reset, and then everything begins anew.
            true => before,
            false => again.min(before),
        }
    }

    async fn attempt(&self) -> anyhow::Result<Option<FeedCursor>> {
        let list = || {
            self.shared.store.segments(SegmentsRequest {
                namespace: self.namespace.signed(),
            })
        };
        let listed = match self.persist(list).await {
            Err(error) if error.kind == ErrorKind::NotFound => return Ok(None),
            listed => listed?,
        };
        let SegmentsReply {
            cursor,
            segments,
            unsealed,
        } = listed;
        let all = segments.len();
        let (fitting, reservation) = self.shared.capacity.reserve(segments, &self.shared.config);
        self.set_lacks_capacity(fitting.len() < all);
        if all == 0 {
            return Ok(None);
        }
        // All of them before the first is mounted: only together are they the namespace at one moment.
        let mut fetched = Vec::with_capacity(fitting.len());
        for info in fitting {
            let segment = self.fetch(&info).await?;
            fetched.push((segment, info.masked));
        }
        let incoming = tokio::task::spawn_blocking(move || incoming(fetched)).await??;
        self.fetch_documents(&unsealed).await?;
        let lock_seconds = self
            .shared
            .metrics
            .lock_seconds
            .with_label_values(&["mount"]);
        reservation.fill(|| {
            let index = &self.namespace.index;
            index.write_timed(&lock_seconds, |index| index.install(incoming));
        });
        Ok(Some(cursor))
    }

    /// Calls the store, and again while it cannot be reached.
    pub(super) async fn persist<T, F>(&self, call: impl Fn() -> F) -> Result<T, ApiError>
    where
        F: Future<Output = Result<T, ApiError>>,
    {
        let mut failures = 0;
        let mut backoff = store_backoff();
        loop {
            match call().await {
                Err(error) if is_transient(error.kind) && failures < FAILURES_MAX => {
                    self.shared.metrics.follow_failures.inc();
                    failures += 1;
                    tokio::time::sleep(backoff.pause()).await;
                }
                outcome => return outcome,
            }
        }
    }

    async fn fetch(&self, info: &SegmentInfo) -> anyhow::Result<Segment> {
        let mut words = SegmentWords::with_capacity(usize::try_from(info.words)?);
        let mut offset = 0;
        while offset < info.words {
            let call = || {
                self.shared.store.segment_piece(SegmentPieceRequest {
                    namespace: self.namespace.signed(),
                    segment: info.segment,
                    offset,
                    max_words: PIECE_WORDS,
                })
            };
            let piece = self.persist(call).await?;
            anyhow::ensure!(
                !piece.words.is_empty(),
                "segment {} of the store ends before its {} words",
                info.segment,
                info.words
            );
            offset += piece.words.len() as u64;
            anyhow::ensure!(
                offset <= info.words,
                "segment {} of the store exceeds its {} words",
                info.segment,
                info.words
            );
            words.extend(&piece.words);
        }
        self.shared.metrics.take_over_bytes.inc_by(4 * info.words);
        let opened = tokio::task::spawn_blocking(move || Segment::open_words(words));
        opened
            .await?
            .with_context(|| format!("segment {} of the store is damaged", info.segment))
    }

    async fn fetch_documents(&self, documents: &[DocumentId]) -> anyhow::Result<()> {
        let mut left = documents;
        while !left.is_empty() {
            self.wait_for_seals().await;
            let call = || {
                self.shared.store.documents(DocumentsRequest {
                    namespace: self.namespace.signed(),
                    documents: left[..left.len().min(DOCUMENTS_AT_ONCE)].to_vec(),
                    max_tokens: self.shared.config.pull_tokens,
                })
            };
            let reply = self.persist(call).await?;
            anyhow::ensure!(reply.covered > 0, "the store answered for no document");
            left = left.get(reply.covered as usize..).unwrap_or_default();
            for update in reply.updates {
                self.merge(&update).await;
            }
        }
        Ok(())
    }

    fn count_take_over(&self, outcome: &str) {
        let take_overs = &self.shared.metrics.take_overs;
        take_overs.with_label_values(&[outcome]).inc();
    }

    fn set_lacks_capacity(&self, lacks_capacity: bool) {
        let flag = &self.namespace.lacks_capacity;
        flag.store(lacks_capacity, Ordering::Relaxed);
    }
}

/// The pauses after failed calls of the store.
pub(super) fn store_backoff() -> Backoff {
    Backoff::new(PAUSE_MIN, PAUSE_MAX)
}

fn is_gone(error: &anyhow::Error) -> bool {
    let error = error.downcast_ref::<ApiError>();
    error.is_some_and(|error| error.kind == ErrorKind::NotFound)
}

/// Whether the same call may succeed later.
fn is_transient(kind: ErrorKind) -> bool {
    use ErrorKind::{Overloaded, Timeout, Unavailable, Upstream};
    matches!(kind, Unavailable | Overloaded | Timeout | Upstream)
}

fn incoming(fetched: Vec<(Segment, Vec<u32>)>) -> anyhow::Result<IncomingSegments> {
    let mut incoming = IncomingSegments::default();
    for (segment, masked) in fetched {
        let fits = incoming.add(segment, &masked);
        anyhow::ensure!(
            fits,
            "a segment of the store has no document at a masked position"
        );
    }
    Ok(incoming)
}

#[cfg(test)]
mod tests;
