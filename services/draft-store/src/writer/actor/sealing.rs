//! The writer's part in making segments: the choice of the next job, the installation of its result, and the report
//! at the end.

use std::time::{Duration, Instant};

use actix::Context;
use refrain_protocol::ApiError;

use crate::background::seal::{self, NewSegment, SealJob, SealReport};
use crate::log::LogError;
use crate::record::SegmentId;
use crate::segments::{SegmentSource, Urgency};
use crate::writer::actor::WriterActor;
use crate::writer::actor::errors::{no_room_for_a_copy, outdated};
use crate::writer::actor::jobs::RETRY_AFTER;
use crate::writer::actor::next_segment::{
    PlannedSegment, RestTimes, next_merge, next_seal, policy,
};

/// All namespaces are searched for old documents at least this often.
const AGE_INTERVAL_MAX: Duration = Duration::from_secs(60);

impl WriterActor {
    /// Starts the next job that an operator wants or that is due.
    pub(super) fn seal_next(&mut self, ctx: &mut Context<Self>) {
        let is_early = |not_before| Instant::now() < not_before;
        let waits = self.sealing.not_before.is_some_and(is_early);
        let purged = self.next_purged().filter(|planned| {
            let open = self.shared.read();
            let bytes = open.map_or(0, |open| planned.bytes_max(&open));
            self.has_room_for(bytes)
        });
        if purged.is_none() && self.sealing.purge.is_some() {
            // Even an operator's request must not fill the disk: the log could not be opened again.
            self.end_purge(Err(no_room_for_a_copy()));
        }
        let due = purged.or_else(|| match waits {
            true => None,
            false => self.next_due(),
        });
        if let Some(planned) = due {
            self.begin_sealing(planned, ctx);
        }
    }

    fn next_due(&mut self) -> Option<PlannedSegment> {
        let now_ms = self.shared.now_ms();
        let seal_after_ms = self.config.seal_after_s.saturating_mul(1_000);
        let seal_age = Duration::from_secs(self.config.tuning.seal_age_s);
        let mut rest = RestTimes::new(&self.config, now_ms.saturating_sub(seal_after_ms), now_ms);
        let looks_at_age = self
            .sealing
            .aged_at
            .is_none_or(|at| at.elapsed() >= seal_age.min(AGE_INTERVAL_MAX));
        let shared = self.shared.clone();
        let open = &*shared.read().ok()?;
        let urgency =
            if open.catalog.segments().unsealed_tokens() > self.config.tuning.unsealed_tokens_max {
                // Finished documents seldom continue, and those that do come back from their segment.
                rest.finished_ms = now_ms;
                Urgency::Crowded
            } else if looks_at_age {
                let age_ms = seal_age.as_millis() as u64;
                let before_ms = now_ms.saturating_sub(age_ms);
                Urgency::Aged { before_ms }
            } else {
                Urgency::Usual
            };
        let policy = policy(&self.config);
        // Sealing and merging take turns. A store that always has something to seal would otherwise never free space,
        // nor seal if it always has something to merge.
        let has_room = |planned: &PlannedSegment| self.has_room_for(planned.bytes_max(open));
        let merge = next_merge(policy, open).filter(has_room);
        if merge.is_some() && self.sealing.merges_next {
            return merge;
        }
        let seal = next_seal(policy, open, urgency, rest).filter(has_room);
        if seal.is_none() && looks_at_age {
            self.sealing.aged_at = Some(Instant::now());
        }
        seal.or(merge)
    }

    fn begin_sealing(&mut self, planned: PlannedSegment, ctx: &mut Context<Self>) {
        let PlannedSegment { namespace, source } = planned;
        let Ok(id) = self.next_segment_id() else {
            return;
        };
        let names = {
            let Ok(open) = self.shared.read() else { return };
            open.catalog.names(namespace).cloned()
        };
        let from = match &source {
            SegmentSource::Log(_) => "log",
            SegmentSource::Segments(_) => "segments",
        };
        self.sealing.merges_next = matches!(source, SegmentSource::Log(_));
        let (shared, dir) = (self.shared.clone(), self.config.data_dir.clone());
        self.begin_job(
            "draft-store-seal",
            ctx,
            move |host, stop| {
                let job = SealJob {
                    dir,
                    id,
                    namespace,
                    names,
                    source,
                    stop,
                };
                seal::run(&job, &shared, host, &|_| Ok(()))
            },
            move |writer, outcome, ctx| writer.end_sealing(outcome, from, id, ctx),
        );
    }

    /// A number that no segment has or had.
    pub(super) fn next_segment_id(&mut self) -> Result<SegmentId, ApiError> {
        let highest = {
            let open = self.shared.read()?;
            open.catalog.segments().iter().map(|(id, _)| id).max()
        };
        self.sealing.last = self.sealing.last.max(highest.unwrap_or(0)) + 1;
        Ok(self.sealing.last)
    }

    /// Puts a new segment into use.
    pub(super) fn install(&mut self, segment: NewSegment) -> Result<(), LogError> {
        if self.closing.is_some() {
            return Err(outdated());
        }
        self.run(|core, catalog, now_ms| core.install(catalog, segment, now_ms))
            .map_err(|error| LogError::Refused(error.to_string()))?;
        // Drop the views before the files of merged segments are deleted, so that their space comes back.
        self.drop_views();
        Ok(())
    }

    fn end_sealing(
        &mut self,
        outcome: Result<SealReport, LogError>,
        from: &'static str,
        segment: SegmentId,
        ctx: &mut Context<Self>,
    ) {
        let result = if outcome.is_ok() { "done" } else { "failed" };
        let made = &self.metrics.segments_made;
        made.with_label_values(&[from, result]).inc();
        match outcome {
            Ok(made) => tracing::info!(
                from,
                documents = made.documents,
                tokens = made.tokens,
                bytes = made.bytes,
                "draft store segment made"
            ),
            Err(error) => {
                tracing::warn!(from, %error, "draft store segment not made");
                self.sealing.not_before = Some(Instant::now() + RETRY_AFTER);
                self.clear_failed(segment);
                self.end_purge(Err(error));
            }
        }
        self.observe();
        self.observe_disk();
        self.after_job(ctx);
    }

    /// Deletes the leftovers of a segment that was not made. A segment that is in use all the same stays: its name
    /// became durable before something failed.
    fn clear_failed(&self, segment: SegmentId) {
        // While the store is closed nobody knows which segments are in use. The next start does.
        let Ok(open) = self.shared.read() else { return };
        let segments = open.catalog.segments();
        if segments.get(segment).is_none()
            && let Err(error) = seal::clear(&self.config.data_dir, segment)
        {
            tracing::warn!(%error, "orphaned draft store segment not deleted");
        }
    }
}
