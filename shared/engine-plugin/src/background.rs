//! The background actor: everything that may wait. It finds the sources of requests, and passes outputs on.

use std::sync::Arc;
use std::sync::mpsc::{Receiver, TryRecvError};
use std::time::Duration;

use parking_lot::Mutex;
use refrain_draft_replica::{DraftReplica, NamespaceReplica, Uploader};
use refrain_protocol::document::DocumentUpdate;
use refrain_protocol::{DocumentId, SignedNamespace};
use tokio::sync::oneshot;

use crate::backlog::Backlog;
use crate::metrics::{INDEX, PluginMetrics};
use crate::sources::{AwaitedSources, DraftSources};

/// A task that the engine's thread leaves to the background actor.
pub(crate) enum BackgroundEvent {
    /// Pin the output of a request that runs.
    Pin(Arc<NamespaceReplica>, DocumentId),
    /// Find the sources of a request, which could not be had without waiting. Its output is pinned as well.
    FindSources {
        signed: SignedNamespace,
        group: Option<String>,
        document: DocumentId,
        reply: oneshot::Sender<DraftSources>,
    },
    /// Upload an update, and touch these documents, whose drafts were accepted.
    Upload(Arc<NamespaceReplica>, DocumentUpdate, Vec<DocumentId>),
    /// End a request, maybe only for now.
    End(Box<EndedRequest>),
    /// Reply once everything before this is done.
    Flush(oneshot::Sender<()>),
}

impl BackgroundEvent {
    /// Output tokens that the event carries.
    pub(crate) fn tokens(&self) -> usize {
        match self {
            BackgroundEvent::Upload(_, update, _) => update.tokens.len(),
            BackgroundEvent::End(ended) => {
                let upload = ended.upload.as_ref();
                ended.unmerged_tokens() + upload.map_or(0, |update| update.tokens.len())
            }
            BackgroundEvent::Pin(..)
            | BackgroundEvent::FindSources { .. }
            | BackgroundEvent::Flush(_) => 0,
        }
    }
}

/// The background actor's end of the queue, which outlives a panic of it.
pub(crate) struct Inbox {
    events: Mutex<Receiver<BackgroundEvent>>,
    queued: Backlog,
}

impl Inbox {
    pub(crate) fn new(events: Receiver<BackgroundEvent>, queued: Backlog) -> Self {
        Inbox {
            events: Mutex::new(events),
            queued,
        }
    }

    /// The next event, without waiting for one. Its tokens are off the queue.
    ///
    /// # Errors
    /// The queue is empty now, or will be from here on.
    fn try_next(&self) -> Result<BackgroundEvent, TryRecvError> {
        let event = self.events.lock().try_recv()?;
        self.queued.take_off(event.tokens());
        Ok(event)
    }
}

/// The work that is left for a request that has ended.
pub(crate) struct EndedRequest {
    pub(crate) sources: AwaitedSources,
    /// The update that the replica of the namespace lacks, and the one that the group lacks.
    pub(crate) unmerged: UnmergedUpdate,
    pub(crate) group_unmerged: Option<UnmergedUpdate>,
    /// The update that the store lacks; `None` where another service writes the output there.
    pub(crate) upload: Option<DocumentUpdate>,
    pub(crate) touched: Vec<DocumentId>,
}

impl EndedRequest {
    /// Tokens that the replicas lack.
    pub(crate) fn unmerged_tokens(&self) -> usize {
        let updates = [Some(&self.unmerged), self.group_unmerged.as_ref()];
        let updates = updates.into_iter().flatten();
        updates.map(|unmerged| unmerged.update.tokens.len()).sum()
    }

    /// Drops the tokens that the replicas lack. They learn only that the output has ended.
    pub(crate) fn drop_unmerged(&mut self) {
        self.unmerged.update.tokens = Vec::new();
        if let Some(unmerged) = &mut self.group_unmerged {
            unmerged.update.tokens = Vec::new();
        }
    }
}

/// An update that a replica lacks, as [`merge`](refrain_draft_replica::DraftIndex::merge) takes it.
pub(crate) struct UnmergedUpdate {
    pub(crate) update: DocumentUpdate,
    pub(crate) is_sole_source: bool,
}

/// How often the actor looks for events. Nothing wakes it: on a machine without an idle core, that would take the
/// engine's thread off its core.
const LOOK_EVERY: Duration = Duration::from_millis(20);

/// The work of the background actor.
#[derive(Clone)]
pub(crate) struct Background {
    pub(crate) replica: Arc<DraftReplica>,
    pub(crate) uploader: Uploader,
    pub(crate) metrics: PluginMetrics,
}

impl Background {
    /// Handles events until the sender is gone.
    pub(crate) async fn run(self, inbox: Arc<Inbox>) {
        loop {
            match inbox.try_next() {
                Ok(event) => self.handle(event),
                Err(TryRecvError::Empty) => tokio::time::sleep(LOOK_EVERY).await,
                Err(TryRecvError::Disconnected) => return,
            }
        }
    }

    fn handle(&self, event: BackgroundEvent) {
        match event {
            BackgroundEvent::Pin(namespace, document) => namespace.pin(document),
            BackgroundEvent::FindSources {
                signed,
                group,
                document,
                reply,
            } => {
                let id = signed.namespace.id();
                let namespace = self.replica.namespace(id, &signed);
                let group = group.and_then(|group| self.replica.join_group(id, &group, document));
                namespace.pin(document);
                if let Err(unwanted) = reply.send(DraftSources { namespace, group }) {
                    unwanted.namespace.unpin(document);
                }
            }
            BackgroundEvent::Upload(namespace, update, touched) => {
                self.upload(&namespace, Some(update), touched);
            }
            BackgroundEvent::End(ended) => self.end(*ended),
            BackgroundEvent::Flush(done) => drop(done.send(())),
        }
    }

    fn end(&self, mut ended: EndedRequest) {
        // Sources that were not found when the request ended are found by now: events are handled in order.
        let Some(DraftSources { namespace, group }) = ended.sources.poll() else {
            return;
        };
        let UnmergedUpdate {
            update,
            is_sole_source,
        } = &ended.unmerged;
        let merged = namespace.merge_emitted(update.into(), *is_sole_source);
        if merged.is_err() {
            self.metrics.rejected(INDEX);
        }
        if let (Some(membership), Some(unmerged)) = (group, &ended.group_unmerged) {
            let group = membership.group();
            group.merge_emitted((&unmerged.update).into(), unmerged.is_sole_source);
        }
        namespace.unpin(update.document);
        self.upload(namespace, ended.upload, ended.touched);
    }

    fn upload(
        &self,
        namespace: &NamespaceReplica,
        update: Option<DocumentUpdate>,
        touched: Vec<DocumentId>,
    ) {
        let signed = namespace.signed();
        for document in touched {
            self.uploader.touch(namespace.id, &signed, document);
        }
        if let Some(update) = update {
            self.uploader.push(namespace.id, &signed, (&update).into());
        }
    }
}
