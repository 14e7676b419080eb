//! Messages that are neither appends nor about background jobs.

use refrain_protocol::admin::{ConfirmReply, ConfirmRequest};
use refrain_protocol::{ApiError, ErrorKind, NamespaceId};
use tokio::sync::oneshot;

use crate::directory::DiskSpace;
use crate::metrics::Limit;
use crate::record::ErasureRecord;
use crate::shared_store::unavailable;
use crate::writer::actor::WriterActor;
use crate::writer::actor::errors::disk_refused;
use crate::writer::core::WriterCore;
use crate::writer::outcome::CommitOutcome;
use crate::writer::requests::KeptStatistics;

impl WriterActor {
    /// The error for appends if there is no space for them.
    pub(super) fn no_room(&self) -> Option<ApiError> {
        let room = DiskSpace::of(&self.config.data_dir);
        if room
            .is_some_and(|room| room.is_used_up(self.config.disk_reserve_bytes, self.log_bytes()))
        {
            self.metrics.reject(Limit::Disk);
            let message = "the draft store's disk is full up to its reserve (disk_reserve_bytes): \
                           nothing is stored until space is freed";
            return Some(
                ApiError::new(ErrorKind::Unavailable, message).with_retry_after_ms(10_000),
            );
        }
        if self.is_shrinking() && self.log_bytes() > self.config.log_bytes_max {
            self.metrics.reject(Limit::LogBytes);
            let message =
                "the draft store's log has reached log_bytes_max and is being made smaller; retry";
            return Some(ApiError::new(ErrorKind::Overloaded, message).with_retry_after_ms(100));
        }
        None
    }

    /// Whether a job is running that lets the log shrink, directly or with the next job.
    fn is_shrinking(&self) -> bool {
        self.rewriting.is_running() || self.sealing.is_running()
    }

    /// Bytes of the log on disk.
    fn log_bytes(&self) -> u64 {
        let open = self.shared.read();
        open.as_ref().map_or(0, |open| open.log.disk_bytes())
    }

    /// The error for a caller that would add one namespace too many.
    pub(super) fn too_many_namespaces(&self) -> ApiError {
        self.metrics.reject(Limit::Namespaces);
        let message = "the draft store has too many namespaces (namespaces_max); raise the limit";
        ApiError::new(ErrorKind::Overloaded, message).with_retry_after_ms(60_000)
    }

    pub(super) fn statistics(
        &mut self,
        namespace: NamespaceId,
    ) -> Result<Option<KeptStatistics>, ApiError> {
        let mut kept = None;
        self.run(|core, _, _| {
            kept = core.statistics(namespace)?;
            Ok(CommitOutcome::default())
        })?;
        Ok(kept)
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
                "too many erasures are remembered (erasures_max); retry later",
            )
            .with_retry_after_ms(3_600_000)
        })
    }

    /// Accepts an operator's confirmation that a loss is acceptable, or that the wall clock is right.
    ///
    /// # Errors
    /// The store is closed, or its manifest cannot be written. The confirmation would then be lost with a restart.
    pub(super) fn confirm(&mut self, what: ConfirmRequest) -> Result<ConfirmReply, ApiError> {
        if self.core.is_none() {
            return Err(unavailable());
        }
        let confirmed = ConfirmReply {
            lost_documents: self
                .shared
                .loss()
                .filter(|_| what.loss)
                .map(|loss| loss.expected.saturating_sub(loss.found)),
            clock_offset_ms: self.shared.clock_offset_ms().filter(|_| what.clock),
        };
        if what.loss {
            self.shared.set_loss(None);
        }
        if what.clock {
            self.shared.confirm_clock();
        }
        self.write_manifest(false)
            .map_err(|error| disk_refused(&error))?;
        tracing::warn!(?confirmed, "draft store state confirmed by an operator");
        Ok(confirmed)
    }

    /// Closes the store if that was requested and no background thread runs any more.
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
        let _ = self.run(WriterCore::tick);
        let _ = self.write_manifest(true);
        self.closed = true;
        self.shared.set_open(None);
        self.core = None;
        let _ = reply.send(());
    }
}
