//! Lossless acceptance: which tokens of a verified draft are kept.
//!
//! [`walk`] is the rule for drafts of certain tokens, [`sampled`] the one for tokens that a drafter drew from its own
//! distribution.

pub mod sampled;
mod walk;

pub use walk::{Walk, walk};
