//! Tenants and their keys as data, and the limits on what each may use.
//!
//! `file` is the file of tenants, which operators edit and gateways follow. `directory` finds the caller of a key
//! in it, and `limiter` counts what tenants and keys have used in a minute. `budget` counts days and months.
//! `redis_counts` counts minutes for several gateways together, in Redis.

mod bucket;
mod budget;
pub(crate) mod directory;
pub mod file;
mod follow;
pub mod key;
mod limit_usage;
pub(crate) mod limiter;
pub(crate) mod rate_headers;
mod redis_counts;

pub(crate) use budget::{BudgetTicket, Budgets};
pub(crate) use directory::{Caller, Directory};
pub(crate) use follow::TenantsFollower;
pub(crate) use limiter::{Limiter, Made, QuotaTicket};
pub use redis_counts::LimitsRedisConfig;
pub(crate) use redis_counts::RedisCounts;
