//! The writer's part in making segments: the choice of the next job, the installation of its result, and the report
//! at the end.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::time::{Duration, Instant};

use actix::{AsyncContext as _, Context, Recipient};
use tokio::sync::oneshot;

use crate::background::seal::{self, NewSegment, SealHost, SealJob, SealReport};
use crate::log::LogError;
use crate::record::SegmentId;
use crate::segments::{SegmentSource, Urgency};
use crate::writer::actor::WriterActor;
use crate::writer::actor::errors::{no_room_for_a_copy, outdated};
use crate::writer::actor::next_segment::{
    PlannedSegment, RestTimes, next_merge, next_seal, policy,
};
use crate::writer::actor::seal_state::RunningSeal;
use crate::writer::messages::{SealMessage, WriterMessage};

impl WriterActor {
    pub(super) fn handle_seal(&mut self, call: SealMessage, ctx: &mut Context<Self>) {
        match call {
            SealMessage::Purge { waiter, seals } => {
                self.sealing.waiters.push((waiter, seals));
                self.begin_next(ctx);
            }
            SealMessage::Install {
                openings,
                segment,
                reply,
            } => {
                let _ = reply.send(self.install(openings, *segment));
            }
            SealMessage::Ended(outcome) => self.end_sealing(outcome, ctx),
        }
    }

    /// Starts the next job that an operator wants or that is due.
    pub(super) fn seal_next(&mut self, ctx: &mut Context<Self>) {
        let is_early = |not_before| Instant::now() < not_before;
        let waits = self.sealing.not_before.is_some_and(is_early);
        let purged = self.next_purged().filter(|planned| {
            let open = self.shared.read();
            let bytes = open.as_ref().map_or(0, |open| planned.bytes_max(open));
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
        let open = shared.read();
        let open = open.as_ref()?;
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
        let (names, highest) = {
            let open = self.shared.read();
            let Some(open) = open.as_ref() else { return };
            let highest = open.catalog.segments().iter().map(|(id, _)| id).max();
            (open.catalog.names(namespace).cloned(), highest)
        };
        let id = self.sealing.last.max(highest.unwrap_or(0)) + 1;
        self.sealing.last = id;
        let from = match &source {
            SegmentSource::Log(_) => "log",
            SegmentSource::Segments(_) => "segments",
        };
        self.sealing.merges_next = matches!(source, SegmentSource::Log(_));
        let stop = Arc::new(AtomicBool::new(false));
        let job = SealJob {
            dir: self.config.data_dir.clone(),
            id,
            namespace,
            names,
            source,
            stop: stop.clone(),
        };
        self.sealing.running = Some(RunningSeal {
            stop,
            from,
            segment: id,
        });
        let (shared, writer, openings) = (
            self.shared.clone(),
            ctx.address().recipient(),
            self.openings,
        );
        let spawned = std::thread::Builder::new()
            .name("draft-store-seal".to_owned())
            .spawn(move || {
                let host = SealRequests { writer, openings };
                // The writer must receive the end in any case, also after a panic.
                let outcome = catch_unwind(AssertUnwindSafe(|| {
                    seal::run(&job, &shared, &host, &|_| Ok(()))
                }))
                .unwrap_or_else(|_| Err(LogError::Refused("making a segment panicked".into())));
                host.writer
                    .do_send(WriterMessage::Seal(SealMessage::Ended(outcome)));
            });
        if let Err(error) = spawned {
            self.end_sealing(Err(LogError::Refused(error.to_string())), ctx);
        }
    }

    fn install(&mut self, openings: u64, segment: NewSegment) -> Result<(), LogError> {
        if openings != self.openings || self.closing.is_some() || self.core.is_none() {
            return Err(outdated());
        }
        self.run(|core, catalog, now_ms| core.install(catalog, segment, now_ms))
            .map_err(|error| LogError::Refused(error.to_string()))?;
        // Drop the views before the files of merged segments are deleted, so that their space comes back.
        self.drop_views();
        Ok(())
    }

    fn end_sealing(&mut self, outcome: Result<SealReport, LogError>, ctx: &mut Context<Self>) {
        let Some(running) = self.sealing.running.take() else {
            return;
        };
        let result = if outcome.is_ok() { "done" } else { "failed" };
        let made = self
            .metrics
            .segments_made
            .with_label_values(&[running.from, result]);
        made.inc();
        match outcome {
            Ok(made) => tracing::info!(
                from = running.from,
                documents = made.documents,
                tokens = made.tokens,
                bytes = made.bytes,
                "draft store segment made"
            ),
            Err(error) => {
                tracing::warn!(from = running.from, %error, "draft store segment not made");
                self.sealing.not_before = Some(Instant::now() + RETRY_AFTER);
                self.clear_failed(running.segment);
                self.end_purge(Err(error));
            }
        }
        self.observe();
        self.observe_disk();
        if self.closing.is_some() {
            self.close_if_quiet();
            return;
        }
        self.begin_next(ctx);
    }

    /// Deletes the leftovers of a segment that was not made. A segment that is in use all the same stays: its name
    /// became durable before something failed.
    fn clear_failed(&self, segment: SegmentId) {
        let open = self.shared.read();
        // While the store is closed nobody knows which segments are in use. The next start does.
        let Some(open) = open.as_ref() else { return };
        let segments = open.catalog.segments();
        if segments.get(segment).is_none()
            && let Err(error) = seal::clear(&self.config.data_dir, segment)
        {
            tracing::warn!(%error, "orphaned draft store segment not deleted");
        }
    }
}

/// Wait after a failed job.
const RETRY_AFTER: Duration = Duration::from_secs(60);

/// All namespaces are searched for old documents at least this often.
const AGE_INTERVAL_MAX: Duration = Duration::from_secs(60);

/// The writer, as the sealing thread sees it.
struct SealRequests {
    writer: Recipient<WriterMessage>,
    openings: u64,
}

impl SealHost for SealRequests {
    fn install(&self, segment: NewSegment) -> Result<(), LogError> {
        let (reply, answer) = oneshot::channel();
        // One message for each segment: the mailbox takes it even when it is full.
        self.writer
            .do_send(WriterMessage::Seal(SealMessage::Install {
                openings: self.openings,
                segment: Box::new(segment),
                reply,
            }));
        answer.blocking_recv().unwrap_or_else(|_| Err(outdated()))
    }
}
