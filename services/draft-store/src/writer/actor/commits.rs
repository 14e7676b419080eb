//! Gathering appends and statistics updates for a commit. One `fdatasync` serves all of them.

use std::time::{Duration, Instant};

use actix::{AsyncContext as _, Context};
use refrain_protocol::ApiError;

use crate::shared_store::unavailable;
use crate::writer::actor::WriterActor;
use crate::writer::actor::commit_queue::{CommitQueue, WaitingCaller};
use crate::writer::requests::{Append, PendingTokens, Reply, SavedStatistics, StatisticsUpdate};

/// Updates that are enough to commit at once, before the interval is over.
const COMMIT_UPDATES_MAX: usize = 512;

impl WriterActor {
    /// Stores updates with the next commit, and replies with the lengths once they are durable.
    pub(crate) fn queue_append(
        &mut self,
        append: Append,
        tokens: PendingTokens,
        reply: Reply<Vec<u32>>,
        ctx: &mut Context<Self>,
    ) {
        if self.core.is_none() {
            let _ = reply.send(Err(unavailable()));
            return;
        }
        self.commit_queue.updates += append.updates.len();
        self.commit_queue.appends.push(append);
        self.commit_queue.callers.push(WaitingCaller {
            reply,
            arrived: Instant::now(),
            _tokens: tokens,
        });
        self.commit_soon(ctx);
    }

    /// Replaces the acceptance statistics of a namespace with the next commit, and replies once that is durable.
    pub(crate) fn queue_statistics(
        &mut self,
        update: StatisticsUpdate,
        reply: Reply<SavedStatistics>,
        ctx: &mut Context<Self>,
    ) {
        if self.core.is_none() {
            let _ = reply.send(Err(unavailable()));
            return;
        }
        self.commit_queue.updates += 1;
        self.commit_queue.statistics.push(update);
        self.commit_queue.savers.push(reply);
        self.commit_soon(ctx);
    }

    /// Commits everything that is queued.
    pub(super) fn commit(&mut self) {
        let timer = self.commit_queue.timer.take();
        let rest = CommitQueue {
            timer,
            ..CommitQueue::default()
        };
        let queue = std::mem::replace(&mut self.commit_queue, rest);
        let (appends, statistics) = (queue.appends, queue.statistics);
        if appends.is_empty() && statistics.is_empty() {
            return;
        }
        let outcome = match self.no_room() {
            None => self
                .run(|core, catalog, now_ms| core.append(catalog, &appends, &statistics, now_ms)),
            Some(error) => Err(error),
        };
        let (lengths, saved) = match outcome {
            Ok(outcome) => (Ok(outcome.lengths), Ok(outcome.statistics)),
            Err(error) => (Err(error.clone()), Err(error)),
        };
        let answers = self.answers(lengths, appends.len());
        let saved = self.answers(saved, statistics.len());
        for (reply, saved) in queue.savers.into_iter().zip(saved) {
            let _ = reply.send(saved);
        }
        for (caller, answer) in queue.callers.into_iter().zip(answers) {
            self.metrics
                .append_seconds
                .observe(caller.arrived.elapsed().as_secs_f64());
            let _ = caller.reply.send(answer);
        }
    }

    /// The answers for `count` callers of a commit.
    fn answers<T>(
        &self,
        outcome: Result<Vec<Option<T>>, ApiError>,
        count: usize,
    ) -> Vec<Result<T, ApiError>> {
        match outcome {
            Ok(found) => found
                .into_iter()
                .map(|found| found.ok_or_else(|| self.too_many_namespaces()))
                .collect(),
            Err(error) => (0..count).map(|_| Err(error.clone())).collect(),
        }
    }

    /// Commits the queue: at once if it is long enough, otherwise after the interval, with what arrives until then.
    fn commit_soon(&mut self, ctx: &mut Context<Self>) {
        if self.commit_queue.updates >= COMMIT_UPDATES_MAX {
            if let Some(timer) = self.commit_queue.timer.take() {
                ctx.cancel_future(timer);
            }
            self.commit();
        } else if self.commit_queue.timer.is_none() {
            let wait = Duration::from_millis(self.config.tuning.commit_interval_ms);
            self.commit_queue.timer = Some(ctx.run_later(wait, |writer, _| {
                writer.commit_queue.timer = None;
                writer.commit();
            }));
        }
    }
}
