//! Reading the logs of the groups that run here, so that requests draft from samples on other workers while those
//! still run.
//!
//! One task asks for all of them at short intervals, several groups per call, and only while requests of groups run.
//! Waiting in the store for news, as the followers of namespaces do, was rejected: a call for many groups has news
//! all the time, and would be as frequent as the appends of all their workers.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use refrain_protocol::document::FeedEvent;
use refrain_protocol::group::{
    FetchGroupsReply, FetchGroupsRequest, GroupCursor, GroupLog, RegisterGroupRequest,
};
use refrain_protocol::{ApiError, DocumentId, ErrorKind, NamespaceId, SignedNamespace};

use super::groups::{GroupReplica, LogPosition};
use super::registry::Registry;
use super::take_over::store_backoff;
use crate::metrics::{DONE, FAILED};
use crate::update::DocumentUpdateRef;

/// Most groups of one call, with the documents that are named for them.
const CALL_ITEMS_MAX: usize = 1_024;

/// Longest that the store keeps the log of a group for which nobody asks. A worker that asks renews it at half of it.
const LOG_TTL: Duration = Duration::from_secs(600);

/// A group that runs here.
struct RunningGroup {
    name: String,
    group: Arc<GroupReplica>,
    own: Vec<DocumentId>,
}

impl Registry {
    /// Follows the logs of all groups that run here until it is aborted.
    pub(super) async fn follow_groups(self: Arc<Self>) {
        let shared = &self.shared;
        let pause = Duration::from_millis(shared.config.group_fetch_ms);
        let mut backoff = store_backoff();
        let mut is_failing = false;
        loop {
            let running = self.running_groups();
            let count: usize = running.values().map(Vec::len).sum();
            shared.metrics.groups_followed.set(count as i64);
            if count == 0 {
                shared.groups.joined().await;
                continue;
            }
            match self.fetch_all(running).await {
                Ok(is_caught_up) => {
                    backoff.reset();
                    if std::mem::take(&mut is_failing) {
                        tracing::info!("the draft store sends the logs of groups again");
                    }
                    match is_caught_up {
                        true => tokio::time::sleep(pause).await,
                        false => tokio::task::yield_now().await,
                    }
                }
                Err(error) => {
                    if !std::mem::replace(&mut is_failing, true) {
                        tracing::warn!(
                            %error,
                            "the logs of groups cannot be read; they are asked for again, with growing pauses"
                        );
                    }
                    tokio::time::sleep(backoff.pause()).await;
                }
            }
        }
    }

    fn running_groups(&self) -> BTreeMap<NamespaceId, Vec<RunningGroup>> {
        let mut running: BTreeMap<NamespaceId, Vec<RunningGroup>> = BTreeMap::new();
        for ((namespace, name), group) in self.shared.groups.entries() {
            let own = group.read().pinned();
            if !own.is_empty() {
                let of_namespace = running.entry(namespace).or_default();
                of_namespace.push(RunningGroup { name, group, own });
            }
        }
        running
    }

    /// Reads the logs of all groups once. Returns whether that was all there is. A namespace that fails keeps no
    /// other from being read.
    async fn fetch_all(
        &self,
        running: BTreeMap<NamespaceId, Vec<RunningGroup>>,
    ) -> Result<bool, ApiError> {
        let mut is_caught_up = true;
        let mut failure = None;
        for (namespace, groups) in running {
            // Without the namespace there is no signature. The next request of the namespace brings one.
            let Some(signed) = self.signed(namespace) else {
                continue;
            };
            for call in calls(&groups) {
                let fetched = self.fetch(&signed, call).await;
                let outcome = if fetched.is_ok() { DONE } else { FAILED };
                let calls = &self.shared.metrics.group_calls;
                calls.with_label_values(&[outcome]).inc();
                match fetched {
                    Ok(reached_end) => is_caught_up &= reached_end,
                    Err(error) => failure = Some(error),
                }
            }
        }
        failure.map_or(Ok(is_caught_up), Err)
    }

    fn signed(&self, namespace: NamespaceId) -> Option<SignedNamespace> {
        Some(self.followed(namespace)?.signed())
    }

    /// Reads the logs of some groups of one namespace. Returns whether that was all there is.
    async fn fetch(
        &self,
        signed: &SignedNamespace,
        groups: &[RunningGroup],
    ) -> Result<bool, ApiError> {
        let shared = &self.shared;
        for running in groups {
            if running.group.needs_registration(LOG_TTL / 2) {
                self.register(signed, running).await?;
            }
        }
        let positions: Vec<LogPosition> = groups
            .iter()
            .map(|running| running.group.log_position())
            .collect();
        let cursors = groups.iter().zip(&positions);
        let cursors = cursors.map(|(running, position)| GroupCursor {
            group: running.name.clone(),
            after: position.cursor,
            own: running.own.clone(),
        });
        let request = FetchGroupsRequest {
            namespace: signed.clone(),
            groups: cursors.collect(),
            max_tokens: shared.config.follow_tokens,
        };
        let FetchGroupsReply { groups: logs } = shared.store.fetch_groups(request).await?;
        let arrived = Instant::now();
        let mut is_caught_up = true;
        for ((running, log), position) in groups.iter().zip(logs).zip(positions) {
            is_caught_up &= self.apply(running, position, log, arrived).await;
        }
        Ok(is_caught_up)
    }

    /// The gateway has registered the group already, unless the store has been restarted since, or no gateway is in
    /// front of this engine.
    async fn register(
        &self,
        signed: &SignedNamespace,
        running: &RunningGroup,
    ) -> Result<(), ApiError> {
        let request = RegisterGroupRequest {
            namespace: signed.clone(),
            group: running.name.clone(),
            ttl_ms: u64::try_from(LOG_TTL.as_millis()).unwrap_or(u64::MAX),
        };
        match self.shared.store.register_group(request).await {
            Ok(()) => {}
            // A store that is full of groups answers for those that it has.
            Err(error) if error.kind == ErrorKind::Overloaded => {}
            Err(error) => return Err(error),
        }
        running.group.note_registered();
        Ok(())
    }

    /// Applies what stands in a group's log after a position. Stops when the log is begun anew meanwhile, since the
    /// rest may have what was removed then. Returns whether that was all there is.
    async fn apply(
        &self,
        running: &RunningGroup,
        position: LogPosition,
        log: GroupLog,
        arrived: Instant,
    ) -> bool {
        let RunningGroup { group, .. } = running;
        if group.has_begun_anew(position) {
            return false;
        }
        if !log.is_registered {
            group.note_unregistered();
            return true;
        }
        if log.log.reset {
            group.write().reset();
        }
        let mut received = 0;
        'events: for event in &log.log.events {
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
        if let Some(age_ms) = log.age_ms.filter(|_| received > 0) {
            let lag = Duration::from_millis(u64::from(age_ms)) + arrived.elapsed();
            metrics.group_lag_seconds.observe(lag.as_secs_f64());
        }
        group.advance_log(position, log.log.cursor) && log.log.caught_up
    }
}

/// The groups of each call.
fn calls(groups: &[RunningGroup]) -> impl Iterator<Item = &[RunningGroup]> {
    let mut rest = groups;
    std::iter::from_fn(move || {
        let mut items = 0;
        let fits = |running: &&RunningGroup| {
            items += 1 + running.own.len();
            items <= CALL_ITEMS_MAX
        };
        let count = rest.iter().take_while(fits).count();
        // A group whose own documents are too many for a call gets one of its own.
        let (call, others) = rest.split_at(count.max(1).min(rest.len()));
        rest = others;
        (!call.is_empty()).then_some(call)
    })
}

#[cfg(test)]
mod tests;
