//! Erasing documents.
//!
//! First a mark is stored, so that nothing that began before it is accepted any more. Then the documents are removed,
//! each with a tombstone for followers. Finally the files that still hold their text are rewritten.

use std::path::Path;

use refrain_protocol::admin::{ERASED_FILES_LISTED_MAX, EraseReply, EraseRequest};
use refrain_protocol::{ApiError, ErrorKind};

use crate::directory::{Cleared, clear_quarantines};
use crate::handle::DraftStoreHandle;
use crate::handle::checks::{NAME_BYTES_MAX, answer_of};
use crate::reading::erasure;
use crate::record::replication::StreamErasureRecord;
use crate::record::{ErasureRecord, SegmentId};
use crate::segments;
use crate::shared_store::unavailable;

/// Checks that a request says what to erase.
fn check_request(request: EraseRequest) -> Result<ErasureRecord, ApiError> {
    let EraseRequest {
        tenant,
        model,
        session,
        from_ms,
        until_ms,
        quarantines: _,
    } = request;
    for (param, name) in [
        ("tenant", &tenant),
        ("model", &model),
        ("session", &session),
    ] {
        if name
            .as_ref()
            .is_some_and(|name| name.len() > NAME_BYTES_MAX)
        {
            let message = format!("longer than {NAME_BYTES_MAX} bytes");
            return Err(ApiError::invalid(param, message));
        }
    }
    if session.is_some() && tenant.is_none() {
        return Err(ApiError::invalid(
            "tenant",
            "a session belongs to a tenant; name the tenant",
        ));
    }
    if tenant.is_none() && from_ms.is_none() && until_ms.is_none() {
        return Err(ApiError::invalid(
            "tenant",
            "name what to erase: a tenant, a tenant's session, or a time range (from_ms, until_ms)",
        ));
    }
    if let (Some(from_ms), Some(until_ms)) = (from_ms, until_ms)
        && from_ms >= until_ms
    {
        return Err(ApiError::invalid("until_ms", "must be later than from_ms"));
    }
    Ok(ErasureRecord {
        tenant,
        model,
        session,
        from_ms,
        until_ms,
        at_ms: 0,
    })
}

impl DraftStoreHandle {
    pub(super) async fn erase_all(&self, request: EraseRequest) -> Result<EraseReply, ApiError> {
        let with_quarantines = request.quarantines;
        let mark = check_request(request)?;
        if let Some(offset_ms) = self.inner.shared.clock_offset_ms() {
            // The erasure selects documents, and later refuses updates, by the time of this call.
            let message = format!(
                "the wall clock is {offset_ms} ms ahead of the store's time, so the scope of an erasure is \
                 unclear; set the clock, or confirm it first (refrain store confirm --clock)"
            );
            return Err(ApiError::new(ErrorKind::Conflict, message));
        }
        let alone = self.inner.erasing.lock().await;
        let openings = self.inner.shared.openings();
        let mark = self.ask(|writer| writer.mark(mark)).await?;
        let erased_at_ms = mark.at_ms;
        let before = self.segments()?;
        let documents = self.remove_hit(&mark, None).await?;
        let has_remains = self.ask(|writer| writer.has_remains()).await?;
        let files = self.files_with_removed_text(before, has_remains)?;
        let cleared = self.clear_files(with_quarantines).await?;
        if self.inner.shared.openings() != openings {
            // Documents that were quarantined then, or that came back with a log that was rolled back, were not
            // searched.
            let message = "the store was reopened during the erasure; repeat the erasure";
            return Err(unavailable().with_detail(message));
        }
        // Exports that began since the mark may hold documents that were evicted before they could be erased.
        let (shared, ended) = (self.inner.shared.clone(), mark.clone());
        tokio::task::spawn_blocking(move || {
            let open = shared.read()?;
            let catalog = &open.catalog;
            catalog.end_exports(&ended);
            Ok(())
        })
        .await
        .map_err(ApiError::internal)??;
        // The own message of the erasure comes back, and has to be carried out once more meanwhile.
        drop(alone);
        let replicas = self.erased_replicas(&mark).await;
        let (quarantines, quarantines_kept) = (cleared.deleted, cleared.kept);
        tracing::info!(
            documents,
            quarantines,
            quarantines_kept,
            "draft store documents erased"
        );
        Ok(EraseReply {
            erased_at_ms,
            documents,
            files,
            quarantines,
            quarantines_kept,
            replicas,
        })
    }

    /// The segments in use.
    fn segments(&self) -> Result<Vec<SegmentId>, ApiError> {
        let open = self.inner.shared.read()?;
        let segments = open.catalog.segments().iter();
        Ok(segments.map(|(segment, _)| segment).collect())
    }

    /// The files that hold text of removed documents, as paths in `data_dir`: the log if it has remains, and of the
    /// segments that were in use before the removal those that have removed documents. A segment without any others
    /// has gone already.
    fn files_with_removed_text(
        &self,
        before: Vec<SegmentId>,
        has_remains: bool,
    ) -> Result<Vec<String>, ApiError> {
        let open = self.inner.shared.read()?;
        let segments = open.catalog.segments();
        let is_hit = |segment: &SegmentId| segments.get(*segment).is_none_or(|of| of.is_worn());
        let hit = before.into_iter().filter(is_hit);
        let hit = hit.map(|segment| segments::path(Path::new(""), segment));
        let log = has_remains.then(|| "log".into());
        let paths = log.into_iter().chain(hit).take(ERASED_FILES_LISTED_MAX);
        Ok(paths.map(|path| path.display().to_string()).collect())
    }

    /// Carries out erasures that came by the stream. Nothing of their documents is on disk when this returns. The
    /// files are rewritten once for all of them.
    pub(crate) async fn carry_out(&self, erasures: &[StreamErasureRecord]) -> Result<(), ApiError> {
        let _running = self.enter()?;
        let _alone = self.inner.erasing.lock().await;
        let mut documents = 0;
        for erasure in erasures {
            documents += self
                .remove_hit(&erasure.mark, Some(erasure.applied_ms))
                .await?;
        }
        self.clear_files(false).await?;
        let erasures = erasures.len();
        tracing::info!(
            erasures,
            documents,
            "draft store documents erased for the stream"
        );
        Ok(())
    }

    /// Removes the documents that an erasure hits. Returns how many.
    async fn remove_hit(
        &self,
        mark: &ErasureRecord,
        known_ms: Option<u64>,
    ) -> Result<u64, ApiError> {
        let (shared, wanted) = (self.inner.shared.clone(), mark.clone());
        let search = move || erasure::documents_hit(&shared, &wanted, known_ms);
        let keys = tokio::task::spawn_blocking(search)
            .await
            .map_err(ApiError::internal)??;
        let mut documents = 0;
        for keys in keys.chunks(self.inner.config.tuning.eviction_step) {
            let keys = keys.to_vec();
            // One erasure at a time, and one call at a time: a full mailbox must not stop it half way.
            let erased = self.inner.writer.ask(move |writer| writer.erase(&keys));
            documents += answer_of(erased).await?;
        }
        Ok(documents)
    }

    /// Rewrites or deletes all files that may still hold the text of removed documents: quarantined data, segments,
    /// and the log.
    async fn clear_files(&self, with_quarantines: bool) -> Result<Cleared, ApiError> {
        let dir = self.inner.config.data_dir.clone();
        let cleared =
            tokio::task::spawn_blocking(move || clear_quarantines(&dir, with_quarantines))
                .await
                .map_err(ApiError::internal)?
                .map_err(|error| unavailable().with_detail(error))?;
        self.purge(false).await?;
        if self.ask(|writer| writer.has_remains()).await? {
            self.rewrite().await?;
        }
        Ok(cleared)
    }
}
