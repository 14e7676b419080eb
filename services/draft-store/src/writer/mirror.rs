//! Mirroring: while the log is rewritten, a second log gets every commit, too; see `background/log_rewrite.rs`.

use std::sync::Arc;

use crate::log::{Batch, LogError, RecordLog};
use crate::record::store_key;
use crate::writer::core::WriterCore;

impl WriterCore {
    /// Waits until the log has memory for a commit, and its mirror as well.
    pub(crate) fn await_room(&mut self) -> Result<(), LogError> {
        if let Some(mirror) = &self.mirror
            && let Err(error) = mirror.await_room()
        {
            self.abort_mirror(&error);
        }
        self.log.await_room()
    }

    fn abort_mirror(&mut self, error: &LogError) {
        tracing::warn!(%error, "draft store log rewrite aborted");
        self.mirror = None;
    }

    /// Repeats a commit in the mirror. A failure costs the rewrite, not the commit.
    pub(super) fn mirror(&mut self, batch: &mut Batch) {
        // The identity says that a log is complete, so it comes last.
        batch.forget(&store_key());
        self.mirrored_bytes += batch.bytes();
        if let Some(mirror) = &self.mirror
            && let Err(error) = mirror.write(batch)
        {
            self.abort_mirror(&error);
        }
    }

    /// Writes every commit to `to` as well from now on. Returns the log that it mirrors.
    pub(crate) fn begin_mirror(&mut self, to: Arc<dyn RecordLog>) -> Arc<dyn RecordLog> {
        self.mirror = Some(to);
        self.remains.begin_copy();
        self.mirrored_bytes = 0;
        self.log.clone()
    }

    /// Writes the identity to the mirror, which has all records now, and makes it durable.
    pub(crate) fn complete_mirror(&self) -> Result<Arc<dyn RecordLog>, LogError> {
        let Some(mirror) = &self.mirror else {
            return Err(LogError::Refused("the rewrite was aborted".into()));
        };
        let mut batch = Batch::default();
        batch.put_record(store_key(), &self.store);
        mirror.commit(&batch)?;
        Ok(mirror.clone())
    }

    /// Ends mirroring. With `to`, that log is in use from now on.
    pub(crate) fn end_mirror(&mut self, to: Option<Arc<dyn RecordLog>>) {
        self.mirror = None;
        if let Some(to) = to {
            self.log = to;
        }
    }
}
