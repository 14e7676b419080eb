//! Passes on what an engine says, and what its end means.

use refrain_protocol::chunk::{ChunkEnd, ChunkEndReason, ChunkEvent};
use refrain_protocol::{ApiError, ErrorKind};
use tokio::sync::mpsc::Permit;
use tokio::sync::mpsc::error::TrySendError;

use super::Chunks;
use super::listen::{Events, Outcome};
use super::outside::Outside;
use crate::decode::entry::Entry;
use crate::engine::GeneratedEnd;
use crate::running::Absorbed;

/// Where one event goes.
type Room<'a> = Permit<'a, Result<ChunkEvent, ApiError>>;

/// Most tokens that an engine draws and does not send: those of a character that lacks its last byte.
const UNSENT_TOKENS_MAX: u32 = 3;

impl Chunks {
    /// Passes on what was taken in. Returns the chunk's end, if this is it.
    ///
    /// # Errors
    /// The chunk is over for another reason: its reader's, or what it was told meanwhile.
    pub(super) async fn say(
        &self,
        entry: &mut Entry,
        outside: &mut Outside,
        absorbed: Absorbed,
    ) -> Result<Option<ChunkEnd>, Outcome> {
        let Absorbed {
            message,
            heard,
            end,
        } = absorbed;
        let running = &entry.running;
        running.remember(running.piece_of(&heard));
        self.outlet.keep(running, heard);
        let event = ChunkEvent::Step(message);
        let room = tokio::select! {
            biased;
            room = self.room(&entry.events) => room,
            over = outside.interrupts(&entry.running) => Err(over),
        };
        match room {
            Ok(room) => room.send(Ok(event)),
            Err(over) => {
                // If its reader is told of the end, then of this before.
                entry.unsent = Some(event);
                return Err(over);
            }
        }
        if end.is_none()
            && let Some(told) = outside.told()
        {
            return Err(told.outcome(&entry.running));
        }
        Ok(end)
    }

    /// Passes an event on once there is room for it.
    pub(super) async fn tell(&self, events: &Events, event: ChunkEvent) -> Result<(), Outcome> {
        self.room(events).await?.send(Ok(event));
        Ok(())
    }

    /// Room for an event. A reader that has none is waited for only for so long.
    async fn room<'a>(&self, events: &'a Events) -> Result<Room<'a>, Outcome> {
        match events.try_reserve() {
            Ok(room) => return Ok(room),
            Err(TrySendError::Closed(())) => return Err(Outcome::Left),
            Err(TrySendError::Full(())) => {}
        }
        match tokio::time::timeout(self.reader_stall_max, events.reserve()).await {
            Ok(Ok(room)) => Ok(room),
            Ok(Err(_)) => Err(Outcome::Left),
            Err(_) => Err(Outcome::Stalled),
        }
    }

    /// The engine ended by itself, where the chunk had not.
    pub(super) fn ended(&self, entry: &mut Entry, end: GeneratedEnd, has_output: bool) -> Outcome {
        let running = &entry.running;
        let reason = match end {
            GeneratedEnd::Stop => ChunkEndReason::Stop,
            GeneratedEnd::Length if !has_output => {
                let nothing = "the engine ended for want of room without a token";
                return self.failed(ApiError::new(ErrorKind::Upstream, nothing));
            }
            // Short of the chunk's limit by tokens that were drawn and never sent. Else it is the engine's own limit.
            GeneratedEnd::Length
                if running.request.chunk_tokens.is_some_and(|tokens| {
                    tokens < running.request.max_new_tokens
                        && running.emitted() + UNSENT_TOKENS_MAX >= tokens
                }) =>
            {
                ChunkEndReason::ChunkLimit
            }
            GeneratedEnd::Length => ChunkEndReason::Length,
        };
        self.outlet.finish(running, reason);
        Outcome::Ended(running.end(reason))
    }
}
