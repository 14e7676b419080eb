//! Purges: rewriting every segment that still holds removed documents, at the request of an operator.

use actix::Context;

use crate::log::LogError;
use crate::segments::{self, SegmentSource, Urgency};
use crate::writer::actor::WriterActor;
use crate::writer::actor::errors::{disk_refused, outdated};
use crate::writer::actor::next_segment::{PlannedSegment, RestTimes, next_seal, policy};
use crate::writer::actor::seal_state::Purge;
use crate::writer::requests::Reply;

impl WriterActor {
    /// Rewrites all segments with removed documents, and with `seals` seals the documents that have ended. The work
    /// begins after this call.
    pub(crate) fn request_purge(
        &mut self,
        seals: bool,
        waiter: Reply<()>,
        ctx: &mut Context<Self>,
    ) {
        self.sealing.waiters.push((waiter, seals));
        self.begin_next(ctx);
    }

    /// The next segment of the purge, which begins now if callers wait for one.
    pub(super) fn next_purged(&mut self) -> Option<PlannedSegment> {
        loop {
            if self.sealing.purge.is_none() && !self.sealing.waiters.is_empty() {
                self.begin_purge();
            }
            let purge = self.sealing.purge.as_mut()?;
            if self.core.is_none() || purge.openings != self.openings {
                self.end_purge(Err(outdated()));
                continue;
            }
            let open = self.shared.read();
            let Some(segment) = purge.left.pop_front() else {
                if let (Ok(open), Some(before_ms)) = (&open, purge.seals_before_ms) {
                    let rest = RestTimes::new(&self.config, before_ms, self.shared.now_ms());
                    let due = next_seal(policy(&self.config), open, Urgency::Crowded, rest);
                    if due.is_some() {
                        return due;
                    }
                }
                drop(open);
                self.end_purge(Ok(()));
                continue;
            };
            let mounted = open
                .as_ref()
                .ok()
                .and_then(|open| open.catalog.segments().get(segment));
            // A segment that was merged by another purge is gone.
            if let Some(mounted) = mounted {
                return Some(PlannedSegment {
                    namespace: mounted.file.namespace,
                    source: SegmentSource::Segments(vec![segment]),
                });
            }
        }
    }

    pub(super) fn begin_purge(&mut self) {
        let waiters = std::mem::take(&mut self.sealing.waiters);
        let seals = waiters.iter().any(|(_, seals)| *seals);
        let waiters: Vec<Reply<()>> = waiters.into_iter().map(|(waiter, _)| waiter).collect();
        let (left, cleared) = {
            let open = match self.shared.read() {
                Ok(open) => open,
                Err(closed) => {
                    for waiter in waiters {
                        let _ = waiter.send(Err(closed.clone()));
                    }
                    return;
                }
            };
            let segments = open.catalog.segments();
            let worn = segments.iter().filter(|(_, mounted)| mounted.is_worn());
            let left = worn.map(|(segment, _)| segment).collect();
            // Files that could not be deleted earlier must be gone now.
            let cleared = segments::clear_orphans(&self.config.data_dir, |segment| {
                segments.get(segment).is_some()
            });
            (left, cleared)
        };
        self.sealing.purge = Some(Purge {
            openings: self.openings,
            left,
            // This includes documents stored in the current millisecond.
            seals_before_ms: seals.then(|| self.shared.now_ms() + 1),
            waiters,
        });
        if let Err(error) = cleared {
            self.end_purge(Err(error));
        }
    }

    pub(super) fn end_purge(&mut self, outcome: Result<(), LogError>) {
        if let Some(purge) = self.sealing.purge.take() {
            for waiter in purge.waiters {
                let _ = waiter.send(outcome.clone().map_err(|error| disk_refused(&error)));
            }
        }
    }
}
