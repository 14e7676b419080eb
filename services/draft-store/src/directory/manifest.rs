//! The manifest: which log is in use, and the minimum that it must hold.

use std::path::Path;

use serde::{Deserialize, Serialize};

use crate::catalog::{Catalog, LoadedCatalog};
use crate::log::{LogError, refused, sync_directory};
use crate::record::StoreRecord;

/// The facts about the log that are known without opening it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Manifest {
    /// Number of the log in use: `log-<number>`, or `log` for 0. All others are leftovers.
    #[serde(default)]
    pub(crate) log: u64,
    pub(super) generation: u64,
    sequence_reserved: u64,
    /// Sequence of the last change at the time of writing.
    head: u64,
    documents: u64,
    /// Nothing was written to the log afterwards.
    closed: bool,
    /// A loss of documents that no operator has confirmed.
    #[serde(default)]
    loss: Option<Loss>,
    /// The time of writing by the store's own clock, which does not jump, in Unix milliseconds. It is 0 if unknown.
    #[serde(default)]
    pub(super) known_ms: u64,
}

/// A start found far fewer documents than there were before.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Loss {
    pub(crate) expected: u64,
    pub(crate) found: u64,
}

/// Fewer missing documents than this do not stop the store, since damage costs what it touches.
const LOSS_DOCUMENTS_MIN: u64 = 16;

/// The same limit as one part in this many of the documents before.
const LOSS_SHARE: u64 = 10;

impl Manifest {
    pub(crate) fn new(log: u64, store: StoreRecord, catalog: &Catalog, closed: bool) -> Self {
        Manifest {
            log,
            generation: store.generation,
            sequence_reserved: store.sequence_reserved,
            head: catalog.head(),
            documents: catalog.totals().documents,
            closed,
            loss: None,
            known_ms: 0,
        }
    }

    /// Adds an unconfirmed loss, and the time.
    pub(crate) fn with(self, loss: Option<Loss>, known_ms: u64) -> Self {
        Manifest {
            loss,
            known_ms,
            ..self
        }
    }

    /// The loss, given the number of documents now. `is_in_doubt` says that something could not be read; otherwise
    /// the missing documents were removed on purpose.
    pub(super) fn loss(&self, documents: u64, is_in_doubt: bool) -> Option<Loss> {
        let missing = self.documents.saturating_sub(documents);
        let is_much = missing >= LOSS_DOCUMENTS_MIN.max(self.documents / LOSS_SHARE);
        match self.loss {
            Some(loss) => Some(loss),
            None if is_in_doubt && is_much => Some(Loss {
                expected: self.documents,
                found: documents,
            }),
            None => None,
        }
    }

    /// Whether the log lacks something that was durable when this was written.
    pub(super) fn disagrees(&self, store: StoreRecord, loaded: &LoadedCatalog) -> bool {
        // Documents with damaged states are handled already: they are removed with a tombstone each.
        let documents = loaded.catalog.totals().documents + loaded.damaged.len() as u64;
        // The documents of a lost segment are gone, and the followers of its namespace start over in any case.
        let is_whole = loaded.lost_segments == 0;
        self.generation == store.generation
            && (self.sequence_reserved > store.sequence_reserved
                || (self.head > loaded.catalog.head() && is_whole && loaded.damaged_records == 0)
                || (self.closed && self.documents != documents && is_whole))
    }

    /// Writes it atomically.
    pub(crate) fn write(&self, dir: &Path) -> Result<(), LogError> {
        let (path, temporary) = (dir.join("manifest.json"), dir.join("manifest.json.new"));
        let write = || -> std::io::Result<()> {
            let file = std::fs::File::create(&temporary)?;
            serde_json::to_writer(&file, self)?;
            file.sync_all()?;
            std::fs::rename(&temporary, &path)?;
            sync_directory(dir)
        };
        write().map_err(|error| refused("write", &path, &error))
    }

    /// Reads it. `None` if there is none, or it is not readable.
    pub(crate) fn read(dir: &Path) -> Option<Manifest> {
        let bytes = std::fs::read(dir.join("manifest.json")).ok()?;
        let manifest = serde_json::from_slice(&bytes);
        if let Err(error) = &manifest {
            tracing::warn!(%error, "draft store manifest is not readable");
        }
        manifest.ok()
    }
}
