//! What the file of tenants says about the requests of a tenant, beside limits.

use refrain_protocol::scheduling::{RequestClass, TenantWeight};

use super::file::TenantEntry;

/// Percent of a tenant's tokens that may be urgent, where the file says nothing.
const URGENT_PERCENT_MAX: u8 = 25;

/// The standing of a tenant's requests among those of others.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct TenantPolicy {
    /// Its share of the engines among the tenants that wait.
    pub(crate) weight: TenantWeight,
    /// The highest class of its requests.
    pub(crate) class_max: RequestClass,
    /// Percent of its tokens that may be urgent.
    pub(crate) urgent_percent_max: u8,
}

impl Default for TenantPolicy {
    fn default() -> Self {
        TenantPolicy::from(&TenantEntry::default())
    }
}

impl From<&TenantEntry> for TenantPolicy {
    fn from(entry: &TenantEntry) -> Self {
        TenantPolicy {
            weight: entry.weight,
            class_max: entry.class_max,
            urgent_percent_max: entry.urgent_percent_max.unwrap_or(URGENT_PERCENT_MAX),
        }
    }
}

impl TenantPolicy {
    /// The class of a request that asks for this one.
    pub(crate) fn class(&self, asked: RequestClass) -> RequestClass {
        match self.class_max {
            RequestClass::Interactive => asked,
            RequestClass::Rollout => RequestClass::Rollout,
        }
    }
}
