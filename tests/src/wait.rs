//! Waiting for something to become true.

use std::time::{Duration, Instant};

/// How long a mesh may take over anything: far longer than it should, since test machines are busy.
pub const PATIENCE: Duration = Duration::from_secs(60);

const PAUSE: Duration = Duration::from_millis(20);

/// Asks `condition` again and again until it gives a value.
///
/// # Panics
/// After [`PATIENCE`], with `what` it waited for.
pub async fn wait_until<T>(what: &str, mut condition: impl AsyncFnMut() -> Option<T>) -> T {
    let deadline = Instant::now() + PATIENCE;
    loop {
        if let Some(value) = condition().await {
            return value;
        }
        assert!(
            Instant::now() < deadline,
            "waited {PATIENCE:?} in vain until {what}"
        );
        tokio::time::sleep(PAUSE).await;
    }
}
