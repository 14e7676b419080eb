//! The log of a group that runs here: what it brings, so that requests draft from samples on other workers while
//! those still run.

use std::sync::Arc;
use std::time::Duration;

use refrain_protocol::document::{FeedCursor, FeedDelta, FeedEvent};
use refrain_protocol::group::RegisterGroupRequest;
use refrain_protocol::{DocumentId, ErrorKind};
use tokio::time::Instant;

use super::groups::{GroupReplica, LogPosition};
use super::namespace::NamespaceReplica;
use super::registry::SharedState;
use super::take_over::store_backoff;
use crate::update::DocumentUpdateRef;

/// Longest that the store keeps the log of a group for which nobody asks. A worker that asks renews it at half of it.
const LOG_TTL: Duration = Duration::from_secs(600);

/// Pause until a group is registered again that the store has just refused for want of capacity.
const REFUSED_FOR: Duration = Duration::from_secs(5);

/// The log of a group, read by this worker.
pub(super) struct GroupLog {
    namespace: Arc<NamespaceReplica>,
    group: Arc<GroupReplica>,
    name: String,
    shared: Arc<SharedState>,
    /// The position of the last call.
    asked: LogPosition,
}

impl GroupLog {
    /// Registers the group, unless that was done a while ago. Then its log can be read.
    pub(super) async fn begin(
        shared: Arc<SharedState>,
        namespace: Arc<NamespaceReplica>,
        name: String,
        group: Arc<GroupReplica>,
    ) -> Self {
        let log = GroupLog {
            asked: group.log_position(),
            namespace,
            group,
            name,
            shared,
        };
        log.renew().await;
        log
    }

    /// The documents that requests here write, and the position of the next call.
    pub(super) fn ask(&mut self) -> (Vec<DocumentId>, FeedCursor) {
        self.asked = self.group.log_position();
        (self.group.read().pinned(), self.asked.cursor)
    }

    /// Whether requests of the group run here.
    pub(super) fn is_in_use(&self) -> bool {
        self.group.is_in_use()
    }

    /// Whether it is time to register the group again.
    pub(super) fn needs_registration(&self) -> bool {
        self.group.needs_registration(LOG_TTL / 2)
    }

    /// Registers the group again where it is time to.
    pub(super) async fn renew(&self) {
        if self.needs_registration() {
            self.register().await;
        }
    }

    /// The store does not know the group. Its log begins anew.
    pub(super) async fn register_again(&self) {
        if !self.group.needs_registration(REFUSED_FOR) {
            tokio::time::sleep(REFUSED_FOR).await;
        }
        self.group.begin_log_anew();
        self.register().await;
    }

    /// The gateway has registered the group already, unless the store has been restarted since, or no gateway is in
    /// front of this engine.
    async fn register(&self) {
        let mut backoff = store_backoff();
        loop {
            let request = RegisterGroupRequest {
                namespace: self.namespace.signed(),
                group: self.name.clone(),
                ttl_ms: u64::try_from(LOG_TTL.as_millis()).unwrap_or(u64::MAX),
            };
            match self.shared.store.register_group(request).await {
                Ok(()) => break,
                // A store that is full of groups answers for those that it has.
                Err(error) if error.kind == ErrorKind::Overloaded => break,
                Err(error) => {
                    tracing::debug!(%error, "a group cannot be registered yet");
                    self.shared.metrics.follow_failures.inc();
                    tokio::time::sleep(backoff.pause()).await;
                }
            }
        }
        self.group.note_registered();
    }

    /// Applies what stands in the log after the position that was asked for. Stops when the log is begun anew
    /// meanwhile, since the rest may have what was removed then.
    pub(super) async fn apply(&self, delta: FeedDelta, age_ms: Option<u32>, arrived: Instant) {
        let (group, position) = (&self.group, self.asked);
        if group.has_begun_anew(position) {
            return;
        }
        if delta.reset {
            group.write().reset();
        }
        let mut received = 0;
        'events: for event in &delta.events {
            match event {
                FeedEvent::Remove(document) => {
                    group.write().remove_unless_pinned(&[*document]);
                }
                FeedEvent::Update(update) => {
                    let len = || u64::from(group.read().len_of(update.document).unwrap_or(0));
                    for part in DocumentUpdateRef::from(update).parts() {
                        drop(group.index.building.lock().await);
                        if group.has_begun_anew(position) {
                            break 'events;
                        }
                        let before = len();
                        group.merge(part);
                        received += len().saturating_sub(before);
                        tokio::task::yield_now().await;
                    }
                }
            }
        }
        let metrics = &self.shared.metrics;
        metrics.group_tokens_received.inc_by(received);
        if let Some(age_ms) = age_ms.filter(|_| received > 0) {
            let lag = Duration::from_millis(u64::from(age_ms)) + arrived.elapsed();
            metrics.group_lag_seconds.observe(lag.as_secs_f64());
        }
        group.advance_log(position, delta.cursor);
    }
}

#[cfg(test)]
mod tests;
