//! The gateway over HTTP, with a scripted scheduler and scripted workers behind it.

mod errors;
mod failures;
mod limits;
mod mesh;
mod plain;
mod streams;
