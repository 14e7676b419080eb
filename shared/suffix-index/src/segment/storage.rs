//! The memory of a segment's words.

use memmap2::MmapMut;

use crate::memory_hints::{HUGE_FROM_BYTES, reserve_huge};

/// The words of a segment.
pub(super) enum SegmentStorage {
    /// On the heap.
    Owned(Vec<u32>),
    /// On huge pages, if the system has some. The size is a whole number of words.
    Huge(MmapMut),
    /// Memory of the caller. When the segment was opened, it was aligned and a whole number of words.
    Shared(Box<dyn AsRef<[u8]> + Send + Sync>),
}

impl SegmentStorage {
    /// Stores words where a search reads them fastest: on huge pages, if possible.
    ///
    /// A search reads some dozens of places all over a segment. With pages of 4 KiB, nearly every read misses the
    /// processor's TLB as well, which costs about as much as the read itself. The price is one copy when a segment is
    /// built. By then the memory for sorting is free again.
    pub(super) fn new(mut words: Vec<u32>) -> SegmentStorage {
        match huge(bytemuck::cast_slice(&words)) {
            Some(map) => SegmentStorage::Huge(map),
            None => {
                words.shrink_to_fit();
                SegmentStorage::Owned(words)
            }
        }
    }

    pub(super) fn get(&self) -> &[u32] {
        match self {
            SegmentStorage::Owned(words) => words,
            SegmentStorage::Huge(map) => bytemuck::cast_slice(map),
            SegmentStorage::Shared(bytes) => {
                bytemuck::try_cast_slice(bytes.as_ref().as_ref()).unwrap_or_default()
            }
        }
    }
}

/// The words of a segment that arrives in pieces, for instance from the network. They are stored where a search reads
/// them fastest: on huge pages, if the system has some.
#[derive(Debug, Default)]
pub struct SegmentWords(pub(super) Vec<u32>);

impl SegmentWords {
    /// Reserves room for this number of words.
    pub fn with_capacity(words: usize) -> Self {
        let mut all = Vec::new();
        reserve_huge(&mut all, words);
        SegmentWords(all)
    }

    /// Adds the next words.
    pub fn extend(&mut self, words: &[u32]) {
        reserve_huge(&mut self.0, words.len());
        self.0.extend_from_slice(words);
    }
}

/// A copy on huge pages, if it is large enough to fill one page.
fn huge(bytes: &[u8]) -> Option<MmapMut> {
    let mut map = (bytes.len() >= HUGE_FROM_BYTES)
        .then(|| MmapMut::map_anon(bytes.len()).ok())
        .flatten()?;
    // If the system refuses, everything still works, but more slowly.
    #[cfg(target_os = "linux")]
    let _ = map.advise(memmap2::Advice::HugePage);
    map.copy_from_slice(bytes);
    Some(map)
}
