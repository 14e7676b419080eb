//! The chunks of a streaming engine at the gate of a trainer's orders.

use std::time::Instant;

use super::context::StreamContext;
use super::interrupts::Interrupts;
use super::timeout::{HELD_CHECK, Moment, TokenTimeout};
use crate::chunk::{ChunkEnding, Watch};
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
        watch: &mut Watch,
        interrupts: &mut Interrupts,
    ) -> Result<(), ChunkEnding> {
        let orders = &self.shared.orders;
        loop {
            let gate = orders.gate();
            let is_held = watch.look(&gate, Instant::now(), self.shared.reader_stall_max())?;
            if !is_held {
                return Ok(());
            }
            tokio::select! {
                biased;
                ending = interrupts.wait() => return Err(ending),
                () = orders.changed_since(gate.changes()) => {}
                () = tokio::time::sleep(HELD_CHECK) => {}
            }
        }
    }

    /// Waits until a chunk that began in the pause of this number is not held any longer. Returns whether it was.
    pub(super) async fn was_held(&self, begun_in: u64) -> bool {
        let orders = &self.shared.orders;
        let mut was_held = false;
        loop {
            let gate = orders.gate();
            if gate.fate(begun_in) != Fate::Held {
                return was_held;
            }
            was_held = true;
            orders.changed_since(gate.changes()).await;
        }
    }

    /// Looks whether the time of a chunk is really up, or was only held up.
    ///
    /// # Errors
    /// It is up, and the chunk ends.
    pub(super) fn check_time(
        &self,
        watch: &mut Watch,
        timeout: &mut TokenTimeout,
    ) -> Result<(), ChunkEnding> {
        let gate = self.shared.orders.gate();
        let moment = Moment::at(&gate, Instant::now());
        if watch.look(&gate, moment.now, self.shared.reader_stall_max())? {
            timeout.look_again(moment);
        } else if timeout.is_over(moment) {
            return Err(self.engine_failed(timeout.error()));
        }
        Ok(())
    }
}
