//! Storing updates.

use std::time::Duration;

use refrain_protocol::document::AppendReply;
use refrain_protocol::{ApiError, ErrorKind};

use crate::metrics::Limit;
use crate::service::handle::DraftStoreHandle;
use crate::writer::requests::{Append, PendingTokens};

/// How long a caller waits for its commit. After that it gets 504, and the commit may still happen.
const COMMIT_WAIT_MAX: Duration = Duration::from_secs(10);

impl DraftStoreHandle {
    /// Stores checked updates, and waits until they are durable.
    pub(super) async fn store(&self, append: Append) -> Result<AppendReply, ApiError> {
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
