//! Callers that wait for replication.

use std::collections::HashMap;

use tokio::sync::oneshot;

use crate::record::DocumentKey;

/// Callers that wait until the brokers have a document, with the sequence that they wait for.
#[derive(Default)]
pub(super) struct ReplicationWaiters(HashMap<DocumentKey, Vec<(u64, oneshot::Sender<()>)>>);

impl ReplicationWaiters {
    /// Adds a caller that waits for a document up to this change.
    pub(super) fn add(&mut self, key: DocumentKey, sequence: u64, reply: oneshot::Sender<()>) {
        self.0.entry(key).or_default().push((sequence, reply));
    }

    /// Answers those who wait for a document up to this change.
    pub(super) fn answer(&mut self, key: DocumentKey, sequence: u64) {
        let Some(waiting) = self.0.get_mut(&key) else {
            return;
        };
        let (answered, left) = std::mem::take(waiting)
            .into_iter()
            .partition(|(wanted, _)| *wanted <= sequence);
        *waiting = left;
        if waiting.is_empty() {
            self.0.remove(&key);
        }
        let answered: Vec<(u64, oneshot::Sender<()>)> = answered;
        for (_, reply) in answered {
            let _ = reply.send(());
        }
    }

    /// Forgets callers that wait no longer.
    pub(super) fn sweep(&mut self) {
        self.0.retain(|_, waiting| {
            waiting.retain(|(_, reply)| !reply.is_closed());
            !waiting.is_empty()
        });
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    use refrain_protocol::{DocumentId, NamespaceId};

    #[test]
    fn a_caller_is_answered_once_the_brokers_have_its_change() {
        let key = |document| DocumentKey::new(NamespaceId(1), DocumentId(document));
        let mut waiters = ReplicationWaiters::default();
        let mut answers = Vec::new();
        for (document, sequence) in [(1, 5), (1, 7), (2, 5), (2, 5)] {
            let (reply, answer) = oneshot::channel();
            waiters.add(key(document), sequence, reply);
            answers.push(answer);
        }
        // One of them hangs up.
        answers.pop();
        waiters.sweep();
        waiters.answer(key(1), 6);
        waiters.answer(key(3), 9);
        let is_answered = answers.iter_mut().map(|answer| answer.try_recv().is_ok());
        assert_eq!(is_answered.collect::<Vec<_>>(), [true, false, false]);
        waiters.answer(key(1), 7);
        waiters.answer(key(2), 5);
        assert!(answers[1].try_recv().is_ok() && answers[2].try_recv().is_ok());
        assert!(waiters.0.is_empty());
    }
}
