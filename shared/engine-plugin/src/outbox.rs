//! The queue from the engine's thread to the background actor, and its limit.

use std::sync::mpsc::{self, Sender};

use refrain_protocol::document::FinishReason;

use crate::background::{BackgroundEvent, Inbox};
use crate::backlog::Backlog;
use crate::config::PluginConfig;
use crate::metrics::{PluginMetrics, QUEUED_TOKENS_MAX};
use crate::request::Request;
use crate::request_state::RequestState;

/// The engine's end of the queue.
pub(crate) struct Outbox {
    events: Sender<BackgroundEvent>,
    metrics: PluginMetrics,
    /// Output tokens in the queue.
    queued: Backlog,
    /// Output tokens of a request that are uploaded together.
    upload_tokens: usize,
}

impl Outbox {
    /// Both ends of the queue.
    pub(crate) fn new(config: &PluginConfig, metrics: PluginMetrics) -> (Self, Inbox) {
        let (events, received) = mpsc::channel();
        let queued = Backlog::new(config.queued_tokens_max, metrics.queued_tokens.clone());
        let inbox = Inbox::new(received, queued.clone());
        let outbox = Outbox {
            events,
            metrics,
            queued,
            upload_tokens: config.piece_tokens as usize,
        };
        (outbox, inbox)
    }

    pub(crate) fn send(&self, event: BackgroundEvent) {
        self.queued.add(event.tokens());
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
        let has_room = self.queued.has_room(tokens);
        if !has_room {
            self.metrics.rejected(QUEUED_TOKENS_MAX);
        }
        has_room
    }
}
