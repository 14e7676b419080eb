//! A chunk's place in the batch: where its events go, whether it may move, what its errors mean.

use std::collections::VecDeque;
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

use refrain_protocol::chunk::ChunkEvent;
use refrain_protocol::document::DocumentUpdate;
use refrain_protocol::error::code;
use refrain_protocol::{ApiError, ErrorKind, LeaseId, NamespaceId, SignedNamespace};
use refrain_service_kit::drain::InFlight as DrainToken;
use tokio::sync::mpsc;

use crate::running::{Heard, Running};
use refrain_draft_replica::{GroupMemory, NamespaceMemory};

/// How long the engine may refuse a request for want of room before the request fails.
const ENGINE_ROOM_WAIT: Duration = Duration::from_secs(20);
/// Pause after a refusal without a hint.
pub(super) const ENGINE_ROOM_PAUSE: Duration = Duration::from_millis(20);

/// A chunk and where its events go.
pub(crate) struct Start {
    pub(crate) running: Running,
    pub(crate) events: mpsc::Sender<Result<ChunkEvent, ApiError>>,
    pub(crate) slot: Slot,
    pub(crate) span: tracing::Span,
    /// When nobody waits for it any more.
    pub(crate) deadline: Option<Instant>,
    /// Where its reader runs. A chunk that is listened to runs there as well: what the engine says then reaches the
    /// client's connection on one thread, and wakes no other.
    pub(crate) runtime: tokio::runtime::Handle,
}

/// A chunk's place: given back when the chunk is over.
pub(crate) struct Slot {
    pub(crate) lease: LeaseId,
    pub(crate) slots: Arc<crate::slots::Slots>,
    pub(crate) _running: DrainToken,
}

impl Drop for Slot {
    fn drop(&mut self) {
        self.slots.release(self.lease);
    }
}

pub(super) struct Entry {
    pub(super) running: Running,
    /// What its last step brought, until there was time to learn from it and to keep it.
    pub(super) heard: Option<Heard>,
    pub(super) events: mpsc::Sender<Result<ChunkEvent, ApiError>>,
    pub(super) lease: LeaseId,
    /// Given back before the last event is sent: whoever hears of the end may count on the slot.
    pub(super) slot: Option<Slot>,
    pub(super) span: tracing::Span,
    /// When nobody waits for it any more.
    pub(super) deadline: Option<Instant>,
    /// What its reader had no room for when the chunk ended.
    pub(super) unsent: Option<ChunkEvent>,
    /// Since when its reader has had no room for more.
    pub(super) stalled_since: Option<Instant>,
    /// Not before then: the engine had no room for it.
    pub(super) wait_until: Option<Instant>,
    pub(super) waits_since: Option<Instant>,
}

/// What is needed to shorten an output after its chunk has ended.
pub(crate) struct EndedChunk {
    pub(super) namespace_id: NamespaceId,
    pub(super) memory: Option<Arc<NamespaceMemory>>,
    /// Not held on to: many chunks are remembered, and a group is let go when nobody needs it.
    pub(super) group: Option<Weak<GroupMemory>>,
    pub(super) namespace: SignedNamespace,
    pub(super) update: DocumentUpdate,
}

/// How a chunk left the batch.
pub(super) enum Over {
    /// As it should; the outcome's label.
    Ended(&'static str),
    Failed(ApiError),
}

impl Entry {
    pub(super) fn new(start: Start) -> Self {
        let Start {
            running,
            events,
            slot,
            span,
            deadline,
            runtime: _,
        } = start;
        Entry {
            running,
            heard: None,
            events,
            lease: slot.lease,
            slot: Some(slot),
            span,
            deadline,
            unsent: None,
            stalled_since: None,
            wait_until: None,
            waits_since: None,
        }
    }

    /// The error of a chunk whose time is up.
    pub(super) fn overdue(&self, now: Instant) -> Option<ApiError> {
        let is_overdue = self.deadline.is_some_and(|deadline| deadline <= now);
        is_overdue.then(|| {
            let message = "the request has taken as long as it may";
            ApiError::new(ErrorKind::Timeout, message).with_code(code::REQUEST_TIMEOUT)
        })
    }

    /// What an item's error means: try again later, open a new session, or the end.
    pub(super) fn postpone(&mut self, error: ApiError, now: Instant) -> Result<(), ApiError> {
        match error.kind {
            ErrorKind::NotFound => self.running.reopen(),
            ErrorKind::Overloaded => {
                let since = *self.waits_since.get_or_insert(now);
                if now - since > ENGINE_ROOM_WAIT {
                    return Err(error);
                }
                let pause = error
                    .retry_after_ms
                    .map_or(ENGINE_ROOM_PAUSE, Duration::from_millis);
                self.wait_until = Some(now + pause.min(Duration::from_secs(1)));
                Ok(())
            }
            _ => Err(error),
        }
    }

    /// How to shorten the output to `output_len`.
    pub(super) fn ended(&self, output_len: u32) -> EndedChunk {
        let running = &self.running;
        let sources = running.sources.as_ref();
        EndedChunk {
            namespace_id: running.namespace,
            memory: sources.map(|sources| sources.memory.clone()),
            group: sources
                .and_then(|sources| sources.group.as_ref())
                .map(|member| Arc::downgrade(member.group())),
            namespace: running.request.namespace.clone(),
            update: running.cut(output_len),
        }
    }

    /// The last event must arrive even if the reader lags: a task of its own waits for room.
    pub(super) fn send_last(&mut self, event: Result<ChunkEvent, ApiError>) {
        self.slot = None;
        let mut last: VecDeque<_> = self.unsent.take().map(Ok).into_iter().collect();
        last.push_back(event);
        while let Some(event) = last.pop_front() {
            if let Err(mpsc::error::TrySendError::Full(event)) = self.events.try_send(event) {
                last.push_front(event);
                break;
            }
        }
        if !last.is_empty() {
            let events = self.events.clone();
            tokio::spawn(async move {
                for event in last {
                    // The reader left: nothing to tell it.
                    let _ = events.send(event).await;
                }
            });
        }
    }
}

/// Waits until a paused request may move again.
pub(super) async fn wait_for_room(batch: &[Entry]) {
    let now = Instant::now();
    let waits = batch.iter().map(|entry| {
        Box::pin(async move {
            match entry.wait_until {
                Some(until) if until > now => tokio::time::sleep(until - now).await,
                _ => {
                    // Ends with room in the queue, or with the reader's departure.
                    let _ = entry.events.reserve().await;
                }
            }
        })
    });
    if batch.is_empty() {
        return;
    }
    futures_util::future::select_all(waits).await;
}
