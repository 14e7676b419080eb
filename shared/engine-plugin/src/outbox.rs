//! The queue from the engine's thread to the background thread, and its limit.

use std::sync::mpsc::{self, Receiver, Sender};

use refrain_protocol::document::FinishReason;

use crate::background::BackgroundEvent;
use crate::config::PluginConfig;
use crate::metrics::{PluginMetrics, QUEUED_TOKENS_MAX};
use crate::request::Request;
use crate::request_state::RequestState;

/// The engine's end of the queue.
pub(crate) struct Outbox {
    events: Sender<BackgroundEvent>,
    metrics: PluginMetrics,
    /// Output tokens of a request that are uploaded together.
    upload_tokens: usize,
    queued_tokens_max: usize,
}

impl Outbox {
    /// Both ends of the queue.
    pub(crate) fn new(
        config: &PluginConfig,
        metrics: PluginMetrics,
    ) -> (Self, Receiver<BackgroundEvent>) {
        let (events, inbox) = mpsc::channel();
        let outbox = Outbox {
            events,
            metrics,
            upload_tokens: config.piece_tokens as usize,
            queued_tokens_max: config.queued_tokens_max,
        };
        (outbox, inbox)
    }

    pub(crate) fn send(&self, event: BackgroundEvent) {
        self.metrics.queued_tokens.add(event.tokens() as i64);
        // The receiver is gone while the client is being closed.
        let _ = self.events.send(event);
    }

    /// Queues a request's output for upload, once there is enough of it. Where the queue is full it waits with the
    /// request.
    pub(crate) fn upload_if_due(&self, request: &mut Request) {
        let tokens = request.tokens_to_upload();
        if tokens < self.upload_tokens {
            return;
        }
        if self.has_room(tokens)
            && let Some(event) = request.take_upload()
        {
            self.send(event);
        }
    }

    /// Ends a request, maybe only for now.
    pub(crate) fn end(&self, request: Request, finish: FinishReason) -> RequestState {
        let (state, ended) = request.end(finish);
        if let Some(mut ended) = ended {
            // The end of an output always reaches the store. Tokens that the replicas lack only cost drafts.
            let unmerged = ended.unmerged_tokens();
            if unmerged > 0 && !self.has_room(unmerged) {
                ended.drop_unmerged();
            }
            self.send(BackgroundEvent::End(ended));
        }
        state
    }

    /// Whether the queue has room for this many more tokens.
    fn has_room(&self, tokens: usize) -> bool {
        let queued = self.metrics.queued_tokens.get().max(0) as usize;
        let has_room = queued + tokens <= self.queued_tokens_max;
        if !has_room {
            self.metrics.rejected(QUEUED_TOKENS_MAX);
        }
        has_room
    }
}
