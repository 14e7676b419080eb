//! Tenants that the draft store keeps for gateways.
//!
//! The store keeps each tenant as text, and does not look into it. So a gateway that knows more fields than its store
//! loses none of them.

use serde::{Deserialize, Serialize};
use xxhash_rust::xxh3::Xxh3;

/// A tenant as the store keeps it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct TenantRecord {
    /// Its name.
    pub name: String,
    /// Its version, which grows with each change. No two changes of a store have the same one.
    pub version: u64,
    /// Its keys and limits, as JSON that gateways write and read.
    pub entry: String,
}

/// Asks for all tenants, unless the caller knows them.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct TenantsRequest {
    /// The state that the caller knows.
    pub known: Option<u64>,
}

/// All tenants.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct TenantsReply {
    /// A number that is equal as long as the tenants are: the exclusive or of the [`state_part`] of each.
    pub state: u64,
    /// The tenants in order of their names. `None` if the caller knows this state.
    pub tenants: Option<Vec<TenantRecord>>,
}

/// A change of one tenant.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct TenantChange {
    /// Its name.
    pub name: String,
    /// The version that the change was made from. `None`: there must be no such tenant.
    pub expected: Option<u64>,
    /// The tenant as it becomes; `None` removes it.
    pub entry: Option<String>,
}

/// The answer to a change, which is durable then.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct TenantChangeReply {
    /// The version of the change.
    pub version: u64,
}

/// A tenant's part of the state of all. So whoever makes a change knows the state after it.
pub fn state_part(name: &str, version: u64) -> u64 {
    let mut hash = Xxh3::new();
    hash.update(name.as_bytes());
    hash.update(&version.to_le_bytes());
    hash.digest()
}
