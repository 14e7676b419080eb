//! The background thread: finds requests their places, hands outputs on, and renews the engine's own namespace. Whatever may
//! wait is done here.

use std::sync::Arc;
use std::sync::mpsc::{Receiver, TryRecvError};
use std::time::{Duration, Instant};

use refrain_draft_replica::{Harvest, Memory, NamespaceMemory};
use refrain_protocol::document::DocumentUpdate;
use refrain_protocol::{DocumentId, SignedNamespace};
use tokio::sync::oneshot;

use crate::metrics::{INDEX, InEngineMetrics};
use crate::place::{Place, Placed};

/// What the engine's thread has to say.
pub(crate) enum Event {
    /// A request runs.
    Began(Arc<NamespaceMemory>, DocumentId),
    /// A request runs whose place could not be found at once.
    Place {
        signed: SignedNamespace,
        group: Option<String>,
        document: DocumentId,
        reply: oneshot::Sender<Place>,
    },
    /// It said something, and drafts of these documents were accepted.
    Said(Arc<NamespaceMemory>, DocumentUpdate, Vec<DocumentId>),
    /// It has ended, maybe for now.
    Ended(Box<Ended>),
    /// Everything before this has been handed on.
    Flush(oneshot::Sender<()>),
}

impl Event {
    /// Output tokens that are on their way with it.
    pub(crate) fn tokens(&self) -> usize {
        match self {
            Event::Said(_, update, _) => update.tokens.len(),
            Event::Ended(ended) => {
                let told = ended.tell.as_ref().map_or(0, |update| update.tokens.len());
                ended.lacking_tokens() + told
            }
            Event::Began(..) | Event::Place { .. } | Event::Flush(_) => 0,
        }
    }
}

/// What is to be done for a request that has ended.
pub(crate) struct Ended {
    pub(crate) placed: Placed,
    /// What the memory lacks of it, and the group's.
    pub(crate) lack: Lack,
    pub(crate) group_lack: Option<Lack>,
    /// What the store lacks of it; `None` where somebody else writes the output.
    pub(crate) tell: Option<DocumentUpdate>,
    pub(crate) touched: Vec<DocumentId>,
}

impl Ended {
    /// Tokens that the copies of the drafts lack.
    pub(crate) fn lacking_tokens(&self) -> usize {
        let lacks = [Some(&self.lack), self.group_lack.as_ref()];
        let lacks = lacks.into_iter().flatten();
        lacks.map(|lack| lack.piece.tokens.len()).sum()
    }

    /// Leaves the copies of the drafts without these: they learn of the end alone.
    pub(crate) fn drop_lacking(&mut self) {
        self.lack.piece.tokens = Vec::new();
        if let Some(lack) = &mut self.group_lack {
            lack.piece.tokens = Vec::new();
        }
    }
}

/// What a copy of the drafts lacks of an output, as [`merge_said`](refrain_draft_replica::Drafts::merge_said) takes it.
pub(crate) struct Lack {
    pub(crate) piece: DocumentUpdate,
    pub(crate) is_alone: bool,
}

/// How often it is looked for events. Nobody is woken by them: on a machine without an idle core that would cost the
/// engine's thread its place.
const LOOK_EVERY: Duration = Duration::from_millis(20);

/// What the engine's thread says, and where it goes.
pub(crate) struct Background {
    pub(crate) memory: Arc<Memory>,
    pub(crate) harvest: Harvest,
    pub(crate) metrics: InEngineMetrics,
}

impl Background {
    /// Does what the engine's thread says, until that is gone.
    pub(crate) async fn run(self, events: Receiver<Event>) {
        loop {
            match events.try_recv() {
                Ok(event) => {
                    let tokens = event.tokens();
                    self.take(event);
                    self.metrics.queued_tokens.sub(tokens as i64);
                }
                Err(TryRecvError::Empty) => tokio::time::sleep(LOOK_EVERY).await,
                Err(TryRecvError::Disconnected) => return,
            }
        }
    }

    fn take(&self, event: Event) {
        match event {
            Event::Began(memory, document) => memory.begin(document),
            Event::Place {
                signed,
                group,
                document,
                reply,
            } => {
                let id = signed.namespace.id();
                let memory = self.memory.namespace(id, &signed);
                let group = group.and_then(|group| self.memory.group(id, &group, document));
                memory.begin(document);
                if let Err(unwanted) = reply.send(Place { memory, group }) {
                    unwanted.memory.end(document);
                }
            }
            Event::Said(memory, update, touched) => self.tell(&memory, Some(update), touched),
            Event::Ended(ended) => self.end(*ended),
            Event::Flush(done) => drop(done.send(())),
        }
    }

    fn end(&self, ended: Ended) {
        let Ended {
            mut placed,
            lack,
            group_lack,
            tell,
            touched,
        } = ended;
        // Where it was not found by its end, it has been since: that was told before.
        let Some(Place { memory, group }) = placed.place() else {
            return;
        };
        let Lack { piece, is_alone } = lack;
        let merged = memory.lock().merge_said(&piece, is_alone, Instant::now());
        if merged.is_err() {
            self.metrics.rejected(INDEX);
        }
        if let (Some(member), Some(Lack { piece, is_alone })) = (group, group_lack) {
            member.group().merge_said(&piece, is_alone);
        }
        memory.end(piece.document);
        self.tell(memory, tell, touched);
    }

    fn tell(
        &self,
        memory: &NamespaceMemory,
        update: Option<DocumentUpdate>,
        touched: Vec<DocumentId>,
    ) {
        let grant = memory.grant();
        for document in touched {
            self.harvest.touch(memory.id(), &grant, document);
        }
        if let Some(update) = update {
            self.harvest.push(memory.id(), &grant, (&update).into());
        }
    }
}
