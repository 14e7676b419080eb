//! Which program runs: its version, and the commit that it was built from.
//!
//! The program knows its commit, and libraries do not: otherwise each commit would compile all of them anew.

use std::sync::OnceLock;

/// The version of all packages of the workspace.
pub const VERSION: &str = env!("CARGO_PKG_VERSION");

static COMMIT: OnceLock<&str> = OnceLock::new();

/// Says which commit the program was built from. Only the first call counts.
pub fn set_commit(commit: &'static str) {
    COMMIT.get_or_init(|| commit);
}

/// The commit, or `unknown` where the program has not said it.
pub fn commit() -> &'static str {
    COMMIT.get().copied().unwrap_or("unknown")
}
