//! The commands to a driver, and the chunks that an order ends.

use refrain_protocol::chunk::{ChunkCut, ChunkEndReason};
use refrain_protocol::{DocumentId, LeaseId};
use tokio::sync::oneshot;

use super::active::{ActiveChunk, ChunkKey};
use super::ending::ChunkEnding;
use crate::orders::{Fate, Gate};

/// A command to the driver that decodes.
pub(crate) enum Command {
    /// Decode a chunk.
    Start(Box<ActiveChunk>),
    /// Shorten an output: its reader needs no more of it. The sender reports that this is done.
    Cut(ChunkCut, oneshot::Sender<()>),
    /// End the running chunks that an order is about.
    EndChunks(EndOrder),
    /// Stop as soon as the running chunks have ended. No chunk begins after this.
    Stop,
}

/// An order to end running chunks.
#[derive(Clone, Debug)]
pub(crate) enum EndOrder {
    /// The worker drains: all requests go on at other workers.
    Evacuate,
    /// Other tenants wait for the slots of these chunks.
    GiveWay(Vec<LeaseId>),
    /// A trainer aborts what runs.
    Abort,
    /// A newer lease of this output's request is here. The older one must not go on beside it.
    TakeOver(DocumentId),
}

impl EndOrder {
    /// Whether it ends a chunk, with the gate as it is now.
    pub(crate) fn ends(&self, chunk: &ChunkKey, gate: &Gate) -> bool {
        match self {
            EndOrder::Evacuate => true,
            // A held chunk is in nobody's way: another one would be held in its place.
            EndOrder::GiveWay(leases) => !gate.is_shut() && leases.contains(&chunk.lease),
            EndOrder::Abort => gate.fate(chunk.begun_in) == Fate::Aborted,
            EndOrder::TakeOver(document) => chunk.document == *document,
        }
    }

    /// The way in which it ends a chunk.
    pub(crate) fn ending(&self) -> ChunkEnding {
        match self {
            EndOrder::Evacuate => ChunkEnding::Ended(ChunkEndReason::Draining),
            EndOrder::GiveWay(_) => ChunkEnding::Ended(ChunkEndReason::GaveWay),
            EndOrder::Abort => ChunkEnding::Ended(ChunkEndReason::Aborted),
            EndOrder::TakeOver(_) => ChunkEnding::TakenOver,
        }
    }
}

#[cfg(test)]
mod tests {
    use std::time::Instant;

    use refrain_protocol::engine_order::PauseMode;

    use super::*;

    #[test]
    fn an_order_ends_the_chunks_that_it_is_about() {
        let chunk = |lease, document, begun_in| ChunkKey {
            lease: LeaseId(lease),
            document: DocumentId(document),
            begun_in,
        };
        let open = Gate::default();
        let chunks = [chunk(1, 1, 0), chunk(2, 2, 0), chunk(3, 3, 1)];
        let ended = |order: EndOrder, gate: &Gate| chunks.map(|chunk| order.ends(&chunk, gate));
        assert_eq!(ended(EndOrder::Evacuate, &open), [true; 3]);
        let way = EndOrder::GiveWay(vec![LeaseId(2), LeaseId(9)]);
        assert_eq!(ended(way.clone(), &open), [false, true, false]);
        let newer = EndOrder::TakeOver(DocumentId(3));
        assert_eq!(ended(newer, &open), [false, false, true]);
        assert_eq!(ended(EndOrder::Abort, &open), [false; 3]);

        let mut kept = open;
        kept.begin_pause(PauseMode::Keep, Instant::now());
        assert!(kept.is_shut());
        assert_eq!(ended(way, &kept), [false; 3]);
        assert_eq!(ended(EndOrder::Evacuate, &kept), [true; 3]);
        assert_eq!(ended(EndOrder::Abort, &kept), [false; 3]);

        // The request that began in the pause waits for its end.
        let mut aborting = open;
        aborting.begin_pause(PauseMode::Abort, Instant::now());
        assert_eq!(ended(EndOrder::Abort, &aborting), [true, true, false]);
    }
}
