//! What to draft, whether to, and what of it to keep: the decisions of speculative decoding over suffix
//! indexes, as pure functions.
//!
//! One step of decoding proposes a [`DraftTree`], has the target model verify it, and keeps the path the
//! target itself would have taken. This crate proposes and decides; the model is the caller's.
//!
//! ```
//! use refrain_speculation::{
//!     Asked, Fallback, Found, Lookup, ProposeParams, Route, Scope, Source, Threshold, propose, route, walk,
//! };
//! use refrain_suffix_index::{DocumentKey, Index, IndexConfig};
//!
//! // What was said before, and what is being said now.
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
//! let found = Found::Score(candidate.score);
//! let decision = route(Asked::Auto, found, Threshold::Auto, Fallback::Absent);
//! assert_eq!(decision.route, Route::Suffix);
//!
//! // The target agrees about 5, and goes its own way after it.
//! let walk = walk(&candidate.tree, |path| if path.is_empty() { 5 } else { 70 });
//! assert_eq!(walk.emitted, [5, 70]);
//! # Ok::<(), refrain_suffix_index::IndexError>(())
//! ```
//!
//! Where to go on: [`propose`] is Algorithm 1 of SuffixDecoding (arXiv 2411.04975), steered by
//! [`ProposeParams`]; [`route`] is its hybrid rule, a [`Gate`] says whether the fallback that it knows pays, and
//! [`hands_over`] whether a request is better off with that of another worker. For whole batches [`Goodput`] decides: out of
//! what drafts are worth ([`Calibration`]), what steps take ([`StepCost`]) and what time is worth ([`GoingRate`]), [`divide`] says
//! who gets to verify how much. Behind either stands a [`Guard`]. For engines that generate by themselves, [`best_call`] says
//! whether a draft is worth a call. [`walk`] is the acceptance rule for drafts of certain tokens, [`sampled`] the one for tokens
//! that were drawn. [`Acceptance`] and [`AcceptanceTable`] count what came of it, by [`Source`] and [`Scope`].
//!
//! Deliberately absent: the model and its engine, sampling, wire formats.

mod accept;
mod budget;
mod calibration;
mod cost;
mod counts;
mod expand;
mod gate;
mod going_rate;
mod goodput;
mod guard;
mod handover;
mod lately;
mod merged;
mod propose;
mod route;
pub mod sampled;
mod source;
#[cfg(test)]
mod testing;
mod tree;
mod urgency;
mod verify_call;

pub use accept::{Walk, walk, walk_drawn};
pub use budget::{BudgetRequest, BudgetStep, Budgeted, HeadOffer, Share, divide};
pub use calibration::{
    CALIBRATION_BYTES_MAX, Calibration, CalibrationError, NodeFeatures, Observed,
};
pub use cost::{HeadCost, HeadDrafted, STEP_SECONDS_MIN, Stair, StepCost};
pub use counts::{Acceptance, AcceptanceTable};
pub use gate::{Gate, GateParams, GateStep, Mode, Passage, TRIAL_STEPS_MIN, batch_bucket};
pub use going_rate::GoingRate;
pub use goodput::{
    Goodput, GoodputParams, Grant, Granted, HeadWish, HeadWork, StepFrame, StepTaken, Wish,
};
pub use guard::{Guard, Guarded, GuardedStep, HeadUse, Verdict};
pub use handover::{Candidacy, HandOverParams, RecentRoutes, hands_over};
pub use lately::DecayedRatio;
pub use propose::{Candidate, Expansion, Lookup, ProposeParams, propose};
pub use route::{
    ACCEPTED_LENGTH_PRIOR, Asked, Decision, Fallback, Found, Route, RouteReason, Threshold, route,
};
pub use source::{Scope, Source};
pub use tree::{DraftNode, DraftTree, Origin, TreeError};
pub use urgency::{Pace, Priority};
pub use verify_call::{CallOffer, CallWorth, StreamPace, best_call};
