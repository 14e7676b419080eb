//! Waits until a condition holds.

use std::time::{Duration, Instant};

/// How long a mesh may take for anything. Only a hang takes that long, also on a busy machine.
pub const PATIENCE: Duration = Duration::from_secs(300);

const PAUSE: Duration = Duration::from_millis(20);

/// Polls `condition` until it returns a value. The conditions are about other processes and servers, so there is
/// nothing that could notify the test.
///
/// # Panics
/// After [`PATIENCE`], with a message that names the condition (`what`).
pub async fn wait_until<T>(what: &str, mut condition: impl AsyncFnMut() -> Option<T>) -> T {
    let deadline = Instant::now() + PATIENCE;
    loop {
        if let Some(value) = condition().await {
            return value;
        }
        assert!(
            Instant::now() < deadline,
            "after {PATIENCE:?} it is still not true that {what}"
        );
        tokio::time::sleep(PAUSE).await;
    }
}
