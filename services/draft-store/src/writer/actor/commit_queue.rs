//! Appends and statistics updates that wait for the next commit. One `fdatasync` serves all of them.

use std::time::Instant;

use refrain_protocol::ApiError;

use crate::writer::outcome::CommitOutcome;
use crate::writer::requests::{Append, PendingTokens, Reply, SavedStatistics, StatisticsUpdate};

/// Updates that are enough to commit at once, before the interval is over.
const UPDATES_MAX: usize = 512;

/// The caller of an append, who waits for its commit.
struct WaitingCaller {
    reply: Reply<Vec<u32>>,
    arrived: Instant,
    _tokens: PendingTokens,
}

/// Everything that the next commit will contain.
#[derive(Default)]
pub(super) struct CommitQueue {
    appends: Vec<Append>,
    /// The callers of the appends, in the same order.
    callers: Vec<WaitingCaller>,
    statistics: Vec<StatisticsUpdate>,
    /// The callers of the statistics updates, in the same order.
    savers: Vec<Reply<SavedStatistics>>,
    /// Updates of all appends. A statistics update counts as one.
    updates: usize,
}

impl CommitQueue {
    pub(super) fn add(&mut self, append: Append, tokens: PendingTokens, reply: Reply<Vec<u32>>) {
        self.updates += append.updates.len();
        self.appends.push(append);
        self.callers.push(WaitingCaller {
            reply,
            arrived: Instant::now(),
            _tokens: tokens,
        });
    }

    pub(super) fn add_statistics(
        &mut self,
        update: StatisticsUpdate,
        reply: Reply<SavedStatistics>,
    ) {
        self.updates += 1;
        self.statistics.push(update);
        self.savers.push(reply);
    }

    /// Whether there is enough for a commit before the interval is over.
    pub(super) fn is_full(&self) -> bool {
        self.updates >= UPDATES_MAX
    }

    pub(super) fn is_empty(&self) -> bool {
        self.appends.is_empty() && self.statistics.is_empty()
    }

    pub(super) fn appends(&self) -> &[Append] {
        &self.appends
    }

    pub(super) fn statistics(&self) -> &[StatisticsUpdate] {
        &self.statistics
    }

    /// Answers all callers. One who would have added a namespace too many gets the error of `too_many`; `observe`
    /// gets the seconds that each append took.
    pub(super) fn answer(
        self,
        outcome: Result<CommitOutcome, ApiError>,
        too_many: impl Fn() -> ApiError,
        observe: impl Fn(f64),
    ) {
        let (lengths, saved) = match outcome {
            Ok(outcome) => (
                outcome.lengths.into_iter().map(Ok).collect(),
                outcome.statistics.into_iter().map(Ok).collect(),
            ),
            Err(error) => (
                vec![Err(error.clone()); self.callers.len()],
                vec![Err(error); self.savers.len()],
            ),
        };
        let saved: Vec<Result<Option<SavedStatistics>, ApiError>> = saved;
        for (reply, saved) in self.savers.into_iter().zip(saved) {
            let _ = reply.send(saved.and_then(|saved| saved.ok_or_else(&too_many)));
        }
        let lengths: Vec<Result<Option<Vec<u32>>, ApiError>> = lengths;
        for (caller, lengths) in self.callers.into_iter().zip(lengths) {
            observe(caller.arrived.elapsed().as_secs_f64());
            let answer = lengths.and_then(|lengths| lengths.ok_or_else(&too_many));
            let _ = caller.reply.send(answer);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    use std::cell::Cell;
    use std::sync::Arc;

    use refrain_protocol::document::{DocumentHead, DocumentUpdate};
    use refrain_protocol::{DocumentId, ErrorKind, Namespace};
    use tokio::sync::oneshot;

    use crate::writer::requests::UpdateAuthor;

    fn names() -> Namespace {
        let [tenant, model, tokenizer] = ["a", "m", "t"].map(str::to_owned);
        Namespace {
            tenant,
            model,
            tokenizer,
        }
    }

    /// An append of so many updates.
    fn append(updates: usize) -> Append {
        let update = |document| DocumentUpdate {
            document: DocumentId(document),
            epoch: 1,
            prev_len: 0,
            tokens: vec![1],
            head: DocumentHead::default(),
            finish: None,
        };
        Append {
            namespace: names().id(),
            names: names(),
            updates: (0..updates as u128).map(update).collect(),
            waited_ms: 0,
            author: UpdateAuthor::Worker,
        }
    }

    fn add(
        queue: &mut CommitQueue,
        updates: usize,
    ) -> oneshot::Receiver<Result<Vec<u32>, ApiError>> {
        let (reply, answer) = oneshot::channel();
        let tokens = PendingTokens::claim(&Arc::default(), 1, 1).unwrap();
        queue.add(append(updates), tokens, reply);
        answer
    }

    fn add_statistics(
        queue: &mut CommitQueue,
    ) -> oneshot::Receiver<Result<SavedStatistics, ApiError>> {
        let (reply, answer) = oneshot::channel();
        let update = StatisticsUpdate {
            namespace: names().id(),
            names: names(),
            continues: 0,
            new_table: 7,
            statistics: vec![1],
        };
        queue.add_statistics(update, reply);
        answer
    }

    fn too_many() -> ApiError {
        ApiError::new(ErrorKind::Overloaded, "too many")
    }

    #[test]
    fn enough_updates_are_a_commit_whoever_sent_them() {
        let mut queue = CommitQueue::default();
        assert!(queue.is_empty());
        add(&mut queue, UPDATES_MAX - 1);
        assert!(!queue.is_full() && !queue.is_empty());
        add_statistics(&mut queue);
        assert!(queue.is_full());
        assert_eq!((queue.appends().len(), queue.statistics().len()), (1, 1));
    }

    #[test]
    fn every_caller_gets_its_own_answer() {
        let mut queue = CommitQueue::default();
        let (mut first, mut second) = (add(&mut queue, 2), add(&mut queue, 1));
        let mut saved = add_statistics(&mut queue);
        let observed = Cell::new(0);
        let outcome = CommitOutcome {
            lengths: vec![Some(vec![1, 2]), None],
            statistics: vec![Some(SavedStatistics::Table(7))],
            ..CommitOutcome::default()
        };
        queue.answer(Ok(outcome), too_many, |_| observed.set(observed.get() + 1));
        assert_eq!(first.try_recv().unwrap(), Ok(vec![1, 2]));
        assert_eq!(second.try_recv().unwrap(), Err(too_many()));
        assert_eq!(saved.try_recv().unwrap(), Ok(SavedStatistics::Table(7)));
        assert_eq!(observed.get(), 2);
    }

    #[test]
    fn a_failed_commit_fails_for_all() {
        let mut queue = CommitQueue::default();
        let (mut stored, mut saved) = (add(&mut queue, 1), add_statistics(&mut queue));
        let failed = ApiError::new(ErrorKind::Unavailable, "the disk");
        queue.answer(Err(failed.clone()), too_many, |_| ());
        assert_eq!(stored.try_recv().unwrap(), Err(failed.clone()));
        assert_eq!(saved.try_recv().unwrap(), Err(failed));
    }
}
