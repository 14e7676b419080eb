//! The replicas of a store's shard: how far this one is, as others see it, and those that it has heard of.

mod directory;
pub(crate) mod status;
