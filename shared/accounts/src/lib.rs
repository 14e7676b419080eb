//! Accounts: who calls a gateway, what its callers may use, and what they have used.
//!
//! `tenants` knows tenants and their keys, limits and budgets; `usage` counts requests for bills and for budgets.
//! `operators` has those who may change accounts. [`Accounts`] is all of it for the way of a request: it finds the
//! caller, takes the request into its limits, and counts it while it runs. Nothing here knows a web framework or a
//! model.
//!
//! Read first: `accounts.rs`, then `tenants/limiter.rs` and `usage/book.rs`.

mod accounts;
mod metrics;
mod operators;
pub mod tenants;
mod usage;

pub use accounts::{
    AccountedRequest, Accounts, AccountsConfig, AccountsDeps, AccountsService, RequestAccount,
};
pub use metrics::{AccountMetrics, NONE, TENANT_LABELS_MAX, TokenSeries};
pub use operators::{OperatorConfig, OperatorToken, operator_faults};
pub use usage::{OnErasure, ProgressClock, UsageMeter};
