//! The decisions of speculative decoding over suffix indexes, as pure functions: what to draft, whether to verify it,
//! and which tokens to keep.
//!
//! One step of decoding proposes a draft tree, has the target model verify it, and keeps the path that the target
//! itself would have taken. This crate proposes and decides; the model belongs to the caller. It has no model, no
//! sampling, no wire format, no clock and no I/O.
//!
//! ```
//! use refrain_speculation::draft::{Lookup, ProposeParams, Scope, Source, propose};
//! use refrain_speculation::router::Threshold;
//! use refrain_speculation::verify::walk;
//! use refrain_suffix_index::{DocumentKey, Index, IndexConfig};
//!
//! // An earlier output, and the context of a request that runs now.
//! let mut tenant = Index::new(IndexConfig::default());
//! tenant.open(DocumentKey(1), &[])?;
//! tenant.append(DocumentKey(1), &[1, 2, 3, 4, 5, 6])?;
//! let context = [9, 2, 3, 4];
//!
//! let lookup = Lookup {
//!     source: Source::Suffix,
//!     scope: Scope::Tenant,
//!     index: &tenant,
//!     cursor: tenant.start(&context),
//!     context: &context,
//! };
//! let candidate = propose(&[lookup], &ProposeParams::default(), 32).expect("2 3 4 was seen before");
//! assert_eq!(candidate.tree.tokens().collect::<Vec<_>>(), [5, 6]);
//! // Worth more than a plain step, which brings one token.
//! assert!(candidate.score > Threshold::Auto.in_force(Some(1.0)));
//!
//! // The target agrees with 5, and goes its own way after it.
//! let walk = walk(&candidate.tree, |_, path| Some(if path.is_empty() { 5 } else { 70 }));
//! assert_eq!(walk.emitted, [5, 70]);
//! # Ok::<(), refrain_suffix_index::IndexError>(())
//! ```
//!
//! | module | holds | read first |
//! |---|---|---|
//! | [`draft`] | draft trees; Algorithm 1 of SuffixDecoding (arXiv 2411.04975) | [`draft::propose`] |
//! | [`router`] | which draft each request of a batch verifies | [`router::Router`] |
//! | [`statistics`] | how often drafts of a kind are accepted, per namespace | [`statistics::AcceptanceStatistics`] |
//! | [`verify`] | the lossless acceptance rules | [`verify::walk`] |

mod candidate;
mod decayed;
pub mod draft;
pub mod router;
pub mod statistics;
#[cfg(test)]
mod testing;
pub mod verify;

pub use decayed::DecayedRatio;
