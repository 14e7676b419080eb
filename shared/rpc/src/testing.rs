//! A draft store in memory, for tests of its callers.

use std::collections::{HashMap, HashSet};
use std::future::Future;
use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use futures_util::future::BoxFuture;
use parking_lot::{MappedMutexGuard, Mutex, MutexGuard};
use refrain_protocol::acceptance::{AcceptanceStatsReply, AcceptanceStatsRequest};
use refrain_protocol::document::{
    AppendReply, AppendRequest, DocumentHead, DocumentUpdate, ERASED_LEN, FeedCursor, FeedDelta,
    FeedEvent, FinishReason, StoreStats, TouchRequest, UnknownDocumentsReply,
    UnknownDocumentsRequest,
};
use refrain_protocol::error::code;
use refrain_protocol::group::RegisterGroupRequest;
use refrain_protocol::history::{OutputLengths, OutputLengthsRequest, PromptHash};
use refrain_protocol::pull::{
    NamespacePull, PullReply, PullRequest, Scope, ScopeDelta, ScopeNews, ScopePull,
};
use refrain_protocol::segment::{
    DocumentsReply, DocumentsRequest, SegmentPiece, SegmentPieceRequest, SegmentsReply,
    SegmentsRequest,
};
use refrain_protocol::tenants::{
    TenantChange, TenantChangeReply, TenantRecord, TenantsReply, TenantsRequest, state_part,
};
use refrain_protocol::{ApiError, DocumentId, ErrorKind, NamespaceId, SignedNamespace, TokenId};
use tokio::sync::Notify;

use crate::draft_store::DraftStore;
use crate::usage_store::UsageReplica;

/// A call of a [`FakeStore`].
#[derive(Clone, Debug, PartialEq)]
pub enum StoreCall {
    /// [`DraftStore::append`].
    Append(AppendRequest),
    /// [`DraftStore::pull`].
    Pull(PullRequest),
    /// [`DraftStore::touch`].
    Touch(TouchRequest),
    /// [`DraftStore::stats`].
    Stats,
    /// [`DraftStore::register_group`].
    RegisterGroup(RegisterGroupRequest),
    /// [`DraftStore::output_lengths`].
    OutputLengths(OutputLengthsRequest),
    /// [`DraftStore::segments`].
    Segments(SegmentsRequest),
    /// [`DraftStore::segment_piece`].
    SegmentPiece(SegmentPieceRequest),
    /// [`DraftStore::documents`].
    Documents(DocumentsRequest),
    /// [`DraftStore::unknown_documents`].
    UnknownDocuments(UnknownDocumentsRequest),
    /// [`DraftStore::acceptance_stats`].
    AcceptanceStats(AcceptanceStatsRequest),
    /// [`DraftStore::tenants`].
    Tenants(TenantsRequest),
    /// [`DraftStore::change_tenant`].
    ChangeTenant(TenantChange),
}

/// A document that was appended to a [`FakeStore`].
#[derive(Clone, Debug, Default, PartialEq)]
pub struct StoredDocument {
    /// The output so far.
    pub tokens: Vec<TokenId>,
    /// The reason of its end.
    pub finish: Option<FinishReason>,
    /// Its properties.
    pub head: DocumentHead,
}

/// The tenants of a [`FakeStore`].
#[derive(Debug, Default)]
pub struct FakeTenants {
    records: Vec<TenantRecord>,
    changes: u64,
    /// Number of records that callers were sent.
    pub sent: usize,
    /// Whether calls about tenants fail.
    pub is_away: bool,
}

impl FakeTenants {
    /// The tenants of a store that answers no call about them.
    pub fn away() -> Self {
        FakeTenants {
            is_away: true,
            ..FakeTenants::default()
        }
    }

    /// Puts a tenant in, as an earlier version would have.
    pub fn put(&mut self, name: &str, entry: String) {
        self.changes += 1;
        self.records.push(TenantRecord {
            name: name.to_owned(),
            version: self.changes,
            entry,
        });
    }

    fn state(&self) -> u64 {
        let parts = self.records.iter();
        let parts = parts.map(|record| state_part(&record.name, record.version));
        parts.fold(0, |state, part| state ^ part)
    }

    fn check(&self) -> Result<(), ApiError> {
        match self.is_away {
            true => Err(ApiError::new(ErrorKind::Unavailable, "away by script")),
            false => Ok(()),
        }
    }
}

/// The content of a [`FakeStore`], all of which a test may change at any time.
#[derive(Default)]
pub struct FakeContent {
    /// All calls so far, the failed ones included.
    pub calls: Vec<StoreCall>,
    /// The documents of all namespaces.
    pub documents: HashMap<DocumentId, StoredDocument>,
    /// Documents that were erased before they arrived.
    pub erased: HashSet<DocumentId>,
    /// The feed of every namespace. It has what a test puts in, and nothing that callers append.
    pub news: Vec<FeedEvent>,
    /// The generation of the feed. A reader of another one goes on, as at another replica of a store.
    pub generation: u64,
    /// Scopes that are refused, with the kind of the error.
    pub refused: HashMap<Scope, ErrorKind>,
    /// Whether a pull without news is refused, as by a store in which too many wait.
    pub is_crowded: bool,
    /// The logs of groups.
    pub groups: HashMap<String, Vec<FeedEvent>>,
    /// The registered groups, each as often as it was registered.
    pub registered: Vec<String>,
    /// The age of the newest tokens in the logs of groups.
    pub age_ms: Option<u32>,
    /// Lengths of earlier outputs by prompt; `None` is for all other prompts.
    pub lengths: HashMap<Option<PromptHash>, Vec<u32>>,
    /// The segments of every namespace; `None`: calls for segments fail.
    pub segments: Option<SegmentsReply>,
    /// The words of segments.
    pub segment_words: HashMap<u64, Vec<u32>>,
    /// Most words of an answer; 0: as many as the caller asks for.
    pub piece_words_max: usize,
    /// The acceptance statistics by namespace.
    pub statistics: HashMap<NamespaceId, Vec<u8>>,
    /// Number of calls that saved statistics.
    pub statistics_saved: u32,
    /// The tenants.
    pub tenants: FakeTenants,
    /// Where usage is kept.
    pub usage: Vec<UsageReplica>,
}

impl FakeContent {
    /// The updates that were appended, in order.
    pub fn updates(&self) -> impl Iterator<Item = &DocumentUpdate> {
        let appended = self.calls.iter().filter_map(|call| match call {
            StoreCall::Append(request) => Some(&request.updates),
            _ => None,
        });
        appended.flatten()
    }

    /// The documents that were marked as used, in order.
    pub fn touched(&self) -> impl Iterator<Item = DocumentId> {
        let touched = self.calls.iter().filter_map(|call| match call {
            StoreCall::Touch(request) => Some(&request.documents),
            _ => None,
        });
        touched.flatten().copied()
    }

    fn store(&mut self, update: DocumentUpdate) -> u32 {
        if self.erased.contains(&update.document) {
            return ERASED_LEN;
        }
        let stored = self.documents.entry(update.document).or_default();
        if update.prev_len as usize <= stored.tokens.len() {
            stored.tokens.truncate(update.prev_len as usize);
            stored.tokens.extend(update.tokens);
            stored.finish = update.finish;
            stored.head = update.head;
        }
        stored.tokens.len() as u32
    }

    /// The events of a list after a cursor, without the growth of the reader's own documents.
    fn read(
        &self,
        events: &[FeedEvent],
        after: FeedCursor,
        own: &[DocumentId],
        max_tokens: u32,
    ) -> FeedDelta {
        let mut to = events.len().min(after.sequence as usize);
        let (mut tokens, mut found) = (0, Vec::new());
        while let Some(event) = events.get(to) {
            if let FeedEvent::Update(update) = event {
                tokens += update.tokens.len();
                if !found.is_empty() && tokens > max_tokens as usize {
                    break;
                }
            }
            let is_own =
                matches!(event, FeedEvent::Update(update) if own.contains(&update.document));
            if !is_own {
                found.push(event.clone());
            }
            to += 1;
        }
        FeedDelta {
            // A reader from the beginning has to drop all that it may have.
            reset: after.generation == 0 && self.generation != 0,
            events: found,
            cursor: FeedCursor {
                generation: self.generation,
                sequence: to as u64,
                ..FeedCursor::default()
            },
            caught_up: to == events.len(),
        }
    }
}

impl FakeContent {
    /// The news of the scopes of a pull.
    fn pull(&self, request: &PullRequest) -> PullReply {
        let scopes = request.namespaces.iter().flat_map(|of| &of.scopes);
        let news = scopes.map(|asked| {
            if let Some(kind) = self.refused.get(&asked.scope) {
                return Some(ScopeNews::Refused {
                    kind: *kind,
                    message: "refused by the test".into(),
                });
            }
            let group = match &asked.scope {
                Scope::Namespace => None,
                Scope::Group(name) if !self.registered.contains(name) => {
                    return Some(ScopeNews::Unregistered);
                }
                Scope::Group(name) => Some(name),
            };
            let log = group.map(|name| self.groups.get(name).map_or(&[][..], Vec::as_slice));
            let events = log.unwrap_or(&self.news);
            let delta = self.read(events, asked.after, &asked.own, request.max_tokens);
            let is_new = delta.reset || delta.cursor != asked.after;
            is_new.then(|| ScopeNews::Changes {
                age_ms: group.and(self.age_ms),
                delta,
            })
        });
        let deltas = (0..).zip(news).filter_map(|(scope, news)| {
            let news = news?;
            Some(ScopeDelta { scope, news })
        });
        let deltas: Vec<ScopeDelta> = deltas.collect();
        let is_cut_off = |delta: &ScopeDelta| match &delta.news {
            ScopeNews::Changes { delta, .. } => !delta.caught_up,
            _ => false,
        };
        PullReply {
            is_full: deltas.iter().any(is_cut_off),
            deltas,
        }
    }
}

type Hook = Arc<dyn Fn(&StoreCall) -> BoxFuture<'static, Result<(), ApiError>> + Send + Sync>;

/// A draft store in memory. It checks no signature, and all namespaces share its content.
#[derive(Default)]
pub struct FakeStore {
    content: Mutex<FakeContent>,
    hook: Mutex<Option<Hook>>,
    has_news: Notify,
}

impl FakeStore {
    /// Its content.
    pub fn content(&self) -> MutexGuard<'_, FakeContent> {
        self.content.lock()
    }

    /// The documents of all namespaces.
    pub fn documents(&self) -> MappedMutexGuard<'_, HashMap<DocumentId, StoredDocument>> {
        MutexGuard::map(self.content.lock(), |content| &mut content.documents)
    }

    /// Adds an event to the feed of every namespace.
    pub fn push_news(&self, event: FeedEvent) {
        self.content().news.push(event);
        self.has_news.notify_waiters();
    }

    /// Adds an event to the log of a group.
    pub fn push_to_group(&self, group: &str, event: FeedEvent) {
        let mut content = self.content();
        let log = content.groups.entry(group.to_owned());
        log.or_default().push(event);
        drop(content);
        self.has_news.notify_waiters();
    }

    /// Has each call wait for `hook`, and fail where that fails. It takes the place of an earlier hook.
    pub fn set_hook<F>(&self, hook: impl Fn(&StoreCall) -> F + Send + Sync + 'static)
    where
        F: Future<Output = Result<(), ApiError>> + Send + 'static,
    {
        *self.hook.lock() = Some(Arc::new(move |call| Box::pin(hook(call))));
    }

    /// Has calls fail for which `refusal` finds an error. It takes the place of a hook.
    pub fn refuse(
        &self,
        refusal: impl Fn(&StoreCall) -> Option<ErrorKind> + Send + Sync + 'static,
    ) {
        self.set_hook(move |call| {
            let refused = refusal(call).map(|kind| ApiError::new(kind, "refused by the test"));
            std::future::ready(refused.map_or(Ok(()), Err))
        });
    }

    /// Has no call fail or wait any more.
    pub fn remove_hook(&self) {
        *self.hook.lock() = None;
    }

    async fn begin(&self, call: StoreCall) -> Result<(), ApiError> {
        let hook = self.hook.lock().clone();
        let passes = hook.map(|hook| hook(&call));
        self.content().calls.push(call);
        match passes {
            Some(passes) => passes.await,
            None => Ok(()),
        }
    }
}

fn missing(what: &str) -> ApiError {
    ApiError::new(ErrorKind::NotFound, what)
}

#[async_trait]
impl DraftStore for FakeStore {
    async fn append(&self, request: AppendRequest) -> Result<AppendReply, ApiError> {
        self.begin(StoreCall::Append(request.clone())).await?;
        let mut content = self.content();
        let updates = request.updates.into_iter();
        let lengths = updates.map(|update| content.store(update)).collect();
        Ok(AppendReply { lengths })
    }

    async fn pull(&self, request: PullRequest) -> Result<PullReply, ApiError> {
        self.begin(StoreCall::Pull(request.clone())).await?;
        let changed = self.has_news.notified();
        let reply = self.content().pull(&request);
        let is_news = |delta: &ScopeDelta| match &delta.news {
            ScopeNews::Changes { delta, .. } => !delta.events.is_empty() || delta.reset,
            _ => true,
        };
        if reply.deltas.iter().any(is_news) || request.wait_ms == 0 {
            return Ok(reply);
        }
        if self.content().is_crowded {
            return Err(ApiError::new(ErrorKind::Overloaded, "too many wait"));
        }
        let wait = Duration::from_millis(request.wait_ms.into());
        // Without news in time, the answer has none.
        let _ = tokio::time::timeout(wait, changed).await;
        Ok(self.content().pull(&request))
    }

    async fn touch(&self, request: TouchRequest) -> Result<(), ApiError> {
        self.begin(StoreCall::Touch(request)).await
    }

    async fn stats(&self) -> Result<StoreStats, ApiError> {
        self.begin(StoreCall::Stats).await?;
        Ok(StoreStats::default())
    }

    async fn register_group(&self, request: RegisterGroupRequest) -> Result<(), ApiError> {
        self.begin(StoreCall::RegisterGroup(request.clone()))
            .await?;
        self.content().registered.push(request.group);
        Ok(())
    }

    async fn output_lengths(
        &self,
        request: OutputLengthsRequest,
    ) -> Result<OutputLengths, ApiError> {
        self.begin(StoreCall::OutputLengths(request.clone()))
            .await?;
        let content = self.content();
        let of_prompt = content.lengths.get(&Some(request.prompt));
        let lengths = of_prompt.or_else(|| content.lengths.get(&None));
        Ok(OutputLengths::of(lengths.cloned().unwrap_or_default()))
    }

    async fn segments(&self, request: SegmentsRequest) -> Result<SegmentsReply, ApiError> {
        self.begin(StoreCall::Segments(request)).await?;
        let segments = self.content().segments.clone();
        segments.ok_or_else(|| missing("there are no segments"))
    }

    async fn segment_piece(&self, request: SegmentPieceRequest) -> Result<SegmentPiece, ApiError> {
        self.begin(StoreCall::SegmentPiece(request.clone())).await?;
        let content = self.content();
        let words = content.segment_words.get(&request.segment);
        let words = words.ok_or_else(|| missing("there is no such segment"))?;
        let most = match content.piece_words_max {
            0 => request.max_words as usize,
            most => most.min(request.max_words as usize),
        };
        let rest = words.iter().skip(request.offset as usize);
        Ok(SegmentPiece {
            words: rest.take(most).copied().collect(),
        })
    }

    async fn documents(&self, request: DocumentsRequest) -> Result<DocumentsReply, ApiError> {
        self.begin(StoreCall::Documents(request.clone())).await?;
        let content = self.content();
        let known = request.documents.iter().filter_map(|document| {
            let stored = content.documents.get(document)?.clone();
            Some(DocumentUpdate {
                document: *document,
                epoch: 1,
                prev_len: 0,
                tokens: stored.tokens,
                head: stored.head,
                finish: stored.finish,
            })
        });
        Ok(DocumentsReply {
            updates: known.collect(),
            covered: request.documents.len() as u32,
        })
    }

    async fn unknown_documents(
        &self,
        mut request: UnknownDocumentsRequest,
    ) -> Result<UnknownDocumentsReply, ApiError> {
        self.begin(StoreCall::UnknownDocuments(request.clone()))
            .await?;
        let content = self.content();
        let is_unknown = |document: &DocumentId| !content.documents.contains_key(document);
        request.documents.retain(is_unknown);
        Ok(UnknownDocumentsReply {
            documents: request.documents,
        })
    }

    async fn acceptance_stats(
        &self,
        request: AcceptanceStatsRequest,
    ) -> Result<AcceptanceStatsReply, ApiError> {
        self.begin(StoreCall::AcceptanceStats(request.clone()))
            .await?;
        let namespace = request.namespace.namespace.id();
        let mut content = self.content();
        if !request.statistics.is_empty() {
            content.statistics.insert(namespace, request.statistics);
            content.statistics_saved += 1;
            return Ok(AcceptanceStatsReply {
                table: 1,
                statistics: Vec::new(),
            });
        }
        let kept = content.statistics.get(&namespace);
        Ok(AcceptanceStatsReply {
            table: u64::from(kept.is_some()),
            statistics: kept.cloned().unwrap_or_default(),
        })
    }

    async fn tenants(&self, request: TenantsRequest) -> Result<TenantsReply, ApiError> {
        self.begin(StoreCall::Tenants(request)).await?;
        // As over a network, others come between.
        tokio::task::yield_now().await;
        let tenants = &mut self.content().tenants;
        tenants.check()?;
        let state = tenants.state();
        let sent = (request.known != Some(state)).then(|| tenants.records.clone());
        tenants.sent += sent.as_ref().map_or(0, Vec::len);
        Ok(TenantsReply {
            state,
            tenants: sent,
        })
    }

    async fn change_tenant(&self, change: TenantChange) -> Result<TenantChangeReply, ApiError> {
        self.begin(StoreCall::ChangeTenant(change.clone())).await?;
        tokio::task::yield_now().await;
        let tenants = &mut self.content().tenants;
        tenants.check()?;
        let records = &mut tenants.records;
        let known = records.iter().find(|known| known.name == change.name);
        if known.map(|known| known.version) != change.expected {
            let error = ApiError::new(ErrorKind::Conflict, "changed by somebody else");
            return Err(error.with_code(code::TENANT_CHANGED));
        }
        tenants.changes += 1;
        let version = tenants.changes;
        records.retain(|known| known.name != change.name);
        records.extend(change.entry.map(|entry| TenantRecord {
            name: change.name,
            version,
            entry,
        }));
        Ok(TenantChangeReply { version })
    }

    fn usage_replicas(&self) -> Vec<UsageReplica> {
        self.content().usage.clone()
    }
}

/// A pull of one namespace or group, for tests that read one.
#[derive(Clone, Debug)]
pub struct ScopeReader {
    /// The namespace, signed by the gateway.
    pub namespace: SignedNamespace,
    /// The scope.
    pub scope: Scope,
    /// The position after which changes are asked for.
    pub after: FeedCursor,
    /// Documents that the reader itself writes.
    pub own: Vec<DocumentId>,
    /// Most tokens of the answer.
    pub max_tokens: u32,
    /// Milliseconds to wait for a change if there is none.
    pub wait_ms: u32,
}

impl ScopeReader {
    /// A reader of a namespace from its beginning, who does not wait.
    pub fn new(namespace: SignedNamespace) -> Self {
        ScopeReader {
            namespace,
            scope: Scope::Namespace,
            after: FeedCursor::default(),
            own: Vec::new(),
            max_tokens: 1 << 20,
            wait_ms: 0,
        }
    }

    /// The call.
    pub fn request(self) -> PullRequest {
        PullRequest {
            namespaces: vec![NamespacePull {
                namespace: self.namespace,
                scopes: vec![ScopePull {
                    scope: self.scope,
                    after: self.after,
                    own: self.own,
                }],
            }],
            max_tokens: self.max_tokens,
            wait_ms: self.wait_ms,
        }
    }

    /// The changes, with the age of a group's newest tokens. `None`: the group is not registered.
    ///
    /// # Errors
    /// Those of [`DraftStore::pull`], and the refusal of the scope.
    pub async fn log(
        self,
        store: &dyn DraftStore,
    ) -> Result<Option<(FeedDelta, Option<u32>)>, ApiError> {
        let cursor = self.after;
        let mut reply = store.pull(self.request()).await?;
        match reply.deltas.pop().map(|delta| delta.news) {
            Some(ScopeNews::Changes { delta, age_ms }) => Ok(Some((delta, age_ms))),
            Some(ScopeNews::Unregistered) => Ok(None),
            Some(ScopeNews::Refused { kind, message }) => Err(ApiError::new(kind, message)),
            None => {
                let nothing = FeedDelta {
                    cursor,
                    caught_up: !reply.is_full,
                    ..FeedDelta::default()
                };
                Ok(Some((nothing, None)))
            }
        }
    }

    /// The changes.
    ///
    /// # Errors
    /// As [`log`](Self::log), and `NotFound` for a group that is not registered.
    pub async fn read(self, store: &dyn DraftStore) -> Result<FeedDelta, ApiError> {
        let log = self.log(store).await?;
        log.map_or_else(
            || Err(missing("the group is not registered")),
            |log| Ok(log.0),
        )
    }
}
