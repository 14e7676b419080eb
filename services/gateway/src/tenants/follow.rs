//! Follows the file of tenants: changes hold within a second or so, and a broken file changes nothing.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::{Context, anyhow};
use tokio::task::JoinHandle;

use super::directory::Directory;
use super::file::TenantsFile;
use super::limiter::Limiter;
use crate::metrics::GatewayMetrics;

/// How often the file is looked at. The content is compared, because a mounted Secret changes by links.
const INTERVAL: Duration = Duration::from_millis(500);

/// Largest file, bytes: some hundred thousand keys.
const BYTES_MAX: u64 = 64 << 20;

/// The task that follows the file. It ends when this is dropped.
pub(crate) struct TenantsFollower(JoinHandle<()>);

impl Drop for TenantsFollower {
    fn drop(&mut self) {
        self.0.abort();
    }
}

impl TenantsFollower {
    /// Takes the file over, and follows it from then on. Without a file it only looks after the limits.
    ///
    /// # Errors
    /// The file cannot be read, or has faults. Later faults are logged, and what was known stays.
    pub(crate) fn start(
        path: Option<PathBuf>,
        directory: Arc<Directory>,
        limiter: Limiter,
        metrics: Arc<GatewayMetrics>,
    ) -> anyhow::Result<Self> {
        let mut known = None;
        if let Some(path) = &path {
            let text = read(path)?;
            take_over(&text, &directory, &metrics)
                .map_err(|faults| anyhow!("{}: {faults}", path.display()))?;
            known = Some(text);
        }
        let follow = async move {
            let mut interval = tokio::time::interval(INTERVAL);
            let (mut trouble, mut seen) = (None, None);
            loop {
                interval.tick().await;
                limiter.forget_idle(Instant::now());
                let Some(path) = path.clone() else {
                    continue;
                };
                let read = tokio::task::spawn_blocking(move || read(&path)).await;
                let text = match read {
                    Ok(Ok(text)) => text,
                    Ok(Err(error)) => {
                        report(&mut trouble, format!("{error:#}"), &metrics);
                        continue;
                    }
                    Err(_) => continue,
                };
                if known.as_ref() == Some(&text) {
                    trouble = None;
                    continue;
                }
                // A file that is written in place may have been read half way, so two looks have to agree.
                if seen.as_ref() != Some(&text) {
                    seen = Some(text);
                    continue;
                }
                match take_over(&text, &directory, &metrics) {
                    Ok(()) => {
                        tracing::info!("the gateway has taken the changed file of tenants over");
                        (known, trouble) = (Some(text), None);
                    }
                    Err(faults) => report(&mut trouble, faults, &metrics),
                }
            }
        };
        Ok(TenantsFollower(tokio::spawn(follow)))
    }
}

fn read(path: &Path) -> anyhow::Result<String> {
    let name = || format!("the file of tenants, {}, cannot be read", path.display());
    let bytes = std::fs::metadata(path).with_context(name)?.len();
    anyhow::ensure!(
        bytes <= BYTES_MAX,
        "the file of tenants, {}, has {bytes} bytes; at most {BYTES_MAX} are read",
        path.display()
    );
    std::fs::read_to_string(path).with_context(name)
}

fn take_over(text: &str, directory: &Directory, metrics: &GatewayMetrics) -> Result<(), String> {
    if text.trim().is_empty() {
        return Err("the file of tenants is empty".to_owned());
    }
    let file = TenantsFile::parse(text)?;
    directory.replace(&file);
    let families = &metrics.families;
    families.tenants.set(file.tenants.len() as i64);
    let keys: usize = file.tenants.iter().map(|tenant| tenant.keys.len()).sum();
    families.tenant_keys.set(keys as i64);
    families.tenants_read.with_label_values(&["read"]).inc();
    Ok(())
}

/// Logs a trouble once, and counts it each time.
fn report(known: &mut Option<String>, trouble: String, metrics: &GatewayMetrics) {
    let failed = &metrics.families.tenants_read;
    failed.with_label_values(&["failed"]).inc();
    if known.as_ref() != Some(&trouble) {
        tracing::error!(
            trouble,
            "the gateway goes on with the tenants that it knows; mend the file"
        );
        *known = Some(trouble);
    }
}
