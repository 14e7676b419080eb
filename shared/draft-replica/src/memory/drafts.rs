//! What can be drafted from in one place, a namespace or a group: the index, and what each document in it is.

#[cfg(test)]
pub(super) mod tests;

use std::collections::hash_map::Entry;
use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;
use std::time::{Duration, Instant};

use refrain_protocol::DocumentId;
use refrain_protocol::document::DocumentUpdate;
use refrain_suffix_index::{
    Cursor, DocumentKey, Index, IndexConfig, IndexError, IndexSizes, MountedSegment, Rebuild,
    Rebuilt, Retired, Segment,
};

use super::room::Size;

/// What can be drafted from in one place. No clock, no I/O.
pub struct Drafts {
    pub(crate) index: Index,
    held: HashMap<DocumentId, Held>,
    /// Documents in the order in which they began.
    order: BTreeMap<u64, DocumentId>,
    /// Number of the document that begins next.
    next: u64,
    /// Documents of the index's live part.
    live: HashMap<DocumentId, Live>,
    /// Documents of requests that run here, with the number of attempts at each: never evicted, never sealed.
    running: HashMap<DocumentId, u32>,
}

struct Held {
    epoch: u64,
    /// Its place in the order.
    began: u64,
}

#[derive(Clone, Copy)]
struct Live {
    /// When it grew or was shortened last.
    changed: Instant,
    ended: bool,
}

/// Segments that are to be taken in, and what is noted of their documents: made ready beside the lock.
#[derive(Default)]
pub(super) struct Arrivals {
    segments: Vec<MountedSegment>,
    held: HashMap<DocumentId, Held>,
    order: BTreeMap<u64, DocumentId>,
}

impl Arrivals {
    /// Adds a segment without the documents of these numbers, which ascend, and without those that came with another
    /// one. Returns whether there are documents of all these numbers.
    pub(super) fn add(&mut self, segment: Segment, masked: &[u32]) -> bool {
        let mut masked = masked.iter().copied().peekable();
        let mut gone = Vec::new();
        for (number, sealed) in (0u32..).zip(segment.iter()) {
            let is_gone = masked.next_if_eq(&number).is_some();
            match self.held.entry(DocumentId(sealed.key.0)) {
                Entry::Vacant(vacant) if !is_gone => {
                    let began = self.order.len() as u64;
                    self.order.insert(began, *vacant.key());
                    vacant.insert(Held { epoch: 0, began });
                }
                _ => gone.push(sealed.key),
            }
        }
        self.segments
            .push(MountedSegment::without(Arc::new(segment), gone));
        masked.next().is_none()
    }
}

/// Documents that are evicted under one hold of the lock.
const EVICTED_AT_ONCE: usize = 1024;

impl Drafts {
    pub(crate) fn new(config: IndexConfig) -> Self {
        Drafts {
            index: Index::new(config),
            held: HashMap::new(),
            order: BTreeMap::new(),
            next: 0,
            live: HashMap::new(),
            running: HashMap::new(),
        }
    }

    /// What is searched for drafts.
    pub fn index(&self) -> &Index {
        &self.index
    }

    /// Where a text stands that ends in a document's output, of which it has `output_len` tokens. A document that was
    /// removed while it runs ends elsewhere or is gone; then the end of the text is looked up afresh.
    pub fn cursor(&self, document: DocumentId, output_len: u32, text: &[u32]) -> Cursor {
        let tip = self.index.tip_at(key(document), output_len);
        tip.unwrap_or_else(|| self.index.start(text))
    }

    /// Takes a piece of a document from whatever side it comes first: overlaps are cut off, a higher epoch
    /// may shorten, an older one and a piece after a gap are ignored.
    ///
    /// # Errors
    /// The index has no room for more states.
    pub fn merge(&mut self, update: &DocumentUpdate, now: Instant) -> Result<(), IndexError> {
        self.take(update, false, now)
    }

    /// The same from the request that says it. An earlier attempt of the same epoch may have said something else: until this
    /// one `is_alone`, what stands here is compared with what it says, and the newer word holds. Returns whether it is alone
    /// from here on.
    ///
    /// # Errors
    /// As [`merge`](Self::merge).
    pub fn merge_said(
        &mut self,
        update: &DocumentUpdate,
        is_alone: bool,
        now: Instant,
    ) -> Result<bool, IndexError> {
        self.take(update, !is_alone, now)?;
        let said_len = update.prev_len + update.tokens.len() as u32;
        Ok(is_alone
            || self
                .len_of(update.document)
                .is_none_or(|len| len <= said_len))
    }

    fn take(
        &mut self,
        update: &DocumentUpdate,
        compares: bool,
        now: Instant,
    ) -> Result<(), IndexError> {
        let (document, key) = (update.document, key(update.document));
        let known = self.held.get(&document).map(|held| held.epoch);
        if known.is_some_and(|epoch| update.epoch < epoch) {
            return Ok(());
        }
        if known.is_none() {
            if update.prev_len > 0 {
                // Its beginning is not here (any more): a tail of it would be matched in the wrong place.
                return Ok(());
            }
            self.index.open(key, &update.head.left_context)?;
            let began = self.next;
            self.next += 1;
            self.order.insert(began, document);
            let epoch = update.epoch;
            self.held.insert(document, Held { epoch, began });
        }
        let mut len = self.index.len_of(key).unwrap_or(0);
        let mut is_changed = known.is_none();
        let is_newer = known.is_some_and(|epoch| update.epoch > epoch);
        if (is_newer || compares) && update.prev_len < len {
            // What is the same stays: to compare costs less than to cut it off and append it again.
            let agreeing = self
                .index
                .matching_prefix(key, update.prev_len, &update.tokens);
            let kept = update.prev_len + agreeing as u32;
            if kept < len && (is_newer || agreeing < update.tokens.len()) {
                self.index.shorten(key, kept)?;
                len = kept;
                is_changed = true;
            }
        }
        if let Some(held) = self.held.get_mut(&document) {
            held.epoch = update.epoch;
        }
        let new = len
            .checked_sub(update.prev_len)
            .and_then(|overlap| update.tokens.get(overlap as usize..));
        // The store's feed brings again what was said here. An empty append would take a sealed document back.
        if let Some(new) = new.filter(|new| !new.is_empty()) {
            self.index.append(key, new)?;
            is_changed = true;
        }
        if is_changed {
            self.live.entry(document).or_insert(Live {
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

    /// Takes in segments, as the oldest of all and of an epoch that every other follows. What is here already stays as it
    /// is. Costs a look at each document that is here, however many come.
    pub(super) fn install(&mut self, arrivals: Arrivals) {
        let Arrivals {
            segments,
            mut held,
            mut order,
        } = arrivals;
        self.index.mount_all(segments);
        let mut next = order.len() as u64;
        for document in std::mem::take(&mut self.order).into_values() {
            let epoch = self.held.get(&document).map_or(0, |held| held.epoch);
            if let Some(known) = held.insert(document, Held { epoch, began: next }) {
                order.remove(&known.began);
            }
            order.insert(next, document);
            next += 1;
        }
        self.next = next;
        self.held = held;
        self.order = order;
    }

    /// Length of a document's output, if all of it is here.
    pub fn len_of(&self, document: DocumentId) -> Option<u32> {
        self.index.len_of(key(document))
    }

    /// A request runs whose output this is. If it was sealed, it is taken back: it is going to grow.
    ///
    /// # Errors
    /// The index has no room for that; then it is still there, sealed.
    pub(crate) fn begin(&mut self, document: DocumentId, now: Instant) -> Result<(), IndexError> {
        *self.running.entry(document).or_default() += 1;
        self.revive(document, now)
    }

    pub(crate) fn end(&mut self, document: DocumentId) {
        if let Some(attempts) = self.running.get_mut(&document) {
            *attempts -= 1;
            if *attempts == 0 {
                self.running.remove(&document);
            }
        }
    }

    /// Whether a request runs that belongs here.
    pub(super) fn is_running(&self) -> bool {
        !self.running.is_empty()
    }

    pub(crate) fn remove(&mut self, documents: &[DocumentId]) {
        let keys: Vec<DocumentKey> = documents.iter().copied().map(key).collect();
        self.index.remove(&keys);
        for document in documents {
            self.live.remove(document);
            if let Some(held) = self.held.remove(document) {
                self.order.remove(&held.began);
            }
        }
    }

    /// Forgets all but what runs here.
    pub(super) fn reset(&mut self) {
        let others = self
            .order
            .values()
            .copied()
            .filter(|document| !self.running.contains_key(document));
        let others: Vec<DocumentId> = others.collect();
        self.remove(&others);
    }

    /// Forgets everything; what runs here starts anew.
    pub(super) fn clear(&mut self) {
        let all: Vec<DocumentId> = self.order.values().copied().collect();
        self.remove(&all);
    }

    /// What it holds, as limits count it.
    pub(super) fn size(&self) -> Size {
        Size {
            tokens: self.index.tokens(),
            bytes: settled_bytes(&self.index.sizes()),
        }
    }

    /// Lets the oldest documents go until at most so many tokens are left. Returns how many went; more may have to,
    /// in another go.
    pub(super) fn evict(&mut self, tokens_max: u64) -> usize {
        let mut over = self.index.tokens().saturating_sub(tokens_max);
        let mut gone = Vec::new();
        for document in self.order.values() {
            if over == 0 || gone.len() == EVICTED_AT_ONCE {
                break;
            }
            if !self.running.contains_key(document) {
                over = over.saturating_sub(u64::from(self.len_of(*document).unwrap_or(0)));
                gone.push(*document);
            }
        }
        if !gone.is_empty() {
            self.remove(&gone);
        }
        gone.len()
    }

    /// Tokens of the outputs that could be sealed now. Costs a look at every live document.
    pub(super) fn sealable_tokens(&self, now: Instant, quiet: Duration) -> u64 {
        self.live
            .keys()
            .filter(|document| self.is_sealable(**document, now, quiet))
            .filter_map(|document| self.len_of(*document))
            .map(u64::from)
            .sum()
    }

    /// Copies the live texts, to seal those that ended or have not changed for so long.
    pub(super) fn begin_seal(&self, now: Instant, quiet: Duration) -> Rebuild {
        self.index
            .begin_seal(|key| self.is_sealable(DocumentId(key.0), now, quiet))
    }

    /// Installs what a seal or a rebuild has made.
    ///
    /// # Errors
    /// As [`Index::finish_rebuild`].
    pub(super) fn finish(&mut self, rebuilt: Rebuilt, now: Instant) -> Result<Retired, IndexError> {
        let retired = self.index.finish_rebuild(rebuilt)?;
        let index = &self.index;
        self.live
            .retain(|document, _| index.tip(key(*document)).is_some());
        // A request may have begun meanwhile to continue an output that had ended.
        let running: Vec<DocumentId> = self.running.keys().copied().collect();
        for document in running {
            if let Err(error) = self.revive(document, now) {
                tracing::warn!(%error, "an output stays sealed while it runs");
            }
        }
        Ok(retired)
    }

    fn is_sealable(&self, document: DocumentId, now: Instant, quiet: Duration) -> bool {
        !self.running.contains_key(&document)
            && self.live.get(&document).is_some_and(|live| {
                live.ended || now.saturating_duration_since(live.changed) >= quiet
            })
    }

    fn revive(&mut self, document: DocumentId, now: Instant) -> Result<(), IndexError> {
        if self.index.is_sealed(key(document)) {
            self.index.append(key(document), &[])?;
            let live = Live {
                changed: now,
                ended: false,
            };
            self.live.insert(document, live);
        }
        Ok(())
    }
}

/// The bytes that are left of an index once what was removed has been rebuilt and merged away, reckoned by tokens.
pub(super) fn settled_bytes(sizes: &IndexSizes) -> u64 {
    let share = |bytes: usize, kept: u64, gone: u64| {
        let all = (kept + gone).max(1);
        (bytes as u128 * u128::from(all - gone) / u128::from(all)) as u64
    };
    share(sizes.live_bytes, sizes.live_tokens, sizes.dead_tokens)
        + share(
            sizes.segment_bytes,
            sizes.segment_tokens,
            sizes.masked_tokens,
        )
}

fn key(document: DocumentId) -> DocumentKey {
    DocumentKey(document.0)
}
