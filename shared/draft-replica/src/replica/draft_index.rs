//! The suffix index that requests of one namespace or group draft from, with the state of each document in it.

mod revival;
#[cfg(test)]
pub(super) mod tests;

use std::collections::hash_map::{DefaultHasher, Entry};
use std::collections::{BTreeMap, HashMap};
use std::hash::{Hash, Hasher};
use std::sync::Arc;
use std::time::{Duration, Instant};

use refrain_protocol::DocumentId;
use refrain_suffix_index::{
    Cursor, DocumentKey, Index, IndexConfig, IndexError, IndexSizes, MountedSegment, Rebuild,
    Rebuilt, Retired, Segment, SegmentBuilder, Token,
};

use super::capacity::IndexSize;
use crate::update::DocumentUpdateRef;

/// The suffix index of one namespace or group, with the state of its documents. It has no clock and does no I/O.
pub struct DraftIndex {
    pub(super) index: Index,
    documents: HashMap<DocumentId, DocumentState>,
    /// Documents by their ordinals: the oldest first.
    by_age: BTreeMap<u64, DocumentId>,
    next_ordinal: u64,
    /// Documents of the index's live part.
    live: HashMap<DocumentId, LiveState>,
    /// Documents of requests that run here. They are never evicted and never sealed.
    pinned: HashMap<DocumentId, Pin>,
    /// Documents that are being taken back from segments. The live part has the beginnings of their texts.
    reviving: HashMap<DocumentId, Revival>,
}

/// A document whose request runs here.
#[derive(Default)]
struct Pin {
    /// Attempts at it.
    attempts: u32,
    /// Its text is here from the beginning, and comes from its request alone.
    is_begun_here: bool,
}

struct DocumentState {
    epoch: u64,
    /// Its key in `by_age`.
    ordinal: u64,
}

/// The text of a document that is taken back, as far as it is not in the live part yet.
struct Revival {
    tokens: Vec<Token>,
    done: usize,
}

#[derive(Clone, Copy)]
struct LiveState {
    /// When it last grew or was shortened.
    changed: Instant,
    ended: bool,
}

/// Segments of the store that are about to be installed, and the states of their documents. They are prepared beside
/// the lock.
#[derive(Default)]
pub(super) struct IncomingSegments {
    segments: Vec<MountedSegment>,
    documents: HashMap<DocumentId, DocumentState>,
    by_age: BTreeMap<u64, DocumentId>,
}

impl IncomingSegments {
    /// Adds a segment, except for the documents at the positions `masked`, which ascend, and for those that an
    /// earlier segment brought. Returns whether the segment has a document at each of these positions.
    pub(super) fn add(&mut self, segment: Segment, masked: &[u32]) -> bool {
        let mut masked = masked.iter().copied().peekable();
        let mut left_out = Vec::new();
        for (position, sealed) in (0u32..).zip(segment.iter()) {
            let is_masked = masked.next_if_eq(&position).is_some();
            match self.documents.entry(DocumentId(sealed.key.0)) {
                Entry::Vacant(vacant) if !is_masked => {
                    let ordinal = self.by_age.len() as u64;
                    self.by_age.insert(ordinal, *vacant.key());
                    vacant.insert(DocumentState { epoch: 0, ordinal });
                }
                _ => left_out.push(sealed.key),
            }
        }
        self.segments
            .push(MountedSegment::without(Arc::new(segment), left_out));
        masked.next().is_none()
    }
}

/// Documents that are evicted under one hold of the lock.
const EVICTED_AT_ONCE: usize = 1024;

impl DraftIndex {
    pub(super) fn new(config: IndexConfig) -> Self {
        DraftIndex {
            index: Index::new(config),
            documents: HashMap::new(),
            by_age: BTreeMap::new(),
            next_ordinal: 0,
            live: HashMap::new(),
            pinned: HashMap::new(),
            reviving: HashMap::new(),
        }
    }

    /// The index that drafts are searched in.
    pub fn index(&self) -> &Index {
        &self.index
    }

    /// A number that changes with the text that [`copy_settled`](Self::copy_settled) copies.
    pub fn settled_stamp(&self) -> u64 {
        let settled = self.live.keys().filter(|id| !self.is_pinned(**id));
        let stamp = |id: &DocumentId| {
            let mut hasher = DefaultHasher::new();
            (
                id.0,
                self.len_of(*id),
                self.documents.get(id).map(|state| state.epoch),
            )
                .hash(&mut hasher);
            hasher.finish()
        };
        settled.map(stamp).fold(0, u64::wrapping_add)
    }

    /// Copies the live outputs that no request here emits, to be sealed for another place.
    pub fn copy_settled(&self) -> SegmentBuilder {
        self.index
            .copy_live(|key| !self.is_pinned(DocumentId(key.0)))
    }

    /// The position in the index of the end of `text`, which ends with the first `output_len` tokens of a document's
    /// output. A document that was removed while it runs is shorter here or gone; then the end of the text is
    /// searched for instead.
    pub fn cursor(&self, document: DocumentId, output_len: u32, text: &[u32]) -> Cursor {
        let tip = self.index.tip_at(key(document), output_len);
        tip.unwrap_or_else(|| self.index.start(text))
    }

    /// Applies an update, whether the request or the store's feed brings it first. Overlaps are cut off. A higher
    /// epoch may shorten the document. An update of an older epoch, or one after a gap, is ignored.
    ///
    /// An earlier attempt of the same epoch may have emitted other tokens than the request that brings the update.
    /// Until the request `is_sole_source` of what stands here, the text is compared with the update, and the update
    /// holds. Returns whether the request is the sole source from here on: nothing of an earlier attempt stands
    /// behind the update.
    ///
    /// # Errors
    /// The index has no capacity for more states.
    pub fn merge(
        &mut self,
        update: DocumentUpdateRef<'_>,
        is_sole_source: bool,
        now: Instant,
    ) -> Result<bool, IndexError> {
        self.apply(update, !is_sole_source, now)?;
        let emitted_len = update.prev_len + update.tokens.len() as u32;
        let len = self.len_of(update.document);
        if update.prev_len == 0
            && len == Some(emitted_len)
            && let Some(pin) = self.pinned.get_mut(&update.document)
        {
            pin.is_begun_here = true;
        }
        Ok(is_sole_source || len.is_none_or(|len| len <= emitted_len))
    }

    /// Applies an update of the store's feed; see [`merge`](Self::merge). With `compares`, its text holds against the
    /// one that stands here.
    ///
    /// # Errors
    /// The index has no capacity for more states.
    pub(super) fn apply(
        &mut self,
        update: DocumentUpdateRef<'_>,
        compares: bool,
        now: Instant,
    ) -> Result<(), IndexError> {
        let (document, key) = (update.document, key(update.document));
        let known = self.documents.get(&document).map(|state| state.epoch);
        if known.is_some_and(|epoch| update.epoch < epoch) {
            return Ok(());
        }
        self.revive(document, usize::MAX)?;
        if known.is_none() {
            if update.prev_len > 0 {
                // The beginning is not here, or no longer: the tail alone would be matched at the wrong position.
                return Ok(());
            }
            self.index.open(key, &update.head.left_context)?;
            let ordinal = self.next_ordinal;
            self.next_ordinal += 1;
            self.by_age.insert(ordinal, document);
            let epoch = update.epoch;
            self.documents
                .insert(document, DocumentState { epoch, ordinal });
        }
        let mut len = self.index.len_of(key).unwrap_or(0);
        let mut is_changed = known.is_none();
        let is_newer = known.is_some_and(|epoch| update.epoch > epoch);
        if (is_newer || compares) && update.prev_len < len {
            // Equal tokens stay: comparing costs less than cutting them off and appending them again.
            let agreeing = self
                .index
                .matching_prefix(key, update.prev_len, update.tokens);
            let kept = update.prev_len + agreeing as u32;
            if kept < len && (is_newer || agreeing < update.tokens.len()) {
                self.index.shorten(key, kept)?;
                len = kept;
                is_changed = true;
            }
        }
        if let Some(state) = self.documents.get_mut(&document) {
            state.epoch = update.epoch;
        }
        let new = len
            .checked_sub(update.prev_len)
            .and_then(|overlap| update.tokens.get(overlap as usize..));
        // The store's feed repeats what requests here emitted. An empty append would take a sealed document back.
        if let Some(new) = new.filter(|new| !new.is_empty()) {
            self.index.append(key, new)?;
            is_changed = true;
        }
        if is_changed {
            self.live.entry(document).or_insert(LiveState {
                changed: now,
                ended: false,
            });
        }
        if let Some(live) = self.live.get_mut(&document) {
            live.ended |= update.finish.is_some();
            if is_changed {
                live.changed = now;
            }
        }
        Ok(())
    }

    /// Installs segments as the oldest documents, with an epoch below every other. Documents that are here already
    /// stay as they are. The cost is a look at each document that is here, however many come.
    pub(super) fn install(&mut self, incoming: IncomingSegments) {
        let IncomingSegments {
            segments,
            mut documents,
            mut by_age,
        } = incoming;
        self.index.mount_all(segments);
        let mut ordinal = by_age.len() as u64;
        for document in std::mem::take(&mut self.by_age).into_values() {
            let epoch = self.documents.get(&document).map_or(0, |state| state.epoch);
            let state = DocumentState { epoch, ordinal };
            if let Some(sealed) = documents.insert(document, state) {
                by_age.remove(&sealed.ordinal);
            }
            by_age.insert(ordinal, document);
            ordinal += 1;
        }
        self.next_ordinal = ordinal;
        self.documents = documents;
        self.by_age = by_age;
    }

    /// Length of a document's output; `None` where its beginning is not here.
    pub fn len_of(&self, document: DocumentId) -> Option<u32> {
        self.index.len_of(key(document))
    }

    /// Keeps a document from eviction and sealing while a request emits its output. A sealed document begins to be
    /// taken back to the live part, because it is going to grow; [`revive_part`](Self::revive_part) goes on with it.
    pub(super) fn pin(&mut self, document: DocumentId, now: Instant) {
        self.pinned.entry(document).or_default().attempts += 1;
        self.begin_revival(document, now);
    }

    pub(super) fn unpin(&mut self, document: DocumentId) {
        if let Some(pin) = self.pinned.get_mut(&document) {
            pin.attempts -= 1;
            if pin.attempts == 0 {
                self.pinned.remove(&document);
            }
        }
    }

    /// The documents of requests that run here.
    pub(super) fn pinned(&self) -> Vec<DocumentId> {
        self.pinned.keys().copied().collect()
    }

    /// Those of them whose text is here from the beginning, so that the store has nothing new of it.
    pub(super) fn begun_here(&self) -> Vec<DocumentId> {
        let begun = self.pinned.iter().filter(|(_, pin)| pin.is_begun_here);
        begun.map(|(document, _)| *document).collect()
    }

    pub(super) fn is_pinned(&self, document: DocumentId) -> bool {
        self.pinned.contains_key(&document)
    }

    /// Removes those of the documents that no request here emits. Returns them.
    pub(super) fn remove_unless_pinned(&mut self, documents: &[DocumentId]) -> Vec<DocumentId> {
        let documents = documents.iter().copied();
        let unpinned: Vec<DocumentId> = documents.filter(|id| !self.is_pinned(*id)).collect();
        self.remove(&unpinned);
        unpinned
    }

    /// Whether a request of this namespace or group runs here.
    pub(super) fn is_in_use(&self) -> bool {
        !self.pinned.is_empty()
    }

    pub(super) fn remove(&mut self, documents: &[DocumentId]) {
        let keys: Vec<DocumentKey> = documents.iter().copied().map(key).collect();
        self.index.remove(&keys);
        for document in documents {
            self.live.remove(document);
            self.reviving.remove(document);
            if let Some(pin) = self.pinned.get_mut(document) {
                pin.is_begun_here = false;
            }
            if let Some(state) = self.documents.remove(document) {
                self.by_age.remove(&state.ordinal);
            }
        }
    }

    /// Removes all documents but those of requests that run here.
    pub(super) fn reset(&mut self) {
        let others = self.unpinned();
        self.remove(&others);
    }

    /// All documents but those of requests that run here.
    pub(super) fn unpinned(&self) -> Vec<DocumentId> {
        let documents = self.by_age.values().copied();
        documents
            .filter(|document| !self.pinned.contains_key(document))
            .collect()
    }

    /// The size that limits are compared with.
    pub(super) fn size(&self) -> IndexSize {
        IndexSize {
            tokens: self.index.tokens(),
            bytes: settled_bytes(&self.index.sizes()),
        }
    }

    /// Evicts the oldest documents until at most `tokens_max` tokens are left. Returns how many were evicted. One
    /// call evicts a limited number, so that the lock is not held for long; the caller repeats it.
    pub(super) fn evict(&mut self, tokens_max: u64) -> usize {
        let mut excess = self.index.tokens().saturating_sub(tokens_max);
        let mut evicted = Vec::new();
        for document in self.by_age.values() {
            if excess == 0 || evicted.len() == EVICTED_AT_ONCE {
                break;
            }
            if !self.pinned.contains_key(document) {
                let len = self.len_of(*document).unwrap_or(0);
                excess = excess.saturating_sub(u64::from(len));
                evicted.push(*document);
            }
        }
        if !evicted.is_empty() {
            self.remove(&evicted);
        }
        evicted.len()
    }

    /// Tokens of the outputs that could be sealed now. The cost is a look at every live document.
    pub(super) fn sealable_tokens(&self, now: Instant, quiet: Duration) -> u64 {
        self.live
            .keys()
            .filter(|document| self.is_sealable(**document, now, quiet))
            .filter_map(|document| self.len_of(*document))
            .map(u64::from)
            .sum()
    }

    /// Copies the live texts, to seal outputs that ended or have not changed for `quiet`.
    pub(super) fn begin_seal(&self, now: Instant, quiet: Duration) -> Rebuild {
        self.index
            .begin_seal(|key| self.is_sealable(DocumentId(key.0), now, quiet))
    }

    /// Installs the result of a seal or a rebuild. [`revive_part`](Self::revive_part) goes on with outputs that were
    /// sealed although they are continued.
    ///
    /// # Errors
    /// Those of [`Index::finish_rebuild`].
    pub(super) fn finish_rebuild(
        &mut self,
        rebuilt: Rebuilt,
        now: Instant,
    ) -> Result<Retired, IndexError> {
        let retired = self.index.finish_rebuild(rebuilt)?;
        let index = &self.index;
        self.live
            .retain(|document, _| index.tip(key(*document)).is_some());
        // Meanwhile a request may have begun to continue an output that had ended.
        let pinned: Vec<DocumentId> = self.pinned.keys().copied().collect();
        for document in pinned {
            self.begin_revival(document, now);
        }
        Ok(retired)
    }

    fn is_sealable(&self, document: DocumentId, now: Instant, quiet: Duration) -> bool {
        !self.pinned.contains_key(&document)
            && self.live.get(&document).is_some_and(|live| {
                live.ended || now.saturating_duration_since(live.changed) >= quiet
            })
    }
}

/// Bytes that an index will take once removed documents have been rebuilt and merged away, in proportion to tokens.
pub(super) fn settled_bytes(sizes: &IndexSizes) -> u64 {
    let share = |bytes: usize, kept: u64, removed: u64| {
        let all = (kept + removed).max(1);
        (bytes as u128 * u128::from(all - removed) / u128::from(all)) as u64
    };
    let live = share(sizes.live_bytes, sizes.live_tokens, sizes.dead_tokens);
    let sealed = share(
        sizes.segment_bytes,
        sizes.segment_tokens,
        sizes.masked_tokens,
    );
    live + sealed
}

fn key(document: DocumentId) -> DocumentKey {
    DocumentKey(document.0)
}
