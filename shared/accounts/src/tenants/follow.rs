//! Follows the tenants, in a file or in the draft store: changes hold within a second or so, and broken ones change
//! nothing.

mod file;
mod key_ends;
mod store;
mod taking;

use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant};

use refrain_service_kit::actors::{self, Actor};
use refrain_service_kit::clock::unix_s;

use self::file::FileFollower;
use self::store::StoreFollower;
use self::taking::Taking;
use super::directory::Directory;
use super::limiter::Limiter;
use super::source::TenantsSource;
use crate::metrics::AccountMetrics;

/// How often the tenants are looked at.
const INTERVAL: Duration = Duration::from_millis(500);

/// How often the gauges of keys that end are renewed: other keys are the next ones once some have ended.
const ENDS_INTERVAL: Duration = Duration::from_secs(60);

/// The place that is followed.
enum Followed {
    Nothing,
    File(FileFollower),
    Store(StoreFollower),
}

/// Takes the tenants over, and follows them from then on. Without any it only looks after the limits. The file
/// `cache` is for those of the draft store.
///
/// # Errors
/// The file cannot be read or has faults, or the draft store keeps no tenants. Later faults are logged, and what
/// was known stays.
pub(crate) async fn start_following(
    source: TenantsSource,
    cache: Option<PathBuf>,
    directory: Arc<Directory>,
    limiter: Limiter,
    metrics: Arc<AccountMetrics>,
) -> anyhow::Result<Actor> {
    let taking = Taking::new(directory, metrics);
    let shown = taking.clone();
    let followed = match source {
        TenantsSource::None => Followed::Nothing,
        TenantsSource::File(path) => Followed::File(FileFollower::start(path, taking)?),
        TenantsSource::Store(store) => {
            Followed::Store(StoreFollower::start(store, cache, taking).await?)
        }
    };
    // It remembers over a panic what it has seen.
    let followed = Arc::new(tokio::sync::Mutex::new(followed));
    let follow = move || follow(followed.clone(), limiter.clone(), shown.clone());
    Ok(actors::start("tenants", follow))
}

async fn follow(followed: Arc<tokio::sync::Mutex<Followed>>, limiter: Limiter, shown: Taking) {
    let mut followed = followed.lock().await;
    let mut interval = tokio::time::interval(INTERVAL);
    let mut shown_at = Instant::now();
    loop {
        interval.tick().await;
        let now = Instant::now();
        limiter.forget_idle(now);
        if now.saturating_duration_since(shown_at) >= ENDS_INTERVAL {
            shown.show_key_ends(unix_s().cast_signed());
            shown_at = now;
        }
        match &mut *followed {
            Followed::Nothing => {}
            Followed::File(file) => file.look().await,
            Followed::Store(store) => store.look().await,
        }
    }
}
