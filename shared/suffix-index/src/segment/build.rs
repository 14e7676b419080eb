//! Builds a segment from documents.

use std::sync::Arc;

use libsais::{LibsaisError, SuffixArrayConstruction};

use super::Segment;
use super::format::{FENCE_ENTRIES, FENCE_TOKENS, Layout, SEPARATOR, SegmentError, key_words};
use super::storage::SegmentStorage;
use crate::{DocumentKey, Token};

/// Collects documents and builds a segment from them.
#[derive(Default)]
pub struct SegmentBuilder {
    tokens: Vec<Token>,
    documents: Vec<AddedDocument>,
}

struct AddedDocument {
    key: DocumentKey,
    start: usize,
    left: usize,
    end: usize,
}

impl SegmentBuilder {
    /// Creates a builder without documents.
    pub fn new() -> Self {
        SegmentBuilder::default()
    }

    /// Adds a document. All its tokens can be matched, and those of the output can be offered.
    pub fn add(
        &mut self,
        key: DocumentKey,
        left_context: impl IntoIterator<Item = Token>,
        output: impl IntoIterator<Item = Token>,
    ) {
        let start = self.tokens.len();
        self.tokens.extend(left_context);
        let left = self.tokens.len() - start;
        self.tokens.extend(output);
        let end = self.tokens.len();
        self.documents.push(AddedDocument {
            key,
            start,
            left,
            end,
        });
    }

    /// Number of documents added.
    pub fn documents(&self) -> usize {
        self.documents.len()
    }

    /// Number of tokens added.
    pub fn tokens(&self) -> usize {
        self.tokens.len()
    }

    /// [`build`](Self::build), or `None` without documents.
    pub(crate) fn build_unless_empty(self) -> Result<Option<Arc<Segment>>, SegmentError> {
        let has_documents = !self.documents.is_empty();
        has_documents
            .then(|| self.build().map(Arc::new))
            .transpose()
    }

    /// Sorts the text and builds the segment. The cost is linear in the tokens, and about 12 bytes of memory per
    /// token in addition to the segment itself.
    ///
    /// # Errors
    /// A key was added twice, or there are too many tokens.
    pub fn build(self) -> Result<Segment, SegmentError> {
        let SegmentBuilder {
            tokens,
            mut documents,
        } = self;
        // The table is sorted by key, so that it can be searched without a second table.
        documents.sort_unstable_by_key(|document| document.key);
        let twice = documents.windows(2).find(|pair| pair[0].key == pair[1].key);
        if let Some(pair) = twice {
            return Err(SegmentError::DuplicateDocument(pair[0].key));
        }
        let text_len = 1 + tokens.len() + documents.len();
        if text_len > i32::MAX as usize {
            return Err(SegmentError::TooLarge);
        }
        let fences_len = text_len.div_ceil(FENCE_ENTRIES) * FENCE_TOKENS;
        let mut words = Layout::begin(2 * text_len + fences_len + 6 * documents.len());
        let text_at = words.len();
        words.push(SEPARATOR);
        for document in &documents {
            words.extend(&tokens[document.start..document.end]);
            words.push(SEPARATOR);
        }
        drop(tokens);

        let ends_at = words.len();
        let useful = useful(&words[text_at..], &documents);
        let sorted = sort(&words[text_at..])?;
        let last = text_len - 1;
        words.extend(
            sorted
                .iter()
                .map(|&reversed| last - reversed as usize)
                .filter(|&end| useful.contains(end))
                .map(|end| end as u32),
        );
        drop(sorted);
        let fences_at = words.len();
        for at in (ends_at..fences_at).step_by(FENCE_ENTRIES) {
            let fence = fence(&words[text_at..ends_at], words[at] as usize);
            words.extend(fence);
        }
        words.extend(
            documents
                .iter()
                .flat_map(|document| key_words(document.key)),
        );
        let mut start = 1;
        for document in &documents {
            words.push(start as u32);
            start += document.end - document.start + 1;
        }
        words.extend(documents.iter().map(|document| document.left as u32));
        let layout = Layout {
            text: text_len,
            ends: fences_at - ends_at,
            documents: documents.len(),
        };
        layout.finish(&mut words);
        Ok(Segment::new(SegmentStorage::new(words), layout))
    }
}

/// A set of text positions.
struct Positions(Vec<u64>);

impl Positions {
    fn contains(&self, position: usize) -> bool {
        self.0[position / 64] >> (position % 64) & 1 == 1
    }
}

/// The positions that are followed by output of the same document. Only these become entries of the suffix array. So
/// the length of an interval is the number of occurrences that offer something.
fn useful(text: &[Token], documents: &[AddedDocument]) -> Positions {
    let mut positions = Positions(vec![0; text.len().div_ceil(64)]);
    let mut start = 1;
    for document in documents {
        let end = start + document.end - document.start;
        for position in (start + document.left).max(start + 1) - 1..end.max(1) - 1 {
            if text[position] != SEPARATOR && text[position + 1] != SEPARATOR {
                positions.0[position / 64] |= 1 << (position % 64);
            }
        }
        start = end + 1;
    }
    positions
}

/// The suffix array of the reversed text.
fn sort(text: &[Token]) -> Result<Vec<i32>, SegmentError> {
    let mut reversed = ranks(text);
    SuffixArrayConstruction::for_text_mut(&mut reversed)
        .in_owned_buffer32()
        .single_threaded()
        .run()
        .map(|sorted| sorted.into_vec())
        .map_err(|error| match error {
            LibsaisError::InvalidInput => SegmentError::TooLarge,
            LibsaisError::OutOfMemory | LibsaisError::UnknownError => SegmentError::OutOfMemory,
        })
}

/// The reversed text, with tokens as numbers in the same order and separators highest. Sorting takes memory for every
/// number up to the highest, so sparse token ids are replaced by their ranks.
fn ranks(text: &[Token]) -> Vec<i32> {
    let tokens = || text.iter().rev().copied();
    let highest = tokens().filter(|&token| token != SEPARATOR).max();
    let highest = highest.unwrap_or_default() as usize;
    if highest < text.len().max(1 << 20) {
        let separator = highest as i32 + 1;
        return tokens()
            .map(|token| match token {
                SEPARATOR => separator,
                token => token as i32,
            })
            .collect();
    }
    let mut distinct: Vec<Token> = tokens().collect();
    distinct.sort_unstable();
    distinct.dedup();
    tokens()
        .map(|token| distinct.partition_point(|&other| other < token) as i32)
        .collect()
}

/// The last tokens of the text that ends at `end`, read backwards, as many as fit into a fence.
fn fence(text: &[Token], end: usize) -> [Token; FENCE_TOKENS] {
    let mut fence = [SEPARATOR; FENCE_TOKENS];
    let backwards = text[..=end].iter().rev();
    for (slot, &token) in fence.iter_mut().zip(backwards) {
        if token == SEPARATOR {
            break;
        }
        *slot = token;
    }
    fence
}
