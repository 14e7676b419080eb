//! Tenants and their keys as data, and the limits on what each may use.
//!
//! `file` is the form of tenants, in a file or in the draft store, and `act` what operators do to them. `source` is
//! where they are, `store_tenants` carries acts out in the draft store, and `follow` takes changes over. `callers`
//! finds out who calls: `directory` knows the keys, and `jwt` the tokens of an identity provider. `limiter` counts
//! what tenants and keys have used in a minute, and `budget` counts days and months. `policy` is the standing of a
//! tenant's requests among those of others, and `urgent_share` keeps a tenant from being urgent all day.
//! `rate_headers` tells callers what is left. `redis_counts` counts minutes for several gateways together, in Redis.

pub mod act;
pub mod audit;
mod bucket;
mod budget;
mod callers;
mod directory;
pub mod file;
mod follow;
pub mod jwt;
pub mod key;
mod limit_usage;
mod limiter;
mod policy;
mod rate_headers;
mod redis_counts;
mod source;
mod store_tenants;
mod stream_shape;
mod urgent_share;

pub use budget::USAGE_UNKNOWN;
pub(crate) use budget::{BudgetTicket, Budgets};
pub(crate) use callers::Callers;
pub(crate) use directory::Directory;
pub use directory::{Caller, KnownKey};
pub(crate) use follow::start_following;
pub(crate) use limiter::Limiter;
pub use limiter::{Made, QuotaTicket};
pub use policy::TenantPolicy;
pub use rate_headers::HeaderWords;
pub use redis_counts::LimitsRedisConfig;
pub(crate) use redis_counts::RedisCounts;
pub use source::TenantsSource;
pub use store_tenants::{StoreTenants, VersionedTenant};
pub use stream_shape::StreamShape;
pub(crate) use urgent_share::{UrgentShares, UrgentTicket};
