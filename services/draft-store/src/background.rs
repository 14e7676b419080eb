//! Jobs on threads of their own, which run while the store serves.
//!
//! `seal.rs` makes a segment from documents in the log, or from other segments. It reads in small steps under the
//! store's lock, and reports to the writer through a trait ([`seal::SealHost`]). The writer makes the result count in
//! one commit. The other job is a rewrite of the log, which the log does itself (`log/journaled/rewrite.rs`). The
//! writer runs one job at a time, so that the disk needs room for one copy only.

pub(crate) mod seal;
