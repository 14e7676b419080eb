//! The chunks of a streaming engine at the gate of a trainer's orders.

use std::time::Instant;

use refrain_protocol::chunk::ChunkEndReason;

use super::context::StreamContext;
use super::ending::{ChunkControl, ChunkEnding};
use super::interrupts::Interrupts;
use super::timeout::{HELD_CHECK, Moment, TokenTimeout};
use crate::chunk::{ActiveChunk, HeldNotices};
use crate::orders::Fate;

impl StreamContext {
    /// This moment.
    pub(super) fn moment(&self) -> Moment {
        Moment::at(&self.shared.orders.gate(), Instant::now())
    }

    /// Waits until the chunk may call its engine.
    ///
    /// # Errors
    /// The chunk ends.
    pub(super) async fn pass_gate(
        &self,
        chunk: &mut ActiveChunk,
        interrupts: &mut Interrupts,
        held: &mut HeldNotices,
    ) -> Result<(), ChunkEnding> {
        let orders = &self.shared.orders;
        loop {
            let gate = orders.gate();
            let moment = Moment::at(&gate, Instant::now());
            let fate = chunk.fate(&gate);
            held.note(fate == Fate::Held, &chunk.events, moment.now);
            match fate {
                Fate::Runs => {
                    chunk.begin_time(moment.working_time);
                    return Ok(());
                }
                Fate::Aborted => {
                    let abort = ChunkControl::End(ChunkEndReason::Aborted);
                    return Err(ChunkEnding::Controlled(abort));
                }
                Fate::Held => tokio::select! {
                    biased;
                    ending = interrupts.wait() => return Err(ending),
                    () = orders.changed_since(gate.changes()) => {}
                    () = tokio::time::sleep(HELD_CHECK) => {}
                },
            }
        }
    }

    /// Waits until the chunk is not held any longer.
    pub(super) async fn is_let_go(&self, chunk: &ActiveChunk) {
        let orders = &self.shared.orders;
        loop {
            let gate = orders.gate();
            if chunk.fate(&gate) != Fate::Held {
                return;
            }
            orders.changed_since(gate.changes()).await;
        }
    }

    /// Ends the chunks that the order of a trainer aborts.
    pub(crate) fn abort_running(&self) {
        self.chunks.abort(&self.shared.orders.gate());
    }

    /// Looks whether the time of a chunk is really up, or was only held up.
    ///
    /// # Errors
    /// It is up, and the chunk ends.
    pub(super) fn check_time(
        &self,
        chunk: &ActiveChunk,
        timeout: &mut TokenTimeout,
    ) -> Result<(), ChunkEnding> {
        let gate = self.shared.orders.gate();
        let moment = Moment::at(&gate, Instant::now());
        let is_held = chunk.fate(&gate) == Fate::Held;
        timeout.held.note(is_held, &chunk.events, moment.now);
        if is_held {
            timeout.look_again(moment);
        } else if timeout.is_over(moment) {
            return Err(match chunk.overdue(moment.working_time) {
                Some(error) => ChunkEnding::Overdue(error),
                None => self.engine_failed(timeout.error()),
            });
        }
        Ok(())
    }
}
