//! An online index of token sequences. For a context, it finds the longest suffix that was seen before, and counts
//! the tokens that followed.
//!
//! Drafts for speculative decoding are read from this index, so it is written and queried at the same time. Documents
//! grow by one or many tokens, interleaved, and can be drafted from while they grow. Following a context costs
//! amortised constant time per token, whatever the size of the index.
//!
//! ```
//! use refrain_suffix_index::{DocumentKey, Index, IndexConfig, SearchLimits};
//!
//! let mut index = Index::new(IndexConfig::default());
//! // Two outputs that begin with the same tokens. The left context is matched, but never offered.
//! for (key, output) in [(1, [10, 11, 12, 13]), (2, [10, 11, 12, 99])] {
//!     index.open(DocumentKey(key), &[7])?;
//!     index.append(DocumentKey(key), &output)?;
//! }
//!
//! // The first one is finished and moves to a segment. The answers stay the same.
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
//! An index is one scope: a request, a group of samples, or a tenant's namespace. It does not know the meaning of a
//! token, the rights of a reader, or the score of a draft.
//!
//! # Where to read
//!
//! `DESIGN.md` beside this crate explains the structures, starting from the naive version, and lists the cost of each
//! operation. Then read the files in this order:
//!
//! | file | content |
//! |---|---|
//! | `index.rs` | **Read this first.** [`Index`]: documents go in, cursors and searches come out. |
//! | `live_part.rs`, `live_part/` | Documents that may grow, in a suffix automaton. |
//! | `segment.rs`, `segment/` | Finished documents, in an immutable suffix array, and its bytes. |
//! | `mounted_segment.rs` | A segment in an index: which of its documents are still there. |
//! | `search.rs`, `search/` | [`Search`]: matches from longest to shortest, and their continuations. |
//! | `rebuild.rs` | [`Rebuild`]: seals finished documents and drops removed ones. |
//! | `merge.rs` | [`Merge`]: keeps the number of segments small. |
//! | `oracle.rs` | The naive index, with which tests compare. |

mod config;
mod error;
mod ids;
mod index;
mod live_part;
mod memory_hints;
mod merge;
mod mounted_segment;
#[cfg(any(test, feature = "oracle"))]
pub mod oracle;
mod rebuild;
mod search;
mod segment;
#[cfg(test)]
mod tests;

pub use config::IndexConfig;
pub use error::IndexError;
pub use ids::{DocumentKey, Origin, Token};
pub use index::{Index, IndexSizes};
pub use live_part::Cursor;
pub use merge::{Merge, MergePolicy, Merged};
pub use mounted_segment::{MountedSegment, SearchWords, SegmentStats};
pub use rebuild::{Rebuild, Rebuilt, Retired};
pub use search::{Continuation, Match, Node, Search, SearchLimits, Sighting};
pub use segment::{SealedDocument, Segment, SegmentBuilder, SegmentError, SegmentWords};
