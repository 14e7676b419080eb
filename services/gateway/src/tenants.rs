//! Tenants and their keys as data, and the limits on what each may use.
//!
//! `file` is the file of tenants, which operators edit and gateways follow. `directory` finds the caller of a key
//! in it, and `limiter` counts what tenants and keys have used in a minute. `budget` counts days and months.

mod bucket;
mod budget;
pub(crate) mod directory;
pub mod file;
mod follow;
pub mod key;
pub(crate) mod limiter;
pub(crate) mod rate_headers;

pub(crate) use budget::{BudgetTicket, Budgets};
pub(crate) use directory::{Caller, Directory};
pub(crate) use follow::TenantsFollower;
pub(crate) use limiter::{Limiter, Made, QuotaTicket};
