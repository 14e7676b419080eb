//! What the engine's thread hands to the background thread, and how much may be on its way.

use std::sync::mpsc::{self, Receiver, Sender};

use refrain_protocol::document::FinishReason;

use crate::background::Event;
use crate::config::InEngineConfig;
use crate::metrics::{InEngineMetrics, QUEUED_TOKENS_MAX};
use crate::request::{Paused, Request};

/// The engine's end of the way to the background thread.
pub(crate) struct Outbox {
    events: Sender<Event>,
    metrics: InEngineMetrics,
    /// Output of a request that goes together, tokens.
    piece_tokens: usize,
    queued_tokens_max: usize,
}

impl Outbox {
    /// Both ends.
    pub(crate) fn new(
        config: &InEngineConfig,
        metrics: InEngineMetrics,
    ) -> (Self, Receiver<Event>) {
        let (events, inbox) = mpsc::channel();
        let outbox = Outbox {
            events,
            metrics,
            piece_tokens: config.piece_tokens as usize,
            queued_tokens_max: config.queued_tokens_max,
        };
        (outbox, inbox)
    }

    pub(crate) fn say(&self, event: Event) {
        self.metrics.queued_tokens.add(event.tokens() as i64);
        // Nobody listens once the client is being closed.
        let _ = self.events.send(event);
    }

    /// Hands on what a request said, once that is a piece. Without room it waits with its request.
    pub(crate) fn tell_if_due(&self, request: &mut Request) {
        let untold = request.untold();
        if untold < self.piece_tokens {
            return;
        }
        if self.has_room(untold)
            && let Some(event) = request.tell()
        {
            self.say(event);
        }
    }

    /// Ends a request, maybe only for now.
    pub(crate) fn end(&self, request: Request, finish: FinishReason) -> Paused {
        let (paused, ended) = request.end(finish);
        if let Some(mut ended) = ended {
            // The end of an output always reaches the store. Without it others draft less, no more.
            let lacking = ended.lacking_tokens();
            if lacking > 0 && !self.has_room(lacking) {
                ended.drop_lacking();
            }
            self.say(Event::Ended(ended));
        }
        paused
    }

    /// Whether so many tokens more may be on their way.
    fn has_room(&self, tokens: usize) -> bool {
        let queued = self.metrics.queued_tokens.get().max(0) as usize;
        let has_room = queued + tokens <= self.queued_tokens_max;
        if !has_room {
            self.metrics.rejected(QUEUED_TOKENS_MAX);
        }
        has_room
    }
}
