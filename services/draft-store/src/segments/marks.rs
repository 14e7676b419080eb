//! Marks: changes of sealed documents, which live in the log.

use std::collections::BTreeMap;

use crate::record::{GONE, MARKS_DOCUMENTS, SegmentId, SegmentSlot};

/// Marks by segment and chunk.
#[derive(Default)]
pub(crate) struct Marks {
    pub(crate) chunks: BTreeMap<(SegmentId, u32), Vec<u32>>,
}

impl Marks {
    /// The mark of a document, 0 for none.
    pub(crate) fn get(&self, slot: SegmentSlot) -> u32 {
        let (chunk, at) = chunk_of(slot);
        let marks = self.chunks.get(&chunk);
        marks.and_then(|marks| marks.get(at)).copied().unwrap_or(0)
    }

    /// Marks a document.
    pub(crate) fn set(&mut self, slot: SegmentSlot, mark: u32) {
        let (chunk, at) = chunk_of(slot);
        let marks = self.chunks.entry(chunk).or_default();
        marks.resize(marks.len().max(MARKS_DOCUMENTS as usize), 0);
        marks[at] = mark;
    }
}

/// The chunk that holds a document's mark, and the mark's position in it.
pub(crate) fn chunk_of(slot: SegmentSlot) -> ((SegmentId, u32), usize) {
    let SegmentSlot { segment, number } = slot;
    let chunk = (segment, number / MARKS_DOCUMENTS);
    (chunk, (number % MARKS_DOCUMENTS) as usize)
}

/// The mark for a time of use, in seconds. It never collides with [`GONE`].
pub(crate) fn mark_of(used_ms: u64) -> u32 {
    u32::try_from(used_ms / 1_000).map_or(GONE - 1, |used_s| used_s.min(GONE - 1))
}
