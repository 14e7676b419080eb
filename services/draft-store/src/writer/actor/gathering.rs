//! What waits for the next commit: updates, and what workers tell of drafts. One fsync serves all of it.

use std::time::{Duration, Instant};

use actix::{AsyncContext, Context, SpawnHandle};
use refrain_protocol::ApiError;
use tokio::sync::oneshot;

use super::Writer;
use crate::shared::unavailable;
use crate::writer::call::PendingTokens;
use crate::writer::{Append, Told};

/// An append that waits for its commit.
struct Pending {
    append: Append,
    reply: oneshot::Sender<Result<Vec<u32>, ApiError>>,
    arrived: Instant,
    _tokens: PendingTokens,
}

/// Who told what drafts are worth, and waits for the commit.
struct Teller {
    told: Told,
    reply: oneshot::Sender<Result<Vec<u8>, ApiError>>,
}

/// See the module.
#[derive(Default)]
pub(super) struct Gathered {
    pending: Vec<Pending>,
    tellers: Vec<Teller>,
    /// Of all of them; a teller counts as one.
    updates: usize,
    timer: Option<SpawnHandle>,
}

impl Writer {
    pub(super) fn gather_append(
        &mut self,
        append: Append,
        tokens: PendingTokens,
        reply: oneshot::Sender<Result<Vec<u32>, ApiError>>,
        ctx: &mut Context<Self>,
    ) {
        if self.core.is_none() {
            let _ = reply.send(Err(unavailable()));
            return;
        }
        self.gathered.updates += append.updates.len();
        self.gathered.pending.push(Pending {
            append,
            reply,
            arrived: Instant::now(),
            _tokens: tokens,
        });
        self.commit_soon(ctx);
    }

    pub(super) fn gather_told(
        &mut self,
        told: Told,
        reply: oneshot::Sender<Result<Vec<u8>, ApiError>>,
        ctx: &mut Context<Self>,
    ) {
        if self.core.is_none() {
            let _ = reply.send(Err(unavailable()));
            return;
        }
        self.gathered.updates += 1;
        self.gathered.tellers.push(Teller { told, reply });
        self.commit_soon(ctx);
    }

    /// Commits what was gathered.
    pub(super) fn commit(&mut self) {
        let pending = std::mem::take(&mut self.gathered.pending);
        let tellers = std::mem::take(&mut self.gathered.tellers);
        self.gathered.updates = 0;
        if pending.is_empty() && tellers.is_empty() {
            return;
        }
        let (appends, waiting): (Vec<Append>, Vec<_>) = pending
            .into_iter()
            .map(|pending| {
                (
                    pending.append,
                    (pending.reply, pending.arrived, pending._tokens),
                )
            })
            .unzip();
        let (told, tellers): (Vec<Told>, Vec<_>) = tellers
            .into_iter()
            .map(|teller| (teller.told, teller.reply))
            .unzip();
        let outcome = match self.no_room() {
            None => {
                self.run(|core, catalog, now_ms| core.take_in(catalog, &appends, &told, now_ms))
            }
            Some(error) => Err(error),
        };
        let (lengths, tables) = match outcome {
            Ok(outcome) => (Ok(outcome.lengths), Ok(outcome.tables)),
            Err(error) => (Err(error.clone()), Err(error)),
        };
        let answers = self.answers(lengths, waiting.len());
        let tables = self.answers(tables, tellers.len());
        // A caller that is gone needs no answer.
        for (reply, tables) in tellers.into_iter().zip(tables) {
            let _ = reply.send(tables);
        }
        for ((reply, arrived, _tokens), answer) in waiting.into_iter().zip(answers) {
            self.metrics
                .append_seconds
                .observe(arrived.elapsed().as_secs_f64());
            let _ = reply.send(answer);
        }
    }

    /// What each of `count` callers is told of a commit.
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

    /// Commits what waits: at once when that is enough, else in a moment, with what comes until then.
    fn commit_soon(&mut self, ctx: &mut Context<Self>) {
        if self.gathered.updates >= self.config.commit_updates {
            if let Some(timer) = self.gathered.timer.take() {
                ctx.cancel_future(timer);
            }
            self.commit();
        } else if self.gathered.timer.is_none() {
            let wait = Duration::from_millis(self.config.commit_interval_ms);
            self.gathered.timer = Some(ctx.run_later(wait, |writer, _| {
                writer.gathered.timer = None;
                writer.commit();
            }));
        }
    }
}
