//! Checks of requests, and refusals.

use actix::Context;
use actix::prelude::SendError;
use refrain_protocol::document::DocumentUpdate;
use refrain_protocol::shard::shard_of;
use refrain_protocol::{ApiError, ErrorKind, Namespace, NamespaceId, SignedNamespace};
use tokio::sync::oneshot;

use crate::handle::DraftStoreHandle;
use crate::metrics::Limit;
use crate::shared_store::unavailable;
use crate::writer::actor::WriterActor;
use crate::writer::requests::Reply;

/// Longest session or group name, and part of a namespace's name. They are stored in one small record.
pub(super) const NAME_BYTES_MAX: usize = 512;

impl DraftStoreHandle {
    /// The namespace of a call, if its signature is right and this replica's shard has it.
    pub(super) fn namespace_of(&self, signed: &SignedNamespace) -> Result<NamespaceId, ApiError> {
        let namespace = self.inner.mesh.verify(signed)?;
        self.check_shard(namespace)?;
        Ok(namespace)
    }

    /// Refuses a namespace of another shard: its replicas would never see it.
    pub(super) fn check_shard(&self, namespace: NamespaceId) -> Result<(), ApiError> {
        let Some(feed) = &self.inner.config.feed else {
            return Ok(());
        };
        let shard = shard_of(namespace, feed.shards);
        if shard == feed.shard {
            return Ok(());
        }
        let message = format!(
            "the namespace belongs to shard {shard} of {}, and this store is of shard {}; give the caller the list \
             urls.draft_stores, and all stores the same feed.shards",
            feed.shards, feed.shard
        );
        Err(ApiError::new(ErrorKind::Conflict, message))
    }

    /// Sends a call to the writer, unless its mailbox is full.
    pub(super) fn send(
        &self,
        call: impl FnOnce(&mut WriterActor, &mut Context<WriterActor>) + Send + 'static,
    ) -> Result<(), ApiError> {
        self.inner
            .writer
            .try_send(call)
            .map_err(|error| match error {
                SendError::Full(_) => {
                    self.overloaded(Limit::Mailbox, "the writer's mailbox is full; retry")
                }
                SendError::Closed(_) => unavailable().with_detail("the writer has stopped"),
            })
    }

    /// Counts a call that comes while a limit is reached, and returns its refusal.
    pub(super) fn overloaded(&self, limit: Limit, what: &str) -> ApiError {
        let message = format!("{what} ({})", limit.as_str());
        let error = ApiError::new(ErrorKind::Overloaded, message).with_retry_after_ms(100);
        self.reject(limit, error)
    }

    pub(super) fn reject(&self, limit: Limit, error: ApiError) -> ApiError {
        self.inner.metrics.reject(limit);
        error
    }

    /// Sends a call to the writer, and waits for its answer.
    pub(super) async fn ask<T: Send + 'static>(
        &self,
        call: impl FnOnce(&mut WriterActor) -> Result<T, ApiError> + Send + 'static,
    ) -> Result<T, ApiError> {
        self.ask_later(move |writer, _, reply| drop(reply.send(call(writer))))
            .await
    }

    /// Sends a call to the writer, and waits until something answers it by the sender that the call gets.
    pub(super) async fn ask_later<T: Send + 'static>(
        &self,
        call: impl FnOnce(&mut WriterActor, &mut Context<WriterActor>, Reply<T>) + Send + 'static,
    ) -> Result<T, ApiError> {
        let (reply, answer) = oneshot::channel();
        self.send(move |writer, ctx| call(writer, ctx, reply))?;
        answer_of(answer).await
    }

    /// Refuses a call with too many items.
    pub(super) fn check_count(
        &self,
        count: usize,
        most: usize,
        items: &str,
        limit: Limit,
    ) -> Result<(), ApiError> {
        if count <= most {
            return Ok(());
        }
        let message = format!("more than {most} {items} in one call");
        Err(self.reject(limit, ApiError::new(ErrorKind::TooLarge, message)))
    }

    /// Checks what no retry can correct.
    pub(super) fn check(
        &self,
        names: &Namespace,
        updates: &[DocumentUpdate],
    ) -> Result<(), ApiError> {
        let most = self.inner.config.tuning.updates_max;
        self.check_count(updates.len(), most, "updates", Limit::Updates)?;
        for part in [&names.tenant, &names.model, &names.tokenizer] {
            self.check_name("namespace", part)?;
        }
        if let Some(fault) = names.fault() {
            return Err(ApiError::invalid("namespace", fault));
        }
        for update in updates {
            self.check_update(update)?;
        }
        Ok(())
    }

    fn check_update(&self, update: &DocumentUpdate) -> Result<(), ApiError> {
        let end = u64::from(update.prev_len) + update.tokens.len() as u64;
        let most = self.inner.config.document_tokens_max;
        if end > u64::from(most) {
            let message = format!("document {} has more than {most} tokens", update.document);
            return Err(self.reject(
                Limit::DocumentTokens,
                ApiError::new(ErrorKind::TooLarge, message),
            ));
        }
        for name in [&update.head.session, &update.head.group]
            .into_iter()
            .flatten()
        {
            self.check_name("head", name)?;
        }
        Ok(())
    }

    pub(super) fn check_name(&self, param: &str, name: &str) -> Result<(), ApiError> {
        if name.len() <= NAME_BYTES_MAX {
            return Ok(());
        }
        let message = format!("a name in {param} is longer than {NAME_BYTES_MAX} bytes");
        Err(self.reject(Limit::Head, ApiError::invalid(param, message)))
    }
}

/// The writer's answer. It is missing if the writer was closed meanwhile.
pub(super) async fn answer_of<T>(
    answer: oneshot::Receiver<Result<T, ApiError>>,
) -> Result<T, ApiError> {
    let answer = answer.await;
    answer.map_err(|_| unavailable().with_detail("the writer dropped the call"))?
}
