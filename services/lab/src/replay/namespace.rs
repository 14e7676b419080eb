//! The index of one tenant during a replay: running outputs are live, finished ones are sealed from time to time.

use std::collections::HashSet;
use std::sync::Arc;

use refrain_suffix_index::{
    DocumentKey, Index, IndexConfig, IndexError, SegmentBuilder, SegmentError, Token,
};

use super::presets::Automaton;

/// Size of the segments of warm outputs; building one takes a few gigabytes at most.
const WARM_SEGMENT_TOKENS: usize = 1 << 27;

/// The index of one namespace.
pub(super) struct Namespace {
    pub(super) index: Index,
    /// Documents that are not finished.
    pub(super) open: HashSet<DocumentKey>,
    /// Warm outputs that are in no segment yet.
    known: SegmentBuilder,
    /// The warm outputs as SAM decoding keeps them, if it is compared.
    pub(super) corpus: Option<Automaton>,
}

impl Namespace {
    pub(super) fn new(config: IndexConfig) -> Self {
        Namespace {
            index: Index::new(config),
            open: HashSet::new(),
            known: SegmentBuilder::new(),
            corpus: None,
        }
    }

    /// Seals finished documents, and merges segments if there are too many.
    pub(super) fn seal(&mut self) -> Result<(), IndexError> {
        self.index.seal(|key| !self.open.contains(&key))?;
        self.index.merge()?;
        Ok(())
    }

    /// Adds a whole document that goes directly into a segment. It can be drafted from after [`mount`](Self::mount).
    pub(super) fn add_known(
        &mut self,
        key: DocumentKey,
        left: &[Token],
        output: &[Token],
    ) -> Result<(), SegmentError> {
        let (left, output) = (left.iter().copied(), output.iter().copied());
        self.known.add(key, left, output);
        if self.known.tokens() >= WARM_SEGMENT_TOKENS {
            self.mount()?;
        }
        Ok(())
    }

    /// Builds the segment of the added documents.
    pub(super) fn mount(&mut self) -> Result<(), SegmentError> {
        if self.known.documents() > 0 {
            let segment = std::mem::take(&mut self.known).build()?;
            self.index.mount(Arc::new(segment), []);
        }
        Ok(())
    }
}
