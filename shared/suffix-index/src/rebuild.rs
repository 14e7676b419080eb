//! Getting rid of what was removed: a new automaton from the texts that are left.
//!
//! In place, [`Index::rebuild`] costs an append of every token. For a large index that is served meanwhile:
//!
//! 1. [`Index::begin_rebuild`], under the lock: copies the texts (4 bytes per token, nothing else);
//! 2. [`Rebuild::run`], on a thread of its own: the appends;
//! 3. [`Index::finish_rebuild`], under the lock: brings over what was opened, appended, shortened and removed
//!    in between, and takes the place of the old automaton.

use std::collections::HashMap;

use crate::{DocumentKey, Index, IndexConfig, IndexError, Token};

/// The texts of an index at one moment. See [`Index::begin_rebuild`].
pub struct Rebuild {
    config: IndexConfig,
    generation: u64,
    texts: Vec<Text>,
}

struct Text {
    key: DocumentKey,
    slot: u32,
    left_len: usize,
    tokens: Vec<Token>,
}

/// A new index over those texts, to be handed to [`Index::finish_rebuild`].
pub struct Rebuilt {
    index: Index,
    /// Generation of the index it was made from.
    generation: u64,
    /// Slots, in that index, of the documents it was made from.
    slots: HashMap<DocumentKey, u32>,
}

impl Rebuild {
    /// Builds the new index. Needs nothing of the old one.
    pub fn run(self) -> Result<Rebuilt, IndexError> {
        let mut index = Index::new(self.config);
        let mut slots = HashMap::with_capacity(self.texts.len());
        for text in self.texts {
            let (left, output) = text.tokens.split_at(text.left_len);
            index.open(text.key, left)?;
            index.append(text.key, output)?;
            slots.insert(text.key, text.slot);
        }
        Ok(Rebuilt {
            index,
            generation: self.generation,
            slots,
        })
    }
}

impl Index {
    /// Forgets what was removed or cut off, here and now: an append of every token that is left. Cursors
    /// have to be started again.
    pub fn rebuild(&mut self) -> Result<(), IndexError> {
        let rebuilt = self.begin_rebuild().run()?;
        self.finish_rebuild(rebuilt)
    }

    /// Copies the texts that are there.
    pub fn begin_rebuild(&self) -> Rebuild {
        let texts = self.present().map(|(slot, document)| Text {
            key: document.key,
            slot,
            left_len: document.left_len() as usize,
            tokens: document.live().collect(),
        });
        Rebuild {
            config: self.config.clone(),
            generation: self.generation,
            texts: texts.collect(),
        }
    }

    /// Replaces the automaton by the rebuilt one, brought up to date: the cost is a comparison of the
    /// texts and the appends since the rebuild began. Cursors have to be started again. On an error
    /// the index is as it was.
    pub fn finish_rebuild(&mut self, rebuilt: Rebuilt) -> Result<(), IndexError> {
        if rebuilt.generation != self.generation {
            return Err(IndexError::OutdatedRebuild);
        }
        let Rebuilt {
            mut index, slots, ..
        } = rebuilt;
        // Slots tell a document from a later one of the same key.
        let gone: Vec<DocumentKey> = slots
            .iter()
            .filter(|&(_, &slot)| self.documents[slot as usize].removed)
            .map(|(&key, _)| key)
            .collect();
        index.remove(&gone);
        for (_, document) in self.present() {
            let mut text = document.live();
            let left: Vec<Token> = text.by_ref().take(document.left_len() as usize).collect();
            let output: Vec<Token> = text.collect();
            let common = match index.document(document.key) {
                None => {
                    index.open(document.key, &left)?;
                    0
                }
                Some(copied) => {
                    let copied = copied.live().skip(left.len());
                    copied
                        .zip(&output)
                        .take_while(|(copied, now)| copied == *now)
                        .count()
                }
            };
            index.shorten(document.key, common as u32)?;
            index.append(document.key, &output[common..])?;
        }
        *self = index;
        Ok(())
    }
}
