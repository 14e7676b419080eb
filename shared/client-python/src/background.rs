//! The background thread: hands outputs on, and renews the engine's own namespace. Whatever may wait is done here.

use std::path::PathBuf;
use std::sync::mpsc::{Receiver, TryRecvError};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use refrain_draft_memory::{Harvest, Membership, Memory, NamespaceMemory};
use refrain_protocol::document::DocumentUpdate;
use refrain_protocol::{ApiError, DocumentId, SignedNamespace};
use refrain_service_kit::mesh::{MeshAuth, from_token};
use tokio::sync::oneshot;

use crate::metrics::ClientMetrics;

/// What the engine's thread has to say.
pub(crate) enum Event {
    /// A request runs.
    Began(Arc<NamespaceMemory>, DocumentId),
    /// It said something, and drafts of these documents were accepted.
    Said(Arc<NamespaceMemory>, DocumentUpdate, Vec<DocumentId>),
    /// It has ended, maybe for now. The memory lacks the update's tokens.
    Ended(Arc<NamespaceMemory>, DocumentUpdate, Option<Membership>),
    /// Everything before this has been handed on.
    Flush(oneshot::Sender<()>),
}

/// How often it is looked for events. Nobody is woken by them: on a machine without an idle core that would cost the
/// engine's thread its place.
const LOOK_EVERY: Duration = Duration::from_millis(20);

/// Hands on what the engine's thread says, until that is gone.
pub(crate) async fn hand_on(events: Receiver<Event>, harvest: Harvest, metrics: ClientMetrics) {
    loop {
        let event = match events.try_recv() {
            Ok(event) => event,
            Err(TryRecvError::Empty) => {
                tokio::time::sleep(LOOK_EVERY).await;
                continue;
            }
            Err(TryRecvError::Disconnected) => return,
        };
        match event {
            Event::Began(memory, document) => memory.begin(document),
            Event::Said(memory, update, touched) => {
                metrics.queued_tokens.sub(update.tokens.len() as i64);
                let grant = memory.grant();
                for document in touched {
                    harvest.touch(memory.id(), &grant, document);
                }
                harvest.push(memory.id(), &grant, update);
            }
            Event::Ended(memory, update, group) => {
                let mut drafts = memory.lock();
                if let Err(error) = drafts.merge(&update, Instant::now()) {
                    tracing::warn!(%error, "index took no more tokens");
                }
                drop(drafts);
                if let Some(group) = &group {
                    group.group().merge(&update);
                }
                memory.end(update.document);
            }
            Event::Flush(done) => drop(done.send(())),
        }
    }
}

/// How often the token's file is read.
const READ_EVERY: Duration = Duration::from_secs(60);

/// The namespace of requests that bring none.
pub(crate) struct Standing {
    pub(crate) file: Option<PathBuf>,
    pub(crate) auth: MeshAuth,
    pub(crate) tokenizer: String,
    signed: Mutex<Option<SignedNamespace>>,
}

impl Standing {
    pub(crate) fn new(file: Option<PathBuf>, auth: MeshAuth, tokenizer: String) -> Self {
        Standing {
            file,
            auth,
            tokenizer,
            signed: Mutex::default(),
        }
    }

    /// Believes a token, if it is this mesh's and of this engine's tokenizer.
    pub(crate) fn check(&self, token: &str) -> Result<SignedNamespace, ApiError> {
        let signed = from_token(token)?;
        self.auth.verify(&signed)?;
        if signed.namespace.tokenizer != self.tokenizer {
            return Err(ApiError::invalid(
                "namespace",
                "namespace refused: it is of another tokenizer than this engine's; sign it with the files that the engine has",
            ));
        }
        Ok(signed)
    }

    pub(crate) fn signed(&self) -> Option<SignedNamespace> {
        let signed = self.signed.lock().unwrap_or_else(PoisonError::into_inner);
        signed.clone()
    }

    pub(crate) fn set(&self, signed: SignedNamespace) {
        *self.signed.lock().unwrap_or_else(PoisonError::into_inner) = Some(signed);
    }

    /// Reads the token's file.
    pub(crate) fn read(&self) -> anyhow::Result<Option<SignedNamespace>> {
        let Some(file) = &self.file else {
            return Ok(None);
        };
        let token = std::fs::read_to_string(file)
            .map_err(|error| anyhow::anyhow!("{}: {error}", file.display()))?;
        let signed = self.check(&token);
        Ok(Some(signed.map_err(|error| {
            anyhow::anyhow!("{}: {error}", file.display())
        })?))
    }

    /// Reads it again and again.
    pub(crate) async fn renew(self: Arc<Self>, memory: Arc<Memory>) {
        loop {
            tokio::time::sleep(READ_EVERY).await;
            match self.read() {
                Ok(Some(signed)) => {
                    memory.namespace(signed.namespace.id(), &signed);
                    self.set(signed);
                }
                Ok(None) => return,
                Err(error) => tracing::warn!(%error, "the namespace's token is not renewed"),
            }
        }
    }
}
