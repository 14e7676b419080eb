//! Relaying an engine's tokens to the reader, and the meaning of the engine's end.

use refrain_protocol::chunk::{ChunkEndReason, ChunkEvent};
use refrain_protocol::document::FinishReason;
use refrain_protocol::{ApiError, ErrorKind};

use super::context::StreamContext;
use super::interrupts::Interrupts;
use crate::chunk::{ActiveChunk, ChunkEnding};
use crate::engine::GeneratedEnd;
use crate::running::{Absorbed, ActiveRequest};

/// Maximum number of tokens that an engine generates and does not send: those of a character without its last byte.
const UNSENT_TOKENS_MAX: u32 = 3;

impl StreamContext {
    /// Records a step's tokens, and sends them to the reader. Returns the reason for which they end the chunk, if they
    /// do.
    ///
    /// # Errors
    /// The chunk ends for another reason: its reader left or stalled, or it was interrupted.
    pub(super) async fn relay(
        &self,
        chunk: &mut ActiveChunk,
        interrupts: &mut Interrupts,
        absorbed: Absorbed,
    ) -> Result<Option<ChunkEndReason>, ChunkEnding> {
        let Absorbed {
            message,
            record,
            end,
        } = absorbed;
        let running = &chunk.running;
        running.remember(running.document.piece_of(&record));
        self.shared.sink.record_step(running, record);
        let event = ChunkEvent::Step(message);
        let stall_max = self.shared.reader_stall_max();
        let reader = &mut chunk.watch.reader;
        reader.deliver(event, stall_max, interrupts.wait()).await?;
        match interrupts.pending_control() {
            Some(ending) if end.is_none() => Err(ending),
            _ => Ok(end),
        }
    }

    /// The ending of a chunk whose engine ended by itself.
    pub(super) fn engine_ended(
        &self,
        running: &ActiveRequest,
        end: GeneratedEnd,
        has_output: bool,
    ) -> ChunkEnding {
        let (reason, finish) = match end {
            GeneratedEnd::Aborted if self.shared.orders.gate().is_ordered() => {
                return ChunkEnding::Ended(ChunkEndReason::Aborted);
            }
            GeneratedEnd::Aborted => {
                let message = "the engine aborted the request";
                return self.engine_failed(ApiError::new(ErrorKind::Upstream, message));
            }
            GeneratedEnd::Stop => (ChunkEndReason::Stop, FinishReason::Stop),
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
                return ChunkEnding::Ended(ChunkEndReason::ChunkLimit);
            }
            // The engine's own limit.
            GeneratedEnd::Length => (ChunkEndReason::Length, FinishReason::Length),
        };
        self.shared.sink.record_finish(running, finish);
        ChunkEnding::Ended(reason)
    }
}
