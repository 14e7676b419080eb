//! Draft trees, and the search for the best one: Algorithm 1 of SuffixDecoding.

mod expand;
mod propose;
mod source;
mod tree;

pub use expand::Expansion;
pub use propose::{Candidate, Lookup, ProposeParams, propose};
pub use source::{Scope, Source};
pub use tree::{DraftNode, DraftTree, Origin, TreeError};
