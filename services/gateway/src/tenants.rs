//! Tenants and their keys as data, and the limits on what each may use.
//!
//! `file` is the form of tenants, in a file or in the draft store, and `act` what operators do to them. `source` is
//! where they are, and `follow` takes changes over. `directory` finds the caller of a key, `limiter` counts what tenants
//! and keys have used in a minute, and `budget` counts days and months.

pub mod act;
pub mod audit;
mod bucket;
mod budget;
pub(crate) mod directory;
pub mod file;
mod follow;
pub mod key;
pub(crate) mod limiter;
pub(crate) mod rate_headers;
pub(crate) mod source;

pub(crate) use budget::{BudgetTicket, Budgets};
pub(crate) use directory::{Caller, Directory};
pub(crate) use follow::TenantsFollower;
pub(crate) use limiter::{Limiter, Made, QuotaTicket};
pub(crate) use source::{TenantsSource, VersionedTenant};
