//! The notices to the reader of a request that a trainer's order holds back.

use std::time::{Duration, Instant};

use refrain_protocol::ApiError;
use refrain_protocol::chunk::ChunkEvent;
use tokio::sync::mpsc;

/// How often the reader of a held request is told so. A gateway gives up a worker after minutes of silence.
const INTERVAL: Duration = Duration::from_secs(5);

/// The time that a request is held and that its reader does not know of yet.
#[derive(Debug, Default)]
pub(crate) struct HeldNotices {
    since: Option<Instant>,
}

impl HeldNotices {
    /// Notes whether the request is held, and tells its reader for how long it was: now and then, and at the end. A
    /// reader that lags is told later.
    pub(crate) fn note(
        &mut self,
        is_held: bool,
        events: &mpsc::Sender<Result<ChunkEvent, ApiError>>,
        now: Instant,
    ) {
        let Some(since) = self.since else {
            self.since = is_held.then_some(now);
            return;
        };
        let held = now.saturating_duration_since(since);
        if is_held && held < INTERVAL {
            return;
        }
        let ms = held.as_millis() as u64;
        if ms == 0 || events.try_send(Ok(ChunkEvent::Held { ms })).is_ok() {
            self.since = is_held.then_some(now);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_reader_learns_all_of_the_time_even_if_it_lags() {
        let (events, mut reader) = mpsc::channel(1);
        let mut notices = HeldNotices::default();
        let start = Instant::now();
        let at = |seconds| start + Duration::from_secs(seconds);
        notices.note(false, &events, at(0));
        for second in 1..8 {
            notices.note(true, &events, at(second));
        }
        // The queue is full until the reader reads the first notice.
        notices.note(true, &events, at(12));
        assert_eq!(reader.try_recv(), Ok(Ok(ChunkEvent::Held { ms: 5_000 })));
        notices.note(false, &events, at(13));
        assert_eq!(reader.try_recv(), Ok(Ok(ChunkEvent::Held { ms: 7_000 })));
        notices.note(false, &events, at(20));
        assert!(reader.try_recv().is_err());
    }
}
