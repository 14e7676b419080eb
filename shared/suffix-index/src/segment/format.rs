//! The bytes of a segment.
//!
//! Little-endian words of 32 bits. Eight of header: magic, version, checksum (two words, xxh3-64 of everything behind
//! it), lengths of text, suffix array and document table, and one that is 0. Then the sections:
//!
//! ```text
//! text     separator, then each document (left context, output) and a separator
//! ends     the suffix array, a position per word
//! fences   8 tokens for every 128 ends
//! keys     4 words per document, ascending
//! starts   where each document starts in the text
//! lefts    length of each left context
//! ```
//!
//! Everything is aligned and used as it lies. Packing tokens to 18 or 24 bits would save up to 1.75 bytes a token; it
//! was rejected because comparisons, which are all of a search, then shift and mask, and mapped pages could no longer
//! be lent out as slices of tokens.

use std::fmt;

use xxhash_rust::xxh3::xxh3_64;

use super::{FENCE_ENTRIES, FENCE_TOKENS, SEPARATOR};
use crate::DocumentKey;

const MAGIC: u32 = u32::from_le_bytes(*b"RFSG");
const VERSION: u32 = 1;
const HEADER_WORDS: usize = 8;
/// The checksum covers what stands behind it.
const CHECKED_FROM: usize = 4;
const KEY_WORDS: usize = 4;

/// Why a segment cannot be made or opened.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SegmentError {
    /// The bytes do not begin like a segment.
    NotASegment,
    /// A version that this code does not read.
    UnknownVersion(u32),
    /// Shorter or longer than the header says.
    WrongLength {
        /// Bytes by the header.
        expected: u64,
        /// Bytes there are.
        found: u64,
    },
    /// The bytes are damaged.
    WrongChecksum,
    /// The checksum is right, but something in the named section cannot be: written by something else.
    Inconsistent(&'static str),
    /// A key was added twice.
    DuplicateDocument(DocumentKey),
    /// More than 2^31 tokens: make several segments of them.
    TooLarge,
    /// No memory to sort in.
    OutOfMemory,
}

impl fmt::Display for SegmentError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            SegmentError::NotASegment => f.write_str("the bytes are not those of a segment"),
            SegmentError::UnknownVersion(version) => write!(
                f,
                "the segment has format version {version}; this program reads {VERSION}"
            ),
            SegmentError::WrongLength { expected, found } => write!(
                f,
                "the segment is {found} bytes long where its header says {expected}"
            ),
            SegmentError::WrongChecksum => f.write_str("the segment is damaged"),
            SegmentError::Inconsistent(section) => {
                write!(f, "the segment's section of {section} is inconsistent")
            }
            SegmentError::DuplicateDocument(key) => {
                write!(f, "document {:032x} is in the segment twice", key.0)
            }
            SegmentError::TooLarge => f.write_str("too many tokens for one segment"),
            SegmentError::OutOfMemory => f.write_str("no memory to sort the segment in"),
        }
    }
}

impl std::error::Error for SegmentError {}

/// Lengths of the sections. Only made by [`Layout::check`] and [`Layout::finish`], so it fits its words.
#[derive(Clone, Copy, Debug)]
pub(super) struct Layout {
    pub(super) text: usize,
    pub(super) ends: usize,
    pub(super) documents: usize,
}

impl Layout {
    /// Words in all.
    pub(super) fn words(&self) -> usize {
        HEADER_WORDS + self.lengths().iter().sum::<usize>()
    }

    /// Text, ends, fences, keys, starts, lefts.
    pub(super) fn sections<'a>(&self, words: &'a [u32]) -> [&'a [u32]; 6] {
        let mut rest = words.get(HEADER_WORDS..).unwrap_or_default();
        self.lengths().map(|length| {
            let (section, behind) = rest.split_at(length.min(rest.len()));
            rest = behind;
            section
        })
    }

    /// Reads the header and checks all that later reads rely on.
    pub(super) fn check(words: &[u32]) -> Result<Layout, SegmentError> {
        let header: &[u32; HEADER_WORDS] = words
            .first_chunk()
            .filter(|header| header[0] == MAGIC)
            .ok_or(SegmentError::NotASegment)?;
        let &[_, version, low, high, text, ends, documents, reserved] = header;
        if version != VERSION {
            return Err(SegmentError::UnknownVersion(version));
        }
        // Lengths of 32 bits cannot overflow their sum in 64.
        let layout = Layout {
            text: text as usize,
            ends: ends as usize,
            documents: documents as usize,
        };
        if layout.words() != words.len() {
            return Err(SegmentError::WrongLength {
                expected: layout.words() as u64 * 4,
                found: words.len() as u64 * 4,
            });
        }
        if checksum(words) != u64::from(low) | u64::from(high) << 32 {
            return Err(SegmentError::WrongChecksum);
        }
        if reserved != 0 {
            return Err(SegmentError::Inconsistent("lengths"));
        }
        layout.check_sections(words)?;
        Ok(layout)
    }

    /// What keeps every later read within bounds. The order of the suffix array is not checked: a wrong one finds
    /// less, and reads nothing that is not there.
    fn check_sections(&self, words: &[u32]) -> Result<(), SegmentError> {
        let inconsistent = |section| Err(SegmentError::Inconsistent(section));
        let [text, ends, _, keys, starts, lefts] = self.sections(words);
        // Comparisons run backwards until a separator stops them, reads run forwards likewise.
        if text.first() != Some(&SEPARATOR) || text.last() != Some(&SEPARATOR) {
            return inconsistent("text");
        }
        let last = text.len() as u32 - 1;
        if !ends.iter().all(|&end| end < last) {
            return inconsistent("ends");
        }
        if !keys
            .as_chunks::<KEY_WORDS>()
            .0
            .is_sorted_by(|one, next| one < next)
        {
            return inconsistent("keys");
        }
        let mut next_start = 1;
        for (number, (&start, &left)) in starts.iter().zip(lefts).enumerate() {
            let end = starts
                .get(number + 1)
                .map_or(last, |&next| next.wrapping_sub(1));
            let fits = start == next_start
                && start <= end
                && end <= last
                && text[end as usize] == SEPARATOR
                && left <= end - start;
            if !fits {
                return inconsistent("starts");
            }
            next_start = end + 1;
        }
        if next_start != last + 1 {
            return inconsistent("starts");
        }
        Ok(())
    }

    /// Writes the header before finished sections.
    pub(super) fn finish(&self, words: &mut [u32]) {
        debug_assert_eq!(words.len(), self.words());
        words[0] = MAGIC;
        words[1] = VERSION;
        words[4] = self.text as u32;
        words[5] = self.ends as u32;
        words[6] = self.documents as u32;
        words[7] = 0;
        let checksum = checksum(words);
        words[2] = checksum as u32;
        words[3] = (checksum >> 32) as u32;
    }

    /// Words to begin with: an empty header.
    pub(super) fn begin(capacity: usize) -> Vec<u32> {
        let mut words = Vec::with_capacity(HEADER_WORDS + capacity);
        words.resize(HEADER_WORDS, 0);
        words
    }

    fn lengths(&self) -> [usize; 6] {
        [
            self.text,
            self.ends,
            self.ends.div_ceil(FENCE_ENTRIES) * FENCE_TOKENS,
            self.documents * KEY_WORDS,
            self.documents,
            self.documents,
        ]
    }
}

pub(super) fn key_words(key: DocumentKey) -> [u32; KEY_WORDS] {
    [96, 64, 32, 0].map(|shift| (key.0 >> shift) as u32)
}

fn checksum(words: &[u32]) -> u64 {
    let checked = words.get(CHECKED_FROM..).unwrap_or_default();
    if cfg!(target_endian = "little") {
        xxh3_64(bytemuck::cast_slice(checked))
    } else {
        xxh3_64(&bytes_of(checked))
    }
}

pub(super) fn bytes_of(words: &[u32]) -> Vec<u8> {
    if cfg!(target_endian = "little") {
        bytemuck::cast_slice(words).to_vec()
    } else {
        words.iter().flat_map(|word| word.to_le_bytes()).collect()
    }
}

/// For bytes that are not aligned, and for machines of the other byte order.
pub(super) fn words_of(bytes: &[u8]) -> Result<Vec<u32>, SegmentError> {
    let (words, rest) = bytes.as_chunks();
    if !rest.is_empty() {
        // No segment has such a length. Say so only of what looks like one.
        let expected = (bytes.len() - rest.len()) as u64;
        return Err(if bytes.starts_with(&MAGIC.to_le_bytes()) {
            SegmentError::WrongLength {
                expected,
                found: bytes.len() as u64,
            }
        } else {
            SegmentError::NotASegment
        });
    }
    Ok(words.iter().map(|&word| u32::from_le_bytes(word)).collect())
}
