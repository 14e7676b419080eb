//! Rebuilding and sealing: a new live part without removed tokens, and, when sealing, without finished documents.
//!
//! In place, [`Index::rebuild`] costs an append of every live token, and [`Index::seal`] an append of every token
//! that stays live. A large index that serves requests meanwhile takes three steps:
//!
//! 1. [`Index::begin_rebuild`] or [`Index::begin_seal`], under the lock, copies the texts, which are 4 bytes per
//!    token.
//! 2. [`Rebuild::run`], on a thread of its own, appends the texts and builds the segment.
//! 3. [`Index::finish_rebuild`], under the lock, repeats the changes that were made in between, and replaces the old
//!    live part.

use std::collections::HashMap;
use std::sync::Arc;

use crate::live_part::{Document, LivePart};
use crate::{
    DocumentKey, Index, IndexConfig, IndexError, MountedSegment, Segment, SegmentBuilder, Token,
};

/// A copy of the live texts of an index. See [`Index::begin_rebuild`] and [`Index::begin_seal`].
pub struct Rebuild {
    config: IndexConfig,
    generation: u64,
    texts: Vec<CopiedText>,
}

struct CopiedText {
    key: DocumentKey,
    copied: CopiedVersion,
    left_len: usize,
    tokens: Vec<Token>,
}

/// The version of a document that was copied. The slot tells a document from a later one with the same key.
#[derive(Clone, Copy)]
struct CopiedVersion {
    slot: u32,
    cuts: u32,
    /// Whether the copy goes to the segment.
    sealed: bool,
}

/// A new live part and perhaps a segment, to be passed to [`Index::finish_rebuild`].
pub struct Rebuilt {
    live: LivePart,
    /// The segment of the sealed documents, if any document was sealed.
    pub(crate) segment: Option<Arc<Segment>>,
    /// The generation of the live part that was copied.
    generation: u64,
    /// The copied documents of that live part.
    copied: HashMap<DocumentKey, CopiedVersion>,
}

/// The parts that an index no longer needs. Dropping them takes time, so do it where no request waits.
pub struct Retired {
    #[expect(dead_code, reason = "held to be dropped elsewhere")]
    live: Option<LivePart>,
    #[expect(dead_code, reason = "held to be dropped elsewhere")]
    sealed: Vec<MountedSegment>,
}

impl Retired {
    pub(crate) fn segments(sealed: Vec<MountedSegment>) -> Self {
        Retired { live: None, sealed }
    }
}

impl Rebuild {
    /// Builds the new parts. It does not use the old ones.
    ///
    /// # Errors
    /// There are more tokens than an automaton or a segment can number.
    pub fn run(self) -> Result<Rebuilt, IndexError> {
        let mut live = LivePart::new(&self.config);
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
        Ok(Rebuilt {
            live,
            segment: builder.build_unless_empty()?,
            generation: self.generation,
            copied,
        })
    }
}

impl Index {
    /// Rebuilds the live part in place without removed and cut-off tokens. The cost is an append of every live token.
    /// Cursors become invalid.
    ///
    /// # Errors
    /// As [`Rebuild::run`].
    pub fn rebuild(&mut self) -> Result<(), IndexError> {
        let rebuilt = self.begin_rebuild().run()?;
        self.finish_rebuild(rebuilt).map(drop)
    }

    /// Moves live documents that are `finished` to a segment, and rebuilds the live part from the others, in place.
    /// Cursors become invalid.
    ///
    /// # Errors
    /// As [`Rebuild::run`].
    pub fn seal(&mut self, finished: impl FnMut(DocumentKey) -> bool) -> Result<(), IndexError> {
        let rebuilt = self.begin_seal(finished).run()?;
        self.finish_rebuild(rebuilt).map(drop)
    }

    /// Begins a rebuild: copies the live texts.
    pub fn begin_rebuild(&self) -> Rebuild {
        self.begin_seal(|_| false)
    }

    /// Begins a seal: copies the live texts, and marks those that are `finished` to be sealed. A document that
    /// changes before [`finish_rebuild`](Self::finish_rebuild) stays live.
    pub fn begin_seal(&self, mut finished: impl FnMut(DocumentKey) -> bool) -> Rebuild {
        let texts = self.live.present().map(|(slot, document)| CopiedText {
            key: document.key,
            copied: CopiedVersion {
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

    /// Brings the rebuilt live part up to date, replaces the old one with it, and adds the segment. Cursors become
    /// invalid.
    ///
    /// The cost is a look at every live document, the appends since the rebuild began, and a comparison of the
    /// documents that were shortened since.
    ///
    /// # Errors
    /// Another rebuild was finished since this one began, or the index is full. The index is left as it was.
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
        let mut mounted = segment.map(MountedSegment::new);
        for (&key, copied) in &copied {
            if self.live.documents[copied.slot as usize].removed {
                match &mut mounted {
                    Some(mounted) if copied.sealed => mounted.mask(key),
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

/// Whether a document is still equal to its sealed copy.
fn is_unchanged(mounted: &MountedSegment, now: &Document) -> bool {
    mounted.segment.get(now.key).is_some_and(|sealed| {
        sealed.output.len() as u32 == now.output_len()
            && (now.cuts == 0
                || now
                    .live_from(now.left_len())
                    .eq(sealed.output.iter().copied()))
    })
}

/// Brings `now` into the new live part, which may have an older copy of it.
fn catch_up(
    live: &mut LivePart,
    now: &Document,
    copied: Option<&CopiedVersion>,
) -> Result<(), IndexError> {
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

/// Length of the common prefix of the outputs of two versions of a document.
fn common_output(now: &Document, then: &Document) -> u32 {
    now.live_from(now.left_len())
        .zip(then.live_from(then.left_len()))
        .take_while(|(now, then)| now == then)
        .count() as u32
}
