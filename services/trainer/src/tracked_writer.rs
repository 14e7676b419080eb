//! The writer of an answer, which tells the listener how its request ended.

use std::sync::Arc;

use async_trait::async_trait;
use refrain_gateway::{ChoiceProgress, RequestEvents, RequestSummary, SurfaceWriter};
use refrain_protocol::ApiError;

use super::hold::Slots;
use super::in_flight::{Entry, Outcome};

/// Passes everything on to another writer. With it the slots of the request end.
pub(super) struct TrackedWriter {
    writer: Box<dyn SurfaceWriter>,
    entry: Arc<Entry>,
    _slots: Option<Slots>,
}

impl TrackedWriter {
    /// Wraps the writer of a request.
    pub(super) fn new(
        writer: Box<dyn SurfaceWriter>,
        entry: Arc<Entry>,
        slots: Option<Slots>,
    ) -> Self {
        TrackedWriter {
            writer,
            entry,
            _slots: slots,
        }
    }
}

#[async_trait]
impl SurfaceWriter for TrackedWriter {
    fn begin(&mut self) -> Result<Vec<u8>, ApiError> {
        self.writer.begin()
    }

    fn progress(&mut self, index: u32, progress: ChoiceProgress) -> Result<Vec<u8>, ApiError> {
        self.writer.progress(index, progress)
    }

    fn done(&mut self, summary: &RequestSummary) -> Result<Vec<u8>, ApiError> {
        self.entry.ended(self.entry.answered());
        self.writer.done(summary)
    }

    fn failed(&mut self, error: &ApiError) -> Result<Vec<u8>, ApiError> {
        self.entry.ended(Outcome::Failed);
        self.writer.failed(error)
    }

    fn keep_alive(&self) -> &'static [u8] {
        self.writer.keep_alive()
    }

    async fn collect(self: Box<Self>, events: &mut RequestEvents) -> Result<Vec<u8>, ApiError> {
        let TrackedWriter {
            writer,
            entry,
            _slots: slots,
        } = *self;
        let body = writer.collect(events).await?;
        entry.ended(entry.answered());
        drop(slots);
        Ok(body)
    }
}
