//! The harness of the end-to-end tests: whole meshes, their clients, and readers of their metrics and traces.
//!
//! [`UpMesh`] runs all services in the test's own process. [`HttpMesh`] runs each behind its own listener.
//! [`Program`] is the `refrain` binary as a child that can be killed. [`Client`] speaks OpenAI's API as far as the
//! tests need it, [`Scrape`] reads `/metrics`, and [`SchedulingEvent`] the scheduler's log. [`serve_http`] plays a
//! program that a mesh calls. Tests assert work that was done, never seconds. The limit in [`wait_until`] only keeps
//! a broken mesh from hanging.

#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    reason = "a test that panics has failed"
)]

mod bill;
mod client;
mod http_mesh;
mod http_server;
mod program;
mod prompts;
mod protobuf;
mod scheduling;
mod scrape;
mod settings;
mod up_mesh;
mod wait;

pub use bill::{counts, until_stored};
pub use client::{Answer, Chat, Client, Event, EventStream, Reply};
pub use http_mesh::{HttpMesh, Service, free_addr};
pub use http_server::serve_http;
pub use program::{Program, refrain_binary};
pub use prompts::{TINY_MODEL, long_task, special_tokens, varied_prompts};
pub use protobuf::{Span, exported_spans};
pub use scheduling::SchedulingEvent;
pub use scrape::Scrape;
pub use up_mesh::{KEY, KEY_OF_ANOTHER, UpMesh};
pub use wait::{PATIENCE, wait_until};

use std::path::PathBuf;
use std::str::FromStr;

use anyhow::Context as _;

/// The root folder of the repository.
pub fn repository() -> PathBuf {
    let tests = PathBuf::from(env!("CARGO_MANIFEST_DIR"));
    tests.parent().map(PathBuf::from).unwrap_or(tests)
}

/// A number that an environment variable sets.
///
/// # Errors
/// The variable has another value.
pub fn number_of<T: FromStr>(name: &str, default: T) -> anyhow::Result<T> {
    match std::env::var(name) {
        Ok(value) => {
            let value = value.parse().ok();
            value.with_context(|| format!("{name} is not a number"))
        }
        Err(_) => Ok(default),
    }
}
