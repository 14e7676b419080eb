//! Getting rid of what was removed: a new automaton from the texts that are left.
//!
//! In place, [`Index::rebuild`] costs an append of every token. For a large index that is served meanwhile:
//!
//! 1. [`Index::begin_rebuild`], under the lock: copies the texts (4 bytes per token, nothing else);
//! 2. [`Rebuild::run`], on a thread of its own: the appends;
//! 3. [`Index::finish_rebuild`], under the lock: brings over what was opened, appended, shortened and removed
//!    in between, and takes the place of the old automaton.

use std::collections::HashMap;

use crate::document::Document;
use crate::{DocumentKey, Index, IndexConfig, IndexError, Token};

/// The texts of an index at one moment. See [`Index::begin_rebuild`].
pub struct Rebuild {
    config: IndexConfig,
    generation: u64,
    texts: Vec<Text>,
}

struct Text {
    key: DocumentKey,
    copied: Copied,
    left_len: usize,
    tokens: Vec<Token>,
}

/// Which state of which document was copied. A slot tells a document from a later one of the same key.
#[derive(Clone, Copy)]
struct Copied {
    slot: u32,
    cuts: u32,
}

/// A new index over those texts, to be handed to [`Index::finish_rebuild`].
pub struct Rebuilt {
    index: Index,
    /// Generation of the index it was made from.
    generation: u64,
    /// The documents, of that index, that it was made from.
    copied: HashMap<DocumentKey, Copied>,
}

impl Rebuild {
    /// Builds the new index. Needs nothing of the old one.
    pub fn run(self) -> Result<Rebuilt, IndexError> {
        let mut index = Index::new(self.config);
        let mut copied = HashMap::with_capacity(self.texts.len());
        for text in self.texts {
            let (left, output) = text.tokens.split_at(text.left_len);
            index.open(text.key, left)?;
            index.append(text.key, output)?;
            copied.insert(text.key, text.copied);
        }
        Ok(Rebuilt {
            index,
            generation: self.generation,
            copied,
        })
    }
}

impl Index {
    /// Forgets what was removed or cut off, here and now: an append of every token that is left. Cursors
    /// have to be started again.
    pub fn rebuild(&mut self) -> Result<(), IndexError> {
        let rebuilt = self.begin_rebuild().run()?;
        self.finish_rebuild(rebuilt).map(drop)
    }

    /// Copies the texts that are there.
    pub fn begin_rebuild(&self) -> Rebuild {
        let texts = self.present().map(|(slot, document)| Text {
            key: document.key,
            copied: Copied {
                slot,
                cuts: document.cuts,
            },
            left_len: document.left_len() as usize,
            tokens: document.live().collect(),
        });
        Rebuild {
            config: self.config.clone(),
            generation: self.generation,
            texts: texts.collect(),
        }
    }

    /// Replaces the automaton by the rebuilt one, brought up to date: the cost is a look at every document, the
    /// appends since the rebuild began, and a comparison of those that were shortened since. Cursors have
    /// to be started again. On an error the index is as it was.
    pub fn finish_rebuild(&mut self, rebuilt: Rebuilt) -> Result<Index, IndexError> {
        if rebuilt.generation != self.generation {
            return Err(IndexError::OutdatedRebuild);
        }
        let Rebuilt {
            mut index, copied, ..
        } = rebuilt;
        let is_gone = |copied: &Copied| self.documents[copied.slot as usize].removed;
        let gone: Vec<DocumentKey> = copied
            .iter()
            .filter(|(_, copied)| is_gone(copied))
            .map(|(&key, _)| key)
            .collect();
        index.remove(&gone);
        for (slot, document) in self.present() {
            let (key, left_len) = (document.key, document.left_len());
            let common = match copied.get(&key).filter(|copied| copied.slot == slot) {
                None => {
                    let left: Vec<Token> = document.live().take(left_len as usize).collect();
                    index.open(key, &left)?;
                    0
                }
                Some(copied) => {
                    let len = index.len_of(key).unwrap_or(0);
                    if copied.cuts == document.cuts {
                        len
                    } else {
                        common_output(document, index.document(key))
                    }
                }
            };
            index.shorten(key, common)?;
            let rest: Vec<Token> = document.live_from(left_len + common).collect();
            index.append(key, &rest)?;
        }
        Ok(std::mem::replace(self, index))
    }
}

/// How many tokens of output two versions of a document begin with in common.
fn common_output(now: &Document, copied: Option<&Document>) -> u32 {
    let copied = copied
        .into_iter()
        .flat_map(|copied| copied.live_from(copied.left_len()));
    now.live_from(now.left_len())
        .zip(copied)
        .take_while(|(now, copied)| now == copied)
        .count() as u32
}
