//! Storing updates.

use std::time::Duration;

use refrain_protocol::document::{Acknowledgement, AppendReply};
use refrain_protocol::{ApiError, ErrorKind};

use crate::handle::DraftStoreHandle;
use crate::metrics::Limit;
use crate::record::DocumentKey;
use crate::writer::requests::{Append, PendingTokens};

/// How long a caller waits for its commit. After that it gets 504, and the commit may still happen.
const COMMIT_WAIT_MAX: Duration = Duration::from_secs(10);

impl DraftStoreHandle {
    /// Whether an append is answered only when the brokers have it.
    pub(super) fn replicates(&self, asked: Option<Acknowledgement>) -> Result<bool, ApiError> {
        let feed = self.inner.config.feed.as_ref();
        let configured = feed.map_or(Acknowledgement::Local, |feed| feed.acknowledgement);
        let level = asked.unwrap_or(configured);
        if level == Acknowledgement::Replicated && feed.is_none() {
            let message = "this draft store has no feed, so nothing is replicated; ask for the level local, or \
                           configure [draft_store.feed]";
            return Err(ApiError::invalid("acknowledgement", message));
        }
        Ok(level == Acknowledgement::Replicated)
    }

    /// Stores checked updates, and waits until they are durable here, and with `replicates` in the stream, too.
    pub(super) async fn store(
        &self,
        append: Append,
        replicates: bool,
    ) -> Result<AppendReply, ApiError> {
        let keys: Vec<DocumentKey> = match replicates {
            true => {
                let updates = append.updates.iter();
                updates
                    .map(|update| DocumentKey::new(append.namespace, update.document))
                    .collect()
            }
            false => Vec::new(),
        };
        let reply = self.store_here(append).await?;
        if replicates {
            self.replicated(keys).await?;
        }
        Ok(reply)
    }

    /// Waits until the stream has documents as they are here.
    async fn replicated(&self, mut keys: Vec<DocumentKey>) -> Result<(), ApiError> {
        keys.sort_unstable();
        keys.dedup();
        let (Some(feed), Some(status)) = (&self.inner.config.feed, &self.inner.feed) else {
            return Ok(());
        };
        let wait_ms = match status.state().connected {
            true => feed.acknowledgement_wait_ms,
            // They are sent later. A caller that repeats them then finds them sent.
            false => 0,
        };
        let waiting = self
            .ask(move |writer| writer.await_replication(&keys))
            .await?;
        let all = futures_util::future::join_all(waiting);
        match tokio::time::timeout(Duration::from_millis(wait_ms), all).await {
            Ok(answers) if answers.iter().all(Result::is_ok) => Ok(()),
            _ => Err(ApiError::new(
                ErrorKind::Unavailable,
                "the updates are stored here and not replicated yet, since the broker of the feed is away or slow; \
                 retry, since repeats are harmless",
            )
            .with_retry_after_ms(1_000)),
        }
    }

    async fn store_here(&self, append: Append) -> Result<AppendReply, ApiError> {
        let count = append
            .updates
            .iter()
            .map(|update| update.tokens.len() as u64)
            .sum();
        let most = self.inner.config.pending_tokens_max;
        let Some(tokens) = PendingTokens::claim(&self.inner.shared.pending_tokens, count, most)
        else {
            let message = "too many tokens wait for a commit; retry";
            return Err(self.overloaded(Limit::PendingTokens, message));
        };
        let stored = self.ask_later(move |writer, ctx, reply| {
            writer.queue_append(append, tokens, reply, ctx);
        });
        match tokio::time::timeout(COMMIT_WAIT_MAX, stored).await {
            Ok(lengths) => Ok(AppendReply { lengths: lengths? }),
            Err(_) => Err(ApiError::new(
                ErrorKind::Timeout,
                "the disk is slow: the updates may or may not be stored; retry, since repeats are harmless",
            )
            .with_retry_after_ms(1_000)),
        }
    }
}
