//! Draft trees, the search for the best one (Algorithm 1 of SuffixDecoding), and the form of an output.

mod expand;
mod form;
mod lookup;
mod merge;
mod params;
mod paying;
mod propose;
mod reach;
mod values;

pub use crate::candidate::{Candidate, DraftNode, DraftTree, Origin, Scope, Source, Witnesses};
pub use form::{Form, within_form};
pub use lookup::Lookup;
pub use params::{Expansion, ProposeParams};
pub use propose::{propose, propose_valued};
pub use reach::{ProposeRules, Setting};
