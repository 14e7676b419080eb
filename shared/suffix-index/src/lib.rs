//! An online index of token sequences that answers, for a context: what is the longest suffix of it that
//! was seen before, and what followed, how often?
//!
//! It is what drafts for speculative decoding are read from, so it is built for being written and asked at
//! once: documents grow by a token or many at a time, interleaved, and can be drafted from while they grow;
//! following a context costs amortised constant time per token, whatever the size of the index.
//!
//! ```
//! use refrain_suffix_index::{DocumentKey, Index, IndexConfig, SearchLimits};
//!
//! let mut index = Index::new(IndexConfig::default());
//! // Two outputs that went the same way for a while. The left context is matched, but never offered.
//! for (key, output) in [(1, [10, 11, 12, 13]), (2, [10, 11, 12, 99])] {
//!     index.open(DocumentKey(key), &[7])?;
//!     index.append(DocumentKey(key), &output)?;
//! }
//!
//! // The first one is finished and goes to a segment; the answers stay the same.
//! index.seal(|key| key == DocumentKey(1))?;
//!
//! let context = [5, 7, 10, 11, 12];
//! let mut search = index.search(index.start(&context), &context, SearchLimits::EXACT);
//! let longest = search.next_match().expect("12 was seen before");
//! assert_eq!(longest.len, 4); // 7 10 11 12
//! let mut continuations = Vec::new();
//! let total = search.continuations(&longest.node, &mut continuations);
//! let offered: Vec<_> = continuations.iter().map(|next| (next.token, next.count)).collect();
//! assert_eq!((total, offered), (2, vec![(13, 1), (99, 1)]));
//! # Ok::<(), refrain_suffix_index::IndexError>(())
//! ```
//!
//! Where to go on: [`Index`] holds documents and answers; [`Cursor`] is where a context stands in it; [`Search`]
//! finds a [`Match`] after the other, and what followed. [`Rebuild`] seals what is finished and gets rid of what was
//! removed, [`Merge`] keeps segments few, [`Segment`] goes to files and back. Most users can ignore [`Work`] and
//! [`MergePolicy`]. How it works and what each operation costs: `DESIGN.md` beside this
//! crate.
//!
//! One index is one scope: a request, a group of samples, or a tenant's namespace. It does not know what a
//! token means, who may see a document, or how a draft is scored.

mod error;
mod index;
mod live;
mod memory;
mod merge;
#[cfg(any(test, feature = "oracle"))]
pub mod oracle;
mod rebuild;
mod sealed;
mod search;
mod segment;
#[cfg(test)]
mod tests;

pub use error::IndexError;
pub use index::{Index, IndexConfig, IndexSizes};
pub use live::automaton::Work;
pub use merge::{Merge, MergePolicy, Merged};
pub use rebuild::{Rebuild, Rebuilt, Retired};
pub use sealed::{Mounted, SegmentStats};
pub use search::{Continuation, Cursor, Match, Node, Origin, Search, SearchLimits, Sighting};
pub use segment::{SealedDocument, Segment, SegmentBuilder, SegmentError, SegmentWords};

/// Id of a token, as the tokenizer numbers them.
pub type Token = u32;

/// The caller's name for a document.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct DocumentKey(pub u128);
