//! Draft trees, the search for the best one (Algorithm 1 of SuffixDecoding), and the form of an output.

mod candidate;
mod expand;
mod form;
mod lookup;
mod merge;
mod params;
mod paying;
mod propose;
mod reach;
mod source;
mod tree;
mod values;
mod witnesses;

pub use candidate::Candidate;
pub use form::{Form, within_form};
pub use lookup::Lookup;
pub use params::{Expansion, ProposeParams};
pub use propose::{propose, propose_valued};
pub use reach::{ProposeRules, Setting};
pub use source::{Scope, Source};
pub use tree::{DraftNode, DraftTree, Origin};
pub use witnesses::Witnesses;
