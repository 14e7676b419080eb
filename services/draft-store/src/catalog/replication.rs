//! The knowledge of a replica beyond its documents: how far it has applied the stream, which erasures came by it, and
//! what other replicas do not have yet.

use std::collections::{BTreeMap, HashMap};

use refrain_protocol::Namespace;
use refrain_protocol::document::DocumentHead;

use crate::catalog::moves::Moves;
use crate::catalog::outbox::Outbox;
use crate::record::replication::{PositionRecord, StreamErasureRecord};
use crate::record::{DocumentKey, ErasureRecord};

/// The state of a replica. A store without a feed has an empty one.
#[derive(Default)]
pub(crate) struct Replication {
    /// Whether changes are to reach other replicas.
    pub(crate) is_on: bool,
    /// Whether samples of groups are sent while they grow.
    pub(crate) sends_groups: bool,
    /// How far the stream is applied. `None` if this store was no replica so far.
    pub(crate) position: Option<PositionRecord>,
    pub(crate) outbox: Outbox,
    /// Where readers of other replicas go on.
    pub(crate) moves: Moves,
    revisions: HashMap<DocumentKey, u32>,
    /// The latest erasure of each scope.
    erasures: BTreeMap<u128, StreamErasureRecord>,
}

impl ErasureRecord {
    /// Whether a document that reached a store at `stored_ms`, and began at `created_ms` by its worker's clock, began
    /// before the erasure. The worker's clock counts only for a document that came after the erasure.
    pub(crate) fn hits_begin(&self, stored_ms: u64, created_ms: u64) -> bool {
        self.hits_time(stored_ms)
            || stored_ms > self.at_ms && created_ms > 0 && self.hits_time(created_ms)
    }
}

impl Replication {
    /// Sequence of the last message that was applied; 0 before the first.
    pub(crate) fn sequence(&self) -> u64 {
        self.position.map_or(0, |position| position.sequence)
    }

    /// The last message up to which this replica has applied everything, and has carried out all erasures. So none of
    /// its documents is in the scope of an erasure up to there.
    pub(crate) fn seen(&self) -> u64 {
        let open = self.erasures.values().filter(|erasure| !erasure.is_done);
        let first = open.map(|erasure| erasure.sequence).min();
        first.map_or(self.sequence(), |first| first.saturating_sub(1))
    }

    /// How often a document's text was corrected within its epoch.
    pub(crate) fn revision(&self, key: DocumentKey) -> u32 {
        self.revisions.get(&key).copied().unwrap_or(0)
    }

    /// Records the revision of a document. Returns whether it changed.
    pub(crate) fn set_revision(&mut self, key: DocumentKey, revision: u32) -> bool {
        let before = match revision {
            0 => self.revisions.remove(&key),
            _ => self.revisions.insert(key, revision),
        };
        before.unwrap_or(0) != revision
    }

    /// Remembers an erasure that came by the stream in place of an earlier one of the same scope. Returns what is
    /// remembered.
    ///
    /// The time is the later one of the two. The replica that was asked later may have a clock that is behind, and a
    /// document that only the earlier erasure hits would come back. The rest of the earlier one is still to be done.
    pub(crate) fn note_erasure(&mut self, mut erasure: StreamErasureRecord) -> StreamErasureRecord {
        let id = erasure.mark.id();
        if let Some(known) = self.erasures.get(&id) {
            erasure.mark.at_ms = erasure.mark.at_ms.max(known.mark.at_ms);
            erasure.is_own |= known.is_own && !known.is_done;
        }
        self.erasures.insert(id, erasure.clone());
        erasure
    }

    /// An erasure that came by the stream.
    pub(crate) fn erasure_mut(&mut self, id: u128) -> Option<&mut StreamErasureRecord> {
        self.erasures.get_mut(&id)
    }

    /// All erasures of the stream that are remembered.
    pub(crate) fn erasures(&self) -> impl Iterator<Item = &StreamErasureRecord> {
        self.erasures.values()
    }

    /// The erasures that this replica has not carried out completely.
    pub(crate) fn open_erasures(&self) -> Vec<StreamErasureRecord> {
        let open = self.erasures.values().filter(|erasure| !erasure.is_done);
        open.cloned().collect()
    }

    /// Forgets erasures before a time that were carried out. Returns their scopes.
    pub(crate) fn forget_erasures(&mut self, before_ms: u64) -> Vec<u128> {
        let is_old =
            |erasure: &StreamErasureRecord| erasure.is_done && erasure.mark.at_ms < before_ms;
        let old = self.erasures.iter().filter(|(_, erasure)| is_old(erasure));
        let old: Vec<u128> = old.map(|(id, _)| *id).collect();
        for id in &old {
            self.erasures.remove(id);
        }
        old
    }

    /// Whether a document of the stream is refused: it began in the scope of an erasure that its sender did not know.
    /// All replicas decide it by the same values, so they agree.
    pub(crate) fn refuses(
        &self,
        seen: u64,
        names: &Namespace,
        head: &DocumentHead,
        stored_ms: u64,
    ) -> bool {
        self.erasures.values().any(|erasure| {
            let mark = &erasure.mark;
            seen < erasure.sequence
                && mark.hits_namespace(Some(names))
                && mark.hits_session(head.session.as_deref())
                && mark.hits_begin(stored_ms, head.created_ms)
        })
    }
}
