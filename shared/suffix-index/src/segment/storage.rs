//! Where a segment's words are.

use memmap2::MmapMut;

use crate::memory::{HUGE_FROM_BYTES, make_room};

/// The words of a segment.
pub(super) enum Words {
    /// On the heap.
    Owned(Vec<u32>),
    /// On huge pages, if the system has some. A whole number of words.
    Huge(MmapMut),
    /// Somebody else's. Aligned, and a whole number of words, when it was opened.
    Shared(Box<dyn AsRef<[u8]> + Send + Sync>),
}

impl Words {
    /// Keeps words where a search finds them fastest.
    ///
    /// A search looks at some dozens of places all over a segment. With pages of 4 KiB nearly every one misses the
    /// processor's table of pages as well, which costs about as much as the look itself. Copying once, when
    /// a segment is made, is the price; at that time the memory that sorting took is free again.
    pub(super) fn new(mut words: Vec<u32>) -> Words {
        match huge(bytemuck::cast_slice(&words)) {
            Some(map) => Words::Huge(map),
            None => {
                words.shrink_to_fit();
                Words::Owned(words)
            }
        }
    }

    pub(super) fn get(&self) -> &[u32] {
        match self {
            Words::Owned(words) => words,
            Words::Huge(map) => bytemuck::cast_slice(map),
            Words::Shared(bytes) => {
                bytemuck::try_cast_slice(bytes.as_ref().as_ref()).unwrap_or_default()
            }
        }
    }
}

/// The words of a segment that come from elsewhere, piece by piece. They are put where a search finds them fastest, which bytes
/// of somebody else's are not: on huge pages, if the system has some.
#[derive(Debug, Default)]
pub struct SegmentWords(pub(super) Vec<u32>);

impl SegmentWords {
    /// Room for so many words.
    pub fn with_capacity(words: usize) -> Self {
        let mut all = Vec::new();
        make_room(&mut all, words);
        SegmentWords(all)
    }

    /// Adds the next words.
    pub fn extend(&mut self, words: &[u32]) {
        make_room(&mut self.0, words.len());
        self.0.extend_from_slice(words);
    }

    /// Number of words so far.
    pub fn len(&self) -> usize {
        self.0.len()
    }

    /// Whether there are none yet.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }
}

/// A copy on huge pages, if it is large enough to fill one.
fn huge(bytes: &[u8]) -> Option<MmapMut> {
    let mut map = (bytes.len() >= HUGE_FROM_BYTES)
        .then(|| MmapMut::map_anon(bytes.len()).ok())
        .flatten()?;
    // A wish: where it is refused everything works, more slowly.
    #[cfg(target_os = "linux")]
    let _ = map.advise(memmap2::Advice::HugePage);
    map.copy_from_slice(bytes);
    Some(map)
}
