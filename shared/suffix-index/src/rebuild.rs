//! A new live part from the texts that are left: without what was removed, and, when sealing, without the documents
//! that go to a segment.
//!
//! In place, [`Index::rebuild`] costs an append of every token, [`Index::seal`] one of every token that stays. For a
//! large index that is served meanwhile:
//!
//! 1. [`Index::begin_rebuild`] or [`Index::begin_seal`], under the lock: copies the texts (4 bytes per token, nothing
//!    else);
//! 2. [`Rebuild::run`], on a thread of its own: the appends, the segment;
//! 3. [`Index::finish_rebuild`], under the lock: brings over what was opened, appended, shortened and removed
//!    in between, and takes the place of the old live part.

use std::collections::HashMap;
use std::sync::Arc;

use crate::live::Live;
use crate::live::document::Document;
use crate::sealed::Mounted;
use crate::{DocumentKey, Index, IndexConfig, IndexError, Segment, SegmentBuilder, Token};

/// The live texts of an index at one moment. See [`Index::begin_rebuild`] and [`Index::begin_seal`].
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
    /// Whether it went to the segment.
    sealed: bool,
}

/// A new live part and perhaps a segment, to be handed to [`Index::finish_rebuild`].
pub struct Rebuilt {
    live: Live,
    segment: Option<Arc<Segment>>,
    /// Generation of the live part it was made from.
    generation: u64,
    /// The documents, of that live part, that it was made from.
    copied: HashMap<DocumentKey, Copied>,
}

/// What an index no longer needs. Dropping it takes time, so do it where nobody waits.
pub struct Retired {
    #[expect(dead_code, reason = "held to be dropped elsewhere")]
    live: Option<Live>,
    #[expect(dead_code, reason = "held to be dropped elsewhere")]
    sealed: Vec<Mounted>,
}

impl Retired {
    pub(crate) fn segments(sealed: Vec<Mounted>) -> Self {
        Retired { live: None, sealed }
    }
}

impl Rebuild {
    /// Builds the new parts. Needs nothing of the old ones.
    ///
    /// # Errors
    /// More tokens than an automaton or a segment can number.
    pub fn run(self) -> Result<Rebuilt, IndexError> {
        let mut live = Live::new(&self.config);
        let mut builder = SegmentBuilder::new();
        let mut copied = HashMap::with_capacity(self.texts.len());
        for text in self.texts {
            let (left, output) = text.tokens.split_at(text.left_len);
            if text.copied.sealed {
                builder.add(text.key, left.iter().copied(), output.iter().copied());
            } else {
                live.open(text.key, left.iter().copied())?;
                live.append(text.key, output)?;
            }
            copied.insert(text.key, text.copied);
        }
        let segment = match builder.documents() {
            0 => None,
            _ => Some(Arc::new(builder.build()?)),
        };
        Ok(Rebuilt {
            live,
            segment,
            generation: self.generation,
            copied,
        })
    }
}

impl Rebuilt {
    /// The sealed documents, for instance to be written to a file; `None` if none were to be sealed.
    pub fn segment(&self) -> Option<&Arc<Segment>> {
        self.segment.as_ref()
    }
}

impl Index {
    /// Forgets what was removed from the live part or cut off, here and now: an append of every live token that is
    /// left. Cursors have to be started again.
    ///
    /// # Errors
    /// As [`Rebuild::run`].
    pub fn rebuild(&mut self) -> Result<(), IndexError> {
        let rebuilt = self.begin_rebuild().run()?;
        self.finish_rebuild(rebuilt).map(drop)
    }

    /// Moves live documents that are `finished` to a segment, here and now, and rebuilds the live part of the others.
    /// Cursors have to be started again.
    ///
    /// # Errors
    /// As [`Rebuild::run`].
    pub fn seal(&mut self, finished: impl FnMut(DocumentKey) -> bool) -> Result<(), IndexError> {
        let rebuilt = self.begin_seal(finished).run()?;
        self.finish_rebuild(rebuilt).map(drop)
    }

    /// Copies the live texts.
    pub fn begin_rebuild(&self) -> Rebuild {
        self.begin_seal(|_| false)
    }

    /// Copies the live texts, those that are `finished` to be sealed. One that changes after all before
    /// [`finish_rebuild`](Self::finish_rebuild) stays live.
    pub fn begin_seal(&self, mut finished: impl FnMut(DocumentKey) -> bool) -> Rebuild {
        let texts = self.live.present().map(|(slot, document)| Text {
            key: document.key,
            copied: Copied {
                slot,
                cuts: document.cuts,
                sealed: finished(document.key),
            },
            left_len: document.left_len() as usize,
            tokens: document.live().collect(),
        });
        Rebuild {
            config: self.config.clone(),
            generation: self.live.generation,
            texts: texts.collect(),
        }
    }

    /// Replaces the live part by the rebuilt one, brought up to date, and adds the segment: the cost is a look at
    /// every live document, the appends since the rebuild began, and a comparison of those that were shortened since.
    /// Cursors have to be started again. On an error the index is as it was.
    ///
    /// # Errors
    /// Another rebuild was finished since this one began, or there is no room.
    pub fn finish_rebuild(&mut self, rebuilt: Rebuilt) -> Result<Retired, IndexError> {
        if rebuilt.generation != self.live.generation {
            return Err(IndexError::OutdatedRebuild);
        }
        let Rebuilt {
            mut live,
            segment,
            copied,
            ..
        } = rebuilt;
        let mut mounted = segment.map(Mounted::new);
        for (&key, copied) in &copied {
            if self.live.documents[copied.slot as usize].removed {
                match &mut mounted {
                    Some(mounted) if copied.sealed => {
                        mounted.mask(key);
                    }
                    _ => {
                        live.remove(key);
                    }
                }
            }
        }
        for (slot, document) in self.live.present() {
            let key = document.key;
            let copied = copied.get(&key).filter(|copied| copied.slot == slot);
            if let Some(mounted) = &mut mounted
                && copied.is_some_and(|copied| copied.sealed)
            {
                if is_unchanged(mounted, document) {
                    continue;
                }
                mounted.mask(key);
            }
            catch_up(&mut live, document, copied)?;
        }
        self.sealed.extend(mounted);
        Ok(Retired {
            live: Some(std::mem::replace(&mut self.live, live)),
            sealed: Vec::new(),
        })
    }
}

/// Whether a document still is what was sealed of it.
fn is_unchanged(mounted: &Mounted, now: &Document) -> bool {
    mounted.segment.get(now.key).is_some_and(|sealed| {
        sealed.output.len() as u32 == now.output_len()
            && (now.cuts == 0
                || now
                    .live_from(now.left_len())
                    .eq(sealed.output.iter().copied()))
    })
}

/// Brings `now` into the new live part, whatever of it was copied there.
fn catch_up(live: &mut Live, now: &Document, copied: Option<&Copied>) -> Result<(), IndexError> {
    let (key, left_len) = (now.key, now.left_len());
    let common = match copied.filter(|copied| !copied.sealed) {
        None => {
            let left: Vec<Token> = now.live().take(left_len as usize).collect();
            live.open(key, left.into_iter())?;
            0
        }
        Some(copied) => match live.document(key) {
            Some(then) if copied.cuts == now.cuts => then.output_len(),
            Some(then) => common_output(now, then),
            None => 0,
        },
    };
    live.shorten(key, common)?;
    let rest: Vec<Token> = now.live_from(left_len + common).collect();
    live.append(key, &rest)
}

/// How many tokens of output two versions of a document begin with in common.
fn common_output(now: &Document, then: &Document) -> u32 {
    now.live_from(now.left_len())
        .zip(then.live_from(then.left_len()))
        .take_while(|(now, then)| now == then)
        .count() as u32
}
