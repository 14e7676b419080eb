//! The calls of other services: `refrain_rpc::DraftStore` on the handle.

use std::collections::HashSet;
use std::sync::Arc;
use std::time::{Duration, Instant};

use async_trait::async_trait;
use refrain_protocol::acceptance::{AcceptanceStatsReply, AcceptanceStatsRequest};
use refrain_protocol::document::{
    AppendReply, AppendRequest, StoreStats, TouchRequest, UnknownDocumentsReply,
    UnknownDocumentsRequest,
};
use refrain_protocol::error::code;
use refrain_protocol::group::RegisterGroupRequest;
use refrain_protocol::history::{OutputLengths, OutputLengthsRequest};
use refrain_protocol::pull::{PullReply, PullRequest};
use refrain_protocol::segment::{
    DocumentsReply, DocumentsRequest, SegmentPiece, SegmentPieceRequest, SegmentsReply,
    SegmentsRequest,
};
use refrain_protocol::tenants::{TenantChange, TenantChangeReply, TenantsReply, TenantsRequest};
use refrain_protocol::{ApiError, DocumentId, ErrorKind};
use refrain_rpc::{DraftStore, UsageReplica};
use refrain_speculation::statistics::{AcceptanceStatistics, STATISTICS_BYTES_MAX};

use crate::handle::counted_call::CountedCall;
use crate::handle::{DraftStoreHandle, REPLY_TOKENS_MAX};
use crate::log::random;
use crate::metrics::Limit;
use crate::reading::pull::Pull;
use crate::reading::segments;
use crate::record::DocumentKey;
use crate::writer::requests::{
    Append, GroupRegistration, SavedStatistics, StatisticsUpdate, UpdateAuthor,
};

/// Longest wait of `pull`, whatever the caller asks for.
const PULL_WAIT_MS_MAX: u32 = 30_000;

/// Longest that a group lives without being registered again, whatever the caller asks for: one day.
const GROUP_TTL_MS_MAX: u64 = 24 * 3_600 * 1_000;

/// Most words of a segment, of four bytes each, in one answer. Each answer in progress holds this much memory.
const SEGMENT_WORDS_MAX: u32 = 1 << 20;

#[async_trait]
impl DraftStore for DraftStoreHandle {
    async fn append(&self, request: AppendRequest) -> Result<AppendReply, ApiError> {
        let _running = self.enter()?;
        let namespace = self.namespace_of(&request.namespace)?;
        self.check(&request.namespace.namespace, &request.updates)?;
        let replicates = self.replicates(request.acknowledgement)?;
        let append = Append {
            namespace,
            names: Arc::unwrap_or_clone(request.namespace.namespace),
            updates: request.updates,
            waited_ms: request.waited_ms,
            author: UpdateAuthor::Worker,
        };
        self.store(append, replicates).await
    }

    async fn pull(&self, request: PullRequest) -> Result<PullReply, ApiError> {
        let _running = self.enter()?;
        let inner = &*self.inner;
        let wait_ms = request.wait_ms.min(PULL_WAIT_MS_MAX);
        let deadline = Instant::now() + Duration::from_millis(u64::from(wait_ms));
        let mut pull = self.begin_pull(request)?;
        // Subscribe before the first read, so that no change falls between the read and the wait.
        let changes = (wait_ms > 0).then(|| inner.shared.subscribe(pull.namespaces()));
        let mut waiting = None;
        loop {
            let read = move |shared: &_| {
                let damaged = pull.read(shared)?;
                Ok((pull, damaged))
            };
            let damaged;
            (pull, damaged) = self.read_blocking(read).await?;
            self.report(damaged);
            let left = deadline.saturating_duration_since(Instant::now());
            let is_over = pull.has_news() || left.is_zero() || inner.drain.is_draining();
            let Some(changes) = changes.as_ref().filter(|_| !is_over) else {
                return Ok(self.end_pull(pull));
            };
            if waiting.is_none() {
                waiting = CountedCall::begin(&inner.wait_permits, &inner.metrics.feed_waiters);
                if waiting.is_none() {
                    return Err(self.overloaded(Limit::Waiters, "too many pulls wait"));
                }
            }
            // After a wait without changes there is nothing more to read.
            tokio::select! {
                changed = changes.changed() => pull.note_changed(&changed),
                () = inner.drain.begun() => {}
                () = tokio::time::sleep(left) => {}
            }
        }
    }

    async fn touch(&self, request: TouchRequest) -> Result<(), ApiError> {
        let _running = self.enter()?;
        let namespace = self.namespace_of(&request.namespace)?;
        let most = self.inner.config.tuning.updates_max;
        self.check_count(request.documents.len(), most, "documents", Limit::Updates)?;
        let unique: HashSet<DocumentKey> = request
            .documents
            .iter()
            .map(|document| DocumentKey::new(namespace, *document))
            .collect();
        let keys: Vec<DocumentKey> = unique.into_iter().collect();
        self.send(move |writer, _| writer.touch(&keys))
    }

    async fn register_group(&self, request: RegisterGroupRequest) -> Result<(), ApiError> {
        let _running = self.enter()?;
        let namespace = self.namespace_of(&request.namespace)?;
        self.check_name("group", &request.group)?;
        let registration = GroupRegistration {
            group: (namespace, request.group),
            ttl_ms: request.ttl_ms.min(GROUP_TTL_MS_MAX),
        };
        self.ask(move |writer| writer.register_group(registration))
            .await
    }

    async fn output_lengths(
        &self,
        request: OutputLengthsRequest,
    ) -> Result<OutputLengths, ApiError> {
        let _running = self.enter()?;
        let namespace = self.namespace_of(&request.namespace)?;
        // The catalog's lock is held during commits, so the wait for it is left to a blocking thread.
        self.read_blocking(move |shared| {
            let open = shared.read()?;
            Ok(open.catalog.output_lengths(namespace, request.prompt))
        })
        .await
    }

    async fn stats(&self) -> Result<StoreStats, ApiError> {
        Ok(self.inner.shared.stats())
    }

    async fn segments(&self, request: SegmentsRequest) -> Result<SegmentsReply, ApiError> {
        let _running = self.enter()?;
        let namespace = self.namespace_of(&request.namespace)?;
        self.read_blocking(move |shared| segments::list(shared, namespace))
            .await
    }

    async fn segment_piece(&self, request: SegmentPieceRequest) -> Result<SegmentPiece, ApiError> {
        let _running = self.enter()?;
        let namespace = self.namespace_of(&request.namespace)?;
        let words_max = request.max_words.min(SEGMENT_WORDS_MAX) as usize;
        let piece = self
            .read_blocking(move |shared| segments::piece(shared, namespace, &request, words_max))
            .await?;
        let sent = &self.inner.metrics.sent_segment_bytes;
        sent.inc_by(piece.words.len() as u64 * 4);
        Ok(piece)
    }

    async fn documents(&self, mut request: DocumentsRequest) -> Result<DocumentsReply, ApiError> {
        let _running = self.enter()?;
        let namespace = self.namespace_of(&request.namespace)?;
        // `covered` tells the caller to ask for the rest.
        let most = self.inner.config.tuning.updates_max;
        request.documents.truncate(most);
        let tokens_max = request.max_tokens.min(REPLY_TOKENS_MAX) as usize;
        let read = move |shared: &_| {
            segments::documents(shared, namespace, &request.documents, tokens_max)
        };
        let (reply, damaged) = self.read_blocking(read).await?;
        self.report(damaged);
        Ok(reply)
    }

    async fn unknown_documents(
        &self,
        mut request: UnknownDocumentsRequest,
    ) -> Result<UnknownDocumentsReply, ApiError> {
        let _running = self.enter()?;
        let namespace = self.namespace_of(&request.namespace)?;
        let most = self.inner.config.tuning.updates_max;
        self.check_count(request.documents.len(), most, "documents", Limit::Updates)?;
        self.read_blocking(move |shared| {
            let open = shared.read()?;
            let is_unknown = |document: &DocumentId| {
                let key = DocumentKey::new(namespace, *document);
                open.catalog.document(key).is_none()
            };
            request.documents.retain(is_unknown);
            Ok(UnknownDocumentsReply {
                documents: request.documents,
            })
        })
        .await
    }

    /// A few look-ups run at once, and none waits for another.
    async fn acceptance_stats(
        &self,
        request: AcceptanceStatsRequest,
    ) -> Result<AcceptanceStatsReply, ApiError> {
        let _running = self.enter()?;
        let namespace = self.namespace_of(&request.namespace)?;
        let names = Arc::unwrap_or_clone(request.namespace.namespace);
        self.check(&names, &[])?;
        if request.statistics.is_empty() {
            return self.ask(move |writer| writer.statistics(namespace)).await;
        }
        check_statistics(&request.statistics)?;
        let update = StatisticsUpdate {
            namespace,
            names,
            continues: request.table,
            // Never 0, which stands for no table.
            new_table: random().map_err(ApiError::internal)? | 1,
            statistics: request.statistics,
        };
        let save = self.ask_later(|writer, ctx, reply| writer.queue_statistics(update, reply, ctx));
        match save.await? {
            SavedStatistics::Table(table) => Ok(AcceptanceStatsReply {
                table,
                statistics: Vec::new(),
            }),
            SavedStatistics::Erased => {
                let message =
                    "these statistics were erased; ask for the present ones and learn anew";
                Err(ApiError::new(ErrorKind::Conflict, message).with_code(code::STATISTICS_ERASED))
            }
        }
    }

    async fn tenants(&self, request: TenantsRequest) -> Result<TenantsReply, ApiError> {
        let _running = self.enter()?;
        self.list_tenants(request)
    }

    async fn change_tenant(&self, change: TenantChange) -> Result<TenantChangeReply, ApiError> {
        let _running = self.enter()?;
        self.set_tenant(change).await
    }

    fn usage_replicas(&self) -> Vec<UsageReplica> {
        vec![UsageReplica {
            name: "draft store".to_owned(),
            store: Arc::new(self.clone()),
        }]
    }
}

impl DraftStoreHandle {
    fn begin_pull(&self, request: PullRequest) -> Result<Pull, ApiError> {
        let tuning = &self.inner.config.tuning;
        let scopes = || request.namespaces.iter().flat_map(|of| &of.scopes);
        let count = scopes().count();
        self.check_count(count, tuning.pull_scopes_max, "scopes", Limit::Scopes)?;
        let own = scopes().map(|scope| scope.own.len()).sum();
        self.check_count(own, tuning.updates_max, "own documents", Limit::Updates)?;
        let scopes = request.namespaces.into_iter().flat_map(|of| {
            let namespace = self.namespace_of(&of.namespace);
            let scopes = of.scopes.into_iter();
            scopes.map(move |scope| (namespace.clone(), scope))
        });
        let tokens_max = request.max_tokens.min(REPLY_TOKENS_MAX) as usize;
        Ok(Pull::new(scopes, tokens_max, tuning.pull_bytes_max))
    }

    fn end_pull(&self, pull: Pull) -> PullReply {
        let (reply, group_tokens) = pull.into_reply();
        let metrics = &self.inner.metrics;
        metrics.pull_scopes.inc_by(reply.deltas.len() as u64);
        metrics.full_pulls.inc_by(u64::from(reply.is_full));
        metrics.group_tokens.inc_by(group_tokens);
        reply
    }

    /// Asks the writer to remove documents that a reader found damaged.
    pub(super) fn report(&self, damaged: HashSet<DocumentKey>) {
        if !damaged.is_empty() {
            // If the mailbox is full, the next reader finds the damage again.
            let damaged = damaged.into_iter().collect();
            let writer = &self.inner.writer;
            let _ = writer.try_send(move |writer, _| writer.remove_unreadable(damaged));
        }
    }
}

fn check_statistics(statistics: &[u8]) -> Result<(), ApiError> {
    if statistics.len() > STATISTICS_BYTES_MAX {
        let message = format!("statistics: more than {STATISTICS_BYTES_MAX} bytes");
        return Err(ApiError::new(ErrorKind::TooLarge, message));
    }
    AcceptanceStatistics::from_bytes(statistics)
        .map(drop)
        .map_err(|error| ApiError::invalid("statistics", error.to_string()))
}
