//! A worker that meets a namespace takes over the store's segments as they lie, instead of hearing every document
//! once more: a call for each few megabytes, and no building of what was built before.
//!
//! What is in no segment comes as documents, and all that changed since as news of the feed. The segments are mounted
//! last, and the feed is heard at once: what was erased meanwhile must not be drafted from. A store that does not answer is
//! asked again, for the piece that is missing. Where anything else fails, the feed from its beginning brings the same,
//! only later.

use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use anyhow::Context as _;
use refrain_protocol::document::FeedCursor;
use refrain_protocol::segment::{
    DocumentsRequest, SegmentInfo, SegmentPieceRequest, SegmentsReply, SegmentsRequest,
};
use refrain_protocol::{ApiError, DocumentId, ErrorKind};
use refrain_suffix_index::{Segment, SegmentWords};

use super::drafts::Arrivals;
use super::follower::{Follower, backoff, pieces};
use super::room::{Retry, Size};

/// How often the worker begins again when a segment was merged away meanwhile.
const TRIES_MAX: u32 = 3;
/// How often in a row one call may fail because the store is not there: some five minutes.
const FAILURES_MAX: u32 = 100;
/// Words of one answer: 4 MiB, which is what is held twice.
const PIECE_WORDS: u32 = 1 << 20;
/// Documents asked for at once.
const DOCUMENTS_AT_ONCE: usize = 1_024;

impl Follower {
    /// Takes over what the store has sealed. Answers where the feed goes on: at its beginning where there is nothing
    /// to be taken over.
    pub(super) async fn take_over(&self) -> FeedCursor {
        for _ in 0..TRIES_MAX {
            match self.try_take_over().await {
                Ok(cursor) => {
                    let outcome = if cursor.is_some() { "done" } else { "nothing" };
                    self.metrics.take_over(outcome);
                    return cursor.unwrap_or_default();
                }
                // A segment that was merged away, or a store that has none to give.
                Err(error) if is_gone(&error) => {}
                Err(error) => {
                    tracing::warn!(error = format!("{error:#}"), "segments are not taken over");
                    break;
                }
            }
        }
        // The feed brings all of it; what there is no room for goes again.
        self.memory.lacks_room.store(false, Ordering::Relaxed);
        self.metrics.take_over("failed");
        FeedCursor::default()
    }

    /// Whether all that the store has would fit by now, with some slack, where some of it was left out or let go. The
    /// store is asked now and then, while requests of the namespace run: the others have no claim to the room.
    pub(super) async fn would_fit(&self, retry: &mut Retry) -> bool {
        let pause = Duration::from_millis(self.config.take_over_again_ms);
        let lacks_room = self.memory.lacks_room.load(Ordering::Relaxed);
        let is_due = retry.is_due(lacks_room, pause, Instant::now());
        if !is_due || !self.memory.read().is_running() {
            return false;
        }
        retry.looked(Instant::now());
        let request = SegmentsRequest {
            namespace: self.memory.grant(),
        };
        let Ok(listed) = self.store.segments(request).await else {
            self.metrics.follow_failures.inc();
            return false;
        };
        let (own, unsealed) = {
            let drafts = self.memory.read();
            let lens = listed.unsealed.iter();
            let lens = lens.filter_map(|document| drafts.len_of(*document));
            let own = drafts.size();
            (own, own.of_more(lens.map(u64::from).sum()))
        };
        let all = Size::of_segments(&listed.segments) + unsealed;
        self.room.would_fit(all.with_slack(), own, &self.config)
    }

    /// Takes a namespace over once more. What the groups have stays with them, so the feed goes on where it was, if that
    /// is earlier: what was removed since is to be removed there as well.
    pub(super) async fn take_over_again(&self, before: FeedCursor) -> FeedCursor {
        let own = self.memory.read().size();
        self.room.leave(own, || {
            self.memory.is_behind.store(true, Ordering::Relaxed);
            self.memory.lock().reset();
        });
        let again = self.take_over().await;
        let is_of_another = again.generation != before.generation;
        match again != FeedCursor::default() && is_of_another {
            // Refused, and then all of it begins anew.
            true => before,
            false => again.min(before),
        }
    }

    async fn try_take_over(&self) -> anyhow::Result<Option<FeedCursor>> {
        let call = || {
            self.store.segments(SegmentsRequest {
                namespace: self.memory.grant(),
            })
        };
        let listed = match self.persist(call).await {
            Err(error) if error.kind == ErrorKind::NotFound => return Ok(None),
            listed => listed?,
        };
        let SegmentsReply {
            cursor,
            segments,
            unsealed,
        } = listed;
        let all = segments.len();
        let (wanted, reservation) = self.room.reserve(segments, &self.config);
        let lacks_room = wanted.len() < all;
        self.memory.lacks_room.store(lacks_room, Ordering::Relaxed);
        if all == 0 {
            return Ok(None);
        }
        // All of them before the first is mounted: only together are they the namespace at one moment.
        let mut taken = Vec::with_capacity(wanted.len());
        for info in wanted {
            let segment = self.fetch(&info).await?;
            taken.push((segment, info.masked));
        }
        let arrivals = tokio::task::spawn_blocking(move || arrivals(taken)).await??;
        self.fetch_documents(&unsealed).await?;
        let held = self
            .metrics
            .index_lock_seconds
            .with_label_values(&["mount"]);
        reservation.arrive(|| {
            self.memory
                .drafts
                .timed(&held, |drafts| drafts.install(arrivals));
        });
        Ok(Some(cursor))
    }

    /// Calls the store, and again while it is not there.
    async fn persist<T, F>(&self, call: impl Fn() -> F) -> Result<T, ApiError>
    where
        F: Future<Output = Result<T, ApiError>>,
    {
        let mut failures = 0;
        loop {
            match call().await {
                Err(error) if is_passing(error.kind) && failures < FAILURES_MAX => {
                    self.metrics.follow_failures.inc();
                    failures += 1;
                    tokio::time::sleep(backoff(failures)).await;
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
                self.store.segment_piece(SegmentPieceRequest {
                    namespace: self.memory.grant(),
                    segment: info.segment,
                    offset,
                    max_words: PIECE_WORDS,
                })
            };
            let piece = self.persist(call).await?;
            anyhow::ensure!(
                !piece.words.is_empty(),
                "a segment is shorter than was told"
            );
            offset += piece.words.len() as u64;
            anyhow::ensure!(offset <= info.words, "a segment is longer than was told");
            words.extend(&piece.words);
        }
        let bytes = words.len() * size_of::<u32>();
        self.metrics.take_over_bytes.inc_by(bytes as u64);
        let opened = tokio::task::spawn_blocking(move || Segment::open_words(words));
        opened.await?.context("a segment of the store")
    }

    async fn fetch_documents(&self, documents: &[DocumentId]) -> anyhow::Result<()> {
        let mut left = documents;
        while !left.is_empty() {
            self.wait_for_seals().await;
            let call = || {
                self.store.documents(DocumentsRequest {
                    namespace: self.memory.grant(),
                    documents: left[..left.len().min(DOCUMENTS_AT_ONCE)].to_vec(),
                    max_tokens: self.config.follow_tokens,
                })
            };
            let reply = self.persist(call).await?;
            anyhow::ensure!(reply.covered > 0, "the store answers for no document");
            left = left.get(reply.covered as usize..).unwrap_or_default();
            for update in reply.updates {
                for piece in pieces(update) {
                    self.merge(&piece).await;
                }
            }
        }
        Ok(())
    }
}

fn is_gone(error: &anyhow::Error) -> bool {
    let error = error.downcast_ref::<ApiError>();
    error.is_some_and(|error| error.kind == ErrorKind::NotFound)
}

/// Whether the same call may succeed later.
fn is_passing(kind: ErrorKind) -> bool {
    use ErrorKind::{Overloaded, Timeout, Unavailable, Upstream};
    matches!(kind, Unavailable | Overloaded | Timeout | Upstream)
}

fn arrivals(taken: Vec<(Segment, Vec<u32>)>) -> anyhow::Result<Arrivals> {
    let mut arrivals = Arrivals::default();
    for (segment, masked) in taken {
        let fits = arrivals.add(segment, &masked);
        anyhow::ensure!(fits, "masks that fit no document");
    }
    Ok(arrivals)
}

#[cfg(test)]
mod tests;
