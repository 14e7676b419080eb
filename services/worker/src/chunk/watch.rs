//! The watch over a chunk: whether it goes on, is held, or has to end, whatever its engine does.

use std::time::{Duration, Instant};

use refrain_protocol::ApiError;
use refrain_protocol::chunk::{ChunkEndReason, ChunkEvent};

use super::ending::ChunkEnding;
use super::reader::{Reader, ReaderState};
use crate::orders::{Fate, Gate, Ticket};

/// The watch over a chunk.
pub(crate) struct Watch {
    pub(crate) reader: Reader,
    /// Its place at the gate of a trainer's orders.
    ticket: Ticket,
    time: RequestTime,
}

/// The time of a request, by the clock that stands still while everything is held.
#[derive(Clone, Copy, Debug)]
enum RequestTime {
    /// Its time begins with its first turn; `None`: it has no limit.
    Waits(Option<Duration>),
    /// It times out then.
    Runs(Option<Instant>),
}

impl Watch {
    /// The watch over a chunk whose request may take `time_left` from its first turn on.
    pub(crate) fn new(reader: Reader, ticket: Ticket, time_left: Option<Duration>) -> Self {
        Watch {
            reader,
            ticket,
            time: RequestTime::Waits(time_left),
        }
    }

    /// The number of the pause in which the request began; 0: in none.
    pub(crate) fn begun_in(&self) -> u64 {
        self.ticket.begun_in()
    }

    /// The fate of the request at the gate.
    pub(crate) fn fate(&self, gate: &Gate) -> Fate {
        gate.fate(self.begun_in())
    }

    /// The time when the request times out, by the clock that stands still. `None` before its first turn as well.
    pub(crate) fn deadline(&self) -> Option<Instant> {
        match self.time {
            RequestTime::Waits(_) => None,
            RequestTime::Runs(deadline) => deadline,
        }
    }

    /// Looks whether the chunk goes on. Returns whether it is held, which its reader is told. The time of its request
    /// begins when it is not.
    ///
    /// # Errors
    /// The chunk has to end.
    pub(crate) fn look(
        &mut self,
        gate: &Gate,
        now: Instant,
        stall_max: Duration,
    ) -> Result<bool, ChunkEnding> {
        let fate = self.fate(gate);
        let working_time = gate.working_time(now);
        self.reader.note_held(fate == Fate::Held, now);
        if let (Fate::Runs, RequestTime::Waits(left)) = (fate, self.time) {
            let deadline = left.and_then(|left| working_time.checked_add(left));
            self.time = RequestTime::Runs(deadline);
        }
        let is_overdue = self.deadline().is_some_and(|at| at <= working_time);
        match due(fate, is_overdue, self.reader.state(now, stall_max)) {
            Some(ending) => Err(ending),
            None => Ok(fate == Fate::Held),
        }
    }

    /// Ends the watch with the last event for the reader, if it gets any. The place at the gate is free by then.
    pub(crate) fn finish(self, last: Option<Result<ChunkEvent, ApiError>>) {
        drop(self.ticket);
        if let Some(last) = last {
            self.reader.finish(last);
        }
    }
}

/// The ending that is due for a chunk. An order comes first, and a reader that has left cannot stall.
fn due(fate: Fate, is_overdue: bool, reader: ReaderState) -> Option<ChunkEnding> {
    match (fate, reader) {
        (Fate::Aborted, _) => Some(ChunkEnding::Ended(ChunkEndReason::Aborted)),
        _ if is_overdue => Some(ChunkEnding::Overdue),
        (_, ReaderState::Left) => Some(ChunkEnding::ReaderLeft),
        (_, ReaderState::Stalled) => Some(ChunkEnding::ReaderStalled),
        (Fate::Runs | Fate::Held, ReaderState::Reads) => None,
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use refrain_protocol::engine_order::PauseMode;
    use refrain_service_kit::telemetry::Metrics;
    use tokio::sync::mpsc;

    use super::*;
    use crate::metrics::WorkerMetrics;
    use crate::orders::Orders;

    #[test]
    fn the_time_of_a_request_begins_with_its_first_turn() {
        let metrics = Metrics::new().unwrap();
        let metrics = WorkerMetrics::new(&metrics, "model", Default::default()).unwrap();
        let orders = Arc::new(Orders::new(false, Arc::new(metrics)));
        let (events, _received) = mpsc::channel(4);
        orders.begin_pause(PauseMode::Keep);
        let ticket = orders.enter(true);
        let time_left = Some(Duration::from_secs(1));
        let mut watch = Watch::new(Reader::new(events), ticket, time_left);
        let start = Instant::now();
        let mut look = |after_ms| {
            let now = start + Duration::from_millis(after_ms);
            watch.look(&orders.gate(), now, Duration::MAX)
        };
        assert!(matches!(look(10_000), Ok(true)));
        assert!(matches!(look(20_000), Ok(true)));
        orders.end_pause();
        assert!(matches!(look(30_000), Ok(false)));
        assert!(matches!(look(30_500), Ok(false)));
        assert!(matches!(look(32_000), Err(ChunkEnding::Overdue)));
    }

    #[test]
    fn the_ending_that_says_most_is_due_first() {
        use ReaderState::{Left, Reads, Stalled};
        for fate in [Fate::Runs, Fate::Held] {
            assert!(due(fate, false, Reads).is_none());
            assert!(matches!(due(fate, true, Left), Some(ChunkEnding::Overdue)));
            let left = due(fate, false, Left);
            assert!(matches!(left, Some(ChunkEnding::ReaderLeft)));
            let stalled = due(fate, false, Stalled);
            assert!(matches!(stalled, Some(ChunkEnding::ReaderStalled)));
        }
        let aborted = due(Fate::Aborted, true, Left);
        let by_order = ChunkEndReason::Aborted;
        assert!(matches!(aborted, Some(ChunkEnding::Ended(reason)) if reason == by_order));
    }
}
