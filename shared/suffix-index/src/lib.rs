//! An online index of token sequences that answers, for a context: what is the longest suffix of it that
//! was seen before, and what followed, how often?
//!
//! It is what drafts for speculative decoding are read from, so it is built for being written and asked at
//! once: documents grow by a token or many at a time, interleaved, and can be drafted from while they grow;
//! following a context costs amortised constant time per token, whatever the size of the index.
//!
//! ```
//! use refrain_suffix_index::{DocumentKey, Index, IndexConfig};
//!
//! let mut index = Index::new(IndexConfig::default());
//! // Two outputs that went the same way for a while. The left context is matched, but never offered.
//! for (key, output) in [(1, [10, 11, 12, 13]), (2, [10, 11, 12, 99])] {
//!     index.open(DocumentKey(key), &[7])?;
//!     index.append(DocumentKey(key), &output)?;
//! }
//!
//! let cursor = index.start(&[5, 7, 10, 11, 12]);
//! assert_eq!(cursor.len(), 4); // 7 10 11 12
//! let longest = index.matches(cursor).next().expect("12 was seen before, and something followed");
//! let mut continuations = Vec::new();
//! let total = longest.node.continuations(&mut continuations);
//! let offered: Vec<_> = continuations.iter().map(|next| (next.token, next.count)).collect();
//! assert_eq!((total, offered), (2, vec![(13, 1), (99, 1)]));
//! # Ok::<(), refrain_suffix_index::IndexError>(())
//! ```
//!
//! Where to go on: [`Index`] holds documents and answers; [`Cursor`] is where a context stands in it;
//! [`Match`], [`Node`] and [`Continuation`] are what it finds. [`Rebuild`] gets rid of what was removed.
//! Most users can ignore [`Work`]. How it works and what each operation costs: `DESIGN.md` beside this
//! crate.
//!
//! One index is one scope: a request, a group of samples, or a tenant's namespace. It does not know what a
//! token means, who may see a document, or how a draft is scored.

mod automaton;
mod document;
mod edges;
mod error;
mod index;
#[cfg(any(test, feature = "oracle"))]
pub mod oracle;
mod query;
mod rebuild;
#[cfg(test)]
mod tests;

pub use automaton::Work;
pub use error::IndexError;
pub use index::{Index, IndexConfig};
pub use query::{Continuation, Cursor, Match, Matches, Node, Origin};
pub use rebuild::{Rebuild, Rebuilt};

/// Id of a token, as the tokenizer numbers them.
pub type Token = u32;

/// The caller's name for a document.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct DocumentKey(pub u128);
