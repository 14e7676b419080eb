//! Draft trees, and the search for the best one: Algorithm 1 of SuffixDecoding.

mod expand;
mod params;
mod propose;
mod source;
mod tree;

pub use params::{Expansion, ProposeParams};
pub use propose::{Candidate, Lookup, propose};
pub use source::{Scope, Source};
pub use tree::{DraftNode, DraftTree, Origin};
