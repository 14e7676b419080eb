//! Tenants and their keys as data, and the limits on what each may use.
//!
//! `file` is the file of tenants, which operators edit and gateways follow. `directory` finds the caller of a key
//! in it, and `limiter` counts what tenants and keys have used in a minute. `budget` counts days and months. `policy` is
//! the standing of a tenant's requests among those of others, and `urgent_share` keeps a tenant from being urgent all
//! day.

mod bucket;
mod budget;
pub(crate) mod directory;
pub mod file;
mod follow;
pub mod key;
pub(crate) mod limiter;
mod policy;
pub(crate) mod rate_headers;
mod urgent_share;

pub(crate) use budget::{BudgetTicket, Budgets};
pub(crate) use directory::{Caller, Directory};
pub(crate) use follow::TenantsFollower;
pub(crate) use limiter::{Limiter, Made, QuotaTicket};
pub(crate) use urgent_share::{UrgentShares, UrgentTicket};
