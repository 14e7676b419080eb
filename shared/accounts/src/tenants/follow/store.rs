//! Follows the tenants that the draft store keeps. A gateway goes on with what it knows while the store is away.

use std::io::Write as _;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use anyhow::Context;
use refrain_protocol::{ApiError, ErrorKind};

use super::taking::Taking;
use crate::tenants::file::TenantsFile;
use crate::tenants::store_tenants::{StoreTenants, file_of};

/// How long an answer may take.
const ANSWER_WAIT: Duration = Duration::from_secs(2);

/// The draft store, and what is known of its tenants.
pub(super) struct StoreFollower {
    store: Arc<StoreTenants>,
    /// The file that has the tenants while the store is away.
    cache: Option<PathBuf>,
    taking: Taking,
    /// The state that was seen last, also if it had faults.
    known: Option<u64>,
    trouble: Option<String>,
}

impl StoreFollower {
    /// Takes the tenants over, from the cache if the store is away. Without either the gateway is not ready. A cache
    /// that cannot be used is none.
    pub(super) async fn start(
        store: Arc<StoreTenants>,
        cache: Option<PathBuf>,
        taking: Taking,
    ) -> anyhow::Result<Self> {
        let mut follower = StoreFollower {
            store,
            cache,
            taking,
            known: None,
            trouble: None,
        };
        follower.taking.directory.await_tenants();
        match follower.ask().await {
            Ok(()) => follower.take().await,
            Err(error) if is_final(&error) => {
                return Err(anyhow::Error::new(error).context("gateway.tenants_in_store"));
            }
            Err(error) => {
                follower.report(&error);
                follower.read_cache();
            }
        }
        Ok(follower)
    }

    /// Looks at the tenants once.
    pub(super) async fn look(&mut self) {
        match self.ask().await {
            Ok(()) => self.take().await,
            Err(error) => self.report(&error),
        }
    }

    async fn ask(&self) -> Result<(), ApiError> {
        match tokio::time::timeout(ANSWER_WAIT, self.store.look()).await {
            Ok(answer) => answer,
            Err(_) => Err(ApiError::new(
                ErrorKind::Timeout,
                "the draft store does not answer",
            )),
        }
    }

    fn report(&mut self, error: &ApiError) {
        let trouble = format!("the draft store does not tell its tenants: {error}");
        self.taking.report(&mut self.trouble, trouble);
    }

    async fn take(&mut self) {
        let (state, all) = self.store.all_with_state();
        if self.known.is_some() && self.known == state {
            // It answers again, and nothing has changed.
            self.trouble = None;
            return;
        }
        self.known = state;
        let taken = all.and_then(|all| {
            let file = file_of(&all.tenants);
            self.taking.take_over(&file)?;
            Ok((file, all.left_out))
        });
        let (file, left_out) = match taken {
            Ok(taken) => taken,
            Err(faults) => {
                let trouble = format!("the tenants of the draft store have faults: {faults}");
                self.taking.report(&mut self.trouble, trouble);
                return;
            }
        };
        self.trouble = None;
        tracing::info!("the gateway has taken the tenants of the draft store over");
        if !left_out.is_empty() {
            let trouble = format!("tenants are left out: {}", left_out.join("; "));
            self.taking.report(&mut self.trouble, trouble);
        }
        let Some(path) = self.cache.clone() else {
            return;
        };
        let written = tokio::task::spawn_blocking(move || write_cache(&path, &file)).await;
        if let Ok(Err(error)) = written {
            self.taking.report(&mut self.trouble, format!("{error:#}"));
        }
    }

    /// Takes the tenants of the cache over. Without one that can be used, the gateway is not ready.
    fn read_cache(&mut self) {
        let Some(path) = self.cache.as_ref().filter(|path| path.exists()) else {
            tracing::warn!("the gateway is not ready until the draft store tells its tenants");
            return;
        };
        match cached(path).and_then(|file| self.taking.take_over(&file).map_err(anyhow::Error::msg))
        {
            Ok(()) => tracing::warn!(
                "the draft store is away; the gateway starts with the tenants that it had last"
            ),
            Err(error) => {
                let trouble = format!(
                    "gateway.tenants_cache_file, {}, cannot be used, so the gateway is not ready until the draft \
                     store tells its tenants: {error:#}",
                    path.display()
                );
                self.taking.report(&mut self.trouble, trouble);
            }
        }
    }
}

fn cached(path: &Path) -> anyhow::Result<TenantsFile> {
    let file: TenantsFile = serde_json::from_slice(&std::fs::read(path)?)?;
    let faults = file.faults();
    anyhow::ensure!(faults.is_empty(), "{}", faults.join("; "));
    Ok(file)
}

/// Whether a store that gives this answer will never tell tenants.
fn is_final(error: &ApiError) -> bool {
    matches!(error.kind, ErrorKind::InvalidRequest | ErrorKind::NotFound)
}

/// Puts a new cache in the place of the old one. Only its owner may read it.
fn write_cache(path: &Path, file: &TenantsFile) -> anyhow::Result<()> {
    use std::os::unix::fs::OpenOptionsExt as _;
    let name = || {
        format!(
            "gateway.tenants_cache_file, {}, cannot be written",
            path.display()
        )
    };
    let mut new = path.as_os_str().to_owned();
    new.push(".new");
    let mut options = std::fs::OpenOptions::new();
    options.write(true).create(true).truncate(true).mode(0o600);
    let mut written = options.open(&new).with_context(name)?;
    let text = serde_json::to_vec(file)?;
    written.write_all(&text).with_context(name)?;
    written.sync_all().with_context(name)?;
    std::fs::rename(&new, path).with_context(name)
}
