//! Relaying an engine's tokens to the reader, and the meaning of the engine's end.

use refrain_protocol::chunk::{ChunkEnd, ChunkEndReason, ChunkEvent};
use refrain_protocol::{ApiError, ErrorKind};
use tokio::sync::mpsc::Permit;
use tokio::sync::mpsc::error::TrySendError;

use super::context::StreamContext;
use super::ending::{ChunkEnding, Events};
use super::interrupts::Interrupts;
use crate::chunk::ActiveChunk;
use crate::engine::GeneratedEnd;
use crate::running::Absorbed;

/// Room for one event in a reader's queue.
pub(super) type EventPermit<'a> = Permit<'a, Result<ChunkEvent, ApiError>>;

/// Maximum number of tokens that an engine generates and does not send: those of a character without its last byte.
const UNSENT_TOKENS_MAX: u32 = 3;

impl StreamContext {
    /// Records a step's tokens, and sends them to the reader. Returns the end of the chunk, if this is it.
    ///
    /// # Errors
    /// The chunk ends for another reason: its reader left or stalled, or it was interrupted.
    pub(super) async fn relay(
        &self,
        chunk: &mut ActiveChunk,
        interrupts: &mut Interrupts,
        absorbed: Absorbed,
    ) -> Result<Option<ChunkEnd>, ChunkEnding> {
        let Absorbed {
            message,
            record,
            end,
        } = absorbed;
        let running = &chunk.running;
        running.remember(running.document.piece_of(&record));
        self.shared.sink.record_step(running, record);
        let event = ChunkEvent::Step(message);
        let permit = tokio::select! {
            biased;
            permit = self.reserve(&chunk.events) => permit,
            ending = interrupts.wait() => Err(ending),
        };
        match permit {
            Ok(permit) => permit.send(Ok(event)),
            Err(ending) => {
                // A reader that receives the end of the chunk receives this event before it.
                chunk.unsent = Some(event);
                return Err(ending);
            }
        }
        if end.is_none()
            && let Some(ending) = interrupts.pending_control()
        {
            return Err(ending);
        }
        Ok(end)
    }

    /// Waits for room for an event, up to the limit on stalled readers.
    pub(super) async fn reserve<'a>(
        &self,
        events: &'a Events,
    ) -> Result<EventPermit<'a>, ChunkEnding> {
        match events.try_reserve() {
            Ok(permit) => return Ok(permit),
            Err(TrySendError::Closed(())) => return Err(ChunkEnding::ReaderLeft),
            Err(TrySendError::Full(())) => {}
        }
        match tokio::time::timeout(self.shared.reader_stall_max(), events.reserve()).await {
            Ok(Ok(permit)) => Ok(permit),
            Ok(Err(_)) => Err(ChunkEnding::ReaderLeft),
            Err(_) => Err(ChunkEnding::ReaderStalled),
        }
    }

    /// The ending of a chunk whose engine ended by itself.
    pub(super) fn engine_ended(
        &self,
        chunk: &ActiveChunk,
        end: GeneratedEnd,
        has_output: bool,
    ) -> ChunkEnding {
        let running = &chunk.running;
        let reason = match end {
            GeneratedEnd::Aborted if self.shared.orders.gate().is_ordered() => {
                return ChunkEnding::Ended(running.end(ChunkEndReason::Aborted));
            }
            GeneratedEnd::Aborted => {
                let message = "the engine aborted the request";
                return self.engine_failed(ApiError::new(ErrorKind::Upstream, message));
            }
            GeneratedEnd::Stop => ChunkEndReason::Stop,
            GeneratedEnd::Length if !has_output => {
                let message = "the engine reached its length limit without a token";
                return self.engine_failed(ApiError::new(ErrorKind::Upstream, message));
            }
            // The chunk is short of its limit by tokens that the engine generated and never sent.
            GeneratedEnd::Length
                if running.request.chunk_tokens.is_some_and(|tokens| {
                    tokens < running.request.max_new_tokens
                        && running.tally.emitted() + UNSENT_TOKENS_MAX >= tokens
                }) =>
            {
                ChunkEndReason::ChunkLimit
            }
            // The engine's own limit.
            GeneratedEnd::Length => ChunkEndReason::Length,
        };
        self.shared.sink.record_end(running, reason);
        ChunkEnding::Ended(running.end(reason))
    }
}
