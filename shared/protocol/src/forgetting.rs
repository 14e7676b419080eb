//! The erasure of a tenant at an engine and at the worker before it.

use serde::{Deserialize, Serialize};

use crate::TenantId;

/// Tells an engine to forget everything that it computed for a tenant. Repeats are harmless.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ForgetTenant {
    /// The tenant. Sessions and blocks whose tenant nobody named are forgotten as well.
    pub tenant: TenantId,
}

/// The counts of an engine that forgot a tenant.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct TenantForgotten {
    /// Sessions that were kept for reuse or parked.
    pub sessions: u64,
    /// Blocks of its pool of KV blocks, in memory.
    pub memory_blocks: u64,
    /// Blocks of its pool of KV blocks, in the file. They were overwritten.
    pub file_blocks: u64,
    /// Sessions that run. They go on, and nothing of their present chunk is kept.
    pub running: u64,
}
