//! What can be drafted from in one namespace: the index, and what each document in it is.

use std::collections::{HashMap, VecDeque};

use refrain_protocol::DocumentId;
use refrain_protocol::document::DocumentUpdate;
use refrain_suffix_index::{DocumentKey, Index, IndexConfig, IndexError};

/// What can be drafted from in one namespace. No clock, no I/O.
pub(crate) struct Drafts {
    pub(crate) index: Index,
    epochs: HashMap<DocumentId, u64>,
    /// Documents in the order in which they began.
    order: VecDeque<DocumentId>,
    /// Documents of requests that run here, with the number of attempts at each: never evicted.
    running: HashMap<DocumentId, u32>,
    tokens_max: u64,
}

impl Drafts {
    pub(crate) fn new(config: IndexConfig, tokens_max: u64) -> Self {
        Drafts {
            index: Index::new(config),
            epochs: HashMap::new(),
            order: VecDeque::new(),
            running: HashMap::new(),
            tokens_max,
        }
    }

    /// Takes a piece of a document from whatever side it comes first: overlaps are cut off, a higher epoch
    /// may shorten, an older one and a piece after a gap are ignored.
    ///
    /// # Errors
    /// The index has no room for more states.
    pub(crate) fn merge(&mut self, update: &DocumentUpdate) -> Result<(), IndexError> {
        let key = DocumentKey(update.document.0);
        let known = self.epochs.get(&update.document).copied();
        if known.is_some_and(|epoch| update.epoch < epoch) {
            return Ok(());
        }
        if !self.index.contains(key) {
            if update.prev_len > 0 {
                // Its beginning is not here (any more): a tail of it would be matched in the wrong place.
                return Ok(());
            }
            self.index.open(key, &update.head.left_context)?;
            self.order.push_back(update.document);
        }
        let mut len = self.index.len_of(key).unwrap_or(0);
        if known.is_some_and(|epoch| update.epoch > epoch) && update.prev_len < len {
            self.index.shorten(key, update.prev_len)?;
            len = update.prev_len;
        }
        self.epochs.insert(update.document, update.epoch);
        if let Some(new) = len
            .checked_sub(update.prev_len)
            .and_then(|overlap| update.tokens.get(overlap as usize..))
        {
            self.index.append(key, new)?;
        }
        Ok(())
    }

    /// Length of a document's output, if all of it is here.
    pub(crate) fn len_of(&self, document: DocumentId) -> Option<u32> {
        self.index.len_of(DocumentKey(document.0))
    }

    pub(crate) fn begin(&mut self, document: DocumentId) {
        *self.running.entry(document).or_default() += 1;
    }

    pub(crate) fn end(&mut self, document: DocumentId) {
        if let Some(attempts) = self.running.get_mut(&document) {
            *attempts -= 1;
            if *attempts == 0 {
                self.running.remove(&document);
            }
        }
    }

    pub(crate) fn remove(&mut self, documents: &[DocumentId]) {
        let keys: Vec<DocumentKey> = documents
            .iter()
            .map(|document| DocumentKey(document.0))
            .collect();
        self.index.remove(&keys);
        for document in documents {
            self.epochs.remove(document);
        }
        let epochs = &self.epochs;
        self.order.retain(|document| epochs.contains_key(document));
    }

    /// Forgets all but what runs here.
    pub(super) fn reset(&mut self) {
        let others: Vec<DocumentId> = self
            .order
            .iter()
            .copied()
            .filter(|document| !self.running.contains_key(document))
            .collect();
        self.remove(&others);
    }

    /// Lets the oldest documents go until the limit holds. Returns how many went.
    pub(super) fn evict(&mut self) -> usize {
        let mut over = self.index.tokens().saturating_sub(self.tokens_max);
        let mut gone = Vec::new();
        for document in &self.order {
            if over == 0 {
                break;
            }
            if !self.running.contains_key(document) {
                over = over.saturating_sub(u64::from(
                    self.index.len_of(DocumentKey(document.0)).unwrap_or(0),
                ));
                gone.push(*document);
            }
        }
        if !gone.is_empty() {
            self.remove(&gone);
        }
        gone.len()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use refrain_protocol::document::DocumentHead;

    fn update(document: u128, epoch: u64, prev_len: u32, tokens: &[u32]) -> DocumentUpdate {
        DocumentUpdate {
            document: DocumentId(document),
            epoch,
            prev_len,
            tokens: tokens.to_vec(),
            head: DocumentHead::default(),
            finish: None,
        }
    }

    fn drafts(tokens_max: u64) -> Drafts {
        Drafts::new(IndexConfig::default(), tokens_max)
    }

    fn len(drafts: &Drafts, document: u128) -> Option<u32> {
        drafts.index.len_of(DocumentKey(document))
    }

    #[test]
    fn the_same_piece_from_two_sides_counts_once() {
        let mut drafts = drafts(100);
        for piece in [
            update(1, 1, 0, &[1, 2, 3]),
            update(1, 1, 0, &[1, 2]),
            update(1, 1, 2, &[3, 4]),
        ] {
            drafts.merge(&piece).unwrap();
        }
        assert_eq!(len(&drafts, 1), Some(4));
        assert_eq!(drafts.index.tokens(), 4);
    }

    #[test]
    fn gaps_and_old_epochs_are_ignored_and_new_epochs_shorten() {
        let mut drafts = drafts(100);
        drafts.merge(&update(1, 5, 0, &[1, 2, 3])).unwrap();
        drafts.merge(&update(1, 5, 9, &[7])).unwrap();
        drafts.merge(&update(1, 4, 3, &[8])).unwrap();
        assert_eq!(len(&drafts, 1), Some(3));
        drafts.merge(&update(1, 6, 1, &[9])).unwrap();
        assert_eq!(len(&drafts, 1), Some(2));
    }

    #[test]
    fn the_oldest_documents_leave_first_and_running_ones_stay() {
        let mut drafts = drafts(4);
        drafts.begin(DocumentId(1));
        for document in 1..=3 {
            drafts.merge(&update(document, 1, 0, &[1, 2])).unwrap();
        }
        assert_eq!(drafts.evict(), 1);
        assert_eq!(
            [len(&drafts, 1), len(&drafts, 2), len(&drafts, 3)],
            [Some(2), None, Some(2)]
        );
        drafts.reset();
        assert_eq!([len(&drafts, 1), len(&drafts, 3)], [Some(2), None]);
    }
}
