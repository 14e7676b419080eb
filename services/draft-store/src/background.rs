//! Jobs on threads of their own, which run while the store serves.
//!
//! `seal.rs` makes a segment from documents in the log, or from other segments. It reads in small steps under the
//! store's lock, and reports to the writer through a trait ([`seal::SealHost`]). The writer makes the result count in
//! one commit. `log_rewrite.rs` tells when the log is due for fresh files, which it makes itself. The writer runs one
//! job at a time, so that the disk needs room for one copy only.

pub(crate) mod log_rewrite;
pub(crate) mod seal;
