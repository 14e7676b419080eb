//! A copy of the drafts beside an engine, and the way of its outputs to the draft store.
//!
//! [`Memory`] holds what can be drafted from, one index per namespace and one per group of samples, fed by the requests
//! that run here and by the store's feed. [`Elsewhere`] asks the store itself where a namespace is not all here.
//! [`Harvest`] gathers what is said here and sends it until the store has it. Whoever decodes holds these three; none of
//! them makes a step wait for the store longer than it was told to.

mod config;
mod elsewhere;
mod harvest;
mod memory;
mod metrics;

pub use config::{HarvestConfig, MemoryConfig};
pub use elsewhere::{Elsewhere, FoundElsewhere, Wanted};
pub use harvest::{Harvest, Piece};
pub use memory::{Drafts, GroupMemory, Membership, Memory, NamespaceMemory};
pub use metrics::{HarvestMetrics, MemoryMetrics};
