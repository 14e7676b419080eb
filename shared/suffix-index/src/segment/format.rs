//! The bytes of a segment.
//!
//! They are little-endian words of 32 bits. The header has eight words: magic, version, checksum (two words, xxh3-64
//! of everything after it), the lengths of text, suffix array and document table, and one word that is 0. Then come
//! the sections:
//!
//! ```text
//! text     a separator, then each document (left context, output) and a separator
//! ends     the suffix array, one position per word
//! fences   8 tokens for every 128 ends
//! keys     4 words per document, ascending
//! starts   the position at which each document starts in the text
//! lefts    the length of each left context
//! ```
//!
//! Everything is aligned and used in place. Packing tokens to 18 or 24 bits would save up to 1.75 bytes per token. It
//! was rejected because every comparison, the main work of a search, would then have to shift and mask. Also, mapped
//! pages could no longer be read as slices of tokens.

use xxhash_rust::xxh3::xxh3_64;

use crate::{DocumentKey, Token};

/// The token before, between and after documents. Every comparison ends at it, so a match never reaches beyond a
/// document. A token of this value inside a document has the same effect.
pub(crate) const SEPARATOR: Token = Token::MAX;
/// Number of entries of the suffix array per fence. A fence repeats the beginning of an entry in a small table that
/// stays in a cache, and most of a search takes place there.
pub(super) const FENCE_ENTRIES: usize = 128;
/// Number of tokens in a fence.
pub(super) const FENCE_TOKENS: usize = 8;

const MAGIC: u32 = u32::from_le_bytes(*b"RFSG");
const VERSION: u32 = 1;
const HEADER_WORDS: usize = 8;
/// The first word that the checksum covers.
const CHECKED_FROM: usize = 4;
const KEY_WORDS: usize = 4;

/// The reason why a segment cannot be built or opened.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum SegmentError {
    /// The bytes do not begin like a segment.
    #[error("the bytes are not a segment")]
    NotASegment,
    /// This program does not read the format version.
    #[error("the segment has format version {0}; this program reads {VERSION}")]
    UnknownVersion(u32),
    /// The bytes are fewer or more than the header says.
    #[error("the segment has {found} bytes, but its header says {expected}")]
    WrongLength {
        /// Number of bytes by the header.
        expected: u64,
        /// Number of bytes found.
        found: u64,
    },
    /// The bytes are damaged.
    #[error("the segment is damaged: its checksum is wrong")]
    WrongChecksum,
    /// The checksum is right, but the named section has impossible content. Another program must have written it.
    #[error("the segment's section {0} is inconsistent")]
    Inconsistent(&'static str),
    /// A key was added twice.
    #[error("document {:032x} is in the segment twice", .0.0)]
    DuplicateDocument(DocumentKey),
    /// There are more than 2^31 tokens. Divide them into several segments.
    #[error("too many tokens for one segment: divide them into several")]
    TooLarge,
    /// There is not enough memory to sort the text.
    #[error("not enough memory to sort the segment")]
    OutOfMemory,
}

/// The lengths of the sections. [`Layout::check`] and the builder make it, so it fits its words.
#[derive(Clone, Copy, Debug)]
pub(super) struct Layout {
    pub(super) text: usize,
    pub(super) ends: usize,
    pub(super) documents: usize,
}

impl Layout {
    /// Number of words of the whole segment.
    pub(super) fn words(&self) -> usize {
        HEADER_WORDS + self.lengths().iter().sum::<usize>()
    }

    /// The sections: text, ends, fences, keys, starts, lefts.
    pub(super) fn sections<'a>(&self, words: &'a [u32]) -> [&'a [u32]; 6] {
        let mut rest = words.get(HEADER_WORDS..).unwrap_or_default();
        self.lengths().map(|length| {
            let (section, behind) = rest.split_at(length.min(rest.len()));
            rest = behind;
            section
        })
    }

    /// Reads the header, and checks everything that later reads rely on.
    pub(super) fn check(words: &[u32]) -> Result<Layout, SegmentError> {
        let header: &[u32; HEADER_WORDS] = words
            .first_chunk()
            .filter(|header| header[0] == MAGIC)
            .ok_or(SegmentError::NotASegment)?;
        let &[_, version, low, high, text, ends, documents, reserved] = header;
        if version != VERSION {
            return Err(SegmentError::UnknownVersion(version));
        }
        // A sum of 32-bit lengths cannot overflow 64 bits.
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

    /// Checks everything that keeps later reads within bounds. The order of the suffix array is not checked: with a
    /// wrong order, a search finds less, but never reads out of bounds.
    fn check_sections(&self, words: &[u32]) -> Result<(), SegmentError> {
        let inconsistent = |section| Err(SegmentError::Inconsistent(section));
        let [text, ends, _, keys, starts, lefts] = self.sections(words);
        // Comparisons run backwards until a separator stops them, and reads run forwards likewise.
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

    /// Writes the header, after all sections are written.
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

    /// Begins the words of a segment, with an empty header.
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

/// Copies bytes to words, for bytes that are not aligned and for big-endian machines.
pub(super) fn words_of(bytes: &[u8]) -> Result<Vec<u32>, SegmentError> {
    let (words, rest) = bytes.as_chunks();
    if !rest.is_empty() {
        // No segment has such a length. The error mentions the length only if the bytes look like a segment.
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
