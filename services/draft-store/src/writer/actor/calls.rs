//! Calls that change what is stored, apart from those about background jobs and replication.

use std::time::Duration;

use actix::{AsyncContext as _, Context};
use refrain_protocol::acceptance::AcceptanceStatsReply;
use refrain_protocol::admin::{ConfirmReply, ConfirmRequest};
use refrain_protocol::tenants::TenantChange;
use refrain_protocol::usage::{RecordUsageReply, RecordUsageRequest};
use refrain_protocol::{ApiError, ErrorKind, NamespaceId};

use crate::directory::DiskSpace;
use crate::metrics::{Limit, RemovalReason};
use crate::reading::document_text::{self, TextError};
use crate::record::{DocumentKey, ErasureRecord};
use crate::shared_store::unavailable;
use crate::writer::actor::WriterActor;
use crate::writer::edit::usage::ErasedUsagePart;
use crate::writer::errors::disk_refused;
use crate::writer::outcome::CommitOutcome;
use crate::writer::requests::{
    Append, GroupRegistration, PendingTokens, Reply, SavedStatistics, StatisticsUpdate,
};

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
        self.commit_queue.add(append, tokens, reply);
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
        self.commit_queue.add_statistics(update, reply);
        self.commit_soon(ctx);
    }

    /// Commits everything that is queued.
    pub(super) fn commit(&mut self) {
        let queue = std::mem::take(&mut self.commit_queue);
        if queue.is_empty() {
            return;
        }
        let (appends, statistics) = (queue.appends(), queue.statistics());
        let outcome = match self.no_room() {
            None => {
                self.run(|core, catalog, now_ms| core.append(catalog, appends, statistics, now_ms))
            }
            Some(error) => Err(error),
        };
        let seconds = &self.metrics.append_seconds;
        queue.answer(
            outcome,
            || self.too_many_namespaces(),
            |taken| seconds.observe(taken),
        );
    }

    /// Commits the queue: at once if it is long enough, otherwise after the interval, with what arrives until then.
    fn commit_soon(&mut self, ctx: &mut Context<Self>) {
        if self.commit_queue.is_full() {
            if let Some(timer) = self.commit_timer.take() {
                ctx.cancel_future(timer);
            }
            self.commit();
        } else if self.commit_timer.is_none() {
            let wait = Duration::from_millis(self.config.tuning.commit_interval_ms);
            self.commit_timer = Some(ctx.run_later(wait, |writer, _| {
                writer.commit_timer = None;
                writer.commit();
            }));
        }
    }

    /// The error for appends if there is no space for them.
    fn no_room(&self) -> Option<ApiError> {
        if DiskSpace::of(&self.config.data_dir)
            .is_some_and(|room| room.is_used_up(self.config.disk_reserve_bytes, self.log_bytes()))
        {
            self.metrics.reject(Limit::Disk);
            let message = "the draft store's disk is full up to its reserve (disk_reserve_bytes): \
                           nothing is stored until space is freed";
            return Some(
                ApiError::new(ErrorKind::Unavailable, message).with_retry_after_ms(10_000),
            );
        }
        if let Some(feed) = &self.config.feed
            && self.outbox_entries() >= feed.outbox_max
        {
            self.metrics.reject(Limit::Outbox);
            let message = "the broker of the feed is away or slow, and the outbox is full (feed.outbox_max): nothing \
                           is stored until it has been sent";
            return Some(
                ApiError::new(ErrorKind::Unavailable, message).with_retry_after_ms(10_000),
            );
        }
        // Any job lets the log shrink, directly or with the next job. Text of documents that run is in memory, and no
        // job makes it less.
        let log_bytes_max = self.config.log_bytes_max;
        let is_full = self.job.is_some() && self.log_bytes() > log_bytes_max;
        if is_full || self.unsealed_bytes() > log_bytes_max {
            self.metrics.reject(Limit::LogBytes);
            let message =
                "the draft store's log has reached log_bytes_max; retry when it is smaller";
            return Some(ApiError::new(ErrorKind::Overloaded, message).with_retry_after_ms(100));
        }
        None
    }

    /// Bytes of the log on disk.
    fn log_bytes(&self) -> u64 {
        let open = self.shared.read();
        open.map_or(0, |open| open.log.disk_bytes())
    }

    /// Bytes of unsealed documents.
    fn unsealed_bytes(&self) -> u64 {
        let open = self.shared.read();
        open.map_or(0, |open| open.catalog.segments().unsealed_totals().1)
    }

    /// Changes that other replicas do not have yet.
    fn outbox_entries(&self) -> usize {
        let open = self.shared.read();
        open.map_or(0, |open| open.catalog.replication.outbox.len())
    }

    /// Registers a group, or renews it.
    pub(crate) fn register_group(
        &mut self,
        registration: GroupRegistration,
    ) -> Result<(), ApiError> {
        let is_registered = self.answer(|core, catalog, now_ms| {
            let is_registered = core.register_group(catalog, registration, now_ms);
            Ok((is_registered, CommitOutcome::default()))
        })?;
        if is_registered {
            return Ok(());
        }
        self.metrics.reject(Limit::Groups);
        let message = "too many groups are registered (groups_max); retry when some have expired";
        Err(ApiError::new(ErrorKind::Overloaded, message).with_retry_after_ms(10_000))
    }

    /// The error for a caller that would add one namespace too many.
    fn too_many_namespaces(&self) -> ApiError {
        self.metrics.reject(Limit::Namespaces);
        let message = "the draft store has too many namespaces (namespaces_max); raise the limit";
        ApiError::new(ErrorKind::Overloaded, message).with_retry_after_ms(60_000)
    }

    /// Marks documents as used.
    pub(crate) fn touch(&mut self, keys: &[DocumentKey]) {
        // Times of use are advisory. While the store is closed there is nothing to touch.
        let _ = self.run(|core, catalog, now_ms| {
            core.touch(catalog, keys, now_ms);
            Ok(CommitOutcome::default())
        });
    }

    /// Removes documents that a reader could not read, unless they have changed since.
    pub(crate) fn remove_unreadable(&mut self, mut keys: Vec<DocumentKey>) {
        if let Ok(open) = self.shared.read() {
            keys.retain(|key| {
                let read = document_text::read_document(&open, *key);
                open.catalog.document(*key).is_some() && matches!(read, Err(TextError::Damaged(_)))
            });
        }
        if keys.is_empty() {
            return;
        }
        self.metrics.damaged_records.inc_by(keys.len() as u64);
        tracing::error!(documents = keys.len(), "damaged documents are removed");
        let _ = self.run(|core, catalog, now_ms| {
            core.remove(catalog, &keys, RemovalReason::Damage, now_ms)
        });
    }

    /// Removes documents as erased. Returns how many, once that is durable.
    pub(crate) fn erase(&mut self, keys: &[DocumentKey]) -> Result<u64, ApiError> {
        let outcome = self.run(|core, catalog, now_ms| {
            core.remove(catalog, keys, RemovalReason::Erased, now_ms)
        })?;
        Ok(outcome.removed.len() as u64)
    }

    /// The acceptance statistics of a namespace. Empty if there are none.
    pub(crate) fn statistics(
        &mut self,
        namespace: NamespaceId,
    ) -> Result<AcceptanceStatsReply, ApiError> {
        let kept =
            self.answer(|core, _, _| Ok((core.statistics(namespace)?, CommitOutcome::default())))?;
        Ok(kept.unwrap_or_default())
    }

    /// Remembers an erasure, once that is durable.
    pub(crate) fn mark(&mut self, mark: ErasureRecord) -> Result<ErasureRecord, ApiError> {
        // Statistics saved before an erasure are erased by it.
        self.commit();
        let marked = self.answer(|core, catalog, now_ms| core.mark(catalog, mark, now_ms))?;
        marked.ok_or_else(|| {
            self.metrics.reject(Limit::Erasures);
            ApiError::new(
                ErrorKind::Overloaded,
                "too many erasures are remembered (erasures_max); retry later",
            )
            .with_retry_after_ms(3_600_000)
        })
    }

    /// Changes a tenant. Returns the version of the change, once that is durable.
    pub(crate) fn change_tenant(&mut self, change: &TenantChange) -> Result<u64, ApiError> {
        let (version, entry) = self.answer(|core, catalog, now_ms| {
            let (version, outcome) = core.change_tenant(catalog, change, now_ms)?;
            let kept = catalog.tenants.get(&change.name);
            Ok(((version, kept.map(|kept| kept.entry.clone())), outcome))
        })?;
        if let Ok(version) = version {
            self.shared.set_tenant(&change.name, version, entry);
        }
        version.map_err(|refusal| {
            refusal
                .limit()
                .into_iter()
                .for_each(|limit| self.metrics.reject(limit));
            refusal.error()
        })
    }

    /// Accepts an operator's confirmation that a loss is acceptable, or that the wall clock is right.
    ///
    /// # Errors
    /// The store is closed, or its manifest cannot be written. The confirmation would then be lost with a restart.
    pub(crate) fn confirm(&mut self, what: ConfirmRequest) -> Result<ConfirmReply, ApiError> {
        if self.core.is_none() {
            return Err(unavailable());
        }
        let confirmed = ConfirmReply {
            lost_documents: self
                .shared
                .loss()
                .filter(|_| what.loss)
                .map(|loss| loss.expected.saturating_sub(loss.found)),
            clock_offset_ms: self.shared.clock_offset_ms().filter(|_| what.clock),
        };
        if what.loss {
            self.shared.set_loss(None);
        }
        if what.clock {
            self.shared.confirm_clock();
        }
        self.write_manifest(false)
            .map_err(|error| disk_refused(&error))?;
        tracing::warn!(?confirmed, "draft store state confirmed by an operator");
        Ok(confirmed)
    }

    /// Stores rows of usage, which are durable once this returns.
    pub(crate) fn record_usage(
        &mut self,
        request: &RecordUsageRequest,
    ) -> Result<RecordUsageReply, ApiError> {
        if !request.rows.is_empty()
            && let Some(error) = self.no_room()
        {
            return Err(error);
        }
        let reply =
            self.answer(|core, catalog, now_ms| core.record_usage(catalog, request, now_ms))?;
        reply.ok_or_else(|| {
            self.metrics.reject(Limit::UsageRows);
            let message = "the draft store has as many rows of usage as it may (usage_rows_max); raise the limit, or \
                           lower usage_retention_days";
            ApiError::new(ErrorKind::Overloaded, message).with_retry_after_ms(60_000)
        })
    }

    /// Remembers that the usage of a tenant is erased. Returns the time, once that is durable.
    pub(crate) fn mark_usage_erased(&mut self, tenant: &str) -> Result<u64, ApiError> {
        let at_ms =
            self.answer(|core, catalog, now_ms| core.mark_usage_erased(catalog, tenant, now_ms))?;
        at_ms.ok_or_else(|| {
            self.metrics.reject(Limit::Erasures);
            let message = "the usage of too many tenants is erased; erasures are forgotten after usage_retention_days";
            ApiError::new(ErrorKind::Overloaded, message).with_retry_after_ms(3_600_000)
        })
    }

    /// Removes a part of the rows that an erasure hits.
    pub(crate) fn erase_usage(
        &mut self,
        tenant: &str,
        at_ms: u64,
        from: &[u8],
    ) -> Result<ErasedUsagePart, ApiError> {
        self.answer(|core, catalog, now_ms| {
            core.erase_usage(catalog, (tenant, at_ms), from, now_ms)
        })
    }
}
