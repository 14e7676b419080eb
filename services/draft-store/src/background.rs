//! Jobs on threads of their own, which run while the store serves.
//!
//! `seal.rs` makes a segment from documents in the log, or from other segments. `log_rewrite.rs` copies the log into
//! a fresh one, since sled never shrinks. Both read in small steps under the store's lock. They report to the writer
//! through a trait ([`seal::SealHost`], [`log_rewrite::RewriteHost`]), and the writer makes the result count in one
//! commit. The writer runs one job at a time, so that the disk needs room for one copy only.

pub(crate) mod log_rewrite;
pub(crate) mod seal;
