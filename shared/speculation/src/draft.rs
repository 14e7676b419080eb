//! Draft trees, the search for the best one (Algorithm 1 of SuffixDecoding), and the form of an output.

mod expand;
mod form;
mod params;
mod propose;
mod source;
mod tree;

pub use form::{Form, within_form};
pub use params::{Expansion, ProposeParams};
pub use propose::{Candidate, Lookup, propose};
pub use source::{Scope, Source};
pub use tree::{DraftNode, DraftTree, Origin};
