//! A second log that gets every commit while it is being made; see [`crate::directory`].

use std::sync::Arc;

use crate::codec;
use crate::log::{Batch, LogError, RecordLog};
use crate::record::store_key;
use crate::writer::core::WriterCore;

impl WriterCore {
    /// Repeats a commit in the log that is being made. What fails there costs the rewrite, not the commit.
    pub(super) fn mirror(&mut self, batch: &mut Batch) {
        // The identity says that a log is complete.
        batch.forget(&store_key());
        self.mirrored_bytes += batch.bytes();
        if let Some(mirror) = &self.mirror
            && let Err(error) = mirror.write(batch)
        {
            tracing::warn!(%error, "draft store rewrite broken off");
            self.mirror = None;
        }
    }

    /// Has every commit written to `to` as well. Answers with the log that it repeats.
    pub(crate) fn begin_mirror(&mut self, to: Arc<dyn RecordLog>) -> Arc<dyn RecordLog> {
        self.mirror = Some(to);
        self.mirrored_bytes = 0;
        self.log.clone()
    }

    /// Completes the mirror: it has all records now, and they are durable.
    pub(crate) fn complete_mirror(&self) -> Result<Arc<dyn RecordLog>, LogError> {
        let Some(mirror) = &self.mirror else {
            return Err(LogError::Refused("the rewrite was broken off".into()));
        };
        let mut batch = Batch::default();
        batch.put(store_key(), codec::seal(&store_key(), &self.store));
        mirror.commit(&batch)?;
        Ok(mirror.clone())
    }

    /// Bytes of keys and values that the mirror was given since it began.
    pub(crate) fn mirrored_bytes(&self) -> u64 {
        self.mirrored_bytes
    }

    /// Ends mirroring; with `to` that log counts from now on.
    pub(crate) fn end_mirror(&mut self, to: Option<Arc<dyn RecordLog>>) {
        self.mirror = None;
        if let Some(to) = to {
            self.log = to;
        }
    }
}
