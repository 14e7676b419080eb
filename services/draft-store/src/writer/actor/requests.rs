//! Calls that are answered with more than a length.

use refrain_protocol::{ApiError, ErrorKind};

use tokio::sync::oneshot;

use super::Writer;
use crate::directory::Room;
use crate::metrics::Limit;
use crate::record::ErasureRecord;
use crate::writer::{Core, Registration};

impl Writer {
    pub(super) fn is_disk_used_up(&self) -> bool {
        let room = Room::of(&self.config.data_dir);
        room.is_some_and(|room| room.is_used_up(self.config.disk_reserve_bytes))
    }

    pub(super) fn disk_is_full(&self) -> ApiError {
        self.metrics.reject(Limit::Disk);
        let message = "the draft store's disk is full up to its reserve (disk_reserve_bytes): \
                       nothing is stored until there is room";
        ApiError::new(ErrorKind::Unavailable, message).with_retry_after_ms(10_000)
    }

    pub(super) fn register_group(&mut self, registration: Registration) -> Result<(), ApiError> {
        let mut is_registered = false;
        self.run(|core, catalog, now_ms| {
            let (registered, outcome) = core.register_group(catalog, registration, now_ms)?;
            is_registered = registered;
            Ok(outcome)
        })?;
        if is_registered {
            return Ok(());
        }
        self.metrics.reject(Limit::Groups);
        let message = "as many groups are registered as may be (groups_max)";
        Err(ApiError::new(ErrorKind::Overloaded, message).with_retry_after_ms(10_000))
    }

    pub(super) fn mark(&mut self, mark: ErasureRecord) -> Result<ErasureRecord, ApiError> {
        let mut marked = None;
        self.run(|core, catalog, now_ms| {
            let (mark, outcome) = core.mark(catalog, mark, now_ms)?;
            marked = mark;
            Ok(outcome)
        })?;
        marked.ok_or_else(|| {
            self.metrics.reject(Limit::Erasures);
            ApiError::new(
                ErrorKind::Overloaded,
                "as many erasures are remembered as may be (erasures_max)",
            )
            .with_retry_after_ms(3_600_000)
        })
    }

    /// Closes the store when that was asked for and no thread is at work any more.
    pub(super) fn close_if_quiet(&mut self) {
        if !self.rewriting.is_running()
            && !self.sealing.is_running()
            && let Some(reply) = self.closing.take()
        {
            self.close(reply);
        }
    }

    fn close(&mut self, reply: oneshot::Sender<()>) {
        // Writes the times of use.
        let _ = self.run(Core::tick);
        self.write_manifest(true);
        self.closed = true;
        self.shared.set_open(None);
        self.core = None;
        let _ = reply.send(());
    }
}
