//! The reader of a chunk, at the other end of a queue of events.

use std::collections::VecDeque;
use std::time::{Duration, Instant};

use refrain_protocol::ApiError;
use refrain_protocol::chunk::ChunkEvent;
use tokio::sync::mpsc;
use tokio::sync::mpsc::error::TrySendError;

use super::ending::ChunkEnding;

/// The queue of events to a chunk's reader.
pub(crate) type Events = mpsc::Sender<Result<ChunkEvent, ApiError>>;

/// How often the reader of a held request is told so. A gateway gives up a worker after minutes of silence.
const HELD_INTERVAL: Duration = Duration::from_secs(5);

/// The reader of a chunk. It may stall for a while, since its client may be slow, and it may leave at any time.
pub(crate) struct Reader {
    events: Events,
    /// The time since when the queue has been full for a driver that needs room.
    full_since: Option<Instant>,
    /// The time since when the request is held, as far as the reader does not know of it.
    held_since: Option<Instant>,
    /// An event that did not fit into the queue when the chunk ended.
    unsent: Option<ChunkEvent>,
}

/// The state of a reader.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum ReaderState {
    /// It reads, or has not stalled for long.
    Reads,
    /// It stalled for too long.
    Stalled,
    /// It has left.
    Left,
}

impl Reader {
    pub(crate) fn new(events: Events) -> Self {
        Reader {
            events,
            full_since: None,
            held_since: None,
            unsent: None,
        }
    }

    /// The queue of events.
    pub(crate) fn events(&self) -> &Events {
        &self.events
    }

    /// Whether there is room for an event.
    pub(crate) fn has_room(&self) -> bool {
        self.events.capacity() > 0
    }

    /// Notes that a driver needs room for an event now. One that waits for room in [`deliver`](Self::deliver) need
    /// not do so.
    pub(crate) fn needs_room(&mut self, now: Instant) {
        self.full_since = match self.has_room() {
            true => None,
            false => self.full_since.or(Some(now)),
        };
    }

    /// The state of a reader that may stall for `stall_max`.
    pub(super) fn state(&self, now: Instant, stall_max: Duration) -> ReaderState {
        let is_late = |since| now.saturating_duration_since(since) > stall_max;
        if self.events.is_closed() {
            ReaderState::Left
        } else if self.full_since.is_some_and(is_late) {
            ReaderState::Stalled
        } else {
            ReaderState::Reads
        }
    }

    /// Notes whether the request is held, and tells the reader for how long it was: now and then, and at the end. A
    /// reader that lags is told later.
    pub(crate) fn note_held(&mut self, is_held: bool, now: Instant) {
        let Some(since) = self.held_since else {
            self.held_since = is_held.then_some(now);
            return;
        };
        let held = now.saturating_duration_since(since);
        if is_held && held < HELD_INTERVAL {
            return;
        }
        let ms = held.as_millis() as u64;
        if ms == 0 || self.events.try_send(Ok(ChunkEvent::Held { ms })).is_ok() {
            self.held_since = is_held.then_some(now);
        }
    }

    /// Sends an event for which there is room. If the reader has left meanwhile, its chunk ends soon.
    pub(crate) fn send(&self, event: ChunkEvent) {
        let _ = self.events.try_send(Ok(event));
    }

    /// Sends an event, and waits for room for `stall_max` unless `interrupted` comes first.
    ///
    /// # Errors
    /// The chunk ends. A reader that receives the end receives the event before it.
    pub(crate) async fn deliver(
        &mut self,
        event: ChunkEvent,
        stall_max: Duration,
        interrupted: impl Future<Output = ChunkEnding>,
    ) -> Result<(), ChunkEnding> {
        let ending = tokio::select! {
            biased;
            permit = reserve(&self.events, stall_max) => match permit {
                Ok(permit) => {
                    permit.send(Ok(event));
                    return Ok(());
                }
                Err(ending) => ending,
            },
            ending = interrupted => ending,
        };
        self.unsent = Some(event);
        Err(ending)
    }

    /// Sends the last event, which must arrive even if the reader lags. In that case a task of its own waits for room
    /// in the queue.
    pub(super) fn finish(self, last: Result<ChunkEvent, ApiError>) {
        let events = self.events;
        let mut left: VecDeque<_> = self.unsent.map(Ok).into_iter().collect();
        left.push_back(last);
        while let Some(event) = left.pop_front() {
            if let Err(TrySendError::Full(event)) = events.try_send(event) {
                left.push_front(event);
                break;
            }
        }
        if !left.is_empty() {
            tokio::spawn(async move {
                for event in left {
                    // An error means that the reader has left.
                    let _ = events.send(event).await;
                }
            });
        }
    }
}

/// Waits for room for an event, up to the limit on stalled readers.
///
/// # Errors
/// The chunk ends, because its reader left or stalled.
pub(crate) async fn reserve(
    events: &Events,
    stall_max: Duration,
) -> Result<mpsc::Permit<'_, Result<ChunkEvent, ApiError>>, ChunkEnding> {
    match events.try_reserve() {
        Ok(permit) => return Ok(permit),
        Err(TrySendError::Closed(())) => return Err(ChunkEnding::ReaderLeft),
        Err(TrySendError::Full(())) => {}
    }
    match tokio::time::timeout(stall_max, events.reserve()).await {
        Ok(Ok(permit)) => Ok(permit),
        Ok(Err(_)) => Err(ChunkEnding::ReaderLeft),
        Err(_) => Err(ChunkEnding::ReaderStalled),
    }
}

#[cfg(test)]
mod tests {
    use std::future::{pending, ready};

    use super::*;

    const STALL_MAX: Duration = Duration::from_secs(3);

    #[test]
    fn a_held_reader_learns_all_of_the_time_even_if_it_lags() {
        let (events, mut received) = mpsc::channel(1);
        let mut reader = Reader::new(events);
        let start = Instant::now();
        let at = |seconds| start + Duration::from_secs(seconds);
        reader.note_held(false, at(0));
        for second in 1..8 {
            reader.note_held(true, at(second));
        }
        // The queue is full until the reader reads the first notice.
        reader.note_held(true, at(12));
        assert_eq!(received.try_recv(), Ok(Ok(ChunkEvent::Held { ms: 5_000 })));
        reader.note_held(false, at(13));
        assert_eq!(received.try_recv(), Ok(Ok(ChunkEvent::Held { ms: 7_000 })));
        reader.note_held(false, at(20));
        assert!(received.try_recv().is_err());
    }

    #[test]
    fn a_reader_stalls_from_the_time_that_its_queue_is_full() {
        let (events, mut received) = mpsc::channel(1);
        let mut reader = Reader::new(events);
        let start = Instant::now();
        let state = |reader: &mut Reader, seconds| {
            let now = start + Duration::from_secs(seconds);
            reader.needs_room(now);
            reader.state(now, STALL_MAX)
        };
        reader.send(ChunkEvent::Retry);
        assert_eq!(state(&mut reader, 1), ReaderState::Reads);
        assert_eq!(state(&mut reader, 4), ReaderState::Reads);
        assert_eq!(state(&mut reader, 5), ReaderState::Stalled);
        received.try_recv().unwrap().unwrap();
        assert_eq!(state(&mut reader, 6), ReaderState::Reads);
        reader.send(ChunkEvent::Retry);
        assert_eq!(state(&mut reader, 7), ReaderState::Reads);
        drop(received);
        assert_eq!(state(&mut reader, 8), ReaderState::Left);
    }

    #[tokio::test(start_paused = true)]
    async fn an_event_without_room_comes_before_the_last_one() {
        let (events, mut received) = mpsc::channel(1);
        let mut reader = Reader::new(events);
        let held = |ms| ChunkEvent::Held { ms };
        reader.deliver(held(1), STALL_MAX, pending()).await.unwrap();
        let ended = reader.deliver(held(2), STALL_MAX, pending()).await;
        assert!(matches!(ended, Err(ChunkEnding::ReaderStalled)));
        let interrupted = ready(ChunkEnding::TakenOver);
        let ended = reader.deliver(held(2), STALL_MAX, interrupted).await;
        assert!(matches!(ended, Err(ChunkEnding::TakenOver)));
        reader.finish(Ok(ChunkEvent::Retry));
        for expected in [held(1), held(2), ChunkEvent::Retry] {
            assert_eq!(received.recv().await, Some(Ok(expected)));
        }
        assert_eq!(received.recv().await, None);

        let (events, received) = mpsc::channel(1);
        drop(received);
        let ended = Reader::new(events)
            .deliver(held(1), STALL_MAX, pending())
            .await;
        assert!(matches!(ended, Err(ChunkEnding::ReaderLeft)));
    }
}
