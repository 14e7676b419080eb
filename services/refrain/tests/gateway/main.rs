//! The gateway over HTTP, with a scripted scheduler and scripted workers behind it.

#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    reason = "a test that panics has failed"
)]

mod admin;
mod adopters;
mod agents;
mod chat;
mod chunks;
mod console;
mod errors;
mod failures;
mod fleet;
mod forms;
mod jwt;
mod limits;
mod limits_redis;
mod mesh;
mod operations;
mod outcomes;
mod passthrough;
mod plain;
#[path = "../../../../shared/accounts/tests/support/redis_server.rs"]
mod redis_server;
mod rollouts;
mod series;
mod store;
mod streams;
mod surfaces;
mod tenants;
mod tools;
mod trainer;
mod trainer_aborts;
mod trainer_clients;
mod trainer_control;
mod trainer_doors;
mod trainer_engines;
mod trainer_hold;
mod usage;
mod usage_store;
